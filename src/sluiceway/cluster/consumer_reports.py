"""Consumer reports: a queue's consumers as this instance sees them, and merged over all instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sluiceway.adapters import system
from sluiceway.cluster.ownership import Ownership
from sluiceway.core.queue.consumer_activity import Tally, merge, shown
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_CONSUMERS
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.consumers import Consumers, ConsumersSeen, Query
from sluiceway.model.peers import ListConsumers
from sluiceway.model.queue import QueueRecord
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError, Transport

_PATIENCE: Millis = 5_000
"""Timeout for the answer of another instance."""
_SLICE = 5_000
"""Leases examined in one step: a few milliseconds, during which the event loop serves no requests."""
_PACKED = 1_000
"""For as many leases counts a set of packed ones, however many these are."""


class ConsumerSummary(NamedTuple):
    """This instance's summary of a queue's consumers, for metrics."""

    consumers: int
    queries: Sequence[Query]


class ConsumerView:
    """Consumers of all queues. `shares` finds this instance's share of a queue by its incarnation."""

    def __init__(self, shares: Callable[[str], QueueDriver | None], ownership: Ownership, transport: Transport | None) -> None:
        self._shares = shares
        self._ownership = ownership
        self._transport = transport

    def tell(self, record: QueueRecord, client_id: str, query: Query) -> None:
        """Record a streaming query's report on this instance. Raises `queue_not_found`, `too_many_requests`."""
        driver = self._shares(record.incarnation)
        if driver is None:
            raise SluicewayError("queue_not_found", f"there is no queue {record.queue_name!r}", "queue_name")
        driver.consumers.tell(client_id, query, system.now())

    def told(self, record: QueueRecord) -> ConsumerSummary:
        """Summarise the queue's consumers on this instance alone."""
        driver, now = self._shares(record.incarnation), system.now()
        if driver is None:
            return ConsumerSummary(0, ())
        return ConsumerSummary(len(driver.consumers.seen(now)), [query for _, query in driver.consumers.queries(now)])

    async def list(self, records: Iterable[QueueRecord]) -> ConsumersSeen:
        """Consumers of these queues on all instances, and the instances that did not answer. One call to each, whatever the queues."""
        asked = ListConsumers(tuple(record.incarnation for record in records))
        peers = self._ownership.peers()
        answers = await asyncio.gather(self.here(asked), *(self._ask(peer.address, asked) for peer in peers))
        found = [answer for answer in answers if answer is not None]
        queues = {each: merge(share[each] for share in found if each in share) for each in asked.incarnations}
        return ConsumersSeen(queues, tuple(peer.name for peer, answer in zip(peers, answers[1:], strict=True) if answer is None))

    async def here(self, asked: ListConsumers) -> dict[str, Consumers]:
        """Consumers on this instance, for the queues it knows. Costs by leases, and yields to other requests meanwhile."""
        drivers = {each: driver for each in asked.incarnations if (driver := self._shares(each)) is not None}
        return {incarnation: await _consumers(driver) for incarnation, driver in drivers.items()}

    async def _ask(self, address: str, asked: ListConsumers) -> Mapping[str, Consumers] | None:
        assert self._transport is not None, "an instance that is alone has no peers"
        try:
            found: Mapping[str, Consumers] = await self._transport.ask(address, asked, _PATIENCE)
        except (PeerRefusedError, PeerUnknownError, SluicewayError):
            return None
        return found


async def _consumers(driver: QueueDriver) -> Consumers:
    found = Consumers()
    tally = Tally(driver.consumers, driver.waiting(), system.now())
    looked = 0
    for executor in driver.executors:
        partition = executor.partition
        found.ready += partition.log.ready_count
        found.leased += partition.leased_count
        found.scheduled += partition.log.scheduled_count
        for columns in partition.leases.columns:
            tally.add_packed(columns.tally())
            looked += _PACKED
            if looked >= _SLICE:
                looked = 0
                await asyncio.sleep(0)
        leases = partition.leases.objects()
        for start in range(0, len(leases), _SLICE):
            some = leases[start : start + _SLICE]
            tally.add(some)
            looked += len(some)
            if looked >= _SLICE:
                looked = 0
                await asyncio.sleep(0)
    return shown(found, tally.consumers(), MAX_CONSUMERS)
