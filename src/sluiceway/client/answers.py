"""What the server answers, as Python sees it. Times are `datetime` in UTC; a field that the client does not know is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import msgspec

from sluiceway.contract.audit_answers import AuditEntry as AuditEntry
from sluiceway.contract.audit_answers import AuditPage as AuditPage
from sluiceway.contract.config_answers import BackendInfo as BackendInfo
from sluiceway.contract.config_answers import BackendPage as BackendPage
from sluiceway.contract.config_answers import Reloaded as Reloaded
from sluiceway.contract.instance_answers import Instance as Instance
from sluiceway.contract.instance_answers import InstanceList as InstanceList
from sluiceway.contract.instance_answers import LastRound as LastRound
from sluiceway.contract.instance_answers import MovedPartition as MovedPartition
from sluiceway.contract.instance_answers import Round as Round
from sluiceway.contract.instance_answers import RoundList as RoundList
from sluiceway.contract.key_answers import CreatedKey as CreatedKey
from sluiceway.contract.key_answers import KeyInfo as KeyInfo
from sluiceway.contract.key_answers import KeyPage as KeyPage
from sluiceway.contract.key_answers import OwnKey as OwnKey
from sluiceway.contract.queue_settings import Backoff as Backoff
from sluiceway.contract.queue_settings import Partition as Partition
from sluiceway.contract.queue_settings import QueueInfo as QueueInfo
from sluiceway.contract.queue_settings import QueuePage as QueuePage
from sluiceway.contract.queue_stats import LogicalQueueStats as LogicalQueueStats
from sluiceway.contract.queue_stats import PartitionStats as PartitionStats
from sluiceway.contract.queue_stats import QueueStats as QueueStats


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
    """An id on which a call did nothing. The `reason` is one of those that docs/api.md lists: `completed`, `expired`, `not_leased`, …"""

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


class Released(msgspec.Struct, frozen=True, kw_only=True):
    released: int
    ignored: list[Ignored] = []


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    deleted: int
    ignored: list[Ignored] = []


class Extended(msgspec.Struct, frozen=True, kw_only=True):
    leases: list[Lease] = []
    ignored: list[Ignored] = []


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    staged: int
    ignored: list[Ignored] = []


class Peeked(msgspec.Struct, frozen=True, kw_only=True):
    items: list[LeasedItem] = []


class BrowsedItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item as it stood when the snapshot was taken: `state` is ready, leased or scheduled. `payload` is None if it was not asked for.

    `attempts` counts the lease that it is in; `enqueue_at` is when a scheduled one is due.
    """

    state: str
    id: str
    origin: str
    partition: int
    attempts: int = 0
    enqueued_at: datetime | None = None
    enqueue_at: datetime | None = None
    expire_deadline: datetime | None = None
    lease_id: str | None = None
    lease_deadline: datetime | None = None
    kind: str | None = None
    encoding: str | None = None
    reference: str | None = None
    headers: dict[str, str] | None = None
    payload: bytes | None = msgspec.field(name="bytes", default=None)


class Browsed(msgspec.Struct, frozen=True, kw_only=True):
    """A page of what a partition had at one moment; `cursor` is that of the next one, None on the last. Iterating gives the items."""

    queue_name: str
    partition: int
    items: list[BrowsedItem] = []
    cursor: str | None = None

    def __iter__(self) -> Iterator[BrowsedItem]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """How many items were dropped."""

    ready: int = 0
    scheduled: int = 0


class Redriven(msgspec.Struct, frozen=True, kw_only=True):
    """`matched` items were found, `redriven` of them are back (none in a dry run); `targets` counts by queue."""

    matched: int = 0
    redriven: int = 0
    targets: dict[str, int] = {}


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an item is (`state`) and why it is not being served (`reason`, in words). What does not apply is None.

    `state` is ready, scheduled, leased, dying, gone, unknown or unavailable; `ahead` counts the ready items before it.
    """

    id: str
    state: str
    reason: str
    ahead: int | None = None
    attempts: int | None = None
    due_at: datetime | None = None
    expires_at: datetime | None = None
    lease_id: str | None = None
    client_id: str | None = None
    lease_deadline: datetime | None = None


class PartitionExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a partition is (`owner`, at `address`; None: nobody's) and why (`reason`, in words); `state` says whether it serves.

    `era` and `grant` are of its fence. Those of `waits_for` may still serve it, and have to stop first.
    """

    partition: int
    backend: str
    state: str
    reason: str
    owner: str | None = None
    address: str | None = None
    era: int = 1
    grant: int | None = None
    waits_for: list[str] = []


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened on the server. `type` is one of those in docs/api.md, `data` what belongs to it.

    The type `reset` means that events were missed: read again what you follow.
    """

    id: str | None
    type: str
    data: object
