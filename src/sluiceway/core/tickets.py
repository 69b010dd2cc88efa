"""A request on its way through a logical queue, and what the queue asks its driver to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_LEASE_BYTES
from sluiceway.model.changes import Changes
from sluiceway.model.few import Rows
from sluiceway.model.inspection import Deleted, DeleteItems
from sluiceway.model.leased import Slice
from sluiceway.model.peers import GiveKeys, KeysGiven, MoveOut, Shut, Shutted, TakeKeys
from sluiceway.model.requests import (
    Clear,
    Cleared,
    Extend,
    Extended,
    Lease,
    LeaseInfo,
    Life,
    Offsets,
    Produce,
    Produced,
    Settle,
    Settled,
)


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


class TransferBegun(NamedTuple):
    """Items of that partition are durably on their way, under that transfer number; 0 items and number 0 if none was ready."""

    partition: int
    number: int
    items: int


Rebalancing = Shut | GiveKeys | TakeKeys | MoveOut
"""What a rebalance asks of one partition. A MoveOut is answered by TransferBegun: it has begun, and not ended."""

Request = Produce | Lease | Settle | Extend | Clear | DeleteItems | TakeOut | Rebalancing


class Grant(NamedTuple):
    """A lease that a waiter was given, and where its rows lie."""

    info: LeaseInfo
    slices: list[Slice]


class KeysTaken(NamedTuple):
    """So many records of keys were given to that partition."""

    partition: int
    keys: int


Whole = Produced | TransferBegun | Shutted | KeysGiven | KeysTaken
"""The answer of a request that is one lane's alone."""

Answer = Whole | Settled | Extended | Cleared | Deleted | Grant | SluicewayError
"""What one lane says."""

Result = Whole | Settled | Extended | Cleared | Deleted | list[Grant]


_TOTALS: Mapping[type, Callable[[], Settled | Extended | Cleared | Deleted]] = {
    Settle: Settled,
    Extend: Extended,
    Clear: Cleared,
    DeleteItems: Deleted,
}


@dataclass(slots=True, eq=False)
class Ticket:
    """One request until its reply. `waiter` is the driver's own and never looked at."""

    request: Request
    deadline: Millis
    waiter: Any = None
    number: int = 0
    awaiting: int = 0
    """Lanes that have part of the request and have not answered."""
    flying: int = 0
    """Lanes in whose commit the request is right now: only they can make its outcome unknown."""
    done: bool = False
    error: SluicewayError | None = None
    whole: Whole | None = None
    summed: Settled | Extended | Cleared | Deleted | None = None
    """Of a request that several lanes may have part of: what they said so far. See `total`."""
    room: float = MAX_LEASE_BYTES
    """Of a lease: payload bytes that its answer may still take."""
    grants: list[Grant] = field(default_factory=list)
    """Of a lease: those that are durable."""
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
        """Of a settle, an extend, a clear or a delete: what the lanes said so far."""
        if self.summed is None:
            self.summed = _TOTALS[type(self.request)]()
        return self.summed

    def add(self, answer: Answer) -> None:
        """What a lane says has become true."""
        if isinstance(answer, Grant):
            self.grants.append(answer)
        elif isinstance(answer, (Settled, Extended, Cleared, Deleted)):  # A union would be made anew each time.
            self.total.add(answer)  # type: ignore[arg-type]  # A request has answers of one kind.
        elif isinstance(answer, SluicewayError):
            self.error = answer
        else:
            self.whole = answer

    def result(self, now: Millis) -> Result:
        """What the lanes answered. A lease that ran out while another lane was awaited is no use to anybody, and is not told of."""
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

    Without a `reason` they do not die, but go back to where they came from. With `moves_to` they go to that partition of the same queue,
    as they are: `lives` are those of the rows of each slice.
    """

    partition: int
    number: int
    reason: str
    slices: list[Slice]
    target: str | None = None
    moves_to: int | None = None
    lives: tuple[Life, ...] = ()


@dataclass(slots=True)
class Fault:
    """A mistake of ours met while a partition worked: to be logged. The partition is loaded anew."""

    partition: int
    error: Exception


Effect = Open | Commit | Reply | Transfer | Fault
