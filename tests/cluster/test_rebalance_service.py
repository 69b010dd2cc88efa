"""Rebalances of a server that is alone: every kind of plan, with a coordinator that dies at every action, cancelled at every step."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluiceway.adapters import system
from sluiceway.cluster import coordinator, rebalance_records, rebalance_run
from sluiceway.cluster.queue_changes import DROPPING, incarnation_of
from sluiceway.contract.rebalances import DrainMode
from sluiceway.core.partition import admission
from sluiceway.core.rebalance import steps as machine
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_PARTITIONS
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.backends import SqliteBackend
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Produce, ProduceKey, QueuePatch
from sluiceway.ports.meta_store import MetaUnknownError
from sluiceway.ports.partition_store import PartitionRef, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.cluster.rebalance_rig import BY, Doom, Ledger, affinities, at_step, begun, ended, in_memory
from tests.instance.instance_rig import PATIENCE, lease, payloads, produce, serving_on, settle, spec


@contextlib.asynccontextmanager
async def consuming(ledger: Ledger) -> AsyncIterator[None]:
    """Meanwhile everything that can be had is taken and completed."""
    ledger.enough = False
    task = asyncio.create_task(ledger.consume())
    try:
        yield
    finally:
        ledger.enough = True
        await task


async def actions(service: Service) -> list[str]:
    """Of the audit trail, oldest first."""
    return [entry.action for entry in reversed(await service.audit.list(1_000))]


@driven
async def test_four_partitions_become_twelve_and_then_three(tmp_path: Path) -> None:
    async with serving_on(tmp_path, a=SqliteBackend()) as (service, _):
        await service.create_queue(spec("q", 4))
        ledger = Ledger(service, "q")
        await ledger.fill()
        grown = await ended(service, (await begun(service, "q", 12)).id)
        assert (grown.state, len(service.queue("q").partitions)) == ("done", 12)
        await ledger.fill_more(20)
        shrunk = await begun(service, "q", 3)
        async with consuming(ledger):
            await at_step(service, shrunk.id, "drain")
            await ledger.let_go()
            assert (await ended(service, shrunk.id)).state == "done"
        assert [each.partition for each in service.queue("q").partitions] == [0, 1, 2]
        assert service.queue("q").given == 12
        await ledger.check()
        assert not (await service.meta.read(prefixes=["dropping/"])).entries


@pytest.mark.parametrize("drain", ["natural", "copy"])
@driven
async def test_a_move_to_another_backend(tmp_path: Path, drain: DrainMode) -> None:
    async with in_memory(tmp_path, "a", "b") as service:
        await service.create_queue(spec("q", 2))
        ledger = Ledger(service, "q")
        await ledger.fill()
        affinities(service, a=0, b=1)
        moved = await begun(service, "q", drain=drain)
        await ledger.let_go()
        async with consuming(ledger):
            found = await ended(service, moved.id)
        assert (found.state, found.problem) == ("done", "")
        assert [each.backend for each in service.queue("q").partitions] == ["b", "b"]
        assert [each.parents for each in service.queue("q").partitions] == [(0,), (1,)]
        await ledger.check()


@driven
async def test_a_queue_with_one_partition_keeps_its_order(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a", "b") as service:
        await service.create_queue(spec("q"))
        await produce(service, "q", *(f"{each:05}" for each in range(500)))
        affinities(service, a=0, b=1)
        moved = await begun(service, "q")
        assert moved.plan.in_order
        consumed: list[str] = []
        made = 500
        while (await service.get_rebalance(moved.id)).is_open or len(consumed) < made:
            if (await service.get_rebalance(moved.id)).is_open and made < 5_000:
                await produce(service, "q", *(f"{each:05}" for each in range(made, made + 7)))
                made += 7
            leased = await lease(service, "q", 20)
            consumed += payloads(leased.batches)
            await settle(service, "q", leased)
        assert consumed == [f"{each:05}" for each in range(made)]
        assert service.queue("q").partitions[0].backend == "b"


@driven
async def test_copying_such_a_queue_is_refused(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a", "b") as service:
        await service.create_queue(spec("q"))
        affinities(service, a=0, b=1)
        with pytest.raises(SluicewayError, match="order") as refused:
            await begun(service, "q", drain="copy")
        assert (refused.value.code, refused.value.field) == ("invalid_request", "drain")


# ---- a coordinator that dies, and cancellations ---------------------------------------------------------------------


@pytest.mark.parametrize(("partitions", "requested", "drain"), [(2, 5, "natural"), (4, 2, "copy"), (2, 2, "copy"), (3, 1, "natural")])
@driven
async def test_the_coordinator_may_die_at_every_action(tmp_path: Path, partitions: int, requested: int, drain: DrainMode) -> None:
    died = 0
    for at in range(1, 400):
        async with in_memory(tmp_path / str(at), "a", "b") as service:
            await service.create_queue(spec("q", partitions))
            ledger = Ledger(service, "q")
            await ledger.fill()
            if partitions == requested:
                affinities(service, a=0, b=1)
            doom = Doom(service, at)
            asked = await begun(service, "q", requested, drain)
            await ledger.let_go()
            async with consuming(ledger):
                end = asyncio.create_task(ended(service, asked.id))
                dead = asyncio.create_task(doom.dead.wait())
                await asyncio.wait((end, dead), return_when=asyncio.FIRST_COMPLETED)
                dead.cancel()
                if doom.dead.is_set():
                    died += 1
                    await doom.replace()
                found = await end
            assert found.state == "done", at
            assert len(service.queue("q").partitions) == requested
            await ledger.check()
            done = Counter(entry for entry in await actions(service) if entry.startswith("rebalance."))
            assert all(done[f"rebalance.{step}"] >= 1 for step in ("create", "flip", "shut", "keys", "drain", "finish"))
            assert done["rebalance.flip"] == done["rebalance.shut"] == done["rebalance.finish"] == 1
            if not doom.dead.is_set():
                break
    assert died > 20


@driven
async def test_as_many_new_partitions_as_a_queue_may_have_can_be_cancelled(tmp_path: Path) -> None:
    """Their backend may be away, so that the rebalance can neither go on nor stay."""
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 1))
        before = service.queue("q")
        doom = Doom(service, 1)
        asked = await begun(service, "q", MAX_PARTITIONS)
        await doom.dead.wait()
        await doom.bury()
        assert (await service.cancel_rebalance(asked.id, BY)).state == "cancelled"
        assert service.queue("q").partitions == before.partitions
        async with asyncio.timeout(PATIENCE):
            while (await service.meta.read(prefixes=[DROPPING])).entries:  # noqa: ASYNC110 - what is waited for has no event to await
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("at", range(1, 60, 3))
@driven
async def test_cancelled_at_any_moment_it_goes_back(tmp_path: Path, at: int) -> None:
    async with in_memory(tmp_path, "a", "b") as service:
        await service.create_queue(spec("q", 2))
        before = service.queue("q")
        ledger = Ledger(service, "q")
        await ledger.fill()
        affinities(service, a=0, b=1)
        doom = Doom(service, at)
        asked = await begun(service, "q", 2, "copy")
        # What is leased keeps it from its end.
        await doom.dead.wait()
        await doom.bury()
        cancelled = False
        with contextlib.suppress(SluicewayError):
            await service.cancel_rebalance(asked.id, BY)
            cancelled = True
        doom.succeed()
        await ledger.produce("new", partition=None)
        await ledger.let_go()
        async with consuming(ledger):
            found = await ended(service, asked.id)
        assert found.state == ("cancelled" if cancelled else "done")
        if cancelled:
            after = service.queue("q")
            assert after.partitions == before.partitions
            assert after.slots == (0, 1) * 128
        await ledger.check()
        with pytest.raises(SluicewayError) as refused:
            await service.cancel_rebalance(asked.id, BY)
        assert refused.value.code == "not_cancellable"


# ---- the calls ------------------------------------------------------------------------------------------------------


@driven
async def test_what_can_be_refused_is(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a", "b") as service:
        await service.create_queue(spec("q", 2))
        plan_id, made, _ = await service.plan_rebalance("q", 3)
        assert [each.partition for each in made.creates] == [2]
        assert (await service.plan_rebalance("q", 3))[0] == plan_id
        for code, call in {
            "plan_changed": begun(service, "q", 4, plan_id=plan_id),
            "nothing_to_rebalance": begun(service, "q", 2),
            "queue_not_found": begun(service, "other", 2),
            "invalid_request": begun(service, "q", 0),
            "rebalance_not_found": service.get_rebalance("nothing"),
        }.items():
            with pytest.raises(SluicewayError) as refused:
                await call
            assert refused.value.code == code
        await lease(service, "q")
        await produce(service, "q", "held")
        first = await begun(service, "q", 1)
        with pytest.raises(SluicewayError, match=first.id) as refused:
            await begun(service, "q", 4)
        assert refused.value.code == "rebalance_open"


@driven
async def test_a_batch_is_carried_out_one_after_the_other(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a") as service:
        for name in ("orders-1", "orders-2", "orders-3", "others"):
            await service.create_queue(spec(name, 3 if name == "orders-3" else 2))
        batch = await service.rebalance_many("orders-*", 3, "natural", None, BY)
        assert [each.queue_name for each in batch.rebalances] == ["orders-1", "orders-2"]
        assert [each.queue_name for each in batch.left_out] == ["orders-3"]
        ends = [await ended(service, each.id) for each in batch.rebalances]
        assert [each.state for each in ends] == ["done", "done"]
        assert ends[0].ended_at is not None
        assert ends[1].started_at is not None
        assert ends[0].ended_at <= ends[1].started_at
        assert [each.id for each in await service.rebalances(None, False)] == sorted((each.id for each in ends), reverse=True)
        assert not await service.rebalances(None, True)
        assert len(service.queue("others").partitions) == 2


@driven
async def test_a_batch_that_was_recorded_without_an_answer_is_carried_out(tmp_path: Path) -> None:
    """A server that is alone looked at it only when another rebalance began, or after a restart."""
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 2))
        commit = service.meta.commit

        async def unheard(*args: Any, **named: Any) -> None:
            await commit(*args, **named)
            raise MetaUnknownError("cut off")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service.meta, "commit", unheard)
            with pytest.raises(SluicewayError, match="did not confirm"):
                await service.rebalance_many("*", 3, "natural", None, BY)
        (recorded,) = await service.rebalances(None, False)
        assert (await ended(service, recorded.id)).state == "done"


@driven
async def test_of_a_batch_a_queue_that_keeps_its_items_unique_by_then_is_passed_over(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a") as service:
        for name in ("q", "unique"):
            await service.create_queue(spec(name, 2))
        ledger = Ledger(service, "q")
        await ledger.fill()
        batch = await service.rebalance_many("*", 1, "natural", None, BY)
        await at_step(service, batch.rebalances[0].id, "drain")
        await service.update_queue("unique", QueuePatch({"unique": "until_settled"}))
        await service.delete_queue("q", True)
        found = await ended(service, batch.rebalances[1].id)
        assert found.state == "failed"
        assert "unique" in (found.problem or "")
        assert len(service.queue("unique").partitions) == 2


@driven
async def test_of_a_batch_that_copies_a_queue_in_order_drains_naturally(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a", "b") as service:
        for name, partitions in (("many", 2), ("one", 1)):
            await service.create_queue(spec(name, partitions))
        affinities(service, a=0, b=1)
        batch = await service.rebalance_many("*", None, "copy", 1_000, BY)
        ends = [await ended(service, each.id) for each in batch.rebalances]
        assert [(each.queue_name, each.state, each.drain, each.rate) for each in ends] == [
            ("many", "done", "copy", 1_000),
            ("one", "done", "natural", None),
        ]


@driven
async def test_a_queue_that_is_deleted_ends_its_rebalance(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 2))
        ledger = Ledger(service, "q")
        await ledger.fill()
        asked = await begun(service, "q", 1)
        await at_step(service, asked.id, "drain")
        await service.delete_queue("q", True)
        found = await ended(service, asked.id)
        assert (found.state, found.problem) == ("failed", "the queue was deleted")
        assert "rebalance.failed" in await actions(service)


@driven
async def test_settings_can_be_changed_meanwhile(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 2))
        ledger = Ledger(service, "q")
        await ledger.fill()
        asked = await begun(service, "q", 1)
        await at_step(service, asked.id, "drain")
        version = service.queue("q").version
        assert (await service.update_queue("q", QueuePatch({"max_attempts": 7}, version))).rebalance == asked.id
        await ledger.let_go()
        async with consuming(ledger):
            assert (await ended(service, asked.id)).state == "done"
        assert service.queue("q").max_attempts == 7
        await ledger.check()


@driven
async def test_a_partition_is_paused_and_goes_on(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 2))
        ledger = Ledger(service, "q")
        await ledger.produce("in 0", partition=0)
        await service.set_partition("q", 0, True, BY)
        await ledger.produce("in 1")
        assert [each.ready for each in service.stats("q").partitions] == [1, 1]
        assert await ledger.take() == 1
        assert ledger.consumed == ["in 1"]
        await service.set_partition("q", 0, False, BY)
        assert await ledger.take() == 1
        assert [each for each in await actions(service) if each.startswith("partition")] == ["partition.pause", "partition.resume"]
        await ledger.fill()
        await at_step(service, (await begun(service, "q", 1)).id, "drain")
        with pytest.raises(SluicewayError) as refused:
            await service.set_partition("q", 1, True, BY)
        assert refused.value.code == "rebalance_open"


@driven
async def test_a_copy_keeps_its_rate(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 2))
        ledger = Ledger(service, "q")
        await ledger.produce(*(f"item {each}" for each in range(400)), partition=1)
        asked = await begun(service, "q", 1, "copy", rate=200)
        await at_step(service, asked.id, "drain")
        began = system.steady()
        progress = await service.rebalance_progress(await service.get_rebalance(asked.id))
        assert progress.items_left <= 400
        found = await ended(service, asked.id)
        assert 1_500 <= system.steady() - began <= 4_000
        assert found.moved == 400
        await ledger.check()


@driven
async def test_what_arrives_while_its_count_is_written_down_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOVE_ITEMS", 5)
    monkeypatch.setattr(rebalance_run, "NOTE_EVERY", 0)
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 4))
        ledger = Ledger(service, "q")
        for number in (1, 2, 3):
            await ledger.produce(*(f"item {number}.{each}" for each in range(100)), partition=number)
        records = service._rebalancing._records
        write = records.write

        async def slowly(*args: Any) -> int:
            await asyncio.sleep(0.003)
            return await write(*args)

        records.write = slowly  # type: ignore[method-assign,assignment]
        found = await ended(service, (await begun(service, "q", 1, "copy")).id)
        assert (found.items, found.moved) == (300, 300)


@driven
async def test_what_was_counted_by_a_commit_without_an_answer_is_not_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOVE_ITEMS", 5)
    monkeypatch.setattr(rebalance_run, "NOTE_EVERY", 0)
    monkeypatch.setattr(rebalance_run, "MAX_BACK_OFF", 1)
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 2))
        ledger = Ledger(service, "q")
        await ledger.produce(*(f"item {each}" for each in range(100)), partition=1)
        records = service._rebalancing._records
        write, lost = records.write, 0

        async def lands(before: Any, change: machine.Change, *more: Any) -> int:
            nonlocal lost
            stamp = await write(before, change, *more)
            if change.record is None and change.rebalance.is_open:
                lost += 1
                raise SluicewayError("outcome_unknown", "the meta store did not confirm the change")
            return stamp

        records.write = lands  # type: ignore[method-assign,assignment]
        found = await ended(service, (await begun(service, "q", 1, "copy")).id)
        assert (found.items, found.moved) == (100, 100)
        assert lost > 3


@driven
async def test_an_error_that_nobody_expects_is_told_and_not_met_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalance_run, "NOTE_EVERY", 10)
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 1))
        router = service._rebalancing.coordinator._parts.router
        owner_of, asked = router.owner_of, 0

        async def failing(*_: Any, **__: Any) -> Any:
            nonlocal asked
            asked += 1
            raise ValueError("something new")

        router.owner_of = failing  # type: ignore[method-assign]
        id = (await begun(service, "q", 2)).id
        async with asyncio.timeout(PATIENCE):
            while "something new" not in (await service.get_rebalance(id)).problem:  # noqa: ASYNC110 - a record has no event to await
                await asyncio.sleep(0.01)
        assert asked < 10
        router.owner_of = owner_of  # type: ignore[method-assign]
        assert (await ended(service, id)).state == "done"


@driven
async def test_a_coordinator_whose_election_was_not_confirmed_stands_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, too: the rebalance stood still until something else changed."""
    monkeypatch.setattr(coordinator, "POLL", 10)
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 2))
        commit, failures = service.meta.commit, [MetaUnknownError("the disk is full")] * 2

        async def failing(checks: Mapping[str, int | None] | None = None, *args: Any, **fields: Any) -> int:
            if rebalance_records.COORDINATOR in (checks or {}) and failures:
                raise failures.pop()
            return await commit(checks, *args, **fields)

        monkeypatch.setattr(service.meta, "commit", failing)
        assert (await ended(service, (await begun(service, "q", 4)).id)).state == "done"
        assert not failures


@driven
async def test_a_pace_begins_with_nothing_saved_and_catches_up_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += 1000 * seconds

    monkeypatch.setattr(system, "steady", lambda: now)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    pace = rebalance_run.Pace(1_000)
    taken = 0
    while taken < 10_000:
        taken += await pace.take(10_000)
    assert 9_600 <= now - 1_000_000 <= 10_000
    # Held up for long, it may make up for a second.
    now += 60_000
    began = now
    taken = 0
    while taken < 10_000:
        taken += await pace.take(10_000)
    assert 8_600 <= now - began <= 9_000
    before = now
    pace.give_back(await pace.take(10_000))
    await pace.take(10_000)
    assert now - before <= 200
    assert await rebalance_run.Pace(None).take(10_000) == 10_000


@driven
async def test_partitions_that_fail_once_each_are_soon_asked_again(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 1))
        found = await ended(service, (await begun(service, "q", 2)).id)
        run = rebalance_run.Run(service._rebalancing.coordinator._parts, rebalance_records.Stored(found, 1), 1, "a")
        for number in range(50):
            run._fail(number, SluicewayError("unavailable", "it is being opened"))
        assert {run._back_off(number) for number in range(50)} == {2 * rebalance_run.BACK_OFF}
        for _ in range(20):
            run._fail(7, SluicewayError("unavailable", "it is being opened"))
        assert run._back_off(7) == rebalance_run.MAX_BACK_OFF
        run._succeed(7)
        assert run._back_off(7) == rebalance_run.BACK_OFF


@pytest.mark.parametrize("error", [StoreUnavailableError("the disk is gone"), ValueError("something new")])
@driven
async def test_data_of_a_removed_partition_goes_once_its_backend_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(coordinator, "DROP_AGAIN", 10)
    async with serving_on(tmp_path, a=SqliteBackend()) as (service, stores):
        await service.create_queue(spec("q", 2))
        tries = 0

        async def failing(ref: PartitionRef) -> None:
            nonlocal tries
            tries += 1
            if tries < 9:
                raise error

        stores["a"].on_drop = failing
        asked = await begun(service, "q", 1)
        assert (await ended(service, asked.id)).state == "done"
        left: Mapping[str, object] = {"": None}
        async with asyncio.timeout(30):
            while left:
                left = (await service.meta.read(prefixes=["dropping/"])).entries
                await asyncio.sleep(0.01)
        assert tries == 9


@driven
async def test_data_that_is_still_there_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """Its backend cannot be taken away before, and its incarnation is not given again."""

    async def failing(ref: PartitionRef) -> None:
        raise StoreUnavailableError("the disk is gone")

    async with serving_on(tmp_path, a=SqliteBackend(), b=SqliteBackend(partition_affinity=0)) as (service, stores):
        await service.create_queue(spec("q", 2))
        stores["a"].on_drop = failing
        service._backends._settings = {"a": SqliteBackend(partition_affinity=0), "b": SqliteBackend()}
        await ended(service, (await begun(service, "q", 2)).id)
        incarnation = service.queue("q").incarnation
        assert (await service._backend_changes._holding())["a"] == 2
        await service.delete_queue("q", True)
    async with serving_on(tmp_path, a=SqliteBackend(), b=SqliteBackend()) as (service, _):
        view = await service.meta.read(prefixes=["dropping/"])
        assert not view.entries
    assert incarnation_of(f"dropping/{incarnation}/1") == incarnation_of(f"dropping/{incarnation}") == incarnation


@driven
async def test_the_last_ended_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalance_records, "MAX_ENDED_REBALANCES", 3)
    monkeypatch.setattr(rebalance_records, "TRIM_EVERY", 0)
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 1))
        ids = []
        for wanted in (2, 3, 4, 5, 6):
            ids.append((await begun(service, "q", wanted)).id)
            await ended(service, ids[-1])
        found = await service.rebalances("q", False)
        async with asyncio.timeout(30):
            while len(found) > 3:
                await asyncio.sleep(0.01)
                found = await service.rebalances("q", False)
        assert [each.id for each in found] == ids[:1:-1]


@driven
async def test_every_step_has_its_entry_with_who_caused_it(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 2))
        asked = await begun(service, "q", 3)
        await ended(service, asked.id)
        entries = [entry for entry in reversed(await service.audit.list(100)) if "rebalance" in entry.action]
        assert [entry.action for entry in entries] == [
            "queue.rebalance",
            *(f"rebalance.{step}" for step in ("create", "flip", "shut", "keys", "drain", "finish")),
        ]
        assert (entries[0].actor, entries[0].request_id) == ("somebody", "request-1")
        for entry in entries:
            assert entry.detail["rebalance"] == asked.id
            assert entry.detail["cause"] == "rebalance asked by somebody"
            assert entry.detail["cause_request_id"] == "request-1"
        assert entries[0].detail["states"] == {"2": {"from": None, "to": "preparing"}}
        assert entries[2].detail["states"] == {"2": {"from": "preparing", "to": "available"}}


@driven
async def test_nothing_is_read_or_written_while_nothing_is_open(tmp_path: Path) -> None:
    async with in_memory(tmp_path, "a") as service:
        await service.create_queue(spec("q", 2))
        await ended(service, (await begun(service, "q", 3)).id)
        reads = 0
        read = service.meta.read

        async def counted(*args: object, **fields: object) -> object:
            nonlocal reads
            reads += 1
            return await read(*args, **fields)  # type: ignore[arg-type]

        await asyncio.sleep(0.05)
        service.meta.read = counted  # type: ignore[method-assign,assignment]
        stamp = (await read()).stamp
        await asyncio.sleep(0.3)
        assert reads == 0
        assert (await read()).stamp == stamp


@driven
async def test_keys_go_with_each_of_their_slots_though_no_commit_is_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the next slots are asked for anew: what was heard of the first ones is no answer."""
    for module in (admission, machine):
        monkeypatch.setattr(module, "MAX_KEYS_BYTES", 1_000)
    async with in_memory(tmp_path, "a", "b") as service:
        await service.create_queue(spec("q", 1))
        call = Produce(batch_from_rows([{"payload": b"x"}]), 20_000)
        first = [await service.produce("q", replace(call, key=ProduceKey(f"k{number}"))) for number in range(30)]
        commit, unconfirmed = service.meta.commit, 0

        async def landing(checks: Any = None, unchanged: Any = None, puts: Any = None, *args: Any, **fields: Any) -> int:
            nonlocal unconfirmed
            stamp = await commit(checks, unchanged, puts, *args, **fields)
            if rebalance_records.COORDINATOR in (checks or {}) and QUEUE + "q" in (puts or {}):
                unconfirmed += 1
                raise MetaUnknownError("no answer")
            return stamp

        monkeypatch.setattr(service.meta, "commit", landing)
        affinities(service, a=0, b=1)
        asked = await begun(service, "q", 1)
        await at_step(service, asked.id, "drain")
        assert unconfirmed > 4
        again = [await service.produce("q", replace(call, key=ProduceKey(f"k{number}"))) for number in range(30)]
        assert again == [each._replace(deduplicated=True) for each in first]
