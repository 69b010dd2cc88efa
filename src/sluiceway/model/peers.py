"""What one instance of a cluster asks of another: its share of a queue's work, and what there is to be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sluiceway.kernel.clock import Millis
from sluiceway.model.inspection import DeleteItems, ListItems
from sluiceway.model.requests import Clear, Extend, Lease, Peek, Produce, Redrive, Settle


@dataclass(slots=True)
class Explain:
    """Where the item is that had that place."""

    partition: int
    offset: int


@dataclass(slots=True)
class Count:
    """How much of everything there is. Answered by `QueueStats`."""


@dataclass(slots=True)
class Reload:
    """Open every partition anew from its store."""

    request_timeout: Millis


@dataclass(slots=True)
class Close:
    """Take no request any more for so long, and say what is left; 0: take them again."""

    close_timeout: Millis


class Left(NamedTuple):
    """What an instance still has of a queue: items in those of the `partitions` that it serves. `unopened`: one of them that nobody can
    say anything about, as it is not open. `sender`: another queue of which it has items that are, or may be, on their way to this one."""

    partitions: tuple[int, ...] = ()
    items: int = 0
    unopened: int | None = None
    sender: str | None = None


@dataclass(slots=True)
class FindLeases:
    """How many live leases there are under that key in those partitions. Answered by a number."""

    client_id: str
    lease_key: str
    partitions: tuple[int, ...]


@dataclass(slots=True)
class LeaseAnywhere:
    """Take that lease, which has a key, as the one instance that does so for its key, from whoever has items."""

    lease: Lease

    @property
    def request_timeout(self) -> Millis:
        return self.lease.request_timeout


ShareRequest = (
    Produce | Lease | Settle | Extend | Clear | DeleteItems | Redrive | ListItems | Peek | Explain | Count | Reload | Close | FindLeases
)
"""What can be asked of the partitions that an instance owns of a queue."""


class Ask(NamedTuple):
    """Do this with the partitions of the queue that are yours. Refused with `not_here` if some that it names are not.

    `payload` False: of a lease without its items.
    """

    incarnation: str
    request: ShareRequest | LeaseAnywhere
    payload: bool = True


class Learn(NamedTuple):
    """Queues have changed, in the commit with that stamp: look again. Answered by True once the peer has followed it."""

    stamp: int


class Load(NamedTuple):
    """How busy an instance's share of a queue is."""

    ready: int
    """Items that a lease would get, and that nobody waits for there."""
    emptiest: int | None
    """The waiting items of the partition that has fewest of those that take any; None: none does."""
    busy: int = 0
    """Of a queue that is spread by load: what it does there, in thousandths of what one instance can do."""


class Poll(NamedTuple):
    """Say how your shares are: at once if one of the queues `wanted` (incarnations) has ready items, and after `wait` at the latest."""

    wanted: tuple[str, ...]
    wait: Millis


@dataclass(slots=True)
class Polled:
    """The shares that have ready items or are wanted, by incarnation."""

    loads: Mapping[str, Load] = field(default_factory=dict)


PeerRequest = Ask | Learn | Poll
