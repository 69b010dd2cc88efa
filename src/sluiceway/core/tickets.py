"""A request on its way through a logical queue, and what the queue asks its driver to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.changes import Changes
from sluiceway.model.leased import Slice
from sluiceway.model.requests import Extend, Extended, Lease, LeaseInfo, Produce, Produced, Settle, Settled

Request = Produce | Lease | Settle | Extend


class Grant(NamedTuple):
    """A lease that a waiter was given, and where its rows lie."""

    info: LeaseInfo
    slices: list[Slice]


Result = Produced | Settled | Extended | list[Grant]


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
    settled: Settled = field(default_factory=Settled)
    extended: Extended = field(default_factory=Extended)
    grants: list[Grant] = field(default_factory=list)
    """Of a lease: those that are durable."""
    found: dict[tuple[int, ...], Grant] = field(default_factory=dict)
    """Of a keyed lease that waits: what an earlier call took, by partition and lease number, as last seen durable."""

    @property
    def keyed(self) -> bool:
        """A lease with a key."""
        return isinstance(self.request, Lease) and self.request.lease_key is not None

    def result(self, now: Millis) -> Result:
        """What the lanes answered. A lease that ran out while another lane was awaited is no use to anybody, and is not told of."""
        if isinstance(self.request, Settle):
            return self.settled
        if isinstance(self.request, Extend):
            return self.extended
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
    fresh: dict[int, pa.RecordBatch]


@dataclass(slots=True)
class Reply:
    """Tell the client: the commit that this depends on is durable (or, for an error, what is known)."""

    ticket: Ticket
    result: Result | SluicewayError


@dataclass(slots=True)
class Transfer:
    """Produce these rows into the dead queue, keyed by the lease number, and report `transferred`."""

    partition: int
    number: int
    reason: str
    slices: list[Slice]


@dataclass(slots=True)
class Fault:
    """A mistake of ours met while a partition worked: to be logged. The partition is loaded anew."""

    partition: int
    error: Exception


Effect = Open | Commit | Reply | Transfer | Fault
