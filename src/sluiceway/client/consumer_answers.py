"""What the server tells of the consumers of queues."""

from __future__ import annotations

from datetime import datetime

import msgspec


class QueryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a Spark query told of itself at `told_at`. `state` is running, stopped or failed.

    `batch` is the number of its last batch (None: it had none), which had so many `items` and took `batch_duration` (such as `1s200ms`).
    """

    id: str
    run_id: str = ""
    name: str = ""
    state: str = "running"
    batch: int | None = None
    items: int = 0
    input_per_s: float = 0.0
    processed_per_s: float = 0.0
    batch_duration: str = "0s"
    error: str = ""
    told_at: datetime


class ConsumerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A client of a queue: its live leases with so many open `items`, the first of which run out at `lease_deadline`; its lease calls that
    wait; when it last made one, if within the last minute; and its queries."""

    client_id: str
    leases: int = 0
    items: int = 0
    lease_deadline: datetime | None = None
    waiting: int = 0
    seen_at: datetime | None = None
    queries: list[QueryInfo] = []


class QueueConsumers(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's items, and its consumers by name. `more`: there are others beside these."""

    queue_name: str
    ready: int = 0
    leased: int = 0
    scheduled: int = 0
    consumers: list[ConsumerInfo] = []
    more: bool = False


class ConsumerPage(msgspec.Struct, frozen=True, kw_only=True):
    """Queues that have consumers. What the instances that are `silent` know of them is missing."""

    items: list[QueueConsumers] = []
    next: str | None = None
    silent: list[str] = []
