"""Queues that have as many logical queues as their load takes: each instance measures its shares, and one decides for each queue.

That one is the owner of the queue's lowest partition. If for a moment two take themselves for it, the commit of one fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from sluiceway.adapters import system
from sluiceway.cluster.ownership import Ownership
from sluiceway.cluster.remote_demand import Demand
from sluiceway.core.queue.routing import HERE
from sluiceway.core.queue.scaling_policy import Average, Spreader, load_of
from sluiceway.kernel.clock import Millis
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.queue import QueueRecord

log = logging.getLogger(__name__)

LOOK: Millis = 1_000
"""Between two looks at the loads: as old as what the others have said may be."""
GLANCES = 20
"""In that time: at which queues have requests that wait behind commits."""

Spread = Callable[[QueueRecord, int, int], Awaitable[None]]
"""Lets a queue lie on so many instances (the last number), and notes that it was so many."""


class Spreading:
    """`drivers` are this instance's shares; `run` until it is cancelled."""

    def __init__(self, ownership: Ownership, demand: Demand, drivers: Callable[[], Iterable[QueueDriver]], spread: Spread) -> None:
        self._ownership = ownership
        self._demand = demand
        self._drivers = drivers
        self._spread = spread
        self._spreaders: dict[str, Spreader] = {}
        self._busy = Average()
        self._busy_before = 0.0
        self._looked_at = 0.0
        self._queued: Counter[str] = Counter()
        """How often requests waited behind commits, of `_glances` times."""
        self._glances = 0

    async def run(self) -> None:
        while True:
            for _ in range(GLANCES):
                await asyncio.sleep(LOOK / GLANCES / 1000)
                self._glance()
            try:
                await self._look()
            except Exception:
                log.exception("the loads of the queues could not be judged")

    def _glance(self) -> None:
        self._glances += 1
        for driver in self._drivers():
            if driver.record.logical_queues == "auto" and driver.share.is_queued:
                self._queued[driver.record.incarnation] += 1

    def _loop_busy(self, now: Millis) -> int:
        """For how many thousandths of the time the event loop had something to do, on an average."""
        busy, at = system.busy(), system.stopwatch()
        share = (busy - self._busy_before) / max(1e-3, at - self._looked_at)
        self._busy_before, self._looked_at = busy, at
        return self._busy.note(now, 1_000 * min(1.0, max(0.0, share)))

    def _measure(self) -> list[tuple[QueueRecord, int]]:
        """How busy the shares are of those queues that the cluster spreads."""
        now, drivers = system.steady(), list(self._drivers())
        busy, glances, queued = self._loop_busy(now), max(1, self._glances), self._queued
        self._glances, self._queued = 0, Counter()
        if not any(driver.record.logical_queues == "auto" for driver in drivers):
            return []
        work = {driver.record.incarnation: driver.share.measure(now) for driver in drivers}
        total = sum(work.values())
        measured = []
        for driver in drivers:
            if driver.record.logical_queues == "auto":
                name, share = driver.record.incarnation, driver.share
                waits = share.note_queued(now, 1_000 * queued[name] // glances)
                share.busy = load_of(work[name], total, busy, waits)
                measured.append((driver.record, share.busy))
        return measured

    async def _look(self) -> None:
        measured = self._measure()
        mine = [(record, busy) for record, busy in measured if self._is_mine(record)]
        for incarnation in self._spreaders.keys() - {record.incarnation for record, _ in mine}:
            del self._spreaders[incarnation]
        for record, busy in mine:
            await self._judge(record, busy)

    def _is_mine(self, record: QueueRecord) -> bool:
        lowest = min(each.partition for each in record.partitions)
        return self._ownership.holds() and self._ownership.owner(record.incarnation, lowest) is HERE

    async def _judge(self, record: QueueRecord, busy: int) -> None:
        look = self._ownership.look
        resource = None if look is None else look.resource
        limit = None if resource is None else resource.limits.get(record.incarnation)
        # Claims pass over limits, so there is nothing to be decided.
        if look is None or resource is None or limit is None or resource.strategy != "rounds":
            return
        staying = sum(not member.leaving for member in look.members.values())
        most = max(1, min(staying, len(record.partitions)))
        loads = {**self._demand.busy(record.incarnation), HERE: busy}
        owners = {self._ownership.owner(record.incarnation, each.partition) for each in record.partitions}
        spreader = self._spreaders.setdefault(record.incarnation, Spreader())
        count = spreader.decide(system.steady(), min(limit, most), most, [None if owner is None else loads.get(owner) for owner in owners])
        if count is not None:
            await self._spread(record, limit, count)
