"""Requests between instances of a cluster: work on the receiver's share of a queue, and the loads of its shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from sluiceway.contract.queue_stats import KeyObstacle
from sluiceway.kernel.clock import Millis
from sluiceway.model.inspection import Browse, DeleteItems, ListItems, MoveItems, RunNow, Search
from sluiceway.model.requests import Clear, CountBundles, Extend, Lease, Peek, Produce, Redrive, Settle


@dataclass(slots=True)
class Explain:
    """Explain the place of the item that was given that offset."""

    partition: int
    offset: int


@dataclass(slots=True)
class Count:
    """Count the share's items. Answered by `LogicalQueueStats`."""


@dataclass(slots=True)
class CountReasons:
    """Count the share's items by why they died. Answered by `ShareReasons`."""


@dataclass(slots=True)
class ShareReasons:
    """Items of an instance's open `partitions`, and how many died of which reason in which queue: (reason, source, items)."""

    partitions: tuple[int, ...] = ()
    items: int = 0
    reasons: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass(slots=True)
class Reload:
    """Reopen every partition from its store."""

    request_timeout: Millis


@dataclass(slots=True)
class Close:
    """Refuse requests for `close_timeout` ms, and report the remaining items; 0: accept requests again."""

    close_timeout: Millis


@dataclass(slots=True)
class CountKeys:
    """Find the share's keys with most items, and those that have waited longest, up to `limit` of each. Answered by `ShareKeys`."""

    limit: int


class KeyCount(NamedTuple):
    """A key with waiting items. `returned`: items that hold it up until their delay is over. `oldest_at`: when its next item was stored.
    `text`: the key; None: it is that of the items without one, or not known yet."""

    hash: int
    waiting: int
    leased: int
    returned: int
    oldest_at: Millis
    blocked_by: KeyObstacle | None
    text: str | None = None


@dataclass(slots=True)
class ShareKeys:
    """The totals of the keys in the open `partitions` of an instance, and some of the keys, in no order."""

    partitions: tuple[int, ...] = ()
    waiting: int = 0
    blocked: int = 0
    limited: int = 0
    keys: list[KeyCount] = field(default_factory=list)


class RemainingItems(NamedTuple):
    """An instance's remainder of a queue: `items` in its open `partitions`. `unopened`: a partition that is not open, so its items are
    unknown. `sender`: another queue with items at this instance that are, or may be, on their way to this one."""

    partitions: tuple[int, ...] = ()
    items: int = 0
    unopened: int | None = None
    sender: str | None = None


@dataclass(slots=True)
class FindLeases:
    """Count the live leases under the key in those partitions. Answered by a number."""

    client_id: str
    lease_key: str
    partitions: tuple[int, ...]


Shutting = Literal["open", "read_only", "sealed"]
"""Durable admission of a partition. `open`: takes items. `read_only`: takes none until reopened. `sealed`: empty, and stays so."""


@dataclass(slots=True)
class Shut:
    """Set the partition's admission durably, whoever owns it. Answered by Shutted; idempotent.

    A partition that is not empty is not sealed: it stays as it was, and the answer counts the rest. `cursor` orders this among all Shut and
    MoveOut of the partition: one lower than the highest that came with a Shut is refused with `version_conflict`, as it comes from a former
    coordinator. Under one cursor a shut partition is not reopened, nor a sealed one unsealed: it stays as it is.
    """

    partition: int
    shutting: Shutting
    cursor: int
    request_timeout: Millis


class Shutted(NamedTuple):
    """Durable admission of a partition, and its ready, leased, scheduled and outgoing (`transferring`) items.

    `moving`: outgoing items that go to another partition of the queue. `keys`: idempotency key records that other partitions rely on, to be
    handed over before it is sealed. `movable`: scheduled items that need not stay until they are due.

    Where items of a key are kept together, of the slots whose keys another partition takes: `busy` are those of which items are left here,
    `due` those of them with movable items.
    """

    shutting: Shutting
    ready: int = 0
    leased: int = 0
    scheduled: int = 0
    transferring: int = 0
    moving: int = 0
    keys: int = 0
    movable: int = 0
    busy: tuple[int, ...] = ()
    due: tuple[int, ...] = ()

    @property
    def left(self) -> int:
        return self.ready + self.leased + self.scheduled + self.transferring


KeyPiece = tuple[int, int]
"""A piece of the keys of slots: its number, of so many into which their names divide them."""
WHOLE: Final[KeyPiece] = (0, 1)


@dataclass(slots=True)
class GiveKeys:
    """Stop taking idempotency keys of these slots (of `of`), durably, and give their records. Answered by KeysGiven.

    `cursor` orders this among all GiveKeys and TakeKeys of the queue: one that is lower than the partition's last GiveKeys, or not higher
    than its last TakeKeys, is refused with `version_conflict`. A repetition gets the same answer. `too_many_items` if that would exceed
    MAX_KEYS_BYTES; the slots are closed all the same, and can be asked for in smaller numbers, and the keys of one slot in pieces.
    """

    partition: int
    slots: tuple[int, ...]
    of: int
    cursor: int
    request_timeout: Millis
    piece: KeyPiece = WHOLE


class KeysGiven(NamedTuple):
    """The partition's key records by name. Records that name no partition are about this one."""

    partition: int
    keys: dict[str, bytes]


@dataclass(slots=True)
class TakeKeys:
    """Become the home of these slots (of `of`), and durably replace the remembered keys of them by these.

    `keys` None: the partition was their home and stays it, with its own memory. `waits`: hold back items with keys of these slots until
    ServeSlots. Ignored if the partition has given or taken a higher `cursor`, or has taken this one. Answered by the number of keys given.

    With a `piece`, only the remembered keys of that piece are replaced, and the slots stay closed. When all pieces are there, the partition
    becomes their home by a TakeKeys without `keys`.
    """

    partition: int
    slots: tuple[int, ...]
    of: int
    cursor: int
    keys: dict[str, bytes] | None
    request_timeout: Millis
    waits: bool = False
    piece: KeyPiece | None = None


@dataclass(slots=True)
class ServeSlots:
    """Serve items with keys of these slots from now on: their former home has none left. Answered by the number of slots.

    Refused with `version_conflict` if the partition has taken keys under a higher `cursor`: it may hold slots back for another reason.
    """

    partition: int
    slots: tuple[int, ...]
    cursor: int
    request_timeout: Millis


@dataclass(slots=True)
class HandOverKeys:
    """Have the homes of keys durably note the answers that this partition gave as the target of their intents, then forget them here.

    It is shut, so none are added. Hands over as many as one call holds; answered by the number of records. For `cursor` see Shut.
    """

    partition: int
    cursor: int
    request_timeout: Millis


@dataclass(slots=True)
class NoteKeys:
    """As the home of these keys, durably note the answers of their intents' target. Answered by their number."""

    partition: int
    keys: dict[str, bytes]
    request_timeout: Millis


@dataclass(slots=True)
class MoveOut:
    """Move up to `limit` items (and MAX_LEASE_BYTES, at least one item) to the partition `target`: ready ones, oldest first, or, with
    `scheduled`, those not due yet.

    Waits until they have arrived or `request_timeout` is over; a move that has begun continues after that. Answered by Moved. For `cursor`
    see Shut: it prevents a move to a partition that was removed when its rebalance was cancelled.

    `slots`: only scheduled items with keys of these, and, from a partition that is shut, those whose key it has not given away; None: any.
    """

    partition: int
    target: int
    limit: int
    cursor: int
    request_timeout: Millis
    scheduled: bool = False
    slots: tuple[int, ...] | None = None


class Moved(NamedTuple):
    """Number of items taken out of the line, and of those that have arrived."""

    begun: int
    arrived: int


@dataclass(slots=True)
class LeaseAnywhere:
    """Take this lease, which has a key, from any instance with items. Sent to the one instance that does so for that key."""

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
    | CountBundles
    | DeleteItems
    | RunNow
    | MoveItems
    | Search
    | Redrive
    | ListItems
    | Browse
    | Peek
    | Explain
    | Count
    | CountReasons
    | CountKeys
    | Reload
    | Close
    | FindLeases
    | Shut
    | GiveKeys
    | TakeKeys
    | HandOverKeys
    | NoteKeys
    | ServeSlots
    | MoveOut
)
"""Requests to the partitions of a queue that an instance owns."""


class Ask(NamedTuple):
    """Carry out the request on the receiver's partitions of the queue. Refused with `not_here` if it names others.

    `payload` False: a lease without its items.
    """

    incarnation: str
    request: ShareRequest | LeaseAnywhere
    payload: bool = True


class Learn(NamedTuple):
    """Read the queues again up to the commit with that stamp. Answered by True once the receiver follows it."""

    stamp: int


class Load(NamedTuple):
    """Load of an instance's share of a queue."""

    ready: int
    """Items that a lease would get, and that no local lease waits for."""
    emptiest: int | None
    """Waiting items of the emptiest partition that takes any item; None: none does."""
    busy: int = 0
    """Work on a queue that is spread by load, in thousandths of one instance's capacity."""


class Poll(NamedTuple):
    """Report the loads of the shares: when a queue in `wanted` (incarnations) has ready items, else after `wait` ms. It ends the earlier
    poll of the instance `asker`."""

    wanted: tuple[str, ...]
    wait: Millis
    asker: str = ""


@dataclass(slots=True)
class Polled:
    """Loads, by incarnation, of the shares that have ready items, are busy, or take produces."""

    loads: Mapping[str, Load] = field(default_factory=dict)


class ListConsumers(NamedTuple):
    """Report the consumers of these queues (incarnations), where known. Answered by Consumers, by incarnation."""

    incarnations: tuple[str, ...]


class ListProblems(NamedTuple):
    """Report what is wrong with the receiver and its partitions. Answered by Problems."""

    queue_name: str = ""
    """Only of that queue; empty: all."""


BackupVerb = Literal["record", "hold", "freeze", "keep", "end"]


class BackupStep(NamedTuple):
    """Take that step of a backup with the receiver's partitions. Answered by their fences at `freeze`, and by none else.

    `record`: follow their records. `hold`: hold commits back for some seconds. `freeze`: keep the partitions as they are since then, and
    commit again. `keep`: keep them for longer. `end`: they are no longer needed.
    """

    id: str
    step: BackupVerb


class FrozenFence(NamedTuple):
    """The era and the grant under which the owner of a partition has frozen it."""

    incarnation: str
    partition: int
    era: int
    grant: int


class ReadBackup(NamedTuple):
    """Read a part of a backup: records from `start` on, or these blobs. Answered in MessagePack, as clients are. Without an `incarnation`,
    and for partitions of others, the receiver is the instance that took the backup."""

    id: str
    incarnation: str = ""
    partition: int = 0
    start: int = 0
    blobs: tuple[int, ...] = ()


PeerRequest = Ask | Learn | Poll | ListConsumers | ListProblems | BackupStep | ReadBackup
