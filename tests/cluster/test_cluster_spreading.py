"""Queues that lie on so many instances: as they are told, or as their load takes."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest

from sluiceway.adapters import system
from sluiceway.cluster import autoscaler as node_spreading
from sluiceway.contract.queue_settings import LogicalQueues
from sluiceway.core.group.group_records import Strategy
from sluiceway.core.queue import scaling_policy
from sluiceway.core.queue.scaling_policy import Pace
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.partition_openings import RECORDED
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.queue import PartitionRecord, QueueRecord, encode_queue
from sluiceway.model.requests import Lease, Leased, Produce, ProduceKey, QueuePatch, QueueSpec
from tests.cluster.cluster_rig import Cluster, cluster, clustered, put, shares
from tests.instance.instance_rig import PATIENCE, eventually, lease, payloads, produce, rows, settle

QUICK = Pace(grow=3, shrink=1, grow_after=50, shrink_after=400, settle=200, average=100)
"""Five requests a second are much, and one is little."""


def on(made: Cluster, queue: str) -> list[int]:
    """How many partitions each instance has of the queue, those that have some."""
    return sorted(len(shares(service, queue)) for service in made.services if shares(service, queue))


async def lies_on(made: Cluster, queue: str, *counts: int) -> None:
    await eventually(lambda: on(made, queue) == list(counts))


def spec(name: str, partitions: int, logical_queues: LogicalQueues) -> QueueSpec:
    return QueueSpec(name, partitions, logical_queues=logical_queues)


# ---- as they are told ---------------------------------------------------------------------------------------------------


def test_a_queue_lies_on_as_many_instances_as_it_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, services):
            a, b, c = services
            rounds = await clustered(a).rounds()
            await b.create_queue(spec("q", 6, 2))
            assert on(made, "q") == [3, 3]
            assert await clustered(a).rounds() == rounds
            for service in services:
                await produce(service, "q", "x")
            await a.update_queue("q", QueuePatch({"logical_queues": 1}))
            await lies_on(made, "q", 6)
            assert [len((await each.count("q")).logical_queues) for each in services] == [1, 1, 1]
            await c.update_queue("q", QueuePatch({"logical_queues": None}))
            await lies_on(made, "q", 2, 2, 2)
            assert len((await a.count("q")).logical_queues) == 3
            found = [payload for service in services for payload in payloads((await lease(service, "q", most=6)).batches)]
            assert found == ["x"] * 3

    asyncio.run(run())


def test_a_deleted_queue_leaves_no_limit_behind(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            await a.create_queue(spec("q", 2, 1))
            await b.delete_queue("q", force=True)
            look = clustered(b).look
            assert look is not None
            assert look.resource is not None
            assert look.resource.limits == {}

    asyncio.run(run())


def test_a_setting_that_is_told_again_is_no_change(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            await a.create_queue(spec("q", 2, 1))
            before = await a.meta.read(prefixes=["group/partitions/resource"])
            assert (await b.update_queue("q", QueuePatch({"logical_queues": 1}))).version == 1
            assert (await b.update_queue("q", QueuePatch({"reference": "new"}))).version == 2
            assert (await a.meta.read(prefixes=["group/partitions/resource"])).entries == before.entries

    asyncio.run(run())


def test_a_cluster_that_begins_with_queues_knows_where_they_may_lie(tmp_path: Path) -> None:
    """They were made by a server that was alone."""
    settings: dict[str, LogicalQueues] = {"p": 1, "q": "auto", "r": None}

    async def run() -> None:
        async with cluster(tmp_path) as (made, _):
            # Nothing is stored of them so far, so what is missing may be created.
            await made.meta.commit(puts={RECORDED: b"1"})
            for name, logical_queues in settings.items():
                partitions = tuple(PartitionRecord(number) for number in range(4))
                record = QueueRecord(name, name * 8, 1, 1, partitions, logical_queues=logical_queues)
                await made.meta.commit(puts={QUEUE + name: encode_queue(record)})
            await asyncio.gather(made.start("a"), made.start("b"))
            for name, counts in (("p", [4]), ("q", [4]), ("r", [2, 2])):
                await lies_on(made, name, *counts)

    asyncio.run(run())


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_any_strategy_takes_the_setting(tmp_path: Path, strategy: Strategy) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", strategy=strategy) as (made, (a, b)):
            await a.create_queue(spec("q", 4, 1))
            # Claims pass over it.
            await lies_on(made, "q", *([4] if strategy == "rounds" else [2, 2]))
            await produce(b, "q", "x")
            assert payloads((await lease(b, "q")).batches) == ["x"]

    asyncio.run(run())


# ---- by load ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_policy, "PACE", QUICK)
    monkeypatch.setattr(node_spreading, "LOOK", 20)


class Traffic:
    """Producers and consumers at all instances, who repeat under the same keys whatever was not answered."""

    def __init__(self, services: list[Service]) -> None:
        self.services = services
        self.produced: list[str] = []
        self.leased: Counter[str] = Counter()
        self.going = True

    async def produce(self, number: int) -> None:
        count = 0
        while self.going:
            count += 1
            name = f"{number}-{count}"
            while True:
                try:
                    await self.services[number].produce("q", Produce(rows(name), 10_000, ProduceKey(name)))
                    break
                except SluicewayError as error:
                    assert error.kind.retryable or error.code == "outcome_unknown", error
            self.produced.append(name)

    async def consume(self, number: int) -> None:
        count = 0
        while self.going:
            count += 1
            leased = await self._lease(number, f"{number}-{count}")
            self.leased.update(payloads(leased.batches))
            await self._settle(number, leased)

    async def _lease(self, number: int, key: str) -> Leased:
        while True:
            try:
                return await self.services[number].lease("q", Lease(f"c{number}", 10, 50, 3_600_000, lease_key=key))
            except SluicewayError as error:
                assert error.kind.retryable or error.code == "outcome_unknown", error

    async def _settle(self, number: int, leased: Leased) -> None:
        while leased.batches:
            try:
                await settle(self.services[number], "q", leased)
                return
            except SluicewayError as error:
                assert error.kind.retryable or error.code == "outcome_unknown", error

    def start(self) -> list[asyncio.Task[None]]:
        numbers = range(len(self.services))
        return [asyncio.create_task(work) for number in numbers for work in (self.produce(number), self.consume(number))]


def test_a_queue_is_spread_when_its_load_rises_and_gathered_when_it_ends(tmp_path: Path, quick: None) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, services):
            await services[0].create_queue(spec("q", 6, "auto"))
            assert on(made, "q") == [6]
            traffic = Traffic(services)
            tasks = traffic.start()
            await lies_on(made, "q", 2, 2, 2)
            traffic.going = False
            await asyncio.gather(*tasks)
            await lies_on(made, "q", 6)
            while (left := await lease(services[1], "q", most=6)).leases:
                traffic.leased.update(payloads(left.batches))
                await settle(services[1], "q", left)
            assert traffic.leased == Counter(traffic.produced)
            assert sum(each.ready + each.total_leased for each in (await services[2].count("q")).partitions) == 0
            changes = [(each.actor, each.detail) for each in await services[0].audit.list(100, action="queue.spread")]
            numbers = [detail["logical_queues"] for _, detail in changes[::-1]]
            assert numbers[0] == {"from": 1, "to": 2}
            assert 3 in [each["to"] for each in numbers]
            assert numbers[-1]["to"] == 1
            assert all(before["to"] == after["from"] for before, after in itertools.pairwise(numbers))
            assert {actor for actor, _ in changes} == {"system"}
            assert services[0].queue("q").version == 1

    asyncio.run(run())


def test_what_another_owner_has_to_do_spreads_the_queue_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setattr(scaling_policy, "PACE", QUICK._replace(shrink_after=3_600_000))

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, _, _)):
            record = await a.create_queue(spec("q", 6, "auto"))
            await a._changes.spread(record, 1, 2)
            await lies_on(made, "q", 3, 3)
            busy = next(service for service in made.services if shares(service, "q") and 0 not in shares(service, "q"))
            last = shares(busy, "q")[-1]
            async with asyncio.timeout(PATIENCE):
                while on(made, "q") != [2, 2, 2]:
                    await put(busy, "q", last, "x")

    asyncio.run(run())


def test_a_queue_that_is_idle_stays_where_it_is(tmp_path: Path, quick: None) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("idle", 4, "auto"))
            await a.create_queue(spec("busy", 4, "auto"))
            async with asyncio.timeout(PATIENCE):
                while on(made, "busy") != [2, 2]:
                    await produce(b, "busy", "x")
            assert on(made, "idle") == [4]
            assert {each.queue_name for each in await a.audit.list(100, action="queue.spread")} == {"busy"}

    asyncio.run(run())


def test_a_queue_that_comes_to_be_spread_by_load_begins_with_what_it_has(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, _, c)):
            await a.create_queue(spec("q", 6, None))
            await c.update_queue("q", QueuePatch({"logical_queues": "auto"}))
            look = clustered(c).look
            assert look is not None
            assert look.resource is not None
            assert list(look.resource.limits.values()) == [3]
            assert on(made, "q") == [2, 2, 2]

    asyncio.run(run())


def test_two_that_decide_at_once_do_no_harm(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, b, c)):
            record = await a.create_queue(spec("q", 6, "auto"))
            await asyncio.gather(*(each._changes.spread(record, 1, 2) for each in (a, b, c)))
            await lies_on(made, "q", 3, 3)
            assert len(await a.audit.list(100, action="queue.spread")) == 1

    asyncio.run(run())


def test_what_is_no_more_spread_by_load_is_left_as_it_was_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, b, _)):
            decided_on = await a.create_queue(spec("q", 6, "auto"))
            await b.update_queue("q", QueuePatch({"logical_queues": 3}))
            await lies_on(made, "q", 2, 2, 2)
            await a._changes.spread(decided_on, 3, 1)
            assert len(await a.audit.list(100, action="queue.spread")) == 0
            await lies_on(made, "q", 2, 2, 2)

    asyncio.run(run())


@pytest.mark.slow
def test_a_queue_grows_on_a_slow_machine_by_what_keeps_that_one_busy(tmp_path: Path) -> None:
    """At real pace: a few hundred calls a second are all that it can do, a fraction of what the machine did where it was measured."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 4, "auto"))
            assert on(made, "q") == [4]
            began, calls = system.stopwatch(), 0

            async def go_on() -> None:
                nonlocal calls
                while on(made, "q") == [4]:
                    until = system.stopwatch() + 0.003
                    while system.stopwatch() < until:
                        pass
                    await produce(a, "q", "x")
                    calls += 1

            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*(go_on() for _ in range(16)))
            assert calls / (system.stopwatch() - began) < 0.6 * scaling_policy.REQUESTS, "by constants it would have grown, too"
            await lies_on(made, "q", 2, 2)

    asyncio.run(run())
