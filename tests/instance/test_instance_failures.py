"""The instance when its store fails, is damaged, or dies between two steps: nobody waits for ever, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sluiceway.cluster import transfer_sender
from sluiceway.core.queue.tickets import Commit
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.backend import Backend
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, Peek
from sluiceway.model.small_batch import in_columns
from sluiceway.ports.partition_store import Changes, Fence, PartitionRef, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import (
    PATIENCE,
    Store,
    down,
    eventually,
    fine,
    forget_rows,
    lease,
    payloads,
    produce,
    service_on,
    serving,
    settle,
    spec,
    total,
)

DEAD = Disposition("dead", reason="bad")


async def end(work: asyncio.Future[Any]) -> str:
    """How the task ended: the code of its error, or nothing."""
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait((work,))
    error = work.exception()
    assert error is None or isinstance(error, SluicewayError)
    return error.code if error else ""


# ---- dead letters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["before the dead queue", "after the dead queue", "after all"])
@driven
async def test_a_crash_on_the_way_to_the_dead_queue_makes_neither_a_loss_nor_a_copy(tmp_path: Path, point: str) -> None:
    async with serving(tmp_path) as (service, store):
        dead = await service.create_queue(spec("dead", 3))
        await service.create_queue(spec("q", 2, dead_queue="dead"))
        await produce(service, "q", "a", "b", "c")
        leased = await lease(service, "q")
        reached = asyncio.Event()

        async def watch(ref: PartitionRef) -> Outcome | None:
            to_dead = ref.incarnation == dead.incarnation
            if point == "before the dead queue" and to_dead:
                store.die()
                reached.set()
                return Outcome.UNKNOWN
            if point == "after the dead queue" and not to_dead and total(service, "dead"):
                store.die()
                reached.set()
                return Outcome.UNKNOWN
            return None

        store.on_apply = watch
        assert (await settle(service, "q", leased, DEAD)).dead == 3
        if point == "after all":
            await eventually(lambda: total(service, "q") == 0)
        else:
            async with asyncio.timeout(PATIENCE):
                await reached.wait()
    async with serving(tmp_path) as (service, _):
        await eventually(lambda: total(service, "q") == 0 and service.stats("q").partitions[0].dead == 3)
        got = await lease(service, "dead", most=3)
        assert sorted(payloads(got.batches)) == ["a", "b", "c"]
        assert total(service, "dead") == 3
        headers = [dict(pairs) for batch in map(in_columns, got.batches) for pairs in batch.column("headers").to_pylist()]
        assert {(each["sluiceway-reason"], each["sluiceway-queue"], each["sluiceway-attempts"]) for each in headers} == {("bad", "q", "1")}


@driven
async def test_origins_survive_death(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        record = await service.create_queue(spec("q", dead_queue="dead", max_attempts=2))
        produced = await produce(service, "q", "a", "b")
        for _ in range(2):
            leased = await lease(service, "q", timeout=10_000)
            assert leased.leases
            await settle(service, "q", leased, Disposition("retry"))
        got = await lease(service, "dead", timeout=10_000)
        origins = [origin for batch in map(in_columns, got.batches) for origin in batch.column("origin").to_pylist()]
        assert origins == [f"{record.incarnation}.0.{produced.first_offset + n}" for n in range(2)]


@driven
async def test_a_dead_queue_that_is_down_keeps_dead_items_waiting_and_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        dead = await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        await produce(service, "q", "a")
    store = Store(tmp_path / "partitions")
    service = service_on(tmp_path, store)

    async def dead_is_down(ref: PartitionRef) -> None:
        if ref.incarnation == dead.incarnation:
            await down(ref)

    store.on_open = dead_is_down
    await service.start()
    await settle(service, "q", await lease(service, "q"), DEAD)
    await eventually(lambda: service.stats("dead").produce_waiting == 1)
    async with asyncio.timeout(PATIENCE):
        await service.stop()
    async with serving(tmp_path) as (service, _):
        await eventually(lambda: total(service, "dead") == 1)


@driven
async def test_dead_items_that_the_store_has_lost_stop_the_partition(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        await produce(service, "q", "a", "b")
        leased = await lease(service, "q")
        service._cache.capacity = 0  # so that it has to read them
        forget_rows(service)
        store.missing = {0}
        await settle(service, "q", leased, DEAD)
        await eventually(lambda: bool(service.problems()))
        assert "missing" in service.problems()[0]
        assert service.stats("q").partitions[0].dead == 0, "lost items were counted as buried"


# ---- damage ---------------------------------------------------------------------------------------------------


@driven
async def test_a_damaged_blob_stops_its_partition_and_no_other(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        record = await service.create_queue(spec("q", 2))
        await produce(service, "q", "to be damaged" * 100)
        await produce(service, "q", "sound")
    for suffix in ("", "-wal"):
        path = tmp_path / "partitions" / f"{record.incarnation}-0.sqlite{suffix}"
        if path.exists():
            path.write_bytes(path.read_bytes().replace(b"to be damaged", b"it is DAMAGED"))
    async with serving(tmp_path) as (service, _):
        assert service.problems() == [], "it is not read before it is served"
        codes = []
        for _ in range(2):
            try:
                assert payloads((await lease(service, "q", 1)).batches) == ["sound"]
            except SluicewayError as error:
                codes.append(error.code)
        assert codes == ["partition_damaged"]
        (problem,) = service.problems()
        assert "queue q, partition 0: stopped" in problem
        assert "checksum" in problem
        for _ in range(3):
            assert (await produce(service, "q", "more")).partition == 1
        with pytest.raises(SluicewayError) as refused:
            await service.peek("q", Peek(1, partition=0))
        assert refused.value.code == "partition_damaged"


# ---- a failing store ------------------------------------------------------------------------------------------


@driven
async def test_a_store_that_raises_in_a_commit_is_opened_anew(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        faults = iter([OSError("planted"), ZeroDivisionError("planted")])

        async def fail(_: PartitionRef) -> Outcome | None:
            error = next(faults, None)
            if error is not None:
                raise error
            return None

        store.on_apply = fail
        assert (await produce(service, "q", "a")).items == 1
        assert total(service, "q") == 1
        assert service.stats("q").partitions[0].failures == 2


@driven
async def test_a_store_that_raises_in_a_read_is_answered_for(tmp_path: Path) -> None:
    async def fail(_: PartitionRef) -> None:
        raise ZeroDivisionError("planted")

    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
    async with serving(tmp_path) as (service, store):
        store.on_read = fail
        assert await end(asyncio.ensure_future(lease(service, "q"))) == "internal"
        store.on_read = down
        assert await end(asyncio.ensure_future(lease(service, "q"))) == ""


@driven
async def test_items_that_were_leased_and_could_not_be_read_are_served_again_at_once(tmp_path: Path) -> None:
    """The answer says that nothing was done. The items were leased all the same, and waited for their lease to run out."""
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
    async with serving(tmp_path) as (service, store):
        store.on_read = down
        assert await end(asyncio.ensure_future(lease(service, "q"))) == "unavailable"
        store.on_read = fine
        again = await lease(service, "q", timeout=10_000)
        assert [(row["payload"], row["attempts"]) for row in in_columns(again.batches[0]).to_pylist()] == [(b"a", 1)]


@driven
async def test_an_error_that_nobody_expects_while_a_partition_is_opened_is_no_damage(tmp_path: Path) -> None:
    """The partition was stopped until an operator reloaded it."""
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        faults = iter([RuntimeError("can't start new thread"), MemoryError()])

        async def fail(_: PartitionRef) -> None:
            for error in faults:
                raise error

        store.on_open = fail
        assert await end(asyncio.ensure_future(service.reload("q", 10_000))) == "unavailable"
        assert payloads((await lease(service, "q", timeout=10_000)).batches) == ["a"]


@driven
async def test_a_commit_whose_rows_cannot_be_kept_in_memory_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its partition waited for the end of that commit for good, and so did backups, and a stop."""
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        fails = iter([MemoryError("planted")])
        keep = service._drivers["q"]._delivery.keep

        def keep_or_fail(effect: Commit) -> None:
            for error in fails:
                raise error
            keep(effect)

        monkeypatch.setattr(service._drivers["q"]._delivery, "keep", keep_or_fail)
        async with asyncio.timeout(PATIENCE):
            assert (await produce(service, "q", "a")).items == 1
        assert payloads((await lease(service, "q")).batches) == ["a"]


@driven
async def test_a_partition_that_comes_back_serves_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))

        async def unknown(_: PartitionRef) -> Outcome | None:
            return Outcome.UNKNOWN

        store.on_apply, store.on_open = unknown, down
        work = asyncio.ensure_future(produce(service, "q", "a"))
        await eventually(lambda: bool(service.problems()))
        store.on_apply, store.on_open = fine, fine
        assert await end(work) == ""
        assert service.problems() == []


@driven
async def test_a_start_does_not_wait_for_partitions_that_keep_failing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 3))
    store = Store(tmp_path / "partitions")
    order = asyncio.Condition()
    asked = 0

    async def in_turns(ref: PartitionRef) -> None:
        # There is always one that is just being opened: each fails only after the next was asked for.
        nonlocal asked
        async with order:
            asked += 1
            mine = asked
            order.notify_all()
            if mine > 2:
                await order.wait_for(lambda: asked > mine)
        await down(ref)

    store.on_open = in_turns
    service = service_on(tmp_path, store)
    async with asyncio.timeout(PATIENCE):
        await service.start()
    assert service.problems() == ["backend default does not answer: the disk is gone"]
    store.on_open = down
    async with order:
        asked = 10**9
        order.notify_all()
    async with asyncio.timeout(PATIENCE):
        await service.stop()


@driven
async def test_a_stop_leaves_nobody_without_an_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
    store = Store(tmp_path / "partitions")
    service = service_on(tmp_path, store)
    await service.start()
    store.die()
    flying = asyncio.ensure_future(produce(service, "q", "a", timeout=600_000))
    await eventually(lambda: bool(service.problems()))
    behind = asyncio.ensure_future(produce(service, "q", "b", timeout=600_000))
    waiting = asyncio.ensure_future(lease(service, "q", timeout=600_000))
    await eventually(lambda: service.stats("q").lease_waiting == 1)
    async with asyncio.timeout(PATIENCE):
        await service.stop()
    assert await end(flying) == "outcome_unknown"
    assert await end(behind) == "unavailable"
    assert (await waiting).leases == []


@driven
async def test_a_stop_lets_a_commit_in_flight_finish(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(_: PartitionRef) -> Outcome | None:
            begun.set()
            await go_on.wait()
            return None

        store.on_apply = slow
        first = asyncio.ensure_future(produce(service, "q", "a"))
        await begun.wait()
        second = asyncio.ensure_future(produce(service, "q", "b"))
        await eventually(lambda: service.stats("q").produce_waiting == 1)
        asyncio.get_running_loop().call_soon(go_on.set)
        await service._drivers["q"].stop()
        assert (first.result().items, second.result().items) == (1, 1)
        with pytest.raises(SluicewayError, match="stopping"):
            await produce(service, "q", "c")


@driven
async def test_a_queue_that_was_deleted_by_force_answers_those_who_waited(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        waiting = asyncio.ensure_future(lease(service, "q", timeout=600_000))
        await eventually(lambda: service.stats("q").lease_waiting == 1)
        await service.delete_queue("q", True)
        assert await end(waiting) == ""
        assert waiting.result().leases == []


@driven
async def test_a_transfer_whose_answer_was_lost_buries_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_sender, "SEND_TIMEOUT", 200)
    async with serving(tmp_path) as (service, store):
        dead = await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        await produce(service, "q", "a")
        leased = await lease(service, "q")
        held_up = asyncio.Event()
        tries = 0

        async def late(ref: PartitionRef) -> Outcome | None:
            nonlocal tries
            if ref.incarnation == dead.incarnation:
                tries += 1
                if tries == 1:
                    await held_up.wait()
            return None

        store.on_apply = late
        await settle(service, "q", leased, DEAD)
        await eventually(lambda: tries == 1)
        # Longer than its timeout, so the source has been told that the outcome is unknown.
        await eventually(lambda: not service._drivers["q"].queue.executors[0].transferring)
        held_up.set()
        await eventually(lambda: total(service, "q") == 0)
        assert service.stats("q").partitions[0].dead == 1
        (stats,) = service.stats("dead").partitions
        assert (stats.produced, stats.deduplicated) == (1, 1)


@driven
async def test_at_a_start_dead_items_wait_for_their_queue_to_be_opened(tmp_path: Path) -> None:
    """To the queue that opened first it seemed that the other was no more, and it took its dead items back."""
    async with serving(tmp_path) as (service, store):
        dead = await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        await produce(service, "q", "x")
        leased = await lease(service, "q")

        async def to_the_dead(ref: PartitionRef) -> Outcome | None:
            return Outcome.UNKNOWN if ref.incarnation == dead.incarnation else None

        store.on_apply = to_the_dead
        await settle(service, "q", leased, DEAD)
    store = Store(tmp_path / "partitions")
    others = asyncio.Event()

    async def last(ref: PartitionRef) -> None:
        if ref.incarnation == dead.incarnation:
            await others.wait()
        else:
            asyncio.get_running_loop().call_later(0.05, others.set)

    store.on_open = last
    service = service_on(tmp_path, store)
    await service.start()
    await eventually(lambda: total(service, "q") == 0)
    assert payloads((await lease(service, "dead")).batches) == ["x"]
    await service.stop()


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
