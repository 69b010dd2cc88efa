"""Redrives of a real instance: where items go, and redrives that end half way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from sluiceway.core.queue.partition_executor import ExecutorState
from sluiceway.core.queue.tickets import TransferEnd
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local import redrive as redrive_module
from sluiceway.model.inspection import MoveItems
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, Produce, QueueSpec, Redrive, Selection, Settle, Settled
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import down, eventually, fine, forget_rows, lease, payloads, produce, serving, settle, spec, total


def item(text: str, queue: str) -> Produce:
    """As if it had come from that queue."""
    row = {"payload": text.encode(), "headers": [("sluiceway-queue", queue)], "origin": "aaaaaaaa.0.0"}
    return Produce(batch_from_rows([row]), 20_000)


async def bury(service: Service, *names: str, size: int = 1) -> None:
    """Put items into the dead queue, each by a produce of its own."""
    for name in names:
        await service.produce("dead", item(name * size, "q"))


async def retry(service: Service, offset: int) -> Settled:
    return await service.settle("dead", Settle({0: [Selection(Disposition("retry"), offsets=np.array([offset]))]}, 20_000))


@driven
async def test_all_dead_items_are_counted_by_reason_also_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead", 3))
        await service.create_queue(spec("q", dead_queue="dead"))
        for reason, count in (("ValueError: 1", 200), ("ValueError: 2", 150), ("late", 70)):
            await produce(service, "q", *("x" for _ in range(count)))
            await settle(service, "q", await lease(service, "q", count), Disposition("dead", reason=reason))
        await eventually(lambda: total(service, "dead") == 420)
    async with serving(tmp_path) as (service, store):
        found = await service.reasons("dead")
        assert [(each.reason, each.source, each.items) for each in found] == [("ValueError", "q", 350), ("late", "q", 70)]
        assert (found.items, found.skipped) == (420, [])
        # A partition that cannot be asked is named, and the others are counted.
        held = {each.partition: each.total for each in service.stats("dead").partitions}
        store.on_open = down
        with pytest.raises(SluicewayError, match="the disk is gone"):
            await service.reload("dead", 1_000)
        found = await service.reasons("dead")
        away = [each.partition for each in service.stats("dead").partitions if each.state != "available"]
        assert away
        assert (found.skipped, found.items) == (away, sum(count for number, count in held.items() if number not in away))


@driven
async def test_a_redrive_that_one_partition_refuses_says_what_began(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        second = PartitionRef((await service.create_queue(spec("dead", 2))).incarnation, 1)
        await bury(service, *"abcd")
        assert [each.ready for each in service.stats("dead").partitions] == [2, 2]
        refusals: list[PartitionRef] = []

        async def refuse_once(ref: PartitionRef) -> Outcome | None:
            if ref != second or refusals:
                return None
            refusals.append(ref)
            return Outcome.REFUSED

        store.on_apply = refuse_once
        redriven = await service.redrive("dead", Redrive(60_000, 10))
        assert (redriven.matched, redriven.redriven, redriven.targets) == (4, 2, {"q": 2})
        assert refusals == [second]
        await eventually(lambda: service.stats("dead").partitions[1].state == "available")
        assert (await service.redrive("dead", Redrive(60_000, 10))).redriven == 2
        assert sorted(payloads((await lease(service, "q")).batches)) == [*"abcd"]


@driven
async def test_a_redrive_of_which_nothing_began_is_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        await service.create_queue(spec("dead"))
        await bury(service, "a")

        async def refuse(_: PartitionRef) -> Outcome | None:
            return Outcome.REFUSED

        store.on_apply = refuse
        with pytest.raises(SluicewayError) as refused:
            await service.redrive("dead", Redrive(60_000, 10))
        assert refused.value.code == "unavailable"
        store.on_apply = fine
        await eventually(lambda: service.stats("dead").partitions[0].state == "available")
        assert (total(service, "dead"), total(service, "q")) == (1, 0)


@driven
async def test_a_redrive_is_no_larger_than_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive_module, "MAX_LEASE_BYTES", 10_000)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await service.create_queue(spec("dead"))
        await bury(service, *"abcdefg", size=4_000)
        # The one that passes the limit is the last.
        assert [(await service.redrive("dead", Redrive(60_000, 100))).redriven for _ in range(4)] == [3, 3, 1, 0]
        assert total(service, "q") == 7


@driven
async def test_a_redrive_does_not_take_what_it_saw_before_a_commit_failed_for_what_is_there_now(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        for name in ("q1", "q2", "dead"):
            await service.create_queue(spec(name))
        await produce(service, "dead", "x")  # nobody knows where it came from, so it stays
        for name, queue in (("a", "q1"), ("b", "q2")):
            await service.produce("dead", item(name, queue))
        driver = service._drivers["dead"]
        executor = driver.queue.executors[0]
        assert payloads((await lease(service, "dead")).batches) == ["x", "a", "b"]
        await retry(service, 0)
        held, go_on = asyncio.Event(), asyncio.Event()

        async def refuse_late(_: PartitionRef) -> Outcome | None:
            store.on_apply = fine
            held.set()
            await go_on.wait()
            return Outcome.REFUSED

        # a is back in the line at offset 4, but not durably: once that commit has failed, b is put there.
        store.on_apply = refuse_late
        failing = asyncio.ensure_future(retry(service, 1))
        await held.wait()
        # The redrive reads the first extent from the store, and is held up there.
        forget_rows(service)
        reading, read_on = asyncio.Event(), asyncio.Event()

        async def hold(_: PartitionRef) -> None:
            reading.set()
            await read_on.wait()

        store.on_read = hold
        redrive = asyncio.ensure_future(service.redrive("dead", Redrive(20_000, 10)))
        await reading.wait()
        store.on_read, opening = fine, executor.opening
        go_on.set()
        await eventually(lambda: executor.opening > opening and executor.takes_work)
        with pytest.raises(SluicewayError):
            await failing
        await retry(service, 2)
        read_on.set()
        try:
            await redrive
        except SluicewayError as error:
            assert error.code == "unavailable"
        await eventually(lambda: not executor.partition.transfers.by_number)
        assert "b" not in payloads((await lease(service, "q1")).batches), "what was meant for q2 is in q1"


@driven
async def test_an_item_does_not_choose_where_it_is_redriven(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.start()
    try:
        for name in ("dead", "secret"):
            await service.create_queue(QueueSpec(name))
        row = {"payload": b"forged", "headers": [("sluiceway-queue", "secret")]}
        await service.produce("dead", Produce(batch_from_rows([row]), 10_000))
        for wanted in (Redrive(10_000, 10), Redrive(10_000, 10, source="secret")):
            assert (await service.redrive("dead", wanted)).matched == 0
        assert (await service.redrive("dead", Redrive(10_000, 10, target="secret"))).redriven == 1
    finally:
        await service.stop()


@driven
async def test_what_comes_back_before_the_last_transfer_has_begun_is_not_told_as_moved(tmp_path: Path) -> None:
    """Its target was deleted, while another partition was slow."""
    async with serving(tmp_path) as (service, store):
        for name in ("q", "other"):
            await service.create_queue(spec(name, 2))
        for partition in (0, 1):
            await service.produce("q", Produce(batch_from_rows([{"payload": b"a"}]), 10_000, partition=partition))
        driver, go_on = service._drivers["q"], asyncio.Event()

        async def slow(ref: PartitionRef) -> None:
            if ref.partition == 1:
                await go_on.wait()

        async def deleted(*_: object) -> TransferEnd:
            raise SluicewayError("queue_not_found", "the target queue was deleted")

        driver.transfers._bury = deleted
        store.on_apply = slow
        first = np.zeros(1, np.int64)
        moving = asyncio.ensure_future(service.move_items("q", MoveItems({0: first, 1: first}, 20_000, (), "other")))
        # The first one has come back: under a new offset.
        await eventually(lambda: driver.queue.executors[0].partition.log.header.next == 2)
        await eventually(lambda: driver.queue.executors[0].state is ExecutorState.READY)
        go_on.set()
        moved = await moving
        assert (moved.matched, moved.moved, moved.targets) == (2, 0, {})
