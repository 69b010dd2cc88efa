"""Requests and answers of the item calls, in the form that the core handles.

The codecs of `wire/` build requests and render answers; all values here are validated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import repeat
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluiceway.contract.item_answers import FailedAttempt, IgnoredReason, Whereabouts
from sluiceway.contract.queue_settings import QueueSettings
from sluiceway.kernel.clock import Millis, as_millis, format_duration, format_time, parse_duration
from sluiceway.kernel.limits import GENERATED_KEY, KEY_WINDOW

Offsets = npt.NDArray[np.int64]


TRANSFER_GROUP = "transfer/"
"""Prefix of the idempotency groups of transfers to a dead queue. A client's key in such a group could block dead letters for ever."""


MOVE_GROUP = "move/"
"""Prefix of the idempotency groups of moves between partitions of a queue. They belong to a partition, not to a slot."""


class ProduceKey(NamedTuple):
    """Idempotency key of a produce. Without a `group` it lives for `window` ms; with one, until the group's `sequence` rises."""

    key: str
    group: str | None = None
    sequence: int = 0
    window: Millis = KEY_WINDOW

    @property
    def is_system(self) -> bool:
        """Whether it is the key of a transfer or a move, whose home is fixed."""
        return self.group is not None and self.group.startswith((TRANSFER_GROUP, MOVE_GROUP))

    @property
    def is_generated(self) -> bool:
        """Whether the client may replace it."""
        return self.group is None and self.key.startswith(GENERATED_KEY)

    @property
    def identity(self) -> tuple[str | None, str]:
        return self.group, self.key


class MovedItem(NamedTuple):
    """Metadata of moved items: `rows` neighbouring rows of a batch with the same history.

    `expires_at` 0: never. `due_at` 0: ready. `max_lease_size`: maximum number of them in one lease (0: unlimited). `bundle`: hash of the id
    of the bundle to which they belong, or `item_keys.NO_KEY`.
    """

    rows: int
    enqueued_at: Millis
    attempts: int = 0
    expires_at: Millis = 0
    due_at: Millis = 0
    max_lease_size: int = 0
    bundle: int = 0


class CallPart(NamedTuple):
    """A part of a call that was divided by its items' keys, with rows sorted by slot. `slots`: each of them, with the number of its rows.

    `digest`: of the rows of the whole call, which a repetition has however it is divided; empty without an idempotency key.
    """

    digest: bytes
    slots: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Produce:
    """Items for one partition. `batch` has `payload` and any of `model.items.PRODUCED`, `origin`, `enqueue_at`, and at least one row. It
    may be a `model.small_batch.SmallBatch`.

    Without `partition` the queue chooses one. Two kinds have a partition and a key. Moved items have `lives` for all of their rows: their
    key is one of MOVE_GROUP, which that partition remembers whatever its slots are. A produce without `lives` comes from the owner of its
    key's home, whose intent names that partition (ADR 34): `Produced` with 0 items means that the partition has refused the key for good.

    `part`: these are the rows of a call whose keys are at home in that partition (ADR 53), which remembers the idempotency key itself.

    `bundle`: id of the bundle to which the items belong.
    """

    batch: pa.RecordBatch
    request_timeout: Millis
    key: ProduceKey | None = None
    partition: int | None = None
    lives: tuple[MovedItem, ...] = ()
    part: CallPart | None = None
    bundle: str | None = None


Duplicates = tuple[tuple[int, int], ...]
"""Rows of a produce, in order, each with an offset."""


class Produced(NamedTuple):
    """The items have the dense offsets `first_offset … first_offset + items - 1` of `partition`, but for `duplicates`: rows that were not
    stored, since their unique key is taken, each with the offset that the item which has it was given first. They count as `items`, too.

    `runs`: of a part that was stored in pieces, as (partition, first offset, items) of each, in order.
    """

    partition: int
    first_offset: int
    items: int
    deduplicated: bool
    runs: tuple[tuple[int, int, int], ...] = ()
    duplicates: Duplicates = ()


class ProducedByKey(Produced):
    """The same of a call that was divided by its items' keys: these are the first item's partition and offset. `offsets` and `partitions`:
    those of each item, in the order of the call, or for duplicates of the items that have their unique keys; `partitions` None: all are in
    that of the first."""

    offsets: list[int]
    partitions: list[int] | None = None

    @property
    def places(self) -> list[tuple[int, int]]:
        """Partition and offset of each item."""
        return [*zip(self.partitions or repeat(self.partition), self.offsets, strict=False)]


@dataclass(slots=True)
class Lease:
    """Lease up to `batch_size` items from up to `max_partitions` partitions, waiting up to `request_timeout` ms for the first.

    `partition`: lease from that one only; the lease key, too, is looked up only there. `after`, the number of a lease of that partition:
    refuse as `stale_ids` if a later lease of the client was completed there, as far as that is remembered. `before`: by partition, the
    offset before which items may be leased; other partitions give none. `runs`: in a queue with `order`, a lease may have several items of
    a key, since its client handles them in order; otherwise it has one of each.
    """

    client_id: str
    batch_size: int
    request_timeout: Millis = 0
    lease_timeout: Millis | None = None
    max_partitions: int = 1
    lease_key: str | None = None
    partition: int | None = None
    after: int | None = None
    before: Mapping[int, int] | None = None
    runs: bool = False


class LeaseInfo(NamedTuple):
    """A lease. `number` is part of its id; `items` counts its open items."""

    partition: int
    number: int
    items: int
    lease_deadline: Millis


@dataclass(slots=True)
class Leased:
    """Leases and, unless excluded, their items: batches with the columns of `model.leased_items`, one or more per lease.

    A batch may be a `model.small_batch.Served`.
    """

    leases: Sequence[LeaseInfo]
    batches: Sequence[pa.RecordBatch] = ()


class Failure(NamedTuple):
    """A failed attempt of an item. `host`, `handler_time` (ms) and `trace` are as its client says; empty or None: it does not."""

    attempt: int
    at: Millis
    client_id: str
    reason: str = ""
    trace: str = ""
    host: str = ""
    handler_time: Millis | None = None

    @classmethod
    def of(cls, shown: FailedAttempt) -> Failure:
        """From what `shown` gave."""
        took = None if shown.handler_time is None else parse_duration(shown.handler_time, "handler_time")
        return cls(shown.attempt, as_millis(shown.at), shown.client_id, shown.reason, shown.trace, shown.host, took)

    def shown(self) -> FailedAttempt:
        """As answers show it."""
        return FailedAttempt(
            attempt=self.attempt,
            at=cast(datetime, format_time(self.at)),
            client_id=self.client_id,
            host=self.host,
            handler_time=None if self.handler_time is None else format_duration(self.handler_time),
            reason=self.reason,
            trace=self.trace,
        )


Verdict = Literal["done", "retry", "dead", "release"]


class Disposition(NamedTuple):
    """Outcome of an item.

    A retry is due at `retry_at`, or `retry_after` ms after the disposition takes effect; with neither, by the queue's back-off or at once.
    A release puts the item back as if it had not been leased: the attempt is not counted. The rest is as in `Failure`.
    """

    verdict: Verdict
    retry_at: Millis | None = None
    retry_after: Millis | None = None
    reason: str = ""
    trace: str = ""
    host: str = ""
    handler_time: Millis | None = None


DONE = Disposition("done")
RELEASE = Disposition("release")


class Selection(NamedTuple):
    """Items of one partition: sorted unique `offsets`, or all open items of the lease with that number."""

    disposition: Disposition
    offsets: Offsets | None = None
    lease: int | None = None


@dataclass(slots=True)
class Settle:
    """Complete, retry, release or (with `stage`) state outcomes of leased items, by partition.

    `foreign`: ids of other incarnations or of partitions that do not exist; ignored as unknown. With a `client_id`, so are items leased by
    another client. `strict`: the call fails with `stale_ids` if any id was ignored (the others are settled all the same).
    `handler_times`: those of completed items, as pairs of milliseconds and number of items.
    """

    selections: dict[int, list[Selection]]
    request_timeout: Millis
    stage: bool = False
    foreign: Sequence[str] = ()
    client_id: str | None = None
    strict: bool = False
    handler_times: Sequence[tuple[Millis, int]] = ()

    def failed_handler_times(self) -> list[tuple[Millis, int]]:
        """The handler times of failed items, as `handler_times`, as far as their clients reported them."""
        return [
            (each.disposition.handler_time, len(each.offsets))
            for selections in self.selections.values()
            for each in selections
            if each.disposition.handler_time is not None and each.offsets is not None
        ]


@dataclass(slots=True)
class Settled:
    """Items per disposition (applied, or stated in a staging call), and the ignored ids with their reasons."""

    completed: int = 0
    retried: int = 0
    dead: int = 0
    released: int = 0
    ignored: list[tuple[str, IgnoredReason]] = field(default_factory=list)

    def add(self, other: Settled) -> None:
        """Add the other result to this one."""
        self.completed += other.completed
        self.retried += other.retried
        self.dead += other.dead
        self.released += other.released
        self.ignored += other.ignored

    def count(self, verdict: Verdict, items: int) -> None:
        """Add `items` to the count of that verdict."""
        self.completed += items if verdict == "done" else 0
        self.retried += items if verdict == "retry" else 0
        self.dead += items if verdict == "dead" else 0
        self.released += items if verdict == "release" else 0

    @property
    def total(self) -> int:
        return self.completed + self.retried + self.dead + self.released


@dataclass(slots=True)
class Extend:
    """Extend the deadline of leases to now + `lease_timeout` (None: the queue's). An item stands for its whole lease."""

    leases: Sequence[tuple[int, int]]
    """(partition, lease number)"""
    request_timeout: Millis
    lease_timeout: Millis | None = None
    foreign: Sequence[str] = ()
    offsets: Mapping[int, Offsets] = field(default_factory=dict)
    """Items, sorted and unique, by partition."""
    client_id: str | None = None
    strict: bool = False


@dataclass(slots=True)
class Extended:
    """Extended leases, and the ignored ids with their reasons."""

    leases: list[LeaseInfo] = field(default_factory=list)
    ignored: list[tuple[str, IgnoredReason]] = field(default_factory=list)

    def add(self, other: Extended) -> None:
        """Add the other result to this one."""
        self.leases += other.leases
        self.ignored += other.ignored


@dataclass(slots=True)
class Peek:
    """Peek at a lease's open items from position `start`, or at the next items of `partition` (None: each in turn)."""

    limit: int
    partition: int | None = None
    lease: int | None = None
    start: int = 0


@dataclass(slots=True)
class Clear:
    """Drop waiting items: ready ones, and with `scheduled` also those not due yet. Leased items stay.

    `partitions` None: all.
    """

    request_timeout: Millis
    ready: bool = True
    scheduled: bool = False
    partitions: tuple[int, ...] | None = None


@dataclass(slots=True)
class Cleared:
    """Number of items durably dropped."""

    ready: int = 0
    scheduled: int = 0

    def add(self, other: Cleared) -> None:
        """Add the other result to this one."""
        self.ready += other.ready
        self.scheduled += other.scheduled


class BundleCount(NamedTuple):
    """Items of a bundle: how many were stored, and how those that ended have ended. `dropped`: deleted, cleared, or moved to another
    queue."""

    stored: int = 0
    completed: int = 0
    dead: int = 0
    dropped: int = 0

    @property
    def left(self) -> int:
        """How many have not ended."""
        return self.stored - self.completed - self.dead - self.dropped

    def plus(self, other: BundleCount) -> BundleCount:
        """The sum of both."""
        return BundleCount(*(one + another for one, another in zip(self, other, strict=True)))


CountStep = Literal["look", "close", "forget"]


@dataclass(slots=True)
class CountBundles:
    """Count the items of these bundles, by the hashes of their ids. `close`: items that are stored later do not belong to them, whichever
    instance owns the partition. `forget`: they are over. `partitions` None: all.
    """

    request_timeout: Millis
    bundles: tuple[int, ...]
    step: CountStep = "look"
    partitions: tuple[int, ...] | None = None


@dataclass(slots=True)
class BundleCounts:
    """Counts by the hash of the bundle's id."""

    counts: dict[int, BundleCount] = field(default_factory=dict)

    def add(self, other: BundleCounts) -> None:
        """Add the other result to this one."""
        for bundle, count in other.counts.items():
            self.counts[bundle] = count.plus(self.counts.get(bundle, BundleCount()))


@dataclass(slots=True)
class Redrive:
    """Send up to `limit` ready items of a dead queue back to `target` (None: the queue that each came from).

    Only those whose reason contains `reason`, and whose source queue is `source`. `dry_run`: count without moving.
    """

    request_timeout: Millis
    limit: int
    target: str | None = None
    reason: str | None = None
    source: str | None = None
    dry_run: bool = False


@dataclass(slots=True)
class Redriven:
    """`matched`: items found; `redriven`: those durable in their target (0 in a dry run); `targets`: number by target."""

    matched: int = 0
    redriven: int = 0
    targets: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Explanation:
    """Place of an item, and the reason why it is not being served; times and numbers where they apply."""

    state: Whereabouts
    reason: str
    """As text."""
    ahead: int | None = None
    """Ready items that are served before it."""
    attempts: int | None = None
    due_at: Millis | None = None
    expires_at: Millis | None = None
    lease: int | None = None
    client_id: str | None = None
    lease_deadline: Millis | None = None
    failures: Sequence[Failure] = ()
    key: str | None = None
    """The item's key, if it has one and the item is still here."""
    unique_key: str | None = None


class QueueSpec(QueueSettings, frozen=True):
    """Request of `queues.create`. `makes_dead_queue`: the dead queue is created, too, if it does not exist."""

    queue_name: str
    requested_partitions: int = 1
    makes_dead_queue: bool = False


@dataclass(slots=True)
class QueuePatch:
    """Request of `queues.update`: the validated settings to change, by the names of `QueueRecord`.

    With `version`, only if the record still has it.
    """

    settings: dict[str, object]
    version: int | None = None
