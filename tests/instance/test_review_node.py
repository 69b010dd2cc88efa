"""Faults of the node that a review found: deleting what others send to, redrives that end half way, and whose failure a time-out is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local import redrive as redrive_module
from sluiceway.local.backend import Backend
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, Produce, QueuePatch, Redrive, Selection, Settle, Settled
from sluiceway.ports.meta_store import MetaUnknownError, Stamp
from sluiceway.ports.partition_store import Changes, Fence, PartitionRef, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.instance.node_rig import PATIENCE, Store, down, eventually, fine, lease, payloads, produce, serving, settle, spec, total


async def bury(service: Service, *names: str, size: int = 1, queue: str = "dead") -> None:
    """Put items into a dead queue as if they had come from queue q, each by a produce of its own."""
    for name in names:
        row = {"payload": name.encode() * size, "headers": [("sluiceway-queue", "q")], "origin": "aaaaaaaa.0.0"}
        await service.produce(queue, Produce(batch_from_rows([row]), 10_000))


# ---- deleting -------------------------------------------------------------------------------------------------


async def on_the_way(service: Service, then: str | None) -> None:
    """An item of q is on its way to d1, which does not take it; the next to die goes to that queue."""
    for name in ("d1", "d2"):
        await service.create_queue(spec(name))
    await service.create_queue(spec("q", dead_queue="d1"))
    await service.pause("d1", ["produce"], True)
    await produce(service, "q", "a")
    await settle(service, "q", await lease(service, "q"), Disposition("dead"))
    await service.update_queue("q", QueuePatch({"dead_queue": then}))


async def refused_to_delete(service: Service, queue: str) -> tuple[str, str | None]:
    with pytest.raises(SluicewayError) as refused:
        await service.delete_queue(queue, False)
    return refused.value.code, refused.value.field


@driven
async def test_a_queue_that_items_are_on_their_way_to_is_not_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await on_the_way(service, None)
        assert (total(service, "d1"), total(service, "d2")) == (0, 0)
        assert await refused_to_delete(service, "d1") == ("queue_in_use", "force")
        await service.pause("d1", ["produce"], False)
        await eventually(lambda: total(service, "q") == 0)
        assert await refused_to_delete(service, "d1") == ("queue_not_empty", "force")
        await settle(service, "d1", await lease(service, "d1"))
        await service.delete_queue("d1", False)


@driven
async def test_with_force_a_queue_that_items_are_on_their_way_to_is_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await on_the_way(service, None)
        former = service.queue("d1").incarnation

        async def fail(ref: PartitionRef) -> None:
            if ref.incarnation == former:
                raise StoreUnavailableError("the disk is gone")

        # Whether it has them, it does not say.
        store.on_open = store.on_apply = fail
        await service.update_queue("q", QueuePatch({"dead_queue": "d2"}))
        await service.delete_queue("d1", True)
        await eventually(lambda: (total(service, "q"), total(service, "d2")) == (0, 1))


@driven
async def test_while_a_partition_of_another_queue_is_not_open_nothing_is_deleted_without_force(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("empty"))
        closed = (await service.create_queue(spec("q"))).incarnation

        async def fail(ref: PartitionRef) -> None:
            if ref.incarnation == closed:
                raise StoreUnavailableError("the disk is gone")

        store.on_open = store.on_apply = fail
        waiting = asyncio.ensure_future(produce(service, "q", "a", timeout=60_000))
        await eventually(lambda: service.stats("q").partitions[0].state != "available")
        assert service.stats("empty").partitions[0].state == "available"
        assert await refused_to_delete(service, "empty") == ("queue_in_use", "force")
        await service.delete_queue("empty", True)
        assert [each.queue_name for each in service.queues()] == ["q"]
        store.on_open = store.on_apply = fine
        await waiting


@pytest.mark.parametrize("landed", [True, False])
@driven
async def test_a_deletion_that_ended_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool) -> None:
    """What is still recorded serves again; what may be gone takes nothing."""
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        commit = service.meta.commit

        async def cut_off(*arguments: Any, **fields: Any) -> Stamp:
            if landed:
                await commit(*arguments, **fields)
            raise MetaUnknownError("the answer was lost")

        monkeypatch.setattr(service.meta, "commit", cut_off)
        with pytest.raises(SluicewayError) as unknown:
            await service.delete_queue("q", False)
        assert unknown.value.code == "outcome_unknown"
        monkeypatch.setattr(service.meta, "commit", commit)
        if landed:
            with pytest.raises(SluicewayError) as refused:
                await produce(service, "q", "a")
            assert refused.value.code == "queue_not_found"
        else:
            assert (await produce(service, "q", "a")).items == 1
    async with serving(tmp_path) as (service, _):
        assert [each.queue_name for each in service.queues()] == ([] if landed else ["q"])


# ---- settings -------------------------------------------------------------------------------------------------


@driven
async def test_setting_what_is_set_already_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        paused = await service.pause("q", ["lease"], True)
        assert (paused.paused, paused.version) == (("lease",), 2)
        assert await service.pause("q", ["lease"], True) == paused
        assert await service.update_queue("q", QueuePatch({"paused": ("lease",), "reference": ""}, 2)) == paused
        with pytest.raises(SluicewayError) as refused:
            await service.update_queue("q", QueuePatch({"reference": ""}, 1))
        assert refused.value.code == "version_conflict"
        assert (await service.pause("q", ["lease"], False)).version == 3


# ---- redrive --------------------------------------------------------------------------------------------------


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


# ---- whose failure it is --------------------------------------------------------------------------------------


@driven
async def test_a_time_out_is_the_backends_only_if_it_is_its_own_and_for_a_commit(tmp_path: Path) -> None:
    store, ref = Store(tmp_path), PartitionRef("q", 0)

    async def hang(_: PartitionRef) -> None:
        await asyncio.Event().wait()

    def problem() -> str | None:
        return backend.problem

    backend = Backend("a", store, 10)
    backend.attach(ref, lambda _: True)
    changes = Changes(1, b"")
    fence = Fence(1, 1, 1)
    await backend.open(ref, fence)
    store.on_apply = store.on_read = hang
    async with asyncio.timeout(PATIENCE):
        assert await backend.apply(ref, changes, fence, 9) is Outcome.UNKNOWN
        assert problem() is None, "a queue may be more impatient than its backend"
        with pytest.raises(StoreUnavailableError, match="no answer within 10 ms"):
            await backend.read(ref, [1])
        assert problem() is None, "no partition is opened anew for a read"
        assert await backend.apply(ref, changes, fence, 10) is Outcome.UNKNOWN
        assert problem() == "backend a does not answer: a commit took longer than 10 ms"
        await backend.close()


@driven
async def test_a_change_that_ended_unknown_and_is_repeated_takes_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        commit, read = service.meta.commit, service.meta.read

        async def cut_off(*arguments: Any, **fields: Any) -> Stamp:
            await commit(*arguments, **fields)
            monkeypatch.setattr(service.meta, "read", down)
            raise MetaUnknownError("the answer was lost")

        monkeypatch.setattr(service.meta, "commit", cut_off)
        with pytest.raises(SluicewayError) as unknown:
            await service.pause("q", ["produce"], True)
        assert unknown.value.code == "outcome_unknown"
        monkeypatch.setattr(service.meta, "commit", commit)
        monkeypatch.setattr(service.meta, "read", read)
        assert (await service.pause("q", ["produce"], True)).paused == ("produce",)
        assert service.queue("q").paused == ("produce",)
        with pytest.raises(SluicewayError) as refused:
            await produce(service, "q", "a")
        assert refused.value.code == "queue_paused"


def item(text: str, queue: str) -> Produce:
    row = {"payload": text.encode(), "headers": [("sluiceway-queue", queue)], "origin": "aaaaaaaa.0.0"}
    return Produce(batch_from_rows([row]), 20_000)


async def retry(service: Service, offset: int) -> Settled:
    return await service.settle("dead", Settle({0: [Selection(Disposition("retry"), offsets=np.array([offset]))]}, 20_000))


@driven
async def test_a_redrive_does_not_take_what_it_saw_before_a_commit_failed_for_what_is_there_now(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        for name in ("q1", "q2", "dead"):
            await service.create_queue(spec(name))
        await produce(service, "dead", "x")  # nobody knows where it came from, so it stays
        for name, queue in (("a", "q1"), ("b", "q2")):
            await service.produce("dead", item(name, queue))
        driver = service._drivers["dead"]
        executor = driver._queue.executors[0]
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
        service._cache._batches.clear()
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
