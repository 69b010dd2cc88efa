"""What a client asks of a queue, and what it is told, in the form in which the core handles it.

The codecs of `wire/` build requests and render answers; everything here is already validated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import KEY_WINDOW

Offsets = npt.NDArray[np.int64]


TRANSFER_GROUP = "transfer/"
"""Begins the idempotency groups of transfers to a dead queue. A client's key among them could hold up the dead for ever."""


class ProduceKey(NamedTuple):
    """Makes a produce repeatable. Without a `group` the key lives for `window` ms; with one, until the group's `sequence` rises."""

    key: str
    group: str | None = None
    sequence: int = 0
    window: Millis = KEY_WINDOW


@dataclass(slots=True)
class Produce:
    """Items for one partition. `batch` has `payload` and any of `model.items.PRODUCED`, `origin`, `enqueue_at`; 1 row at least."""

    batch: pa.RecordBatch
    request_timeout: Millis
    key: ProduceKey | None = None


class Produced(NamedTuple):
    """The items have the dense offsets `first_offset … first_offset + items - 1` of `partition`."""

    partition: int
    first_offset: int
    items: int
    deduplicated: bool


@dataclass(slots=True)
class Lease:
    """Ask for up to `batch_size` items from up to `max_partitions` partitions; wait `request_timeout` for the first."""

    client_id: str
    batch_size: int
    request_timeout: Millis = 0
    lease_timeout: Millis | None = None
    max_partitions: int = 1
    lease_key: str | None = None


class LeaseInfo(NamedTuple):
    """A lease: `number` is that in its id, `items` its items that are still open."""

    partition: int
    number: int
    items: int
    lease_deadline: Millis


@dataclass(slots=True)
class Leased:
    """Leases and, unless only the leases were asked for, their items: batches with the columns of `model.leased`, one or more a lease."""

    leases: Sequence[LeaseInfo]
    batches: Sequence[pa.RecordBatch] = ()


Verdict = Literal["done", "retry", "dead"]


class Fate(NamedTuple):
    """What becomes of an item. A retry is due at `retry_at`, or `retry_after` from when the fate takes effect, or at once."""

    verdict: Verdict
    retry_at: Millis | None = None
    retry_after: Millis | None = None
    reason: str = ""


DONE = Fate("done")


class Selection(NamedTuple):
    """Items of one partition: sorted unique `offsets`, or all that is open in the lease of that number."""

    fate: Fate
    offsets: Offsets | None = None
    lease: int | None = None


@dataclass(slots=True)
class Settle:
    """Complete, retry or (with `stage`) state outcomes of leased items, by partition.

    `foreign` are ids of other incarnations or partitions that do not exist: ignored as unknown.
    """

    selections: dict[int, list[Selection]]
    request_timeout: Millis
    stage: bool = False
    foreign: Sequence[str] = ()


IgnoredReason = Literal["settled", "not_leased", "unknown"]
"""Settled or put back under another id · waiting, and leased by nobody · no such item or lease."""


@dataclass(slots=True)
class Settled:
    """How many items each fate befell (in a staging call: was stated of), and what was ignored (id, reason)."""

    completed: int = 0
    retried: int = 0
    dead: int = 0
    ignored: list[tuple[str, IgnoredReason]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.completed + self.retried + self.dead


@dataclass(slots=True)
class Extend:
    """Move the deadline of leases to now + `lease_timeout` (None: the queue's)."""

    leases: Sequence[tuple[int, int]]
    """(partition, lease number)"""
    request_timeout: Millis
    lease_timeout: Millis | None = None
    foreign: Sequence[str] = ()


@dataclass(slots=True)
class Extended:
    leases: list[LeaseInfo] = field(default_factory=list)
    ignored: list[tuple[str, IgnoredReason]] = field(default_factory=list)


@dataclass(slots=True)
class Peek:
    """Look at a lease's open items from position `start`, or at what `partition` (None: each in turn) will serve next."""

    limit: int
    partition: int | None = None
    lease: int | None = None
    start: int = 0


@dataclass(slots=True)
class PartitionStats:
    """Now: ready, leased, scheduled, transferring items, live leases. The rest counts items since creation."""

    partition: int
    state: str = "available"
    ready: int = 0
    leased_now: int = 0
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

    @property
    def total(self) -> int:
        return self.ready + self.leased_now + self.scheduled


@dataclass(slots=True)
class QueueStats:
    produce_waiting: int
    lease_waiting: int
    complete_waiting: int
    in_flight: int
    partitions: list[PartitionStats]


@dataclass(slots=True)
class QueueSpec:
    """What `queues.create` asks for."""

    queue_name: str
    requested_partitions: int = 1
    lease_timeout: Millis = 60_000
    max_attempts: int = 0
    dead_queue: str | None = None
    reference: str = ""
