"""What a coordinator finds when others have been at work: records that have changed, and data that nobody has dropped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from simulation.loop import Loop, simulated
from sluiceway.cluster.coordinator import Coordinator
from sluiceway.cluster.ownership import PARAMETERS
from sluiceway.cluster.rebalance_records import Stored, dropping_key
from sluiceway.cluster.rebalance_run import RebalanceContext, Run
from sluiceway.core.group.group_records import GroupView, MemberRecord, Parameters, Resource
from sluiceway.kernel.clock import Millis
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Plan, Rebalance
from sluiceway.ports.meta_store import NOTHING
from sluiceway.testing.drive import driven
from tests.cluster.rebalance_rig import in_memory
from tests.instance.instance_rig import PATIENCE, spec


def _rebalance(**more: Any) -> Rebalance:
    return msgspec.structs.replace(Rebalance("r", "q", "inc", 1, Plan(drains=(0,), keeps=(1,)), "natural", 0, 0, "by"), **more)


@driven
async def test_what_changes_while_a_rebalance_is_read_has_it_read_again_before_anything_is_asked() -> None:
    """Or it would seal, by the old plan and under the new cursor, a partition that a cancellation has just opened again."""
    before, ended = _rebalance(step="drain"), _rebalance(state="cancelled", step="finish", ended_at=1)
    record = QueueRecord("q", "inc", 0, 0, (PartitionRecord(0, state="draining"), PartitionRecord(1)), lease_timeout=1_000, rebalance="r")
    found, asked = [before, ended], []

    async def get(_id: str) -> Stored:
        # The second answer is what is recorded; the first was on its way when that was heard of.
        run.poke()
        if len(found) == 1:
            run._poked = False
            await asyncio.sleep(0.01)
        return Stored(found.pop(0), 1)

    async def follow() -> None:
        return

    async def owner_of(*args: Any) -> Any:
        asked.append(args)
        await asyncio.sleep(3_600)

    parts: Any = SimpleNamespace(
        catalog=SimpleNamespace(of=lambda _: record),
        router=SimpleNamespace(owner_of=owner_of),
        records=SimpleNamespace(get=get),
        changes=SimpleNamespace(follow=follow),
    )
    assert set(vars(parts)) <= set(RebalanceContext.__annotations__)
    run = Run(parts, Stored(before, 1), 1, "here")
    run.poke()
    async with asyncio.timeout(PATIENCE):
        await run.run()
    assert not asked
    assert run.rebalance is ended


@driven
async def test_data_of_a_removed_partition_that_nobody_drops_is_dropped_by_the_coordinator(tmp_path: Path) -> None:
    """Whoever removed it died, or did not hear that it had."""
    async with in_memory(tmp_path, "a") as service:
        record = await service.create_queue(spec("q", 1))
        gone = PartitionRecord(7, "a")
        key = dropping_key(record.incarnation, [gone])
        await service.meta.commit(puts={key: msgspec.json.encode((gone,))})
        service._rebalancing.coordinator.poke()
        async with asyncio.timeout(PATIENCE):
            while (await service.meta.read([key])).entries:  # noqa: ASYNC110 - what is waited for has no event to await
                await asyncio.sleep(0.002)


def _look(lease_timeout: Millis, member_timeout: Millis, *leases: Millis) -> GroupView:
    """Of a cluster with these times, and members that have these leases."""
    parameters = Parameters(lease_timeout=lease_timeout, member_timeout=member_timeout)
    members = {f"m{each}": MemberRecord(beat=1, lease_timeout=each) for each in leases}
    return GroupView(NOTHING, 0, Resource(items=(), parameters=parameters), None, None, members, frozenset(), {})


@pytest.mark.parametrize(
    ("look", "lease"),
    [
        (None, PARAMETERS.lease_timeout),
        (_look(1_000, 1_300, 1_000), PARAMETERS.lease_timeout),
        # An operator may lengthen the times, and one instance may have missed that they were shortened again.
        (_look(60_000, 75_000, 60_000, 60_000), 60_000),
        (_look(1_000, 1_300, 1_000, 300_000), 300_000),
    ],
)
def test_in_a_cluster_data_stays_until_no_instance_can_take_itself_for_the_owner_any_more(look: GroupView | None, lease: Millis) -> None:
    """One that was cut off would open its partition again, find a new one there, and take items that nobody ever finds."""
    dropped: list[str] = []

    async def drop(key: str, _partitions: Any) -> bool:
        dropped.append(key)
        return True

    async def nothing(*_: Any) -> None:
        return

    changes = SimpleNamespace(drop=drop, follow=nothing)
    parts: Any = SimpleNamespace(changes=changes, shares=SimpleNamespace(tell=nothing), catalog=SimpleNamespace(stamp=1))

    async def history() -> None:
        ownership: Any = SimpleNamespace(is_alone=False, look=look)
        Coordinator(parts, ownership, dict).drop("dropping/inc/1", (PartitionRecord(1),))
        # Its lease by a clock that is a tenth slow, and as long again for what was on its way then.
        await asyncio.sleep(2.2 * lease / 1000)
        assert not dropped
        await asyncio.sleep(10 + lease / 1000)
        assert dropped == ["dropping/inc/1"]

    loop = Loop(Random(0))
    with simulated(loop):
        loop.run_until_complete(history())
        loop.close()
