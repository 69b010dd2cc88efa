"""What the server answers, as Python sees it. Times are `datetime` in UTC; a field that the client does not know is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import msgspec


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    partition: int
    backend: str
    state: str


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue. `lease_timeout` is a duration such as `1m`; `max_attempts` 0 means no limit."""

    queue_name: str
    incarnation: str
    created_at: datetime
    updated_at: datetime
    lease_timeout: str
    max_attempts: int
    requested_partitions: int
    partitions: list[Partition]
    dead_queue: str | None = None
    reference: str | None = ""


class QueuePage(msgspec.Struct, frozen=True, kw_only=True):
    """Some queues by name; `next` is the pivot of the next page, None on the last."""

    items: list[QueueInfo]
    next: str | None = None


class Produced(msgspec.Struct, frozen=True, kw_only=True):
    """The items are stored, durably, in one partition. `deduplicated`: an earlier call with the same key had stored them."""

    queue_name: str
    partition: int
    first_id: str
    count: int
    deduplicated: bool = False

    @property
    def ids(self) -> list[str]:
        """The ids of the items, in the order in which they were given; made when asked for."""
        place, _, offset = self.first_id.rpartition(".")
        first = int(offset)
        return [f"{place}.{first + n}" for n in range(self.count)]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A claim on `count` items of one partition until `lease_deadline`; extend it before that or they are served again."""

    lease_id: str
    partition: int
    count: int
    lease_deadline: datetime


class LeasedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item. `id` is good for this lease only; `origin` stays the same for the item's life. `attempts` counts this one."""

    id: str
    origin: str
    partition: int
    payload: bytes = msgspec.field(name="bytes", default=b"")
    attempts: int = 0
    enqueued_at: datetime | None = None
    lease_id: str | None = None
    lease_deadline: datetime | None = None
    kind: str | None = None
    encoding: str | None = None
    reference: str | None = None
    headers: dict[str, str] | None = None


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease call got: nothing, or leases with their items. Iterating gives the items."""

    queue_name: str
    partition: int | None = None
    leases: list[Lease] = []
    items: list[LeasedItem] = []

    @property
    def ids(self) -> list[str]:
        return [item.id for item in self.items]

    @property
    def lease_ids(self) -> list[str]:
        return [lease.lease_id for lease in self.leases]

    def __iter__(self) -> Iterator[LeasedItem]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Ignored(msgspec.Struct, frozen=True, kw_only=True):
    """An id on which a call did nothing: it was `settled` already, is `not_leased`, or is `unknown`."""

    id: str
    reason: str


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    completed: int
    ignored: list[Ignored] = []


class Retried(msgspec.Struct, frozen=True, kw_only=True):
    """`dead` counts the items that went to the dead queue, asked for or because their attempts were used up."""

    retried: int
    dead: int = 0
    ignored: list[Ignored] = []


class Extended(msgspec.Struct, frozen=True, kw_only=True):
    leases: list[Lease] = []
    ignored: list[Ignored] = []


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    staged: int
    ignored: list[Ignored] = []


class Peeked(msgspec.Struct, frozen=True, kw_only=True):
    items: list[LeasedItem] = []


class PartitionStats(msgspec.Struct, frozen=True, kw_only=True):
    """Items now (`total` = `ready` + `total_leased` + `scheduled`), live `leases`, and counts since the queue was created."""

    partition: int
    state: str = "available"
    total: int = 0
    ready: int = 0
    total_leased: int = 0
    scheduled: int = 0
    transferring: int = 0
    leases: int = 0
    failures: int = 0
    produced: int = 0
    deduplicated: int = 0
    leased: int = 0
    completed: int = 0
    retried: int = 0
    expired: int = 0
    dead: int = 0


class LogicalQueueStats(msgspec.Struct, frozen=True, kw_only=True):
    produce_waiting: int = 0
    lease_waiting: int = 0
    complete_waiting: int = 0
    in_flight: int = 0
    partitions: list[PartitionStats] = []


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    queue_name: str
    logical_queues: list[LogicalQueueStats] = []

    @property
    def partitions(self) -> list[PartitionStats]:
        """All partitions of the queue, by number."""
        return sorted((part for logical in self.logical_queues for part in logical.partitions), key=lambda part: part.partition)
