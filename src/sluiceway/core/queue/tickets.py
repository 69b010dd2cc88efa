"""A request on its way through a logical queue, and what the queue asks its driver to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from sluiceway.core.partition.partition import Intended
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_LEASE_BYTES
from sluiceway.model.changes import Changes
from sluiceway.model.inspection import Deleted, DeleteItems
from sluiceway.model.leased_items import Slice
from sluiceway.model.peers import GiveKeys, KeysGiven, MoveOut, NoteKeys, Shut, Shutted, TakeKeys
from sluiceway.model.requests import (
    Clear,
    Cleared,
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
    """Begin the transfer of those ready items (sorted, unique offsets) of a partition to another queue.

    Refused if the partition was opened anew since `opening`: an offset that was seen before a commit failed may be another item's now.
    """

    partition: int
    offsets: Offsets
    target: str
    request_timeout: Millis
    opening: int | None = None
    incarnation: str | None = None
    """Of the target."""


@dataclass(slots=True)
class Compact:
    """Store a blob of a partition as these bytes from now on, which have `kept` of its rows (see `core.compaction`).

    Refused if the partition was opened anew since `opening`. Answered by Compacted.
    """

    partition: int
    opening: int
    blob: int
    kept: int
    nbytes: int
    data: bytes
    request_timeout: Millis


class Compacted(NamedTuple):
    """Whether a blob of that partition is durably stored anew; not if it is gone, or a snapshot refers to it as it is."""

    partition: int
    done: bool


class TransferBegun(NamedTuple):
    """Items of that partition are durably on their way, under that transfer number; 0 items and number 0 if none was ready."""

    partition: int
    number: int
    items: int


@dataclass(slots=True)
class ForgetAnswers:
    """The homes of these keys have noted what `partition` has answered as their target (see `HandOverKeys`). Answered by KeysTaken."""

    partition: int
    names: tuple[str, ...]
    cursor: int
    request_timeout: Millis


Rebalancing = Shut | GiveKeys | TakeKeys | NoteKeys | ForgetAnswers | MoveOut
"""What a rebalance asks of one partition. A MoveOut is answered by TransferBegun: it has begun, and not ended."""

Request = Produce | Lease | Settle | Extend | Clear | DeleteItems | TakeOut | Compact | Rebalancing


class Grant(NamedTuple):
    """A lease that a waiter was given, and where its rows lie."""

    info: LeaseInfo
    slices: list[Slice]


class KeysTaken(NamedTuple):
    """So many records of keys were given to that partition."""

    partition: int
    keys: int


Whole = Produced | TransferBegun | Compacted | Shutted | KeysGiven | KeysTaken
"""The answer of a request that is one executor's alone."""

Answer = Whole | Settled | Extended | Cleared | Deleted | Grant | Intended | SluicewayError
"""What one executor says. Intended: the home of a produce's key does, and the produce goes on to the target."""

Result = Whole | Settled | Extended | Cleared | Deleted | list[Grant]


_TOTALS: Mapping[type, Callable[[], Settled | Extended | Cleared | Deleted]] = {
    Settle: Settled,
    Extend: Extended,
    Clear: Cleared,
    DeleteItems: Deleted,
}


class Reservable(Protocol):
    """A partition executor, as far as a route knows it."""

    def reserve(self, items: int) -> None:
        """Count so many items more (negative: fewer) among those that will come."""


@dataclass(slots=True)
class Route:
    """The way of a produce with a key by its home (ADR 34): first its home has it, and then, if that has an intent, the intent's target."""

    target: int | None = None
    """At the home: the partition that the intent is to name; None: the home itself is to take the items."""
    reserved: Reservable | None = None
    """The executor of that partition, which counts the items among those that it will have."""
    intended: Intended | None = None
    """At the target: the durable intent; None there if the home belongs to another owner, which asks for this."""
    at_target: bool = False
    was_sure: bool = False
    """Before the target was asked it surely had nothing: so it has nothing again if it refuses."""

    @property
    def is_alone(self) -> bool:
        """Only while no other produce with its key is on its way it may be sure that a target has nothing."""
        return self.target is not None or self.at_target

    @property
    def only_intends(self) -> bool:
        """Whatever becomes of the commit that it is in, no item is written by it."""
        return self.target is not None and not self.at_target


@dataclass(slots=True, eq=False)
class Ticket:
    """One request until its reply. `waiter` is the driver's own and never looked at."""

    request: Request
    deadline: Millis
    waiter: Any = None
    number: int = 0
    awaiting: int = 0
    """Executors that have part of the request and have not answered."""
    flying: int = 0
    """Executors in whose commit the request is right now: only they can make its outcome unknown."""
    done: bool = False
    error: SluicewayError | None = None
    whole: Whole | None = None
    summed: Settled | Extended | Cleared | Deleted | None = None
    """Of a request that several executors may have part of: what they said so far. See `total`."""
    room: float = MAX_LEASE_BYTES
    """Of a lease: payload bytes that its answer may still take."""
    grants: list[Grant] = field(default_factory=list)
    """Of a lease: those that are durable."""
    route: Route | None = None
    """Of a produce with a key, while it is on its way."""
    found: dict[tuple[int, ...], Grant] = field(default_factory=dict)
    """Of a keyed lease that waits: what an earlier call took, by partition and lease number, as last seen durable."""

    @property
    def key_name(self) -> tuple[str, str] | None:
        """Of a lease with a key: the client and the key."""
        if isinstance(self.request, Lease) and self.request.lease_key is not None:
            return self.request.client_id, self.request.lease_key
        return None

    @property
    def lease_from(self) -> int | None:
        """Of a lease: the one partition that it is for; None: any."""
        return self.request.partition if isinstance(self.request, Lease) else None

    @property
    def keyed(self) -> bool:
        """A lease with a key."""
        return self.key_name is not None

    @property
    def total(self) -> Settled | Extended | Cleared | Deleted:
        """Of a settle, an extend, a clear or a delete: what the executors said so far."""
        if self.summed is None:
            self.summed = _TOTALS[type(self.request)]()
        return self.summed

    def add(self, answer: Answer) -> None:
        """What an executor says has become true."""
        assert not isinstance(answer, Intended), "that is not the end of a request"
        if isinstance(answer, Grant):
            self.grants.append(answer)
        elif isinstance(answer, (Settled, Extended, Cleared, Deleted)):  # A union would be made anew each time.
            self.total.add(answer)  # type: ignore[arg-type]  # A request has answers of one kind.
        elif isinstance(answer, SluicewayError):
            self.error = answer
        else:
            self.whole = answer

    def result(self, now: Millis) -> Result:
        """What the executors answered. A lease that ran out while another executor was awaited is no use to anybody, and is not told of."""
        if self.whole is not None:
            return self.whole
        if type(self.request) in _TOTALS:
            return self.total
        return [grant for grant in self.grants if grant.info.lease_deadline > now]


@dataclass(slots=True)
class Open:
    """Open the partition in the store with this opening number, and report `opened`."""

    partition: int
    opening: int


@dataclass(slots=True)
class Commit:
    """Apply the changes and report `committed`. `fresh` are the rows of the new blobs, for the driver's cache."""

    partition: int
    opening: int
    changes: Changes
    fresh: dict[int, Rows]


@dataclass(slots=True)
class Reply:
    """Tell the client: the commit that this depends on is durable (or, for an error, what is known)."""

    ticket: Ticket
    result: Result | SluicewayError


@dataclass(slots=True)
class Transfer:
    """Produce these rows into the queue `target` (None: the dead queue), keyed by the lease number, and report `transferred`.

    A redrive goes to that `incarnation` of its target; None: learn which that is, and report it. With `instead` the dead queue is another
    one by now: make sure that the target never takes them, and report `elsewhere`, or that it has. Without a `reason` they do not die, but
    go back to where they came from. With `moves_to` they go to that partition of the same queue, as they are: `lives` are those of the rows
    of each slice.
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


class TransferEnd(NamedTuple):
    """What became of an attempt at a transfer. Not `done`, and nothing else: it is tried again.

    `nowhere`: its target is no more. `elsewhere`: the old target never takes it, and that queue is to. `bound`: the target's incarnation.
    """

    done: bool = False
    nowhere: bool = False
    elsewhere: str | None = None
    bound: str | None = None


@dataclass(slots=True)
class Forward:
    """Ask the owner of that partition, which is not served here, to take the ticket's items by an intent, and report `forwarded`."""

    ticket: Ticket
    partition: int
    request: Produce


@dataclass(slots=True)
class Fault:
    """A mistake of ours met while a partition worked: to be logged. The partition is loaded anew."""

    partition: int
    error: Exception


Effect = Open | Commit | Reply | Transfer | Forward | Fault
