"""Who consumes a queue: what its leases say of its clients, and what queries have told of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sluiceway.contract.consumer_answers import QueryState
from sluiceway.kernel.clock import Millis


class Query(NamedTuple):
    """What a Spark query told of itself: its last batch, and its rates in items per second. `told_at` is when the server heard it."""

    id: str
    run_id: str
    name: str
    state: QueryState
    batch: int | None
    items: int
    input_per_s: float
    processed_per_s: float
    batch_duration: Millis
    error: str
    told_at: Millis = 0


@dataclass(slots=True)
class Consumer:
    """A client of a queue: its live leases, the items that are open in them, and the first deadline of these; its lease calls that wait,
    and when it last made one. None: not known."""

    client_id: str
    leases: int = 0
    items: int = 0
    lease_deadline: Millis | None = None
    waiting: int = 0
    seen_at: Millis | None = None
    queries: list[Query] = field(default_factory=list)

    def add(self, other: Consumer) -> None:
        """Put to this what another instance knows of it. Of a query that told both, the later counts."""
        self.leases += other.leases
        self.items += other.items
        self.lease_deadline = min((at for at in (self.lease_deadline, other.lease_deadline) if at is not None), default=None)
        self.waiting += other.waiting
        self.seen_at = max((at for at in (self.seen_at, other.seen_at) if at is not None), default=None)
        latest = {query.id: query for query in sorted((*self.queries, *other.queries), key=lambda query: query.told_at)}
        self.queries = sorted(latest.values(), key=lambda query: (query.name, query.id))


@dataclass(slots=True)
class Consumers:
    """The consumers of a queue, by client id, or some of them if there are `more`; and its items."""

    ready: int = 0
    leased: int = 0
    scheduled: int = 0
    consumers: list[Consumer] = field(default_factory=list)
    more: bool = False


class ConsumersSeen(NamedTuple):
    """By incarnation; and the names of the instances that did not answer."""

    queues: Mapping[str, Consumers]
    silent: tuple[str, ...] = ()
