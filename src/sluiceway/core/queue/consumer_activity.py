"""Consumer activity: an instance's knowledge of a queue's consumers beside its leases, and its merge across instances.

In memory only: a restart forgets it, and only displays depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sluiceway.core.partition.lease_columns import ClientTally
from sluiceway.core.partition.records import LeaseState
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_CONSUMERS, MAX_CONSUMERS_SHOWN, MAX_QUERIES
from sluiceway.model.consumers import Consumer, Consumers, Query

SEEN_FOR: Millis = 60_000
"""A client without leases and calls still counts as a consumer for this long. Streaming queries report more often than that."""
FAILED_FOR: Millis = 600_000
"""A failed query is reported for this long, unless it runs again."""


class ConsumerBook:
    """Clients that recently asked for items of a queue, and the reports of streaming queries."""

    def __init__(self) -> None:
        self._seen: dict[str, Millis] = {}
        """The last call of each client, latest last."""
        self._queries: dict[tuple[str, str], Query] = {}

    def saw(self, client_id: str, now: Millis) -> None:
        """Record that the client asks for items."""
        seen = self._seen
        seen.pop(client_id, None)
        seen[client_id] = now
        while seen[first := next(iter(seen))] < now - SEEN_FOR or len(seen) > MAX_CONSUMERS:
            del seen[first]

    def tell(self, client_id: str, query: Query, now: Millis) -> None:
        """Record a query's report in place of its previous one. Raises `too_many_requests`."""
        self._forget(now)
        if (client_id, query.id) not in self._queries and len(self._queries) >= MAX_QUERIES:
            raise SluicewayError("too_many_requests", f"{MAX_QUERIES} queries already report on this queue, which is the maximum")
        self._queries[client_id, query.id] = query._replace(told_at=now)

    def seen(self, now: Millis) -> dict[str, Millis]:
        """The clients that asked within the last minute, with their last times."""
        return {client_id: at for client_id, at in self._seen.items() if at >= now - SEEN_FOR}

    @property
    def last_seen(self) -> Millis | None:
        """The last call of any client; None: none is remembered."""
        return next(reversed(self._seen.values()), None)

    def queries(self, now: Millis) -> list[tuple[str, Query]]:
        """The current query reports, with their clients."""
        self._forget(now)
        return [(client_id, query) for (client_id, _), query in self._queries.items()]

    def _forget(self, now: Millis) -> None:
        for key, query in list(self._queries.items()):
            if query.told_at < now - (FAILED_FOR if query.state == "failed" else SEEN_FOR):
                del self._queries[key]


class Tally:
    """The consumers of one instance's share of a queue."""

    def __init__(self, book: ConsumerBook, waiting: Iterable[str], now: Millis) -> None:
        self._consumers: dict[str, Consumer] = {}
        for client_id, at in book.seen(now).items():
            self._of(client_id).seen_at = at
        for client_id, query in book.queries(now):
            self._of(client_id).queries.append(query)
        for client_id in waiting:
            self._of(client_id).waiting += 1

    def add(self, leases: Iterable[LeaseState]) -> None:
        """Add live leases. Costs by the number of leases, not of items."""
        for lease in leases:
            consumer = self._of(lease.client_id)
            consumer.leases += 1
            consumer.items += lease.open
            if lease.deadline is not None and (consumer.lease_deadline is None or lease.deadline < consumer.lease_deadline):
                consumer.lease_deadline = lease.deadline

    def add_packed(self, tallies: Iterable[ClientTally]) -> None:
        """Add live leases that are counted already."""
        for each in tallies:
            consumer = self._of(each.client_id)
            consumer.leases += each.leases
            consumer.items += each.items
            if consumer.lease_deadline is None or each.deadline < consumer.lease_deadline:
                consumer.lease_deadline = each.deadline

    def consumers(self) -> list[Consumer]:
        return list(self._consumers.values())

    def _of(self, client_id: str) -> Consumer:
        found = self._consumers.get(client_id)
        if found is None:
            found = self._consumers[client_id] = Consumer(client_id)
        return found


def merge(shares: Iterable[Consumers]) -> Consumers:
    """Merge the instances' views; at most MAX_CONSUMERS_SHOWN consumers, those with queries and most items first."""
    total, found = Consumers(), dict[str, Consumer]()
    for share in shares:
        total.ready += share.ready
        total.leased += share.leased
        total.scheduled += share.scheduled
        total.more = total.more or share.more
        for consumer in share.consumers:
            if consumer.client_id in found:
                found[consumer.client_id].add(consumer)
            else:
                found[consumer.client_id] = Consumer(consumer.client_id)
                found[consumer.client_id].add(consumer)
    return shown(total, found.values(), MAX_CONSUMERS_SHOWN)


def shown(total: Consumers, consumers: Iterable[Consumer], most: int) -> Consumers:
    """Set the consumers of `total`, sorted by name, limited to the `most` most important."""
    by_weight = sorted(consumers, key=lambda each: (not each.queries, -each.items, each.client_id))
    total.more = total.more or len(by_weight) > most
    total.consumers = sorted(by_weight[:most], key=lambda each: each.client_id)
    return total
