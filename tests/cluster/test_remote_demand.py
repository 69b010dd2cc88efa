"""How instances learn of items elsewhere: what they poll, when, and which of those that wait are told. No poll ends by itself here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluiceway.core.queue import poll_line, remote_items
from sluiceway.instance.service import Service
from sluiceway.model.peers import Poll
from sluiceway.model.requests import Lease
from tests.cluster.cluster_rig import Cluster, cluster, put, shares
from tests.instance.instance_rig import eventually, lease, payloads, spec

LONG = 600_000


@pytest.fixture(autouse=True)
def _long_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_items, "POLL", LONG)


def polls(made: Cluster, address: str, name: str) -> list[tuple[str, ...]]:
    """What the polls of the instance at `address` by that other one named so far."""
    asked = [(to, request) for to, request in made.wires.asked if isinstance(request, Poll)]
    return [request.wanted for to, request in asked if to == address and request.asker.startswith(name)]


def roles(made: Cluster, queue: str) -> tuple[Service, list[Service]]:
    """The owner of the queue's only partition, and the others."""
    owner = made.owner(queue, 0)
    return owner, [service for service in made.services if service is not owner]


def waits(service: Service) -> bool:
    return service.stats("q").lease_waiting > 0


def test_consumers_that_come_and_go_cost_no_polls(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            owner, (consumer,) = roles(made, "q")
            there, here = made.name(owner), made.name(consumer)
            for _ in range(5):
                assert (await lease(consumer, "q", timeout=20)).leases == []
            incarnation = a.queue("q").incarnation
            assert polls(made, there, here) == [(), (incarnation,)]
            # The next one is served all the same.
            await put(owner, "q", 0, "x")
            assert payloads((await lease(consumer, "q", timeout=LONG)).batches) == ["x"]

    asyncio.run(run())


def test_items_that_no_lease_took_are_the_next_ones_at_once(tmp_path: Path) -> None:
    """The owner has told of three, of which one was leased. It is polled for more only after the last one."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            owner, (consumer,) = roles(made, "q")
            await put(owner, "q", 0, "one", "two", "three")
            incarnation, found = a.queue("q").incarnation, []
            for _ in range(3):
                found += payloads((await lease(consumer, "q", 1, LONG)).batches)
            assert found == ["one", "two", "three"]
            await eventually(lambda: polls(made, made.name(owner), made.name(consumer)) == [(), (incarnation,), (), (incarnation,)])

    asyncio.run(run())


def test_a_new_owner_is_polled_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, *_)):
            await a.create_queue(spec("q", 1))
            owner, consumers = roles(made, "q")
            work = [asyncio.create_task(lease(consumer, "q", 1, LONG)) for consumer in consumers]
            await eventually(lambda: all(map(waits, consumers)))
            await made.leave(made.name(owner))
            await eventually(lambda: any(0 in shares(consumer, "q") for consumer in consumers))
            # One of the two is its own consumer's.
            await put(made.owner("q", 0), "q", 0, "x", "y")
            assert sorted([payloads((await each).batches) for each in work]) == [["x"], ["y"]]

    asyncio.run(run())


def test_one_item_is_told_to_one_of_many_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_line, "FEW", 1)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c", "d") as (made, (a, *_)):
            await a.create_queue(spec("q", 1))
            owner, consumers = roles(made, "q")
            waiting = {asyncio.create_task(lease(consumer, "q", timeout=LONG)) for consumer in consumers}
            await eventually(lambda: all(map(waits, consumers)))
            await eventually(lambda: all(len(polls(made, made.name(owner), made.name(each))) == 2 for each in consumers))
            for number in range(3):
                await put(owner, "q", 0, f"{number}")
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                assert [payloads(task.result().batches) for task in done] == [[f"{number}"]]
                assert len(made.wires.requests(Lease)) == number + 1

    asyncio.run(run())


def test_those_that_were_told_and_wait_for_nothing_any_more_leave_it_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_line, "FEW", 1)
    monkeypatch.setattr(poll_line, "RETELL", LONG)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c", "d") as (made, (a, *_)):
            await a.create_queue(spec("q", 1))
            owner, consumers = roles(made, "q")
            for consumer in consumers:
                assert (await lease(consumer, "q", timeout=20)).leases == []
            work = asyncio.create_task(lease(consumers[-1], "q", timeout=LONG))
            await eventually(lambda: waits(consumers[-1]))
            await put(owner, "q", 0, "x")
            assert payloads((await work).batches) == ["x"]

    asyncio.run(run())


def test_an_instance_that_was_told_and_is_silent_leaves_it_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_line, "FEW", 1)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            owner, (consumer,) = roles(made, "q")
            incarnation = a.queue("q").incarnation
            silent = asyncio.create_task(owner.answer(Poll((incarnation,), LONG, "silent")))
            work = asyncio.create_task(lease(consumer, "q", timeout=LONG))
            await eventually(lambda: len(polls(made, made.name(owner), made.name(consumer))) == 2)
            await put(owner, "q", 0, "x")
            assert (await silent).loads[incarnation].ready == 1
            assert payloads((await work).batches) == ["x"]

    asyncio.run(run())


def test_a_poll_ends_the_earlier_one_of_its_instance(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a") as (_, (a,)):
            first = asyncio.create_task(a.answer(Poll(("x",), LONG, "one")))
            other = asyncio.create_task(a.answer(Poll(("x",), LONG, "two")))
            await eventually(lambda: a._demand is not None and len(a._demand._held) == 2)
            second = asyncio.create_task(a.answer(Poll(("y",), LONG, "one")))
            await first
            assert not other.done()
            assert not second.done()
            for each in (other, second):
                each.cancel()
            await asyncio.wait([other, second])

    asyncio.run(run())
