"""Autoscaler for queues with `logical_queues: auto`: each instance measures its shares, and one instance decides for each queue.

The owner of the queue's lowest partition decides. If two instances briefly consider themselves that owner, the commit of one fails.
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
"""Interval between two evaluations of the loads. Those of other instances are as old as polls last (`core/queue/remote_items.py`)."""
GLANCES = 20
"""Samples per LOOK: each notes the queues with requests waiting behind commits."""

Spread = Callable[[QueueRecord, int, int], Awaitable[None]]
"""Spreads the queue over a number of instances, the last argument, and records the previous number, the second argument."""


class Autoscaler:
    """Autoscaler of this instance. `drivers` returns its shares; `run` until cancelled."""

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
        """Samples, out of `_glances`, in which requests waited behind commits; by incarnation."""
        self._glances = 0

    async def run(self) -> None:
        while True:
            for _ in range(GLANCES):
                await asyncio.sleep(LOOK / GLANCES / 1000)
                self._glance()
            try:
                await self._look()
            except Exception:
                log.exception("autoscaling of the queues failed")

    def _glance(self) -> None:
        self._glances += 1
        for driver in self._drivers():
            if driver.record.logical_queues == "auto" and driver.queue.is_queued:
                self._queued[driver.record.incarnation] += 1

    def _loop_busy(self, now: Millis) -> int:
        """Busy share of the event loop, in thousandths of the time; a moving average."""
        busy, at = system.busy(), system.stopwatch()
        share = (busy - self._busy_before) / max(1e-3, at - self._looked_at)
        self._busy_before, self._looked_at = busy, at
        return self._busy.note(now, 1_000 * min(1.0, max(0.0, share)))

    def _measure(self) -> list[tuple[QueueRecord, int]]:
        """Measure the load of this instance's shares, in thousandths, for the queues that the cluster spreads."""
        now, drivers = system.steady(), list(self._drivers())
        busy, glances, queued = self._loop_busy(now), max(1, self._glances), self._queued
        self._glances, self._queued = 0, Counter()
        if not any(driver.record.logical_queues == "auto" for driver in drivers):
            return []
        work = {driver.record.incarnation: driver.queue.measure(now) for driver in drivers}
        total = sum(work.values())
        measured = []
        for driver in drivers:
            if driver.record.logical_queues == "auto":
                name, share = driver.record.incarnation, driver.queue
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
        # Claims ignore limits, so there is no decision to make.
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
