"""State of the sync log and its records: partitions of a change stream, their readers, and their grants."""

from __future__ import annotations

import msgspec

from sluiceway.contract.capture_answers import Phase
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import AnnouncedPartition


class Partition(msgspec.Struct, frozen=True, array_like=True):
    """A partition according to the log.

    `waits`: its unfinished parents. `grant`: number of the record that gave it to its last owner. `to`: target of a pending move. `since`:
    earliest end in ms of its finished parents, None while none is; no record of it or of a child not yet known is older. Once finished: its
    own end. `barrier`: mark of the last barrier that it has reached, 0 before the first.
    """

    token: str
    parents: tuple[str, ...] = ()
    start: str = ""
    phase: Phase = "created"
    waits: tuple[str, ...] = ()
    owner: str = ""
    grant: int = 0
    to: str = ""
    since: Millis | None = None
    barrier: int = 0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Fold of the log up to the record `seq`. Equal for all members that have folded so far, wherever they started.

    `joined`: the prepared members, each with the number of its record; `members`: those of them in the term, in order. `leader` is empty
    once it has left. `sown`: how far the stream's seeds are known, in the stream's own words. `kept_from`: what a snapshot in the log
    covers; no record with that number or a lower one is needed. `given`: handoffs whose source has passed them, and whose target has not
    come to them. `awaited`: handoffs whose source has not passed them, each with the partition that waits for it. `staged`: seeds up to a
    further point, of which more parts are to come: `sowing` has that point and the number of parts. `snapping`: the record up to which an
    unfinished snapshot covers, and the number of its parts.
    """

    seq: int = 0
    term: int = 0
    term_at: int = 0
    generation: int = 0
    leader: str = ""
    members: tuple[str, ...] = ()
    joined: dict[str, int] = {}
    partitions: dict[str, Partition] = {}
    sown: str = ""
    kept_from: int = 0
    given: tuple[str, ...] = ()
    awaited: dict[str, str] = {}
    staged: tuple[AnnouncedPartition, ...] = ()
    sowing: tuple[str, int] = ("", 0)
    snapping: tuple[int, int] = (0, 0)

    def owned(self, name: str) -> dict[str, Partition]:
        """The partitions of that member."""
        return {token: each for token, each in self.partitions.items() if each.owner == name}

    def active(self) -> dict[str, Partition]:
        """The readable partitions: ready or owned."""
        return {token: each for token, each in self.partitions.items() if each.phase in ("ready", "owned")}

    def unfinished(self) -> dict[str, Partition]:
        return {token: each for token, each in self.partitions.items() if each.phase != "finished"}

    def awaits(self, token: str) -> tuple[str, ...]:
        """The handoffs that the partition waits for at its barrier."""
        return tuple(handoff for handoff, target in self.awaited.items() if target == token)


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """The member has folded the log and reaches the position store: it may be given partitions."""

    member: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The member reads nothing any more."""

    member: str


class Term(msgspec.Struct, frozen=True, array_like=True, tag="term"):
    """A new term: its leader and members. `generation` is the election's own number: it tells which of two leaders is newer."""

    term: int
    leader: str
    members: tuple[str, ...]
    generation: int = 0


class Seeds(msgspec.Struct, frozen=True, array_like=True, tag="seeds"):
    """All seeds of the stream between two points that the stream names itself, or one of several parts of them: they count together."""

    term: int
    after: str
    upto: str
    partitions: tuple[AnnouncedPartition, ...]
    part: int = 0
    parts: int = 1


class Assign(msgspec.Struct, frozen=True, array_like=True, tag="assign"):
    """New owners of ready partitions."""

    term: int
    owners: dict[str, str]


class Move(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """New owners of owned partitions, effective once the current owners have released them."""

    term: int
    to: dict[str, str]


class CancelMove(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Partitions that stay where they are, under a new grant: a reader that has begun to stop must open anew."""

    term: int
    tokens: tuple[str, ...]


class Supersede(msgspec.Struct, frozen=True, array_like=True, tag="supersede"):
    """Children of a partition that has not ended yet."""

    term: int
    token: str
    children: tuple[AnnouncedPartition, ...]


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """The reader under this grant has stopped and will not continue."""

    token: str
    grant: int


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """The partition has ended, and its end is committed. `ended_at`: lower bound in ms for records of its children.

    `hints`: the finisher's proposed owners for children that this makes ready.
    """

    token: str
    grant: int
    children: tuple[AnnouncedPartition, ...] = ()
    ended_at: Millis = 0
    hints: dict[str, str] = {}


class Reach(msgspec.Struct, frozen=True, array_like=True, tag="reach"):
    """Everything of the partition up to a barrier is committed. `mark` rises from barrier to barrier of a partition.

    `gives`: handoffs of key ranges that leave the partition there. `takes`: handoffs of those that come to it.
    """

    token: str
    grant: int
    mark: int
    gives: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """The state after an earlier record, `state.seq`. Valid whichever member wrote it: it follows from the log.

    Of several parts, each has some of the partitions.
    """

    state: State
    part: int = 0
    parts: int = 1


Decision = Seeds | Assign | Move | CancelMove | Supersede
"""Records that only the leader of the term may write."""
Record = Join | Leave | Term | Decision | Release | Finish | Reach | Snapshot
Entry = tuple[int, Record]
"""A record and its place in the log. Places rise; they need not be dense."""

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes) -> Record:
    """Decode a record. Raises `msgspec.ValidationError` for malformed data."""
    return _decoder.decode(data)
