"""Load balancer: each instance reports what its partitions cost it, and one of them opens rounds that level the loads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from sluiceway.adapters import system
from sluiceway.cluster.ownership import KEYS, Clustered, item_of
from sluiceway.core.group.group_records import MAX_REPORTED, GroupView, LoadReport
from sluiceway.core.group.load_balance import PACE, Balancer, Pace, decides, noticeable, open_round
from sluiceway.core.queue.partition_load import Counts, PartitionMeter
from sluiceway.kernel.clock import Millis
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

SAMPLE: Millis = 5_000
"""Interval between two samples of the partitions' counts."""


class LoadBalancer:
    """Load balancer of this instance. `drivers` returns its shares; `run` until cancelled."""

    def __init__(self, ownership: Clustered, meta: MetaStore, drivers: Callable[[], Iterable[QueueDriver]], pace: Pace = PACE) -> None:
        self._ownership = ownership
        self._meta = meta
        self._drivers = drivers
        self._meter = PartitionMeter()
        self._pace = pace
        self._balancer = Balancer(pace)
        self._reported: LoadReport | None = None
        self._look_at = system.steady() + pace.look

    @property
    def load(self) -> int:
        """The load of this instance's partitions, in millionths of what an instance can do."""
        return round(self._meter.total().load)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE / 1000)
            try:
                await self.step()
            except (ConflictError, MetaUnknownError, StoreUnavailableError):
                # The next look shows what has come of it.
                continue
            except Exception:
                log.exception("balancing the loads failed")

    async def step(self) -> None:
        """Take a sample and, every `look` ms of the pace, report, and decide if that is this instance's part."""
        now, look = system.steady(), self._ownership.look
        await self._sample(now)
        if look is None:
            return
        self._balancer.note(now, look)
        if now < self._look_at:
            return
        self._look_at = now + self._pace.look
        self._report(look)
        if self._ownership.holds() and decides(look, self._ownership.name):
            swaps = self._balancer.decide(now, look, await self._ownership.reports())
            if swaps:
                writes = open_round(look, KEYS, swaps)
                log.info("moving %s partitions to level the loads", len(swaps))
                await self._meta.commit(writes.checks, puts=writes.puts)

    async def _sample(self, now: Millis) -> None:
        counts: dict[str, Counts] = {}
        for driver in list(self._drivers()):
            counts |= {item_of(driver.record.incarnation, number): count for number, count in driver.queue.counts().items()}
            # A cluster may have thousands of partitions.
            await asyncio.sleep(0)
        self._meter.note(now, counts)

    def _report(self, look: GroupView) -> None:
        total, number = self._meter.total(), 0 if look.plan is None else look.plan.round
        report = LoadReport(loads=self._meter.loads(MAX_REPORTED), round=number, items=round(total.items), bytes=round(total.bytes))
        if noticeable(self._reported, report):
            self._reported = report
            self._ownership.member.report(report)
