"""What one instance of a cluster asks of another: its share of a queue's work, and what there is to be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sluiceway.kernel.clock import Millis
from sluiceway.model.inspection import Browse, DeleteItems, ListItems
from sluiceway.model.requests import Clear, Extend, Lease, Peek, Produce, Redrive, Settle


@dataclass(slots=True)
class Explain:
    """Where the item is that had that place."""

    partition: int
    offset: int


@dataclass(slots=True)
class Count:
    """How much of everything there is. Answered by `LogicalQueueStats`."""


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


Shutting = Literal["open", "read_only", "sealed"]
"""What a partition durably takes: items · no items, ever, until it is opened again · nothing more, as it was empty when it was sealed."""


@dataclass(slots=True)
class Shut:
    """Let the partition be so from now on, durably, whoever owns it. Answered by Shutted; repeating it changes nothing.

    It is not sealed while it has anything: then it stays as it was, and the answer says what is left. `cursor` orders this among all Shut
    and MoveOut of the partition: one that is lower than the highest that came with a Shut is refused with `version_conflict`, as it comes
    from a coordinator that is one no more. Under one cursor a partition that is shut is not opened, nor unsealed, again: it stays as it is.
    """

    partition: int
    shutting: Shutting
    cursor: int
    request_timeout: Millis


class Shutted(NamedTuple):
    """How the partition is, durably, and what it has: ready, leased and scheduled items, and those on their way to elsewhere.

    `moving`: those of the last that go to another partition of the queue. `keys`: records of idempotency keys on which other partitions
    rely, and that have to be handed over before it is sealed.
    """

    shutting: Shutting
    ready: int = 0
    leased: int = 0
    scheduled: int = 0
    transferring: int = 0
    moving: int = 0
    keys: int = 0

    @property
    def left(self) -> int:
        return self.ready + self.leased + self.scheduled + self.transferring


@dataclass(slots=True)
class GiveKeys:
    """Take no idempotency keys of these slots (of `of`) any more, durably, and say what is remembered of them. Answered by KeysGiven.

    `cursor` orders this among all GiveKeys and TakeKeys of the queue: one that is lower than the last GiveKeys of the partition, or not
    higher than its last TakeKeys, is refused with `version_conflict`. Repeating it gives the same answer. `too_many_items` if that were
    more than MAX_KEYS_BYTES; the slots are closed all the same, and fewer of them at a time can be asked for.
    """

    partition: int
    slots: tuple[int, ...]
    of: int
    cursor: int
    request_timeout: Millis


class KeysGiven(NamedTuple):
    """What the partition stores of its keys, by their record's name. What it says of no partition it says of this one."""

    partition: int
    keys: dict[str, bytes]


@dataclass(slots=True)
class TakeKeys:
    """Be the home of these slots (of `of`), and remember these keys of theirs, durably, instead of any that were remembered.

    `keys` None: it was their home, and stays it; what it remembers goes on. Nothing is done if the partition has given or taken a `cursor`
    that is higher, or has taken this one. Answered by the number of keys that it was given.
    """

    partition: int
    slots: tuple[int, ...]
    of: int
    cursor: int
    keys: dict[str, bytes] | None
    request_timeout: Millis


@dataclass(slots=True)
class HandOverKeys:
    """Have the homes of keys note, durably, what the partition has answered as the target of their intents, and let it forget that.

    It is shut, so nothing is added. As much as fits into one call is handed over; answered by the number of records. For `cursor` see Shut.
    """

    partition: int
    cursor: int
    request_timeout: Millis


@dataclass(slots=True)
class NoteKeys:
    """As the home of these keys, note, durably, that the target of their intents has these answers. Answered by their number."""

    partition: int
    keys: dict[str, bytes]
    request_timeout: Millis


@dataclass(slots=True)
class MoveOut:
    """Move up to `limit` items (and MAX_LEASE_BYTES, one item at least) to the partition `target`: ready ones, oldest first, or, with
    `scheduled`, those that are not due yet.

    Waits until they have arrived or `request_timeout` is over; a move that has begun goes on after that. Answered by Moved. For `cursor`
    see Shut: so nothing is moved to a partition that was removed when its rebalance was cancelled.
    """

    partition: int
    target: int
    limit: int
    cursor: int
    request_timeout: Millis
    scheduled: bool = False


class Moved(NamedTuple):
    """So many items were taken out of the line, and so many of them have arrived."""

    begun: int
    arrived: int


@dataclass(slots=True)
class LeaseAnywhere:
    """Take that lease, which has a key, as the one instance that does so for its key, from whoever has items."""

    lease: Lease

    @property
    def request_timeout(self) -> Millis:
        return self.lease.request_timeout


ShareRequest = (
    Produce
    | Lease
    | Settle
    | Extend
    | Clear
    | DeleteItems
    | Redrive
    | ListItems
    | Browse
    | Peek
    | Explain
    | Count
    | Reload
    | Close
    | FindLeases
    | Shut
    | GiveKeys
    | TakeKeys
    | HandOverKeys
    | NoteKeys
    | MoveOut
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


class ListConsumers(NamedTuple):
    """Say who consumes those of the queues (incarnations) that you know. Answered by Consumers, by incarnation."""

    incarnations: tuple[str, ...]


PeerRequest = Ask | Learn | Poll | ListConsumers
