"""A dependency of the handlers is down for ten minutes: with a circuit breaker next to nothing dies, and the queue recovers by itself.

A real service with real timers, in virtual time. The same against real processes and a real clock: `tests/campaigns/outage`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from simulation.loop import Loop, simulated
from sluiceway.adapters import system
from sluiceway.contract.queue_settings import CircuitBreaker
from sluiceway.core.partition.circuit_breaker import LONGEST_WAIT
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.model.backends import MemoryBackend
from sluiceway.model.requests import DONE, Disposition, Lease, Offsets, QueueSpec, Selection, Settle
from sluiceway.model.small_batch import in_columns
from tests.instance.instance_rig import produce

DOWN_AFTER: Millis = 1_000
OUTAGE: Millis = 600_000
RETRY = Disposition("retry", reason="ConnectionError: the database is down")
AT_ONCE = 10
"""Items that a consumer handles at a time, and settles together."""


@dataclass(frozen=True)
class Outage:
    """Consumers of a queue, whose dependency goes down."""

    backlog: int = 2_000
    arrivals: int = 0
    """Items per second that are produced meanwhile."""
    consumers: int = 8
    prefetch: int = 250
    partitions: int = 1
    takes: Millis = 500
    fails_after: Millis = 5
    works: float = 0.0
    """Share of the items that succeed during the outage."""
    hangs: bool = False
    """Handlers do not return, and their leases run out."""


class Ended(NamedTuple):
    items: int
    dead: int
    tries: int
    """Items handled in vain during the outage."""
    recovered: Millis
    """From the dependency's return until all was done."""


class World:
    """A service, and the consumers of its queue `q`."""

    def __init__(self, service: Service, outage: Outage) -> None:
        self.service, self.outage = service, outage
        self.random = Random(0)
        self.began = system.now()
        self.items = self.tries = 0

    @property
    def is_down(self) -> bool:
        return DOWN_AFTER <= system.now() - self.began < DOWN_AFTER + OUTAGE

    async def run(self) -> Ended:
        await self._produce(self.outage.backlog)
        consumers = [asyncio.create_task(self._consume(f"c{n}")) for n in range(self.outage.consumers)]
        while system.now() < self.began + DOWN_AFTER + OUTAGE:
            await asyncio.sleep(1)
            await self._produce(self.outage.arrivals)
        while self._left():  # noqa: ASYNC110 - the clock is virtual, and there is no event
            await asyncio.sleep(0.1)
        recovered = system.now() - self.began - DOWN_AFTER - OUTAGE
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        dead = sum(each.total for each in self.service.stats("dead").partitions)
        return Ended(self.items, dead, self.tries, recovered)

    def _left(self) -> int:
        return sum(each.total + each.transferring for each in self.service.stats("q").partitions)

    async def _produce(self, count: int) -> None:
        names = [f"i{self.items + n}" for n in range(count)]
        if names:
            await produce(self.service, "q", *names)
            self.items += count

    async def _consume(self, client: str) -> None:
        # Clients extend the leases of handlers that are at work.
        timeout = 60_000 if self.outage.hangs else 10 * 60_000
        while True:
            leased = await self.service.lease("q", Lease(client, self.outage.prefetch, 20_000, timeout))
            for served in leased.batches:
                batch = in_columns(served)
                offsets = batch.column("offset").to_numpy()
                partition = batch.column("partition")[0].as_py()
                for at in range(0, len(offsets), AT_ONCE):
                    await self._handle(partition, offsets[at : at + AT_ONCE])

    async def _handle(self, partition: int, offsets: Offsets) -> None:
        down, outage = self.is_down, self.outage
        if down and outage.hangs:
            await asyncio.sleep(300)
            return
        fails = [down and self.random.random() >= outage.works for _ in range(len(offsets))]
        self.tries += sum(fails)
        await asyncio.sleep((outage.fails_after if all(fails) else outage.takes) / 1000)
        is_bad = np.array(fails)
        chosen = [Selection(each, offsets=those) for each, those in ((RETRY, offsets[is_bad]), (DONE, offsets[~is_bad])) if len(those)]
        await self.service.settle("q", Settle({partition: chosen}, 10_000))


def survive(directory: Path, outage: Outage, breaker: CircuitBreaker | None, max_attempts: int = 3) -> Ended:
    async def history() -> Ended:
        service = Service(directory, {"default": MemoryBackend()})
        await service.start()
        await service.create_queue(QueueSpec("dead", 1))
        spec = QueueSpec("q", outage.partitions, max_attempts=max_attempts, dead_queue="dead", circuit_breaker=breaker)
        await service.create_queue(spec)
        try:
            return await World(service, outage).run()
        finally:
            await service.stop()

    loop = Loop(Random(0))
    with simulated(loop):
        return loop.run_until_complete(history())


def test_without_a_breaker_nearly_everything_dies(tmp_path: Path) -> None:
    ended = survive(tmp_path, Outage(), None)
    assert ended.dead > 0.9 * ended.items


OUTAGES = {
    "everything leased": Outage(),
    "four partitions": Outage(partitions=4),
    "small leases": Outage(prefetch=1),
    "one consumer": Outage(consumers=1),
    "slow failures": Outage(fails_after=8_000),
    "items arrive": Outage(backlog=0, arrivals=4),
}
LESSER = {
    "leases run out": Outage(hangs=True),
    "every tenth succeeds": Outage(works=0.1),
    "every third succeeds": Outage(works=1 / 3),
}
"""Here some attempts count that are not the items' fault: an expiry always does, and so do failures while successes close the breaker."""


@pytest.mark.parametrize(
    ("outage", "max_attempts"),
    [
        *(pytest.param(each, most, id=f"{name}, {most} attempts") for name, each in OUTAGES.items() for most in (1, 3)),
        *(pytest.param(each, 3, id=f"{name}, 3 attempts") for name, each in LESSER.items()),
    ],
)
def test_with_a_breaker_next_to_nothing_dies_and_the_queue_recovers(tmp_path: Path, outage: Outage, max_attempts: int) -> None:
    ended = survive(tmp_path, outage, CircuitBreaker(0.5), max_attempts)
    assert ended.dead <= ended.items / 100, ended
    assert ended.recovered <= LONGEST_WAIT + 2 * _alone(outage, ended.items) + 1_000, ended


def _alone(outage: Outage, items: int) -> Millis:
    """How long the consumers need for so many items."""
    at_a_time = outage.consumers * min(AT_ONCE, outage.prefetch)
    return -(-items // at_a_time) * outage.takes
