"""The rate of a queue on several instances, which take their tokens from one record."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from sluiceway.adapters import system
from sluiceway.contract.queue_settings import Rate
from sluiceway.core.queue.queue_rate import RateRecord
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.local.rate_tokens import RATES
from sluiceway.model.requests import Lease, QueuePatch, QueueSpec
from sluiceway.ports.meta_store import MetaUnknownError
from tests.cluster.cluster_rig import Cluster, cluster, put, shares
from tests.instance.instance_rig import eventually, produce, serving

WAIT: Millis = 20_000


async def fill(service: Service, items: int = 10, partitions: int = 4) -> None:
    """That many items into each partition."""
    for number in range(partitions):
        await put(service, "q", number, *["x"] * items)


async def lease(service: Service, items: int, wait: Millis = 0) -> int:
    leased = await service.lease("q", Lease("c", items, wait, None, 8))
    return sum(each.items for each in leased.leases)


async def all_of(services: list[Service], items: int = 100) -> int:
    """What all instances lease without waiting, until none has anything."""
    found = 0
    while more := sum([await lease(each, items) for each in services]):
        found += more
    return found


async def record(made: Cluster) -> RateRecord | None:
    entries = (await made.meta.read(prefixes=[RATES])).entries
    return None if not entries else msgspec.json.decode(next(iter(entries.values())).value, type=RateRecord)


def test_instances_share_one_burst(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (_, services):
            await services[0].create_queue(QueueSpec("q", 4, rate=Rate(0.001, 17)))
            await fill(services[0])
            assert await lease(services[0], 5) == 5
            assert await lease(services[1], 5) == 5
            assert await all_of(services) == 7

    asyncio.run(scenario())


def test_items_of_another_instance_come_at_the_rate(tmp_path: Path) -> None:
    """Consumers wait where there are no partitions: each item is fetched, with a token that is taken where the item is."""

    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (_, services):
            await services[0].create_queue(QueueSpec("q", 1, rate=Rate(50, 1)))
            owner, other = sorted(services, key=lambda each: -len(shares(each, "q")))
            await produce(owner, "q", *["x"] * 20)
            began = system.now()
            assert [await lease(other, 1, WAIT) for _ in range(20)] == [1] * 20
            assert system.now() - began >= 19 * 20 - 1

    asyncio.run(scenario())


def test_what_an_instance_took_counts_after_its_partitions_have_moved(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, rate=Rate(0.001, 8)))
            await fill(services[0])
            assert await lease(services[0], 6) == 6
            await made.leave("a")
            await eventually(lambda: len(shares(services[1], "q")) == 4)
            assert await all_of([services[1]]) == 2

    asyncio.run(scenario())


def test_a_change_holds_for_all_instances_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (_, services):
            await services[0].create_queue(QueueSpec("q", 4, rate=Rate(0.001)))
            await fill(services[0])
            assert await all_of(services) == 1
            waiting = asyncio.create_task(lease(services[1], 9, WAIT))
            await services[0].update_queue("q", QueuePatch({"rate": Rate(100, 5)}))
            assert await waiting > 0
            await services[1].update_queue("q", QueuePatch({"rate": None}))
            before = sum(part.ready for part in (await services[0].count("q")).partitions)
            assert await all_of(services) == before

    asyncio.run(scenario())


def test_the_record_goes_with_its_queue(tmp_path: Path) -> None:
    """Also where consumers wait, who would take tokens again."""

    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, rate=Rate(10, 5)))
            await fill(services[0])
            assert await lease(services[0], 5) == 5
            assert await record(made) is not None
            waiting = [asyncio.create_task(lease(each, 1, WAIT)) for each in services for _ in range(3)]
            await services[1].delete_queue("q", True)
            await asyncio.gather(*waiting, return_exceptions=True)
            assert await record(made) is None
            await services[1].create_queue(QueueSpec("q", 4, rate=Rate(0.001, 5)))
            await fill(services[0])
            assert await all_of(services) == 5

    asyncio.run(scenario())


@pytest.mark.parametrize("landed", [False, True])
def test_tokens_of_a_commit_whose_answer_was_lost_are_not_used(tmp_path: Path, landed: bool) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, rate=Rate(0.001, 10)))
            await fill(services[0])
            assert await lease(services[0], 2) == 2
            meta = made.metas["a"]
            lost: list[object] = []

            async def lose(puts: Mapping[str, bytes]) -> None:
                if not lost and any(key.startswith(RATES) for key in puts):
                    lost.append(puts)
                    raise MetaUnknownError("no answer")

            if landed:
                meta.on_committed = lose
            else:
                meta.on_commit = lose
            assert await lease(services[0], 5, WAIT) == (3 if landed else 5)
            assert lost
            assert await all_of(services) == (0 if landed else 3)

    asyncio.run(scenario())


def test_a_single_server_keeps_to_the_rate_over_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(QueueSpec("q", 2, rate=Rate(0.001, 5)))
            await fill(service, partitions=2)
            said = await service.explain("q", 0, 9)
            assert "rate" not in said.reason
            assert await lease(service, 3) == 3
        async with serving(tmp_path) as (service, _):
            assert await all_of([service]) == 2
            said = await service.explain("q", 0, 9)
            assert said.reason.endswith("; the queue is at its rate of 0.001 a second")
            waiting = asyncio.create_task(lease(service, 1, WAIT))
            await eventually(lambda: service.stats("q").limited_by == "rate")
            await service.update_queue("q", QueuePatch({"rate": None}))
            assert await waiting == 1
            assert service.stats("q").limited_by is None

    asyncio.run(scenario())
