"""A consumer that holds items of several partitions, of which one is away: what it is told of the others counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from sluiceway.client import AsyncConsumer, CallError, Lease, Leased, LeasedItem
from sluiceway.client._async import consumer as consumer_module
from sluiceway.client.answers import Completed, Extended, Ignored, Released
from sluiceway.client.lease_manager import DONE, HANG_UP_TIME, QUIET_TIME, Extend, LeaseManager, Lost, Settle
from sluiceway.client.protocol import Call

AT = datetime(2026, 1, 31, tzinfo=UTC)
LEASE_TIMEOUT = 60_000
PARTITIONS = 4


class World:
    """A consumer with one item of each partition under way, and a server of which the partitions in `away` do not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.away: set[int] = {2}
        self.error = CallError("unavailable", "partition 2 is not open", request_id="r-1")
        self.calls: list[list[int]] = []
        monkeypatch.setattr(consumer_module, "_now", lambda: self.now)
        self.manager = LeaseManager(8, 0, LEASE_TIMEOUT, 20, 30_000)
        self.consumer = AsyncConsumer(self.attempt, "q", "c", self.manager)
        leases = [Lease(lease_id=f"k.{number}.L7", partition=number, count=1, lease_deadline=AT) for number in range(PARTITIONS)]
        items = [LeasedItem(id=f"k.{number}.7", origin="", partition=number, lease_id=f"k.{number}.L7") for number in range(PARTITIONS)]
        self.manager.leased(Leased(queue_name="q", leases=leases, items=items), 0)
        while self.manager.take(0) is not None:
            pass

    async def attempt(self, call: Call[Any]) -> object:
        fields = json.loads(call.body)
        numbers = [int(each.split(".")[1]) for each in [*fields.get("ids", ()), *fields.get("lease_ids", ())]]
        self.calls.append(numbers)
        await asyncio.sleep(0)
        if self.away & {*numbers}:
            raise self.error
        if call.path == "/v1/queue.extend":
            return Extended(leases=[Lease(lease_id=each, partition=0, count=1, lease_deadline=AT) for each in fields["lease_ids"]])
        return Completed(completed=len(numbers), ignored=[Ignored(id=each, reason="completed") for each in fields["ids"][:1]])

    def extend(self) -> None:
        (effect,) = [each for each in self.manager.decide(self.now) if isinstance(each, Extend)]
        asyncio.run(self.consumer._extend(effect.lease_ids))

    def settle(self) -> None:
        (effect,) = [each for each in self.manager.decide(self.now) if isinstance(each, Settle)]
        asyncio.run(self.consumer._settle(effect))

    def lost(self) -> list[str]:
        return [item_id for each in self.manager.decide(self.now) if isinstance(each, Lost) for item_id in each.ids]


def test_a_partition_that_is_away_does_not_cost_the_leases_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call extends them all, and failed for all: after a lease timeout, every handler was cancelled."""
    world = World(monkeypatch)
    world.now = 20_000
    world.extend()
    assert sorted(world.calls) == [[0], [0, 1, 2, 3], [1], [2], [3]]
    world.now = 41_000
    world.calls.clear()
    world.extend()
    assert sorted(world.calls) == [[0, 1, 3], [2]]
    world.now = 60_000
    assert world.lost() == ["k.2.7"]
    world.now = 100_999
    assert world.lost() == []


def test_nor_does_it_hold_up_their_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were sent again and again, and no more items were leased once there were many of them."""
    world = World(monkeypatch)
    for number in range(PARTITIONS):
        world.manager.finish(f"k.{number}.7", DONE, 0)
    world.settle()
    assert sorted(world.calls) == [[0], [0, 1, 2, 3], [1], [2], [3]]
    world.now, world.away = 1_000, set()
    world.calls.clear()
    world.settle()
    assert world.calls == [[2]]
    world.now = 9_000
    assert not [each for each in world.manager.decide(world.now) if isinstance(each, Settle)]


def test_a_partition_that_is_back_is_called_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.now = 20_000
    world.extend()
    world.now, world.away = 41_000, set()
    world.extend()
    world.calls.clear()
    world.now = 62_000
    world.extend()
    assert world.calls == [[0, 1, 2, 3]]


@pytest.mark.parametrize("already_there", [True, False])
def test_a_lease_call_whose_answer_is_here_is_not_hung_up(already_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where handlers keep the event loop busy, an answer and the end of the time to wait for it are noticed together."""

    async def main() -> None:
        answer: asyncio.Future[Leased] = asyncio.get_running_loop().create_future()
        world = World(monkeypatch)
        released: list[list[str]] = []

        async def attempt(call: Call[Any]) -> object:
            if call.path == "/v1/queue.lease":
                return await answer
            released.append(json.loads(call.body)["ids"])
            return Released(released=1)

        consumer = AsyncConsumer(attempt, "q", "c", LeaseManager(8, 0, LEASE_TIMEOUT, 20, 30_000))
        lease = Lease(lease_id="k.0.L7", partition=0, count=1, lease_deadline=AT)
        leased = Leased(queue_name="q", leases=[lease], items=[LeasedItem(id="k.0.7", origin="", partition=0, lease_id="k.0.L7")])

        def arrive() -> None:
            if not answer.cancelled():
                answer.set_result(leased)

        async with consumer:
            await asyncio.sleep(0)
            consumer.stop()
            if already_there:
                arrive()
            world.now += QUIET_TIME
            consumer._pump()
            if not already_there:
                # It is read from the connection next.
                asyncio.get_running_loop().call_soon(arrive)
            for _ in range(5):
                await asyncio.sleep(0)
            world.now += HANG_UP_TIME
            consumer._pump()
        assert released == [["k.0.7"]]

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        lambda: CallError("unavailable", "cannot reach the server"),
        lambda: CallError("rate_limited", "slow down", request_id="r-1"),
        lambda: CallError("forbidden", "no", request_id="r-1"),
    ],
)
def test_what_no_partition_causes_is_not_asked_of_each(monkeypatch: pytest.MonkeyPatch, error: Callable[[], CallError]) -> None:
    world = World(monkeypatch)
    world.now, world.error = 20_000, error()
    world.extend()
    assert world.calls == [[0, 1, 2, 3]]
