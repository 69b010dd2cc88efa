"""Tickets: requests in progress in a logical queue, and the effects that the queue asks of its driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from sluiceway.contract.item_answers import LeftReason
from sluiceway.core.partition.partition import Intended
from sluiceway.core.queue.queue_rate import QueueRate
from sluiceway.core.queue.queue_slots import QueueSlots
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_LEASE_BYTES
from sluiceway.model.changes import Changes
from sluiceway.model.inspection import Deleted, DeleteItems, MadeReady, RunNow
from sluiceway.model.leased_items import Slice
from sluiceway.model.peers import GiveKeys, KeysGiven, MoveOut, NoteKeys, ServeSlots, Shut, Shutted, TakeKeys
from sluiceway.model.requests import (
    BundleCounts,
    Clear,
    Cleared,
    CountBundles,
    Extend,
    Extended,
    Lease,
    LeaseInfo,
    MovedItem,
    Offsets,
    Produce,
    Produced,
    Settle,
    Settled,
)
from sluiceway.model.small_batch import Rows


@dataclass(slots=True)
class TakeOut:
    """Begin the transfer of those ready items (sorted, unique offsets) of a partition to another queue; with `scheduled`, also of those
    not due yet.

    Refused if the partition was reopened since `opening`: an offset seen before a failed commit may now belong to another item.
    """

    partition: int
    offsets: Offsets
    target: str
    request_timeout: Millis
    opening: int | None = None
    incarnation: str | None = None
    """The target's incarnation."""
    scheduled: bool = False


@dataclass(slots=True)
class Compact:
    """Replace a blob of a partition by these bytes, which hold `kept` of its rows (see `core.partition.compaction`).

    Refused if the partition was reopened since `opening`. Answered by Compacted.
    """

    partition: int
    opening: int
    blob: int
    kept: int
    nbytes: int
    data: bytes
    request_timeout: Millis


class Compacted(NamedTuple):
    """Whether the blob was durably replaced; not if it is gone, or pinned by a snapshot."""

    partition: int
    done: bool


class TransferBegun(NamedTuple):
    """Items of that partition are durably in transfer, under that number; 0 items and number 0 if none was there. `ignored`: items that
    were asked for by id and stay, with the reasons."""

    partition: int
    number: int
    items: int
    ignored: Sequence[tuple[str, LeftReason]] = ()


@dataclass(slots=True)
class ForgetAnswers:
    """The homes of these keys have noted the answers of `partition` as their target (see `HandOverKeys`). Answered by KeysTaken."""

    partition: int
    names: tuple[str, ...]
    cursor: int
    request_timeout: Millis


Rebalancing = Shut | GiveKeys | TakeKeys | NoteKeys | ForgetAnswers | ServeSlots | MoveOut
"""Requests of a rebalance to one partition. A MoveOut is answered by TransferBegun: it has begun, not ended."""

Request = Produce | Lease | Settle | Extend | Clear | CountBundles | DeleteItems | RunNow | TakeOut | Compact | Rebalancing


class Grant(NamedTuple):
    """A lease given to a waiter, and the location of its rows."""

    info: LeaseInfo
    slices: list[Slice]


class KeysTaken(NamedTuple):
    """The number of key records given to that partition, or of slots that it serves."""

    partition: int
    keys: int


Summed = Settled | Extended | Cleared | BundleCounts | Deleted | MadeReady
"""Answers that are the sum of those of several executors."""

Whole = Produced | TransferBegun | Compacted | Shutted | KeysGiven | KeysTaken
"""Answers to requests that involve a single executor."""

Answer = Whole | Summed | Grant | Intended | SluicewayError
"""The answer of one executor. Intended: from the home of a produce's key; the produce continues at the target."""

Result = Whole | Summed | list[Grant]


_TOTALS: Mapping[type, Callable[[], Summed]] = {
    Settle: Settled,
    Extend: Extended,
    Clear: Cleared,
    CountBundles: BundleCounts,
    DeleteItems: Deleted,
    RunNow: MadeReady,
}


class Reservable(Protocol):
    """A partition executor, as far as a route needs it."""

    def reserve(self, items: int) -> None:
        """Add `items` (negative: subtract) to those expected to come."""


@dataclass(slots=True)
class Route:
    """Route of a produce with a key (ADR 34): first to the key's home, then, if that has an intent, to the intent's target."""

    target: int | None = None
    """At the home: the partition that the intent is to name; None: the home takes the items itself."""
    reserved: Reservable | None = None
    """The executor of that partition, which counts the items as expected."""
    intended: Intended | None = None
    """At the target: the durable intent; None if the home belongs to another owner, which asks for this."""
    at_target: bool = False
    was_sure: bool = False
    """The target surely had nothing before it was asked, so it has nothing again if it refuses."""

    @property
    def is_alone(self) -> bool:
        """Whether no other produce with its key may be in progress: only then can a target surely have nothing."""
        return self.target is not None or self.at_target

    @property
    def only_intends(self) -> bool:
        """Whether its commit writes no items, whatever the outcome."""
        return self.target is not None and not self.at_target


@dataclass(slots=True, eq=False)
class Ticket:
    """One request until its reply. `waiter` belongs to the driver and is never read here."""

    request: Request
    deadline: Millis
    waiter: Any = None
    number: int = 0
    awaiting: int = 0
    """Executors that have a part of the request and have not answered."""
    flying: int = 0
    """Executors whose commit in flight contains the request: only they can make its outcome unknown."""
    done: bool = False
    error: SluicewayError | None = None
    whole: Whole | None = None
    summed: Summed | None = None
    """For a request split among executors: the sum of answers so far. See `total`."""
    room: float = MAX_LEASE_BYTES
    """For a lease: payload bytes left in its answer."""
    grants: list[Grant] = field(default_factory=list)
    """For a lease: the durable grants."""
    route: Route | None = None
    """For a produce with a key: its route while in progress."""
    found: dict[tuple[int, ...], Grant] = field(default_factory=dict)
    """For a waiting keyed lease: an earlier call's leases, by partition and lease number, as last seen durable."""

    @property
    def key_name(self) -> tuple[str, str] | None:
        """For a keyed lease: the client and the key."""
        if isinstance(self.request, Lease) and self.request.lease_key is not None:
            return self.request.client_id, self.request.lease_key
        return None

    @property
    def lease_from(self) -> int | None:
        """For a lease: the only partition it may be served from; None: any."""
        return self.request.partition if isinstance(self.request, Lease) else None

    @property
    def keyed(self) -> bool:
        """Whether it is a lease with a key."""
        return self.key_name is not None

    @property
    def total(self) -> Summed:
        """For a settle, extend, clear or delete: the sum of answers so far."""
        if self.summed is None:
            self.summed = _TOTALS[type(self.request)]()
        return self.summed

    def add(self, answer: Answer) -> None:
        """Record an executor's answer, now durable."""
        assert not isinstance(answer, Intended), "that is not the end of a request"
        if isinstance(answer, Grant):
            self.grants.append(answer)
        elif isinstance(answer, (Settled, Extended, Cleared, BundleCounts, Deleted, MadeReady)):  # A union would be built again each time.
            self.total.add(answer)  # type: ignore[arg-type]  # A request has answers of one kind.
        elif isinstance(answer, SluicewayError):
            self.error = answer
        else:
            self.whole = answer

    def ending(self, now: Millis) -> Result | SluicewayError:
        """How it ends once nothing of it is awaited: with the error of a part, if there is one."""
        if self.error is None:
            return self.result(now)
        # A repetition would not find leases without a key: what is durable is handed out, whatever became of the rest.
        granted: Result = [] if self.keyed or not self.grants else self.result(now)
        return granted or self.error

    def result(self, now: Millis) -> Result:
        """The combined answer. Omits leases that ran out while another executor was awaited: they are useless to the client."""
        if self.whole is not None:
            return self.whole
        if type(self.request) in _TOTALS:
            return self.total
        return [grant for grant in self.grants if grant.info.lease_deadline > now]


@dataclass(slots=True)
class Open:
    """Effect: open the partition in the store with this opening number, and report `opened`."""

    partition: int
    opening: int


@dataclass(slots=True)
class Commit:
    """Effect: apply the changes and report `committed`. `fresh` are the new blobs' rows, for the driver's cache; `answers` are what is
    released when it is durable, so that the driver can begin to read what they need."""

    partition: int
    opening: int
    changes: Changes
    fresh: dict[int, Rows]
    answers: Sequence[tuple[Ticket, Answer]]


@dataclass(slots=True)
class Reply:
    """Effect: answer the client. The commit it depends on is durable (or, for an error, this is what is known)."""

    ticket: Ticket
    result: Result | SluicewayError


@dataclass(slots=True)
class Transfer:
    """Effect: produce these rows into the queue `target` (None: the dead queue), keyed by the lease number, and report `transferred`.

    It goes to that `incarnation` of its target; None: of a redrive, look it up, and report it; of dead items, any. `instead`: the dead
    queue has changed to this one, perhaps to a new queue of the same name; make sure that the target never takes the rows, and report
    `elsewhere`, or that it has taken them. No `reason`: the items do not die,
    but return to their source. `moves_to`: they go unchanged to that partition of the same queue, with `lives` for the rows of each slice.
    """

    partition: int
    number: int
    reason: str
    slices: list[Slice]
    target: str | None = None
    moves_to: int | None = None
    lives: tuple[MovedItem, ...] = ()
    incarnation: str | None = None
    instead: str | None = None
    failures: Sequence[tuple[Offsets, str]] = ()
    """What dead items' headers say of their failures, by the indexes of the rows."""


class TransferEnd(NamedTuple):
    """Result of an attempt at a transfer. Neither `done` nor anything else: it is retried.

    `nowhere`: its target no longer exists. `elsewhere`: the old target never takes it, and that queue is to. `bound`: the target's
    incarnation.
    """

    done: bool = False
    nowhere: bool = False
    elsewhere: str | None = None
    bound: str | None = None


@dataclass(slots=True)
class Forward:
    """Effect: ask the remote owner of that partition to take the ticket's items by an intent, and report `forwarded`."""

    ticket: Ticket
    partition: int
    request: Produce


@dataclass(slots=True)
class Fault:
    """Effect: log an internal error in a partition's work. The partition is reloaded."""

    partition: int
    error: Exception


@dataclass(slots=True)
class TakeTokens:
    """Effect: take up to `want` tokens of the queue's rate, released by `until`, from its record, and report to `rate`."""

    rate: QueueRate
    want: int
    until: Millis


@dataclass(slots=True)
class AdjustSlots:
    """Effect: look at the record of the queue's concurrency, change it as `core.queue.queue_slots` decides, and report to `slots`."""

    slots: QueueSlots


Effect = Open | Commit | Reply | Transfer | Forward | Fault | TakeTokens | AdjustSlots
