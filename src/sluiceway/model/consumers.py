"""Consumers of a queue: clients, from their leases, and streaming queries, from their reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sluiceway.contract.consumer_answers import QueryState
from sluiceway.kernel.clock import Millis


class Query(NamedTuple):
    """Report of a Spark streaming query: its last batch, and its rates in items per second. `told_at`: time of receipt by the server."""

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
    """A client of a queue. `leases`: live leases; `items`: open items in them; `lease_deadline`: the earliest of theirs; `waiting`: waiting
    lease calls; `seen_at`: time of the last lease call. None: not known."""

    client_id: str
    leases: int = 0
    items: int = 0
    lease_deadline: Millis | None = None
    waiting: int = 0
    seen_at: Millis | None = None
    queries: list[Query] = field(default_factory=list)

    def add(self, other: Consumer) -> None:
        """Merge another instance's view of the client. Of two reports by one query, the later one counts."""
        self.leases += other.leases
        self.items += other.items
        self.lease_deadline = min((at for at in (self.lease_deadline, other.lease_deadline) if at is not None), default=None)
        self.waiting += other.waiting
        self.seen_at = max((at for at in (self.seen_at, other.seen_at) if at is not None), default=None)
        latest = {query.id: query for query in sorted((*self.queries, *other.queries), key=lambda query: query.told_at)}
        self.queries = sorted(latest.values(), key=lambda query: (query.name, query.id))


@dataclass(slots=True)
class Consumers:
    """Consumers of a queue by client id, truncated if `more`; and the queue's item counts."""

    ready: int = 0
    leased: int = 0
    scheduled: int = 0
    consumers: list[Consumer] = field(default_factory=list)
    more: bool = False


class ConsumersSeen(NamedTuple):
    """Consumers of several queues, by incarnation; `silent`: names of the instances that did not answer."""

    queues: Mapping[str, Consumers]
    silent: tuple[str, ...] = ()
