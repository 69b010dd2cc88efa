"""Rebalances in a cluster: one coordinator, whoever dies, and instances that know the queue as it was."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from sluiceway.cluster.rebalance_records import COORDINATOR, ENDED, OPEN
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.backends import MemoryBackend
from sluiceway.model.rebalance import decode_rebalance
from sluiceway.model.requests import QueuePatch
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import MORTAL, Cluster, cluster
from tests.cluster.rebalance_rig import BY, Ledger, at_step, begun, ended
from tests.instance.instance_rig import eventually, spec


def coordinators(*services: Service) -> list[Service]:
    """Those that carry something out."""
    return [each for each in services if each._rebalancing.coordinator._running]


def vacate(*services: Service) -> None:
    """A reload at each: everything is to lie on the other backend."""
    for service in services:
        service._backends._settings = {"default": MemoryBackend(partition_affinity=0), "other": MemoryBackend()}


async def made(cluster: Cluster, *names: str) -> list[Service]:
    cluster.backends = {"default": MemoryBackend(), "other": MemoryBackend(partition_affinity=0)}
    return [await cluster.start(name) for name in names]


@driven
async def test_one_instance_carries_it_out_whoever_was_asked(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (world, _):
        a, b = await made(world, "a", "b")
        await b.create_queue(spec("q", 4))
        ledger = Ledger(a, "q")
        await ledger.fill()
        vacate(a, b)
        asked = await begun(b, "q", 6, "copy")
        await at_step(a, asked.id, "drain")
        assert len(coordinators(a, b)) == 1
        await ledger.let_go()
        found = await ended(a, asked.id)
        assert found.state == "done"
        assert len({each.by for each in found.done}) == 1
        await eventually(lambda: all([each.backend for each in one.queue("q").partitions] == ["other"] * 6 for one in (a, b)))
        await ledger.check()


@pytest.mark.parametrize("nth", range(1, 9))
@driven
async def test_an_instance_dies_with_a_commit_of_its_rebalance(tmp_path: Path, nth: int) -> None:
    """Right after its n-th has landed; another one goes on, though the dead one owned partitions, too."""
    async with cluster(tmp_path, parameters=MORTAL) as (world, _):
        a, b = await made(world, "a", "b")
        await a.create_queue(spec("q", 3))
        ledger = Ledger(b, "q")
        await ledger.fill()
        vacate(a, b)
        seen = 0

        async def committed(puts: Any) -> None:
            nonlocal seen
            seen += any(key.startswith((OPEN, ENDED)) for key in puts)
            if seen == nth and "a" in world.wires.instances:
                world.die("a")
                await asyncio.Event().wait()

        world.metas["a"].on_committed = committed
        begin = asyncio.create_task(begun(a, "q", 2, "copy"))
        ids = [each.id for each in await b.rebalances("q", False)]
        while not ids:
            await asyncio.sleep(0.01)
            ids = [each.id for each in await b.rebalances("q", False)]
        with contextlib.suppress(SluicewayError):
            await ledger.let_go()
        while ledger.held is not None or not (await b.get_rebalance(ids[0])).ended_at:
            with contextlib.suppress(SluicewayError):
                await ledger.let_go()
            await asyncio.sleep(0.02)
        found = await ended(b, ids[0])
        begin.cancel()
        assert found.state == "done"
        assert [each.backend for each in b.queue("q").partitions] == ["other", "other"]
        await ledger.check()


@driven
async def test_a_coordinator_that_leaves_is_followed_by_another(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (world, _):
        a, b = await made(world, "a", "b")
        await a.create_queue(spec("q", 2))
        ledger = Ledger(b, "q")
        await ledger.fill()
        asked = await begun(a, "q", 1)
        await at_step(b, asked.id, "drain")
        (first,) = coordinators(a, b)
        name = world.name(first)
        other = b if first is a else a
        ledger.service = other
        await world.leave(name)
        await ledger.let_go()
        while await ledger.take():
            pass
        found = await ended(other, asked.id)
        assert found.state == "done"
        assert len({each.by for each in found.done}) == 2
        await ledger.check()


@driven
async def test_one_that_is_coordinator_no_more_commits_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (world, _):
        a, b = await made(world, "a", "b")
        await a.create_queue(spec("q", 2))
        ledger = Ledger(b, "q")
        await ledger.fill()
        asked = await begun(a, "q", 1)
        await at_step(b, asked.id, "drain")
        (first,) = coordinators(a, b)
        other = b if first is a else a
        # As if it had been given up, and did not know it.
        looked = await other._rebalancing._records.look()
        await other._rebalancing._records.elect(other.ownership.name, looked.elected, looked.stamp)
        other._rebalancing.coordinator.poke()
        await eventually(lambda: coordinators(other) == [other])
        first._rebalancing.coordinator.poke()
        await ledger.let_go()
        while await ledger.take():
            pass
        found = await ended(other, asked.id)
        assert [each.by for each in found.done if each.kind in ("drain", "finish")] == [other.ownership.name] * 3
        await ledger.check()


@driven
async def test_a_cancellation_at_another_instance_is_followed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (world, _):
        a, b = await made(world, "a", "b")
        await a.create_queue(spec("q", 2))
        before = a.queue("q").partitions
        ledger = Ledger(b, "q")
        await ledger.fill()
        vacate(a, b)
        asked = await begun(a, "q", 3, "copy")
        await at_step(b, asked.id, "drain")
        other = b if coordinators(a) else a
        assert (await other.cancel_rebalance(asked.id, BY)).state == "cancelling"
        found = await ended(other, asked.id)
        assert (found.state, found.step) == ("cancelled", "finish")
        await eventually(lambda: a.queue("q").partitions == b.queue("q").partitions == before)
        await ledger.let_go()
        await ledger.check()


@driven
async def test_two_that_begin_at_once_are_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (world, _):
        a, b = await made(world, "a", "b")
        await a.create_queue(spec("q", 2))
        both = await asyncio.gather(begun(a, "q", 4), begun(b, "q", 3), return_exceptions=True)
        (won,) = [each for each in both if not isinstance(each, BaseException)]
        (lost,) = [each for each in both if isinstance(each, SluicewayError)]
        assert lost.code in ("rebalance_open", "nothing_to_rebalance")
        assert (await ended(a, won.id)).state == "done"
        assert len((await a.look_up("q")).partitions) == won.requested_partitions


@driven
async def test_a_partition_that_cannot_be_opened_is_a_problem_and_then_none(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (world, _):
        (a,) = await made(world, "a")
        await a.create_queue(spec("q", 1))
        blocked = asyncio.Event()
        blocked.set()

        async def on_open(ref: Any) -> None:
            if blocked.is_set() and ref.partition == 1:
                raise StoreUnavailableError("the disk is gone")

        world.stores["a"].on_open = on_open
        asked = await begun(a, "q", 2)
        found = asked
        async with asyncio.timeout(60):
            while not found.problem:
                await asyncio.sleep(0.05)
                found = await a.get_rebalance(asked.id)
        assert found.step == "create"
        assert "partition 1" in found.problem
        blocked.clear()
        done = await ended(a, asked.id)
        assert (done.state, done.problem, done.retries) == ("done", "", 0)
        problems = [entry for entry in await a.audit.list(100) if entry.action == "rebalance.problem"]
        assert len(problems) == 1


@driven
async def test_what_is_recorded_can_be_read_by_all(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (world, _):
        a, b = await made(world, "a", "b")
        await a.create_queue(spec("q", 2))
        done = await ended(b, (await begun(b, "q", 3)).id)
        view = await world.meta.read([COORDINATOR], [OPEN, ENDED])
        assert decode_rebalance(view.entries[ENDED + done.id].value) == done
        assert not view.prefix(OPEN)
        await a.update_queue("q", QueuePatch({"max_attempts": 3}))
        assert b.queue("q").rebalance is None
