"""Rebalances on real instances: a queue with something of everything, what must have become of it, and a coordinator that dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sluiceway.adapters import system
from sluiceway.adapters.storage.memory import MemoryDisk, MemoryPartitionStore
from sluiceway.contract.rebalances import DrainMode
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import Actor
from sluiceway.model.backends import MemoryBackend
from sluiceway.model.items import batch_from_rows
from sluiceway.model.rebalance import Rebalance
from sluiceway.model.requests import Leased, Produce, ProduceKey
from tests.instance.instance_rig import PATIENCE, Store, eventually, lease, payloads, rows, settle

BY = Actor("somebody", "request-1")
SOON = 60_000


@contextlib.asynccontextmanager
async def in_memory(folder: Path, *names: str) -> AsyncIterator[Service]:
    """A service alone, on these backends, of which the first takes everything."""
    disk = MemoryDisk()
    backends = {name: MemoryBackend(partition_affinity=float(index == 0)) for index, name in enumerate(names)}
    service = Service(folder, backends, open_store=lambda *_: Store(folder, MemoryPartitionStore(disk)))
    await service.start()
    try:
        yield service
    finally:
        async with asyncio.timeout(PATIENCE):
            await service.stop()


def affinities(service: Service, **those: float) -> None:
    """As a reload makes them."""
    service._backends._settings = {name: MemoryBackend(partition_affinity=each) for name, each in those.items()}


class Ledger:
    """What was produced into a queue, and what came out. At the end each exactly once, and a repeated key is answered as at first."""

    def __init__(self, service: Service, queue: str) -> None:
        self.service = service
        self.queue = queue
        self.produced: list[str] = []
        self.consumed: list[str] = []
        self.keys: dict[str, Any] = {}
        self.held: Leased | None = None
        self.enough = False

    async def produce(self, *items: str, partition: int | None = None) -> None:
        await self.service.produce(self.queue, Produce(rows(*items), 20_000, partition=partition))
        self.produced += items

    async def produce_keyed(self, name: str) -> None:
        done = await self.service.produce(self.queue, Produce(rows(f"keyed {name}"), 20_000, ProduceKey(name)))
        if name not in self.keys:
            self.keys[name] = (done.partition, done.first_offset)
            self.produced.append(f"keyed {name}")
        assert self.keys[name] == (done.partition, done.first_offset), "another answer to the same key"

    async def fill(self) -> None:
        """Some of everything in each partition: ready, scheduled and leased items, keys."""
        for each in self.service.queue(self.queue).partitions:
            number = each.partition
            await self.produce(*(f"ready {number}.{nth}" for nth in range(5)), partition=number)
            due = batch_from_rows([{"payload": f"due {number}.{nth}".encode(), "enqueue_at": system.now() + SOON} for nth in range(2)])
            await self.service.produce(self.queue, Produce(due, 20_000, partition=number))
            self.produced += [f"due {number}.{nth}" for nth in range(2)]
        for nth in range(24):
            await self.produce_keyed(f"k{nth}")
        self.held = await lease(self.service, self.queue, 3)

    async def fill_more(self, count: int) -> None:
        for nth in range(count):
            await self.produce(f"more {nth}")

    async def take(self, most: int = 1_000) -> int:
        """Take what there is, and complete it."""
        leased = await lease(self.service, self.queue, most, most=100)
        found = payloads(leased.batches)
        if found:
            done = await settle(self.service, self.queue, leased)
            assert done.completed == len(found), done
            self.consumed += found
        return len(found)

    async def let_go(self) -> None:
        """Complete what was leased all the time."""
        if self.held is not None:
            held, self.held = self.held, None
            assert (await settle(self.service, self.queue, held)).completed == 3
            self.consumed += payloads(held.batches)

    async def consume(self) -> None:
        """Until it is told to stop: cut off, it would leave leases behind."""
        while not self.enough:
            with contextlib.suppress(SluicewayError):
                if await self.take():
                    continue
            await asyncio.sleep(0.01)

    async def check(self) -> None:
        """Nothing was lost, nothing is there twice."""
        for name in list(self.keys):
            await self.produce_keyed(name)
        scheduled = sum(each.scheduled for each in (await self.service.count(self.queue)).partitions)
        assert scheduled == sum(each.startswith("due") for each in self.produced)
        while await self.take():
            pass
        left = Counter(self.produced) - Counter(self.consumed)
        assert {each.split()[0] for each in left} <= {"due"}, f"lost: {left}"
        assert not Counter(self.consumed) - Counter(self.produced), "there is something twice"
        assert sum(left.values()) == scheduled


async def begun(service: Service, queue: str, requested: int | None = None, drain: DrainMode = "natural", **fields: Any) -> Rebalance:
    return await service.rebalance(queue, requested, drain, fields.get("rate"), fields.get("plan_id"), BY)


async def ended(service: Service, id: str) -> Rebalance:
    """Wait for its end, whatever that is."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(SluicewayError):
                found = await service.get_rebalance(id)
                if not found.is_open:
                    return found
            await asyncio.sleep(0.005)


async def at_step(service: Service, id: str, step: str) -> Rebalance:
    """Wait until that is its step."""
    async with asyncio.timeout(PATIENCE):
        while (found := await service.get_rebalance(id)).step != step:
            assert found.is_open
            await asyncio.sleep(0.002)
    return found


class Doom:
    """The coordinator of a service dies at its n-th action, before or after it is done: a commit of a rebalance, or a request."""

    def __init__(self, service: Service, at: int) -> None:
        self.service = service
        self.at = at
        self.count = 0
        self.dead = asyncio.Event()
        rebalancing = service._rebalancing
        self._records, self._router = rebalancing._records, service._router
        self._write, self._owner_of = self._records.write, self._router.owner_of
        self._records.write = self._hook(self._write, lambda args: args[3] is not None)  # type: ignore[method-assign]
        self._router.owner_of = self._hook(self._owner_of, lambda args: type(args[2]).__name__ in _ASKED)  # type: ignore[method-assign]

    def _hook(self, call: Callable[..., Any], counts: Callable[[tuple[Any, ...]], bool]) -> Callable[..., Any]:
        async def hooked(*args: Any, **fields: Any) -> Any:
            if not counts(args):
                return await call(*args, **fields)
            await self._point()
            answer = await call(*args, **fields)
            await self._point()
            return answer

        return hooked

    async def _point(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.dead.set()
        if self.dead.is_set():
            await asyncio.Event().wait()

    async def replace(self) -> None:
        """It is gone, and another takes its place, who knows nothing."""
        await self.bury()
        self.succeed()

    async def bury(self) -> None:
        """It is gone, and holds nothing any more."""
        self._records.write, self._router.owner_of = self._write, self._owner_of  # type: ignore[method-assign]
        task = next(each for each in self.service._tasks if each.get_coro().__qualname__ == "Coordinator.run")  # type: ignore[union-attr]
        task.cancel()
        await asyncio.wait([task])

    def succeed(self) -> None:
        self.service._spawn(self.service._rebalancing.coordinator.run())


_ASKED = ("Shut", "GiveKeys", "TakeKeys", "MoveOut")

__all__ = ["BY", "Doom", "Ledger", "affinities", "at_step", "begun", "ended", "eventually", "in_memory"]
