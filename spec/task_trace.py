"""Trace check of the tasks of a capture: whether a recorded history follows the rules of `capture_tasks`.

A history has the records of the log in the order in which they arrived, how far each member had read them, what it said, which readers it
began and stopped, and what took effect in the position store. What a record does is the code's fold, as in the specification. A history may
have what the specification has not: snapshots, members that join and leave, barriers. These are followed by the fold alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from sluiceway.core.group.task_state import (
    Assign,
    CancelMove,
    Decision,
    Finish,
    Leave,
    Move,
    Partition,
    Reach,
    Record,
    Release,
    Snapshot,
    Term,
    encode,
)
from sluiceway.core.group.task_state import State as Folded
from spec.capture_tasks import Facts, Rules, follow
from spec.checker import Broken
from spec.rejected import Rejected, first_rejected


class Said(NamedTuple):
    """The member appends that record to the log: it may arrive at any time from now on, more than once, or never."""

    name: str
    record: Record


class Arrived(NamedTuple):
    """The next record of the log."""

    record: Record


class Knows(NamedTuple):
    """The member has read the log up to that record, which makes this state for it."""

    name: str
    seq: int
    state: Folded


class Begins(NamedTuple):
    """The member begins to open a reader."""

    name: str
    token: str
    grant: int


class Reads(NamedTuple):
    """Its reader begins to read."""

    name: str
    token: str
    grant: int


class Rests(NamedTuple):
    """Its reader has stopped, or has come to the end of the partition."""

    name: str
    token: str
    grant: int
    phase: Literal["stopped", "ended"]


class Fenced(NamedTuple):
    """The position store takes commits of the partition under that grant."""

    token: str
    grant: int


class Kept(NamedTuple):
    """So many records of the partition are committed, by a reader under that grant."""

    token: str
    grant: int
    records: int


Event = Said | Arrived | Knows | Begins | Reads | Rests | Fenced | Kept


class TaskHistory(NamedTuple):
    """`parents` and `records`: of each partition of the stream, its parents and how many records it has."""

    parents: Mapping[str, tuple[str, ...]]
    records: Mapping[str, int]
    events: list[Event]


Reader = tuple[str, str, int]
"""A member, a partition, and the grant under which it reads it."""
_UNSEEN = Snapshot
"""Records that any member may append at any time, unseen: they follow from the log."""


class TaskTraceCheck:
    """Checks one history."""

    def __init__(self, parents: Mapping[str, tuple[str, ...]], records: Mapping[str, int]) -> None:
        self._parents, self._records = parents, records
        self._facts = [Facts(Folded())]
        """What the log says after each record, by its number."""
        self._said: set[bytes] = set()
        self._known: dict[str, int] = {}
        self._readers: dict[Reader, Literal["opens", "reads", "stopped", "ended"]] = {}
        self._fences: defaultdict[str, int] = defaultdict(int)
        self._kept: defaultdict[str, int] = defaultdict(int)

    def check(self, events: Sequence[Event]) -> Rejected[Event] | None:
        """Return None if the history is accepted. A check is for one history."""
        return first_rejected(events, self._take)

    def _take(self, event: Event) -> None:
        match event:
            case Said(name, record):
                self._say(name, record)
                self._said.add(encode(record))
            case Arrived(record):
                self._arrive(record)
            case Knows(name, seq, state):
                if not self._known.get(name, 0) <= seq < len(self._facts) or state != self._facts[seq].state:
                    raise Broken("S8: the log does not say so")
                self._known[name] = seq
            case Begins(name, token, grant):
                self._begin(name, token, grant)
            case Reads(name, token, grant):
                self._read(name, token, grant)
            case Rests(name, token, grant, phase):
                self._rest((name, token, grant), phase)
            case Fenced(token, grant):
                self._check_begun(token, grant)
                if grant < self._fences[token]:
                    raise Broken(f"S2: {self._fences[token]} has opened it")
                self._fences[token] = grant
            case Kept(token, grant, records):
                self._keep(token, grant, records)

    # ---- the log --------------------------------------------------------------------------------------------------

    def _arrive(self, record: Record) -> None:
        if encode(record) not in self._said and not isinstance(record, _UNSEEN):
            raise Broken("nobody has said so")
        before = self._facts[-1]
        after = follow(Rules(), before, len(self._facts), record)
        for token in after.finished - before.finished:
            if self._kept[token] != self._records[token]:
                raise Broken(f"S4: {token} finishes before its end is committed")
        for token, grant in after.released - before.released:
            self._check_at_rest(token, grant)
        self._facts.append(after)

    def _check_at_rest(self, token: str, grant: int) -> None:
        for (name, read, under), phase in self._readers.items():
            if (read, under) == (token, grant) and phase in ("opens", "reads"):
                raise Broken(f"S12: {name} reads {token} under grant {grant}, which is released")

    # ---- what a member says ---------------------------------------------------------------------------------------

    def _state(self, name: str) -> Folded:
        return self._facts[self._known.get(name, 0)].state

    def _say(self, name: str, record: Record) -> None:
        state = self._state(name)
        match record:
            case Term():
                if (record.term, record.leader) != (state.term + 1, name):
                    raise Broken("it may call for the next term only, and for itself")
            case Leave():
                if any(reader[0] == name and phase in ("opens", "reads") for reader, phase in self._readers.items()):
                    raise Broken("S12: it still reads")
            case Release(token, grant):
                if not self._owned(name, token, grant).to or self._phase(name, token, grant) not in ("", "stopped"):
                    raise Broken("S12: it is not to give it up, or has not stopped")
            case Finish(token, grant):
                self._owned(name, token, grant)
                if self._phase(name, token, grant) != "ended":
                    raise Broken("S4: it has not come to its end")
            case Reach(token, grant):
                self._owned(name, token, grant)
                if self._phase(name, token, grant) != "reads":
                    raise Broken("S16: it does not read it")
            case _ if isinstance(record, Decision):
                if (record.term, state.leader) != (state.term, name):
                    raise Broken(f"S11: {state.leader} decides in term {state.term}")
                self._decide(state, record)

    def _decide(self, state: Folded, record: Decision) -> None:
        """A leader decides anything that its term allows."""
        tokens = {Assign: "owners", Move: "to", CancelMove: "tokens"}.get(type(record))
        for token in getattr(record, tokens) if tokens is not None else ():
            each = state.partitions.get(token, Partition(token))
            is_fit = {
                Assign: each.phase == "ready",
                Move: each.phase == "owned" and not each.to,
                CancelMove: bool(each.to),
            }[type(record)]
            if not is_fit:
                raise Broken(f"{token} is {each.phase}" + (f", and moves to {each.to}" if each.to else ""))

    def _owned(self, name: str, token: str, grant: int) -> Partition:
        """The partition, as its owner under that grant knows it."""
        each = self._state(name).partitions.get(token)
        if each is None or (each.owner, each.grant) != (name, grant):
            raise Broken(f"S1: {token} is not {name}'s under grant {grant}")
        return each

    # ---- readers --------------------------------------------------------------------------------------------------

    def _phase(self, name: str, token: str, grant: int) -> str:
        return self._readers.get((name, token, grant), "")

    def _begin(self, name: str, token: str, grant: int) -> None:
        if self._owned(name, token, grant).to:
            raise Broken(f"{name} is to give {token} up")
        for (other, read, _), phase in self._readers.items():
            if (other, read) == (name, token) and phase in ("opens", "reads"):
                raise Broken(f"S1: {name} reads {token} already")
        self._readers[name, token, grant] = "opens"

    def _read(self, name: str, token: str, grant: int) -> None:
        if self._phase(name, token, grant) != "opens" or self._fences[token] < grant:
            raise Broken("it has not been opened")
        facts = self._facts[-1]
        if missing := [parent for parent in self._parents[token] if parent not in facts.finished]:
            raise Broken(f"S3: {missing[0]} has not finished")
        if (token, grant) in facts.released:
            raise Broken("S12: it is released")
        self._readers[name, token, grant] = "reads"

    def _rest(self, reader: Reader, phase: Literal["stopped", "ended"]) -> None:
        _, token, _grant = reader
        if self._readers.get(reader) not in ("opens", "reads"):
            raise Broken("it does not read")
        if phase == "ended" and (self._readers[reader] != "reads" or self._kept[token] != self._records[token]):
            raise Broken("S4: its end is not committed")
        self._readers[reader] = phase

    def _check_begun(self, token: str, grant: int) -> None:
        if not any((read, under) == (token, grant) for _, read, under in self._readers):
            raise Broken(f"nobody has opened {token} under grant {grant}")

    def _keep(self, token: str, grant: int, records: int) -> None:
        self._check_begun(token, grant)
        if grant != self._fences[token]:
            raise Broken(f"S2: {self._fences[token]} has opened it")
        if records < self._kept[token]:
            raise Broken(f"S13: {self._kept[token]} were committed")
        self._kept[token] = records
