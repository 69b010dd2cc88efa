"""What a client asks of a queue, and what it is told, in the form in which the core handles it.

The codecs of `wire/` build requests and render answers; everything here is already validated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluiceway.contract.item_answers import IgnoredReason, Whereabouts
from sluiceway.contract.queue_settings import QueueSettings
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import GENERATED_KEY, KEY_WINDOW

Offsets = npt.NDArray[np.int64]


TRANSFER_GROUP = "transfer/"
"""Begins the idempotency groups of transfers to a dead queue. A client's key among them could hold up the dead for ever."""


MOVE_GROUP = "move/"
"""Begins the idempotency groups of items that are moved between partitions of a queue. They belong to a partition, not to a slot."""


class ProduceKey(NamedTuple):
    """Makes a produce repeatable. Without a `group` the key lives for `window` ms; with one, until the group's `sequence` rises."""

    key: str
    group: str | None = None
    sequence: int = 0
    window: Millis = KEY_WINDOW

    @property
    def is_system(self) -> bool:
        """A key of a transfer or a move: these have a fixed place."""
        return self.group is not None and self.group.startswith((TRANSFER_GROUP, MOVE_GROUP))

    @property
    def is_generated(self) -> bool:
        """The client can replace it."""
        return self.group is None and self.key.startswith(GENERATED_KEY)

    @property
    def identity(self) -> tuple[str | None, str]:
        return self.group, self.key


class MovedItem(NamedTuple):
    """What items that are moved to another partition have behind them: `rows` neighbours of a batch, to which the same befell.

    `expires_at` 0: never. `due_at` 0: they are ready. `together`: at most so many of them in one lease (0: any number).
    """

    rows: int
    enqueued_at: Millis
    attempts: int = 0
    expires_at: Millis = 0
    due_at: Millis = 0
    together: int = 0


@dataclass(slots=True)
class Produce:
    """Items for one partition. `batch` has `payload` and any of `model.items.PRODUCED`, `origin`, `enqueue_at`; 1 row at least. It may be a
    `model.small_batch.SmallBatch`.

    Without a `partition` the queue chooses it. Two kinds have a partition and a key. Items that are moved have `lives` of all of their
    rows: their key is one of MOVE_GROUP, which that partition remembers whatever its slots are. A produce without `lives` comes from the
    owner of its key's home, whose intent names that partition (ADR 34): `Produced` with 0 items says that it has refused the key for good.
    """

    batch: pa.RecordBatch
    request_timeout: Millis
    key: ProduceKey | None = None
    partition: int | None = None
    lives: tuple[MovedItem, ...] = ()


class Produced(NamedTuple):
    """The items have the dense offsets `first_offset … first_offset + items - 1` of `partition`."""

    partition: int
    first_offset: int
    items: int
    deduplicated: bool


@dataclass(slots=True)
class Lease:
    """Ask for up to `batch_size` items from up to `max_partitions` partitions; wait `request_timeout` for the first.

    With a `partition` from that one only, and then the key is looked for there only. With `after`, the number of a lease of that partition,
    too: refused as `stale_ids` if a later lease of that client was completed there, as far as that is remembered. With `before`, only items
    at offsets before the one that it has for their partition, and none of other partitions.
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


class LeaseInfo(NamedTuple):
    """A lease: `number` is that in its id, `items` its items that are still open."""

    partition: int
    number: int
    items: int
    lease_deadline: Millis


@dataclass(slots=True)
class Leased:
    """Leases and, unless only the leases were asked for, their items: batches with the columns of `model.leased`, one or more a lease.

    A batch may be a `model.few.Served`.
    """

    leases: Sequence[LeaseInfo]
    batches: Sequence[pa.RecordBatch] = ()


Verdict = Literal["done", "retry", "dead", "release"]


class Disposition(NamedTuple):
    """What becomes of an item.

    A retry is due at `retry_at`, or `retry_after` from when the disposition takes effect; with neither, by the queue's back-off or at once.
    A release puts it back as if it had not been leased: the attempt is not counted.
    """

    verdict: Verdict
    retry_at: Millis | None = None
    retry_after: Millis | None = None
    reason: str = ""


DONE = Disposition("done")
RELEASE = Disposition("release")


class Selection(NamedTuple):
    """Items of one partition: sorted unique `offsets`, or all that is open in the lease of that number."""

    disposition: Disposition
    offsets: Offsets | None = None
    lease: int | None = None


@dataclass(slots=True)
class Settle:
    """Complete, retry, release or (with `stage`) state outcomes of leased items, by partition.

    `foreign` are ids of other incarnations or partitions that do not exist: ignored as unknown. With a `client_id`, so are items that
    another client has leased. `strict`: the call ends as `stale_ids` if anything was ignored (what was not, is settled all the same).
    """

    selections: dict[int, list[Selection]]
    request_timeout: Millis
    stage: bool = False
    foreign: Sequence[str] = ()
    client_id: str | None = None
    strict: bool = False


@dataclass(slots=True)
class Settled:
    """How many items each disposition befell (in a staging call: was stated of), and what was ignored (id, reason)."""

    completed: int = 0
    retried: int = 0
    dead: int = 0
    released: int = 0
    ignored: list[tuple[str, IgnoredReason]] = field(default_factory=list)

    def add(self, other: Settled) -> None:
        """Put the other's counts and ids to these."""
        self.completed += other.completed
        self.retried += other.retried
        self.dead += other.dead
        self.released += other.released
        self.ignored += other.ignored

    def count(self, verdict: Verdict, items: int) -> None:
        """So many more met that disposition."""
        self.completed += items if verdict == "done" else 0
        self.retried += items if verdict == "retry" else 0
        self.dead += items if verdict == "dead" else 0
        self.released += items if verdict == "release" else 0

    @property
    def total(self) -> int:
        return self.completed + self.retried + self.dead + self.released


@dataclass(slots=True)
class Extend:
    """Move the deadline of leases to now + `lease_timeout` (None: the queue's). An item stands for the whole lease that it is in."""

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
    leases: list[LeaseInfo] = field(default_factory=list)
    ignored: list[tuple[str, IgnoredReason]] = field(default_factory=list)

    def add(self, other: Extended) -> None:
        """Put the other's leases and ids to these."""
        self.leases += other.leases
        self.ignored += other.ignored


@dataclass(slots=True)
class Peek:
    """Look at a lease's open items from position `start`, or at what `partition` (None: each in turn) will serve next."""

    limit: int
    partition: int | None = None
    lease: int | None = None
    start: int = 0


@dataclass(slots=True)
class Clear:
    """Drop what waits: ready items, and with `scheduled` also those that are not due yet. Leased items stay.

    In those `partitions`; None: in all.
    """

    request_timeout: Millis
    ready: bool = True
    scheduled: bool = False
    partitions: tuple[int, ...] | None = None


@dataclass(slots=True)
class Cleared:
    """How many items were dropped, durably."""

    ready: int = 0
    scheduled: int = 0

    def add(self, other: Cleared) -> None:
        """Put the other's counts to these."""
        self.ready += other.ready
        self.scheduled += other.scheduled


@dataclass(slots=True)
class Redrive:
    """Send ready items of a dead queue back to `target` (None: the queue that each came from), `limit` at most.

    Only those whose `reason` contains that text, and whose source queue is `source`. `dry_run` counts and moves nothing.
    """

    request_timeout: Millis
    limit: int
    target: str | None = None
    reason: str | None = None
    source: str | None = None
    dry_run: bool = False


@dataclass(slots=True)
class Redriven:
    """`matched` items were found, `redriven` of them are durable in their target (0 in a dry run); by target."""

    matched: int = 0
    redriven: int = 0
    targets: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Explanation:
    """Where an item is, and why it is not being served; times and numbers where they apply."""

    state: Whereabouts
    reason: str
    """In words."""
    ahead: int | None = None
    """Ready items that are served before it."""
    attempts: int | None = None
    due_at: Millis | None = None
    expires_at: Millis | None = None
    lease: int | None = None
    client_id: str | None = None
    lease_deadline: Millis | None = None


class QueueSpec(QueueSettings, frozen=True):
    """What `queues.create` asks for."""

    queue_name: str
    requested_partitions: int = 1


@dataclass(slots=True)
class QueuePatch:
    """What `queues.update` asks for: the settings to change, already validated, by the names of `QueueRecord`.

    With a `version`, only if that is still the record's.
    """

    settings: dict[str, object]
    version: int | None = None
