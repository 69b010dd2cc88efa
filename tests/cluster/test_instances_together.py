"""What several instances show of one another, and of whose their partitions are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.cluster.group_member import GroupMember
from sluiceway.cluster.instance_view import Instances
from sluiceway.cluster.ownership import Clustered
from sluiceway.contract.queue_stats import LogicalQueueStats, QueueStats
from sluiceway.instance.service import Service
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Lease, Produce, QueueSpec
from tests.cluster.cluster_rig import MORTAL, STEADY, cluster
from tests.server.fake_service import RECORD
from tests.server.server_process import PATIENCE


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.01)


def names(services: list[Service]) -> list[str]:
    return sorted(service.ownership.name for service in services)


async def all_seen(services: list[Service], count: int) -> None:
    """Each sees so many that are alive and have partitions."""

    async def settled() -> bool:
        seen = [service.instances.cluster().instances for service in services]
        return all(len(each) == count and all(one.state == "alive" and one.partitions for one in each) for each in seen)

    await until(settled)


def test_each_instance_shows_all_and_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            await services[0].create_queue(QueueSpec("q", 6))
            await all_seen(services, 3)
            for service in services:
                seen = service.instances.cluster()
                assert [each.name for each in seen.instances] == names(services)
                assert [each.name for each in seen.instances if each.here] == [service.ownership.name]
                assert [each.partitions for each in seen.instances] == [2, 2, 2]
                assert {each.address for each in seen.instances} == {"a", "b", "c"}
                assert all(each.joined_at for each in seen.instances)
                assert (seen.strategy, seen.era) == ("rounds", 2)
                assert seen.parameters is not None
                assert seen.parameters["member_timeout"] == STEADY.member_timeout
            rounds = await services[1].instances.rounds(100)
            assert set(rounds[0].participants) == set(names(services))
            assert [each.number for each in rounds] == list(range(len(rounds), 0, -1))
            assert await services[1].instances.rounds(1) == rounds[:1]
            # None is sealed before that.
            assert min(each.duration for each in rounds) >= STEADY.settle_timeout

    asyncio.run(scenario())


def test_each_partition_is_shown_with_one_owner_everywhere_and_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (_, services):
            record = await services[0].create_queue(QueueSpec("q", 4))
            await all_seen(services, 2)
            owners = [[service.instances.owner(record, n) for n in range(4)] for service in services]
            assert owners[0] == owners[1]
            assert {peer.address for peer in owners[0] if peer is not None} == {"a", "b"}
            for service in services:
                for number, owner in enumerate(owners[0]):
                    why = await service.instances.why(record, number)
                    assert owner is not None
                    assert (why.owner, why.address, why.era, why.waits_for) == (owner.name, owner.address, 2, [])
                    assert "when its queue was created" in why.reason
            counted = await services[0].count("q")
            assert sorted(each.instance or "" for each in counted.logical_queues) == names(services)
            assert sorted(each.partition for each in counted.partitions) == [0, 1, 2, 3]
            for share in counted.logical_queues:
                owned = {number for number, owner in enumerate(owners[0]) if owner is not None and owner.name == share.instance}
                assert {each.partition for each in share.partitions} == owned

    asyncio.run(scenario())


def share_of(counted: QueueStats, service: Service) -> LogicalQueueStats:
    (share,) = [each for each in counted.logical_queues if each.instance == service.ownership.name]
    return share


def test_the_shares_are_counted_apart_and_those_that_do_not_answer_are_shown(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (rig, services):
            here, there = services
            await here.create_queue(QueueSpec("q", 4))
            await all_seen(services, 2)
            waiting = asyncio.create_task(here.lease("q", Lease("c", 1, 60_000), True))

            async def waits() -> bool:
                return share_of(await there.count("q"), here).lease_waiting == 1

            await until(waits)
            assert share_of(await there.count("q"), there).lease_waiting == 0
            await there.produce("q", Produce(batch_from_rows([{"payload": b"x"}]), 30_000))
            assert (await waiting).leases
            rig.wires.refuses.add("b")
            counted = await here.count("q")
            assert {each.state for each in share_of(counted, there).partitions} == {"unavailable"}
            assert len(counted.partitions) == 4
            assert (await here.instances.why(await here.look_up("q"), 0)).owner
            rig.wires.refuses.clear()

    asyncio.run(scenario())


def test_an_instance_that_goes_hands_over_and_is_seen_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (rig, services):
            stays, goes = services
            record = await stays.create_queue(QueueSpec("q", 4))
            await all_seen(services, 2)
            gone = goes.ownership.name
            await rig.leave("b")
            await all_seen([stays], 1)
            assert [each.partitions for each in stays.instances.cluster().instances] == [4]
            newest = (await stays.instances.rounds(1))[0]
            assert (newest.moved, newest.kept) == (2, 2)
            assert {each.item.rpartition(".")[0] for each in newest.moves} == {record.incarnation}
            assert [(each.before, each.owner) for each in newest.moves] == [(gone, stays.ownership.name)] * 2
            assert gone in newest.trigger
            reasons = [(await stays.instances.why(record, number)).reason for number in range(4)]
            assert sum(newest.trigger in reason for reason in reasons) == 2

    asyncio.run(scenario())


def test_an_instance_that_is_silent_is_seen_so_by_itself_and_given_up_by_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b", parameters=MORTAL) as (rig, services):
            third = await rig.start("c")
            gate = rig.metas["c"].hang()
            silent = third.ownership.name

            async def knows_it() -> bool:
                return {each.here: each.state for each in third.instances.cluster().instances}[True] == "silent"

            async def is_given_up() -> bool:
                gone = all(silent not in [each.name for each in one.instances.cluster().instances] for one in services)
                return gone and f"{silent} is silent" in [each.trigger for each in await services[0].instances.rounds(100)]

            await until(knows_it)
            await until(is_given_up)
            gate.open()

    asyncio.run(scenario())


def test_an_instance_that_has_not_seen_the_cluster_yet_shows_itself(tmp_path: Path) -> None:
    ownership = Clustered("a", "http://a")
    ownership._member = GroupMember(MemoryMetaStore(), "partitions", lambda change: None, name="a")
    seen = Instances(ownership, list)
    (only,) = seen.cluster().instances
    assert (only.here, only.state, only.address, only.partitions) == (True, "joining", "http://a", 0)
    assert seen.owner(RECORD, 0) is None
    assert "has not joined the cluster yet" in asyncio.run(seen.why(RECORD, 0)).reason
