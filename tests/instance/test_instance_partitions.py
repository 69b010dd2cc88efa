"""Partitions that come and go, while one server serves their queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from sluiceway.adapters import system
from sluiceway.cluster import transfer_sender
from sluiceway.cluster.transfer_sender import Piece, pieces
from sluiceway.contract.queue_stats import LogicalQueueStats
from sluiceway.contract.rebalances import PartitionState
from sluiceway.core.group.group_records import Token
from sluiceway.core.partition.key_slots import home_of
from sluiceway.core.queue.tickets import Effect, Open
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.inspection import DeleteItems, ListItems
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import MOVING, QueueRecord
from sluiceway.model.requests import (
    DONE,
    Disposition,
    Extend,
    MovedItem,
    Peek,
    Produce,
    Produced,
    ProduceKey,
    Selection,
    Settle,
)
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from sluiceway.wire import json_inspection, json_outcomes
from tests.core.partitions_rig import add, drain, hand_over_keys, move, remove, set_slots, set_state, shut
from tests.instance.instance_rig import eventually, fine, lease, payloads, produce, rows, serving, settle, spec


async def into(service: Service, number: int, *texts: str) -> None:
    await service.produce("q", Produce(rows(*texts), 10_000, partition=number))


def has(stats: LogicalQueueStats) -> dict[int, tuple[int, int, int]]:
    """Of each partition: ready, scheduled and transferring items."""
    return {each.partition: (each.ready, each.scheduled, each.transferring) for each in stats.partitions}


async def refused(work: object) -> SluicewayError:
    with pytest.raises(SluicewayError) as raised:
        await work  # type: ignore[misc]
    return raised.value


# ---- they come and go -----------------------------------------------------------------------------------------


@driven
async def test_partitions_that_are_gained_one_by_one_are_opened_by_one_cycle(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 40))
        driver = service._drivers["q"]
        for number in range(40):
            await service.lost(driver.record.incarnation, number)
        assert not driver.executors
        opens: list[int] = []
        cycle = driver.queue.cycle

        def counted(now: int, timers: int | None = None, is_pressed: bool = False) -> list[Effect]:
            effects = cycle(now, timers, is_pressed)
            if wanted := sum(isinstance(effect, Open) for effect in effects):
                opens.append(wanted)
            return effects

        driver.queue.cycle = counted  # type: ignore[method-assign]
        for number in range(40):
            service.gained(driver.record.incarnation, number, Token(1, 9))
        await driver.opened()
        assert opens == [40]
        assert all(executor.takes_work for executor in driver.executors)


@driven
async def test_a_queue_goes_from_two_partitions_to_four_and_to_one_under_load(tmp_path: Path) -> None:
    """No call fails, and each item is completed once."""
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        done: Counter[str] = Counter()
        sent: list[str] = []
        over = False

        async def feed(name: str) -> None:
            n = 0
            while not over:
                texts = [f"{name}-{n}-{at}" for at in range(3)]
                await produce(service, "q", *texts)
                sent.extend(texts)
                n += 1

        async def work() -> None:
            while not over or sum(done.values()) < len(sent):
                leased = await lease(service, "q", 7, 50, most=2)
                assert not (await settle(service, "q", leased)).ignored
                done.update(payloads(leased.batches))

        feeding = [asyncio.create_task(feed(name)) for name in "ab"]
        working = [asyncio.create_task(work()) for _ in range(3)]
        await eventually(lambda: len(sent) > 50)
        assert await add(service, "q", 2) == [2, 3]
        await eventually(lambda: all(each.produced for each in service.stats("q").partitions))
        for number in (0, 1, 2):
            await drain(service, "q", number, 3)
            await eventually(lambda number=number: not service.stats("q").partitions[0].total)  # type: ignore[misc]
            await hand_over_keys(service, "q", number, 3, 100 + number)
            await remove(service, "q", number)
        await eventually(lambda: len(sent) > 300)
        over = True
        await asyncio.gather(*feeding, *working)
        assert done == Counter(sent)
        assert list(has(service.stats("q"))) == [3]


@driven
async def test_what_has_come_and_gone_is_so_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 1))
        await into(service, 0, "old")
        await add(service, "q", 1)
        await drain(service, "q", 0, 1)
        await hand_over_keys(service, "q", 0, 1)
        await remove(service, "q", 0)
    async with serving(tmp_path) as (service, _):
        assert has(service.stats("q")) == {1: (1, 0, 0)}
        assert payloads((await lease(service, "q")).batches) == ["old"]
        assert (await produce(service, "q", "new", key=ProduceKey("k"))).partition == 1
        # Numbers are not given again.
        assert await add(service, "q", 1) == [2]


@driven
async def test_a_partition_that_is_removed_while_it_is_written_goes_when_that_has_ended(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q", 2))
        driver = service._drivers["q"]
        release, reached = asyncio.Event(), asyncio.Event()

        async def hold(ref: PartitionRef) -> Outcome | None:
            if ref.partition == 1:
                reached.set()
                await release.wait()
            return None

        store.on_apply = hold
        writing = asyncio.create_task(into(service, 1, "x"))
        await reached.wait()
        # It waits for the commit that is under way, and then there is nothing left to ask.
        completing = asyncio.create_task(service.settle("q", Settle({1: [Selection(DONE, lease=7)]}, 10_000)))
        await eventually(lambda: service.stats("q").complete_waiting == 1)
        record = service.queue("q")
        kept = tuple(each for each in record.partitions if each.partition == 0)
        driver.configure(msgspec.structs.replace(record, partitions=kept, next_partition=2))
        opened = asyncio.create_task(driver.opened())
        for _ in range(3):
            # Until after the turn.
            await asyncio.sleep(0)
        assert not opened.done()
        assert (await completing).ignored == [(f"{record.incarnation}.1.L7", "settled")]
        release.set()
        await opened
        await writing
        assert list(has(driver.counts())) == [0]
        assert PartitionRef(record.incarnation, 1) in store.released


# ---- ids of partitions that were removed ----------------------------------------------------------------------


@driven
async def test_ids_of_a_removed_partition_are_settled_and_those_of_none_unknown(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        record = await service.create_queue(spec("q", 2))
        await into(service, 1, "gone")
        leased = await lease(service, "q")
        assert (await settle(service, "q", leased)).completed == 1
        await hand_over_keys(service, "q", 1, 0)
        await shut(service, "q", 1, "read_only")
        await remove(service, "q", 1)
        await into(service, 0, "there")
        here = await lease(service, "q")
        name, both = record.incarnation, np.array([0], np.int64)
        held = here.leases[0].number
        selections = {
            0: [Selection(DONE, lease=held)],
            1: [Selection(DONE, offsets=both), Selection(DONE, lease=7)],
            9: [Selection(DONE, offsets=both)],
        }
        extended = await service.extend("q", Extend([(0, held), (1, 7)], 100, 60_000, offsets={1: both, 9: both}))
        assert [each.number for each in extended.leases] == [held]
        assert sorted(extended.ignored) == [(f"{name}.1.0", "settled"), (f"{name}.1.L7", "settled"), (f"{name}.9.0", "unknown")]
        settled = await service.settle("q", Settle(selections, 100))
        assert settled.completed == 1
        assert sorted(settled.ignored) == [(f"{name}.1.0", "settled"), (f"{name}.1.L7", "settled"), (f"{name}.9.0", "unknown")]
        deleted = await service.delete_items("q", DeleteItems({1: both, 9: both}, 100))
        assert sorted(deleted.ignored) == [(f"{name}.1.0", "gone"), (f"{name}.9.0", "unknown")]
        assert (await service.explain("q", 1, 0)).state == "gone"
        assert (await service.explain("q", 9, 0)).state == "unknown"
        assert (await refused(service.peek("q", Peek(5, 1, 7)))).code == "lease_not_found"
        for number, says in ((1, "was removed"), (9, "has no partition")):
            requests = (
                service.peek("q", Peek(5, number)),
                service.list_items("q", ListItems(number, 0, 5)),
                service.produce("q", Produce(rows("x"), 100, partition=number)),
            )
            for request in requests:
                error = await refused(request)
                assert (error.code, error.field) == ("invalid_request", "partition")
                assert says in error.detail


@driven
async def test_calls_that_name_a_removed_partition_are_safe_to_repeat(tmp_path: Path) -> None:
    """Whether by the ids alone or by the partition, too. What asks about the partition itself is told that it is gone."""
    async with serving(tmp_path) as (service, _):
        record = await service.create_queue(spec("q", 2))
        await hand_over_keys(service, "q", 1, 0)
        await shut(service, "q", 1, "read_only")
        await remove(service, "q", 1)
        record, place = service.queue("q"), f"{record.incarnation}.1"
        for more in ({}, {"partition": 1}):
            complete = {"queue_name": "q", "ids": [f"{place}.0"], "lease_ids": [f"{place}.L1"], **more}
            settle_ids = json_outcomes.decode_select(msgspec.json.encode(complete)).request(record, DONE)
            told = {"ignored": [(f"{place}.0", "settled"), (f"{place}.L1", "settled")]}
            assert (await service.settle("q", settle_ids)).ignored == told["ignored"]
            retry = {"queue_name": "q", "items": [{"id": f"{place}.0"}], **more}
            retried = await service.settle("q", json_outcomes.decode_retry(msgspec.json.encode(retry)).request(record, 0))
            assert retried.ignored == told["ignored"][:1]
            delete = {"queue_name": "q", "ids": [f"{place}.0"], **more}
            deleted = await service.delete_items("q", json_inspection.decode_delete_items(msgspec.json.encode(delete)).request(record))
            assert deleted.ignored == [(f"{place}.0", "gone")]
        looked = json_inspection.decode_list_items(msgspec.json.encode({"queue_name": "q", "partition": 1}))
        with pytest.raises(SluicewayError, match="was removed"):
            looked.request(record, False)
        with pytest.raises(SluicewayError, match="no partition 2"):
            json_outcomes.decode_select(b'{"queue_name": "q", "ids": [], "partition": 2, "lease_ids": ["%s.L1"]}' % place.encode()).request(
                record, DONE
            )


# ---- keys -----------------------------------------------------------------------------------------------------


@driven
async def test_a_repetition_is_known_wherever_its_key_went(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        keys = [ProduceKey(f"key-{n}") for n in range(20)]
        first = [await produce(service, "q", key.key, key=key) for key in keys]
        assert {each.partition for each in first} == {0, 1}
        assert await add(service, "q", 1) == [2]
        await set_state(service, "q", [0, 1], "draining")
        for number in (0, 1):
            await shut(service, "q", number, "read_only")
            await hand_over_keys(service, "q", number, 2, 100 + number)
        again = [await produce(service, "q", key.key, key=key) for key in keys]
        assert [each[:3] for each in again] == [each[:3] for each in first]
        assert all(each.deduplicated for each in again)
        # And when that partition has gone.
        for number in (0, 1):
            await move(service, "q", number, 2)
            await remove(service, "q", number)
        assert [(await produce(service, "q", key.key, key=key))[:3] for key in keys] == [each[:3] for each in first]
        assert len(payloads((await lease(service, "q")).batches)) == 20


@driven
async def test_a_produce_whose_key_is_on_its_way_waits_for_it_to_arrive(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        key = ProduceKey("k")
        home = home_of(service.queue("q"), key)
        await set_slots(service, "q", lambda number: MOVING if number == home else number)
        waiting = asyncio.create_task(produce(service, "q", "x", key=key))
        assert (await refused(produce(service, "q", "x", key=key, timeout=20))).code == "unavailable"
        assert not waiting.done()
        await set_slots(service, "q", lambda number: 1 - home if number == MOVING else number)
        assert (await waiting)[0] == 1 - home


# ---- moves ----------------------------------------------------------------------------------------------------


@driven
async def test_what_is_moved_is_as_it_was(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        record = await service.create_queue(spec("q", 2))
        due = (system.now() // 1000 + 3_600) * 1000
        about = {
            "kind": "k",
            "encoding": "e",
            "reference": "r",
            "key": "customer-7",
            "priority": 0,
            "headers": {"sluiceway-x": "1", "y": "2"},
        }
        batch = batch_from_rows([{"payload": b"a", **about}, {"payload": b"b"}, {"payload": b"later", "enqueue_at": due}])
        await service.produce("q", Produce(batch, 10_000, partition=0))
        once = await lease(service, "q", 1)
        await settle(service, "q", once, Disposition("retry"))
        before = (await service.list_items("q", ListItems(0, 0, 9))).rows
        later = (await service.list_items("q", ListItems(0, 0, 9, True))).rows
        await drain(service, "q", 0, 1)
        assert has(service.stats("q")) == {0: (0, 0, 0), 1: (2, 1, 0)}
        after = (await service.list_items("q", ListItems(1, 0, 9))).rows
        same = ("origin", "attempts", "enqueued_at", "payload", "kind", "encoding", "reference", "key", "priority", "headers")
        assert _told(after, same, record.incarnation) == _told(before, same, record.incarnation)
        found = (await service.list_items("q", ListItems(1, 0, 9, True))).rows
        assert _told(found, same, record.incarnation) == _told(later, same, record.incarnation)
        assert [standing.due_at for _, standing in found] == [due]
        assert (await remove_and_count(service, 0)) == {1: (2, 1, 0)}


async def remove_and_count(service: Service, number: int) -> dict[int, tuple[int, int, int]]:
    await hand_over_keys(service, "q", number, 1)
    await remove(service, "q", number)
    return has(service.stats("q"))


def _told(listed: Sequence[tuple[pa.RecordBatch, object]], names: tuple[str, ...], incarnation: str) -> list[list[object]]:
    """What is said of each item."""
    items = [{**row} for batch, _ in listed for row in batch.to_pylist()]
    for row in items:
        row["origin"] = row.get("origin") or f"{incarnation}.{row['partition']}.{row['origin_offset']}"
    return [[row.get(name) for name in names] for row in sorted(items, key=lambda row: str(row["payload"]))]


@driven
async def test_moves_that_are_asked_for_again_and_again_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_sender, "SEND_TIMEOUT", 100)
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q", 2))
        for text in "abc":
            await into(service, 0, text)
        await shut(service, "q", 0, "read_only")

        async def fails(ref: PartitionRef) -> Outcome | None:
            return Outcome.REFUSED if ref.partition == 1 else None

        store.on_apply = fails
        assert await move(service, "q", 0, 1, 1, 300) == (1, 0)
        assert [await move(service, "q", 0, 1, 1, 300) for _ in range(3)] == [(0, 0)] * 3
        assert has(service.stats("q"))[0] == (2, 0, 1)
        store.on_apply = fine
        assert await move(service, "q", 0, 1) == (2, 2)
        assert has(service.stats("q")) == {0: (0, 0, 0), 1: (3, 0, 0)}
        assert payloads((await lease(service, "q")).batches) == ["a", "b", "c"]


@pytest.mark.parametrize("point", ["begun", "not arrived", "arrived", "over"])
@driven
async def test_a_crash_during_a_move_makes_neither_a_loss_nor_a_copy(tmp_path: Path, point: str) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q", 2))
        await into(service, 0, "a", "b")
        await shut(service, "q", 0, "read_only")
        dead = asyncio.Event()
        seen = 0

        async def before(ref: PartitionRef) -> Outcome | None:
            nonlocal seen
            if (point, ref.partition) == ("begun", 0) or (point, ref.partition) == ("not arrived", 1):
                return die()
            seen += ref.partition == 0
            return die() if (point, seen) == ("arrived", 2) else None

        async def after(ref: PartitionRef) -> None:
            if point == "over" and seen == 2:
                die()

        def die() -> Outcome:
            store.die()
            dead.set()
            return Outcome.UNKNOWN

        store.on_apply, store.on_applied = before, after
        moving = asyncio.create_task(move(service, "q", 0, 1, timeout=1_000))
        await dead.wait()
        await asyncio.wait((moving,))
        _ = moving.exception()
    async with serving(tmp_path) as (service, _):
        await move(service, "q", 0, 1)
        assert has(service.stats("q")) == {0: (0, 0, 0), 1: (2, 0, 0)}
        assert sorted(payloads((await lease(service, "q")).batches)) == ["a", "b"]


@driven
async def test_what_is_on_its_way_to_a_partition_that_is_drained_arrives_and_goes_on(tmp_path: Path) -> None:
    """As when a rebalance is cancelled: nobody can say whether it was there before."""
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q", 2))
        await into(service, 0, "a")
        await shut(service, "q", 0, "read_only", 10)

        async def fails(ref: PartitionRef) -> Outcome | None:
            return Outcome.REFUSED if ref.partition == 1 else None

        store.on_apply = fails
        assert await move(service, "q", 0, 1, 1, 20) == (1, 0)
        store.on_apply = fine
        await set_state(service, "q", [1], "draining")
        assert (await shut(service, "q", 1, "read_only", 20)).shutting == "read_only"
        await shut(service, "q", 0, "open", 20)
        # A late one of the coordinator that began the move is refused: nothing may come out of there any more.
        assert (await refused(move(service, "q", 0, 1))).code == "version_conflict"
        await eventually(lambda: has(service.stats("q")) == {0: (0, 0, 0), 1: (1, 0, 0)})
        assert (await shut(service, "q", 0, "open", 20)).moving == 0


@driven
async def test_a_move_to_a_partition_that_is_gone_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That cannot be; if it is, nothing is lost or doubled: the target may have had them, and handed them on."""
    monkeypatch.setattr(transfer_sender, "SEND_TIMEOUT", 100)
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q", 2))
        await into(service, 0, "a")
        await shut(service, "q", 0, "read_only")
        lost = asyncio.Event()

        commits = 0

        async def all_but_the_first(ref: PartitionRef) -> Outcome | None:
            nonlocal commits
            commits += ref.partition == 0
            if ref.partition == 0 and commits > 1:
                lost.set()
                return Outcome.REFUSED
            return None

        store.on_apply = all_but_the_first
        moving = asyncio.create_task(move(service, "q", 0, 1, timeout=500))
        await lost.wait()
        # It has arrived, but its source does not know.
        assert (await settle(service, "q", await lease(service, "q"))).completed == 1
        await set_slots(service, "q", lambda _: 0)
        await remove(service, "q", 1)
        store.on_apply = fine
        await asyncio.wait((moving,))
        _ = moving.exception()
        tries, produce_really = 0, service._router.produce

        async def count(record: QueueRecord, request: Produce) -> Produced:
            nonlocal tries
            tries += 1
            return await produce_really(record, request)

        monkeypatch.setattr(service._router, "produce", count)
        await eventually(lambda: tries > 1)
        assert has(service.stats("q")) == {0: (0, 0, 1)}
        assert await move(service, "q", 0, 1, timeout=50) == (0, 0)
        assert (await lease(service, "q")).leases == []


# ---- how much goes at once ------------------------------------------------------------------------------------


def test_pieces_hold_all_rows_and_their_lives_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_sender, "MAX_BYTES", 150)
    batch = batch_from_rows([{"payload": bytes([n]) * (10 * n)} for n in range(1, 12)])
    lives = (MovedItem(3, 1), MovedItem(1, 2, due_at=9), MovedItem(7, 3, attempts=4))
    found = pieces(Piece(batch, lives))
    assert len(found) > 3
    assert all(each.batch.nbytes <= 150 or each.batch.num_rows == 1 for each in found)
    assert pa.Table.from_batches([each.batch for each in found]).to_pylist() == batch.to_pylist()
    assert all(sum(life.rows for life in each.lives) == each.batch.num_rows for each in found)
    by_row = [life._replace(rows=1) for life in lives for _ in range(life.rows)]
    assert [life._replace(rows=1) for each in found for life in each.lives for _ in range(life.rows)] == by_row
    assert [each.batch for each in pieces(Piece(batch, lives))] == [each.batch for each in found]


@pytest.mark.parametrize("way", ["move", "dead"])
@driven
async def test_what_is_too_large_for_one_message_goes_in_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Else it could never arrive on another instance. Exactly once, though the answer to one of them is lost."""
    monkeypatch.setattr(transfer_sender, "MAX_BYTES", 1_000)
    monkeypatch.setattr(transfer_sender, "SEND_TIMEOUT", 200)
    async with serving(tmp_path) as (service, store):
        dead = await service.create_queue(spec("dead", 1))
        await service.create_queue(spec("q", 2, dead_queue="dead"))
        texts = [f"{n:03d}" * 50 for n in range(40)]
        await into(service, 0, *texts)
        target = PartitionRef(dead.incarnation, 0) if way == "dead" else PartitionRef(service.queue("q").incarnation, 1)
        lost = 0
        router, largest = service._router, 0
        produce_really = router.produce

        async def watched(record: object, request: Produce) -> object:
            nonlocal largest
            largest = max(largest, request.batch.nbytes)
            return await produce_really(record, request)  # type: ignore[arg-type]

        async def lose(ref: PartitionRef) -> None:
            nonlocal lost
            if ref == target and lost < 3:
                lost += 1
                raise OSError("the answer was lost")

        monkeypatch.setattr(router, "produce", watched)
        store.on_applied = lose
        if way == "dead":
            leased = await lease(service, "q", 100)
            assert (await settle(service, "q", leased, Disposition("dead", reason="bad"))).dead == 40
        else:
            await shut(service, "q", 0, "read_only")
            assert await move(service, "q", 0, 1) == (40, 40)
        await eventually(lambda: not service.stats("q").partitions[0].transferring)
        assert lost == 3
        assert largest <= 1_000
        queue = "dead" if way == "dead" else "q"
        assert sorted(payloads((await lease(service, queue, 100)).batches)) == texts


# ---- what is said of them -------------------------------------------------------------------------------------


@driven
async def test_why_an_item_of_such_a_partition_is_not_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        await into(service, 0, "x")
        reasons: dict[PartitionState, str] = {
            "paused": "is paused",
            "preparing": "is not in use yet",
            "draining": "is draining its partition",
        }
        for state, says in reasons.items():
            await set_state(service, "q", [0], state)
            assert says in (await service.explain("q", 0, 0)).reason
            assert (await lease(service, "q")).leases == [] or state == "draining"
        assert {check.name: check.ok for check in await service.checks()}["partitions"]
