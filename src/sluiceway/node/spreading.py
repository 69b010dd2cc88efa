"""Queues that have as many logical queues as their load takes: each instance measures its shares, and one decides for each queue.

That one is the owner of the queue's lowest partition. If for a moment two take themselves for it, the commit of one fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from sluiceway.adapters import system
from sluiceway.core.routing import HERE
from sluiceway.core.spreading import Spreader
from sluiceway.kernel.clock import Millis
from sluiceway.model.queue import QueueRecord
from sluiceway.node.demand import Demand
from sluiceway.node.driver import QueueDriver
from sluiceway.node.ownership import Ownership

log = logging.getLogger(__name__)

LOOK: Millis = 1_000
"""Between two looks at the loads: as old as what the others have said may be."""

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

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK / 1000)
            try:
                await self._look()
            except Exception:
                log.exception("the loads of the queues could not be judged")

    async def _look(self) -> None:
        measured = [
            (driver.record, driver.measure(system.steady())) for driver in self._drivers() if driver.record.logical_queues == "auto"
        ]
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
