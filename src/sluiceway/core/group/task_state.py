"""What a sync log records, and what follows from it: partitions of a change stream, who reads them, and under which grant."""

from __future__ import annotations

import msgspec

from sluiceway.contract.capture_answers import Phase
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import Born


class Partition(msgspec.Struct, frozen=True, array_like=True):
    """A partition as the log tells of it.

    `waits`: its parents that are not finished. `grant`: the number of the record that gave it to its last owner. `to`: to whom it is to
    move. `since`: no record that it or a child not yet known has in store is older than the least end of the parents that are
    finished; None while none is. Once finished: its own end.
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


class State(msgspec.Struct, frozen=True, kw_only=True):
    """All that follows from the log up to the record `seq`. Equal for all who have folded so far, whatever they began with.

    `joined` has those who are prepared, each with the number of its record; `members` those of them who are in the term, in order.
    `leader` is empty once it has left. `sown`: up to where the stream's seeds are known, in the stream's own words. `kept_from`: what a
    snapshot in the log covers; no record with that number or a lower one is needed.
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

    def owned(self, name: str) -> dict[str, Partition]:
        """What that member has."""
        return {token: each for token, each in self.partitions.items() if each.owner == name}

    def active(self) -> dict[str, Partition]:
        """What can be read: ready or owned."""
        return {token: each for token, each in self.partitions.items() if each.phase in ("ready", "owned")}

    def unfinished(self) -> dict[str, Partition]:
        return {token: each for token, each in self.partitions.items() if each.phase != "finished"}


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """This member has folded the log and reaches the position store: it may be given partitions."""

    member: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """This member reads nothing any more."""

    member: str


class Term(msgspec.Struct, frozen=True, array_like=True, tag="term"):
    """Who leads, and whom. `generation` is the election's own number, for whoever wonders which of two leaders is the newer."""

    term: int
    leader: str
    members: tuple[str, ...]
    generation: int = 0


class Seeds(msgspec.Struct, frozen=True, array_like=True, tag="seeds"):
    """Partitions that are nobody's children, all that the stream has between two points that it names itself."""

    term: int
    after: str
    upto: str
    partitions: tuple[Born, ...]


class Assign(msgspec.Struct, frozen=True, array_like=True, tag="assign"):
    """To whom ready partitions go."""

    term: int
    owners: dict[str, str]


class Move(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """To whom owned partitions are to go, once their owners have released them."""

    term: int
    to: dict[str, str]


class CancelMove(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """These stay where they are, under a new grant: a reader that has begun to stop must open anew."""

    term: int
    tokens: tuple[str, ...]


class Supersede(msgspec.Struct, frozen=True, array_like=True, tag="supersede"):
    """Children of a partition that has not ended yet."""

    term: int
    token: str
    children: tuple[Born, ...]


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """The reader under this grant has stopped and will not go on."""

    token: str
    grant: int


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """The partition has ended, and where it ends is committed. `ended_at`: no record of its children is older.

    `hints` has whom the finisher would give children that become ready by this.
    """

    token: str
    grant: int
    children: tuple[Born, ...] = ()
    ended_at: Millis = 0
    hints: dict[str, str] = {}


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """The state as it was after an earlier record, `state.seq`. Whoever it is that wrote it: it follows from the log."""

    state: State


Decision = Seeds | Assign | Move | CancelMove | Supersede
"""What only the leader of the term may say."""
Record = Join | Leave | Term | Decision | Release | Finish | Snapshot
Entry = tuple[int, Record]
"""A record and its place in the log. Places rise; they need not be dense."""

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes) -> Record:
    """Raises `msgspec.ValidationError` for what is no record."""
    return _decoder.decode(data)
