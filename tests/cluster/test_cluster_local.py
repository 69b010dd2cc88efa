"""What an instance can do by itself it does without a word to the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluiceway.cluster import remote_leases
from sluiceway.core.queue.routing import HERE, OVERFLOW, Peer, stays, taker
from sluiceway.instance.service import Service
from sluiceway.model.peers import Ask, Load, Poll
from sluiceway.model.requests import Leased
from tests.cluster.cluster_rig import Cluster, Gate, cluster, counts, put, shares
from tests.instance.instance_rig import eventually, lease, payloads, produce, settle, spec

LONG = 60_000


def wanted(made: Cluster, service: Service) -> bool:
    """Whether that instance has asked for items that others have."""
    return any(isinstance(request, Poll) and request.wanted for address, request in made.wires.asked if address != made.name(service))


class Looks:
    """Counts how often leases ask whether this instance will serve them."""

    def __init__(self, service: Service, queue: str) -> None:
        owned = service._drivers[queue].queue
        self.count, self._will_serve = 0, owned.will_serve
        owned.will_serve = self  # type: ignore[method-assign]

    def __call__(self, ticket: object) -> bool:
        self.count += 1
        return self._will_serve(ticket)  # type: ignore[arg-type]

    async def some(self) -> None:
        """Returns when there was ample opportunity to ask the others."""
        most = self.count + 3
        await eventually(lambda: self.count >= most)


@pytest.mark.parametrize("leased", [True, False], ids=["the lease is being written", "the items are being written"])
def test_who_is_served_here_in_a_moment_asks_nobody(tmp_path: Path, leased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_leases, "BEING_WRITTEN", LONG)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            await put(a, "q", shares(b, "q")[0], "there")
            number = shares(a, "q")[0]
            if leased:
                await put(a, "q", number, "here")
            made.wires.asked.clear()
            gate = made.stores["a"].on_apply = Gate()
            producing = None if leased else asyncio.create_task(put(a, "q", number, "here"))
            if producing is not None:
                await gate.reached.wait()
            looks = Looks(a, "q")
            work = asyncio.create_task(lease(a, "q", timeout=LONG))
            await gate.reached.wait()
            await looks.some()
            assert not wanted(made, a)
            gate.open()
            assert payloads((await work).batches) == ["here"]
            if producing is not None:
                await producing
            assert not wanted(made, a)

    asyncio.run(run())


def test_what_is_written_for_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang, and others have items."""
    monkeypatch.setattr(remote_leases, "BEING_WRITTEN", 0)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            await put(a, "q", shares(b, "q")[0], "there")
            gate = made.stores["a"].on_apply = Gate()
            producing = asyncio.create_task(put(a, "q", shares(a, "q")[0], "here"))
            await gate.reached.wait()
            assert payloads((await lease(a, "q", timeout=LONG)).batches) == ["there"]
            gate.open()
            await producing

    asyncio.run(run())


def test_more_who_wait_than_are_being_written_for_ask_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_leases, "BEING_WRITTEN", LONG)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            await put(a, "q", shares(b, "q")[0], "there")
            gate = made.stores["a"].on_apply = Gate()
            producing = asyncio.create_task(put(a, "q", shares(a, "q")[0], "here"))
            await gate.reached.wait()
            work = [asyncio.create_task(lease(a, "q", 1, LONG)) for _ in range(2)]
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            assert [payloads(task.result().batches) for task in done] == [["there"]]
            gate.open()
            answers: list[Leased] = await asyncio.gather(*work)
            assert sorted(item for each in answers for item in payloads(each.batches)) == ["here", "there"]
            await producing

    asyncio.run(run())


def test_a_lease_whose_client_goes_while_it_is_written_is_given_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 2))
            number = shares(a, "q")[0]
            await put(a, "q", number, "x")
            gate = made.stores["a"].on_apply = Gate()
            # So long that it does not run out meanwhile.
            work = asyncio.create_task(lease(a, "q", timeout=LONG, lease_timeout=10 * LONG))
            await gate.reached.wait()
            work.cancel()
            await asyncio.wait([work])
            gate.open()
            await eventually(lambda: counts(a.stats("q"))[number] == (1, 0))
            assert payloads((await lease(a, "q", timeout=LONG)).batches) == ["x"]

    asyncio.run(run())


def test_a_cycle_at_one_instance_asks_the_others_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, services):
            await services[0].create_queue(spec("q", 6))
            for service in services:
                for _ in range(3):
                    await produce(service, "q", "x", "y")
                    leased = await lease(service, "q", timeout=LONG)
                    assert (await settle(service, "q", leased)).completed == 2
            assert not [request for _, request in made.wires.asked if isinstance(request, Ask)]

    asyncio.run(run())


@pytest.mark.parametrize("emptiest", [None, 0, 1, OVERFLOW, OVERFLOW + 1, 3 * OVERFLOW])
def test_a_produce_that_stays_would_not_go_to_the_emptiest_of_the_others(emptiest: int | None) -> None:
    """`stays` spares the comparison only where its outcome is known."""
    own, other = Load(0, emptiest, 0), Peer("b", "b")
    assert stays(own) == (emptiest is not None and emptiest <= OVERFLOW)
    if stays(own):
        assert taker(own, {other: Load(0, 0, 0)}, [HERE, other], []) is HERE
