"""The concurrency of a queue on several instances: no more is leased than the limit, wherever the partitions are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluiceway.adapters import system
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.contract.queue_settings import Rate
from sluiceway.core.group.group_records import Token
from sluiceway.core.queue.queue_slots import QueueSlots, Share, SlotRecord
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.local.slot_quotas import SLOTS, SlotQuotas
from sluiceway.model.meta import View
from sluiceway.model.queue import PartitionRecord, QueueRecord, encode_queue
from sluiceway.model.requests import DONE, Lease, Leased, QueuePatch, QueueSpec, Selection, Settle
from sluiceway.ports.meta_store import MetaUnknownError
from tests.cluster.cluster_rig import MORTAL, Cluster, cluster, put, shares
from tests.cluster.rebalance_rig import begun, ended
from tests.instance.instance_rig import eventually, produce, serving

WAIT: Millis = 20_000


async def fill(service: Service, items: int = 20, partitions: int = 4) -> None:
    """That many items into each partition."""
    for number in range(partitions):
        await put(service, "q", number, *["x"] * items)


async def lease(service: Service, items: int, wait: Millis = 0, lease_timeout: Millis = 600_000) -> Leased:
    return await service.lease("q", Lease("c", items, wait, lease_timeout, 8))


def items_of(leased: Leased) -> int:
    return sum(each.items for each in leased.leases)


async def complete(service: Service, leased: Leased) -> None:
    selections = {each.partition: [Selection(DONE, lease=each.number)] for each in leased.leases}
    await service.settle("q", Settle(selections, WAIT))


async def leased_now(service: Service) -> int:
    return sum(part.total_leased for part in (await service.count("q")).partitions)


async def record(made: Cluster) -> SlotRecord | None:
    entries = (await made.meta.read(prefixes=[SLOTS])).entries
    return None if not entries else msgspec.json.decode(next(iter(entries.values())).value, type=SlotRecord)


async def take(services: list[Service], items: int) -> list[Leased]:
    """Lease at all instances in turn, until so many are leased."""
    found: list[Leased] = []
    while (left := items - sum(map(items_of, found))) > 0:
        for each in services:
            leased = await lease(each, left, 100)
            found += [leased] if leased.leases else []
            assert sum(map(items_of, found)) <= items
            left = items - sum(map(items_of, found))
            if not left:
                break
    return found


def test_instances_share_one_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (_, services):
            await services[0].create_queue(QueueSpec("q", 4, concurrency=7))
            await fill(services[0])
            first = await take(services, 7)
            for each in services:
                assert not (await lease(each, 5, 300)).leases
            waiting = asyncio.create_task(lease(services[1], 100, WAIT))
            await complete(services[0], first[0])
            assert 0 < items_of(await waiting) <= items_of(first[0])
            assert await leased_now(services[0]) <= 7

    asyncio.run(scenario())


@pytest.mark.parametrize("limit", [2, 10])
def test_all_is_handled_within_the_limit_by_consumers_at_all_instances(tmp_path: Path, limit: int) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            await services[0].create_queue(QueueSpec("q", 6, concurrency=limit))
            await fill(services[0], 20, 6)
            held = most = handled = 0

            async def consume(at: Service) -> None:
                nonlocal held, most, handled
                while handled < 120:
                    leased = await lease(at, 3, 500)
                    held += items_of(leased)
                    most = max(most, held)
                    assert held <= limit
                    await asyncio.sleep(0.005)
                    held -= items_of(leased)
                    if leased.leases:
                        await complete(at, leased)
                        handled += items_of(leased)

            await asyncio.gather(*(consume(at) for at in services for _ in range(4)))
            assert most >= limit - 1

    asyncio.run(scenario())


def test_consumers_get_items_that_only_another_instance_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (_, services):
            await services[0].create_queue(QueueSpec("q", 1, concurrency=2))
            owner, other = sorted(services, key=lambda each: -len(shares(each, "q")))
            await produce(owner, "q", *["x"] * 10)
            for _ in range(5):
                leased = await lease(other, 2, WAIT)
                assert 0 < items_of(leased) <= 2
                await complete(other, leased)

    asyncio.run(scenario())


def test_leased_items_count_after_their_partition_has_moved(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, concurrency=6))
            await fill(services[0])
            first = await take(services, 6)
            await made.leave("a")
            await eventually(lambda: len(shares(services[1], "q")) == 4)
            assert not (await lease(services[1], 5, 300)).leases
            await complete(services[1], first[0])
            again = await lease(services[1], 100, WAIT)
            assert 0 < items_of(again) <= items_of(first[0])
            assert await leased_now(services[1]) <= 6

    asyncio.run(scenario())


def test_what_a_dead_instance_had_is_used_by_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b", parameters=MORTAL) as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, concurrency=6))
            await fill(services[0])
            await take(services, 4)
            made.die("a")
            await eventually(lambda: len(shares(services[1], "q")) == 4)
            found = 0
            async with asyncio.timeout(60):
                while found < 2:
                    found += items_of(await lease(services[1], 2 - found, 500))
            assert not (await lease(services[1], 5, 300)).leases
            assert await leased_now(services[1]) == 6

    asyncio.run(scenario())


def test_a_limit_that_is_introduced_counts_what_is_leased_already(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4))
            await fill(services[0])
            held = [await lease(each, 4, WAIT) for each in (*services, *services)]
            await services[0].update_queue("q", QueuePatch({"concurrency": 10}))
            for each in services:
                assert not (await lease(each, 5, 300)).leases
            for leased in held[:2]:
                await complete(services[0], leased)
            assert sum(map(items_of, await take(services, 2))) == 2
            assert await leased_now(services[0]) == 10
            await services[1].update_queue("q", QueuePatch({"concurrency": 4}))
            found = await record(made)
            assert found is not None
            assert found.limit == 4
            await complete(services[0], held[2])
            for each in services:
                assert not (await lease(each, 5, 300)).leases, "six are leased"
            await complete(services[0], held[3])
            assert sum(map(items_of, await take(services, 2))) == 2
            await services[0].update_queue("q", QueuePatch({"concurrency": 0}))
            assert await record(made) is None
            assert items_of(await lease(services[0], 5)) + items_of(await lease(services[1], 5)) > 2

    asyncio.run(scenario())


def test_the_record_goes_with_its_queue(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, concurrency=3))
            await fill(services[0])
            await take(services, 3)
            waiting = [asyncio.create_task(lease(each, 1, WAIT)) for each in services for _ in range(3)]
            await services[1].delete_queue("q", True)
            await asyncio.gather(*waiting, return_exceptions=True)
            assert await record(made) is None

    asyncio.run(scenario())


def test_the_limit_holds_while_a_rebalance_changes_the_partitions(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, concurrency=5))
            await fill(services[0])
            rebalance = await begun(services[0], "q", 2)
            handled = 0

            async def consume(at: Service) -> None:
                nonlocal handled
                while handled < 80:
                    leased = await lease(at, 3, 500)
                    assert await leased_now(at) <= 5
                    if leased.leases:
                        try:
                            await complete(at, leased)
                        except SluicewayError as error:
                            assert error.code in ("unavailable", "not_here"), error
                        handled += items_of(leased)

            await asyncio.gather(*map(consume, services))
            await ended(services[0], rebalance.id)
            found = await record(made)
            assert found is not None
            there = {each.partition for each in services[0].queue("q").partitions}
            await fill_any(services[0])
            await take(services, 5)
            found = await record(made)
            assert found is not None
            assert found.shares.keys() <= there

    asyncio.run(scenario())


async def fill_any(service: Service) -> None:
    for _ in range(4):
        await produce(service, "q", *["x"] * 10)


@pytest.mark.parametrize("landed", [False, True])
def test_a_change_whose_answer_was_lost(tmp_path: Path, landed: bool) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, concurrency=6))
            await fill(services[0])
            lost: list[object] = []

            async def lose(puts: Mapping[str, bytes]) -> None:
                if len(lost) < 3 and any(key.startswith(SLOTS) for key in puts):
                    lost.append(puts)
                    raise MetaUnknownError("no answer")

            for meta in made.metas.values():
                if landed:
                    meta.on_committed = lose
                else:
                    meta.on_commit = lose
            await take(services, 6)
            assert lost
            for each in services:
                assert not (await lease(each, 5, 300)).leases

    asyncio.run(scenario())


def test_what_was_read_before_the_limit_was_lowered_gives_nothing() -> None:
    """The instance hears of the lower limit while its look at the record is on its way."""

    async def scenario() -> None:
        token, slots, late = Token(1, 1), QueueSlots(10), 2
        queue = QueueRecord("q", "aaaaaaaa", 0, 0, (PartitionRecord(0, "a"),), concurrency=10)
        meta = MemoryMetaStore()

        class Late(MemoryMetaStore):
            async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
                nonlocal queue, late
                view = await meta.read(keys, prefixes)
                late -= 1
                if not late:
                    queue = msgspec.structs.replace(queue, concurrency=5, version=queue.version + 1)
                    await meta.commit(puts=written(queue, 5))
                    slots.follow(5)
                return view

            async def commit(self, *args: Any, **fields: Any) -> int:
                return await meta.commit(*args, **fields)

        def written(queue: QueueRecord, limit: int) -> dict[str, bytes]:
            slots = SlotRecord(limit, shares={0: Share(token, 10)})
            return {QUEUE + "q": encode_queue(queue), SLOTS + queue.incarnation: msgspec.json.encode(slots)}

        await meta.commit(puts=written(queue, 10))
        quotas = SlotQuotas(Late(), "q", queue.incarnation)
        for limit in (10, 5):
            slots.note(0, True, 0, 20, system.now())
            assert slots.wish(system.now())
            await quotas.adjust(slots, lambda: queue, lambda: {0: token})
            assert slots.quota(0) == limit

    asyncio.run(scenario())


def test_a_single_server_keeps_to_the_limit_over_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(QueueSpec("q", 2, concurrency=5))
            await fill(service, partitions=2)
            # A partition gets its part of the limit when somebody wants an item.
            assert (await service.explain("q", 0, 0)).reason == "it is next"
            await take([service], 3)
        async with serving(tmp_path) as (service, _):
            # That part is written while the lease waits, so a lease that waits shortly may get less.
            await take([service], 2)
            assert not (await lease(service, 20)).leases
            said = await service.explain("q", 0, 19)
            assert said.reason.endswith("; the queue is at its limit of 5 leased items")
            waiting = asyncio.create_task(lease(service, 1, WAIT))
            await eventually(lambda: service.stats("q").limited_by == "concurrency")
            await service.update_queue("q", QueuePatch({"concurrency": 6}))
            assert items_of(await waiting) == 1

    asyncio.run(scenario())


def test_a_queue_that_comes_without_its_record_gets_one(tmp_path: Path) -> None:
    """As after an adoption, or from a directory of another version."""

    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, concurrency=5))
            await fill(services[0])
            await take(services, 3)
            await made.meta.commit(deletes=[SLOTS + services[0].queue("q").incarnation])
            await take(services, 2)
            assert await leased_now(services[0]) == 5
            assert not (await lease(services[1], 5, 300)).leases

    asyncio.run(scenario())


def test_a_rate_and_a_limit_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (_, services):
            await services[0].create_queue(QueueSpec("q", 4, concurrency=3, rate=Rate(0.001, 5)))
            await fill(services[0])
            for leased in await take(services, 3):
                await complete(services[0], leased)
            await take(services, 2)
            for each in services:
                assert not (await lease(each, 5, 300)).leases

    asyncio.run(scenario())
