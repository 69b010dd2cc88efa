"""Specification of the tasks of a capture (docs/project/tasks.md): members that divide a change stream's partitions by a common log.

What a record does is decided by the code (`core/group/task_fold.py`). Around that, a member may be any number of records behind, freeze
with its readers, be given up and go on; records are lost, late and duplicated; a leader decides whatever its term allows.

The stream has two partitions, which merge into a third. Invariants carry the numbers of that page: S3, S4, S6 and S12 at every moment, and
that nothing is handed on twice, for S2. `python -m spec tasks` checks them, and that each rule is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from msgspec.structs import replace

from sluiceway.core.group.task_fold import fold
from sluiceway.core.group.task_state import Assign, CancelMove, Finish, Join, Move, Partition, Record, Release, Seeds, Term, decode, encode
from sluiceway.core.group.task_state import State as Folded
from sluiceway.model.task_records import AnnouncedPartition
from spec.checker import Broken

MEMBERS = ("a", "b")
CHILD = AnnouncedPartition("c", ("p", "r"))
CHILDREN = {"p": (CHILD,), "r": (CHILD,), "c": ()}
TOKENS = tuple(CHILDREN)
START: tuple[Record, ...] = (
    *(Join(name) for name in MEMBERS),
    Term(1, "a", MEMBERS),
    Seeds(1, "", "all", (AnnouncedPartition("p"), AnnouncedPartition("r"))),
    Assign(1, {"p": "a", "r": "b"}),
)
"""The log at first."""


@dataclass(frozen=True)
class Rules:
    """The bounds, and the rules, which can be left out one by one."""

    records: int = 3
    """Records that are appended to the log."""
    terms: int = 2
    late: int = 1
    """Records that may be under way while others arrive."""
    children_wait_for_parents: bool = True
    positions_are_fenced: bool = True
    cancelled_moves_give_grants: bool = True
    grants_are_checked: bool = True
    stops_before_it_releases: bool = True


class Reader(NamedTuple):
    """A member's reader of a partition: it reads, has stopped, or has committed the end."""

    grant: int
    phase: str = "reads"


class Position(NamedTuple):
    """A partition in the position store: the highest grant that has opened it, and whether its end is committed."""

    grant: int = 0
    is_at_end: bool = False


class State(NamedTuple):
    """`folded`: how much of the log each member knows. `late`: records that are under way, or lost. `readers`: by member and partition."""

    log: tuple[bytes, ...]
    folded: tuple[int, ...]
    late: frozenset[bytes] = frozenset()
    readers: tuple[tuple[Reader | None, ...], ...] = ((None,) * len(TOKENS),) * len(MEMBERS)
    positions: tuple[Position, ...] = (Position(),) * len(TOKENS)


class Facts(NamedTuple):
    """What a log says: its fold, the partitions that have finished, and the grants that were released."""

    state: Folded
    finished: frozenset[str] = frozenset()
    released: frozenset[tuple[str, int]] = frozenset()


Step = tuple[str, Callable[[], State]]


class CaptureTasks:
    """The model under these rules."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def first(self) -> State:
        return State(tuple(encode(record) for record in START), (len(START),) * len(MEMBERS))

    def steps(self, state: State) -> Iterator[Step]:
        for record in state.late:
            yield from self._appends(state._replace(late=state.late - {record}), "late", record)
        for record in {*state.log[len(START) :]}:
            yield from self._appends(state, "once more", record)
        for at, name in enumerate(MEMBERS):
            known = facts(self._rules, state.log[: state.folded[at]]).state
            if state.folded[at] < len(state.log):
                folded = (*state.folded[:at], state.folded[at] + 1, *state.folded[at + 1 :])
                yield f"{name} reads the next record", lambda folded=folded: state._replace(folded=folded)  # type: ignore[misc]
            for place, token in enumerate(TOKENS):
                yield from self._reads(state, at, place, known.partitions.get(token))
            for decision in self._decisions(known, name):
                yield from self._sends(state, name, decision)

    def _sends(self, state: State, name: str, record: Record) -> Iterator[Step]:
        """The member appends the record to the log. It may arrive later than others, or never."""
        data = encode(record)
        yield from self._appends(state, f"{name} appends", data)
        if data not in state.late and len(state.late) < self._rules.late:
            yield f"{name} sends {record}", lambda: state._replace(late=state.late | {data})

    def _appends(self, state: State, how: str, record: bytes) -> Iterator[Step]:
        """Only what counts: all else changes nothing (S8, which tests of the fold check)."""
        if len(state.log) < len(START) + self._rules.records and self._counts(state.log, record):
            yield f"{how}: {decode(record)}", lambda: self._arrives(state, record)

    def _counts(self, log: tuple[bytes, ...], record: bytes) -> bool:
        before = facts(self._rules, log).state
        return replace(_fold(self._rules, before, len(log) + 1, decode(record)), seq=before.seq) != before

    def _arrives(self, state: State, record: bytes) -> State:
        log = (*state.log, record)
        before, after = facts(self._rules, state.log), facts(self._rules, log)
        for token in after.finished - before.finished:
            if not state.positions[TOKENS.index(token)].is_at_end:
                raise Broken(f"S4: {token} finishes before its end is committed")
        for token, grant in after.released - before.released:
            self._check_released(state, token, grant)
        return state._replace(log=log)

    def _check_released(self, state: State, token: str, grant: int) -> None:
        for name, readers in zip(MEMBERS, state.readers, strict=True):
            reader = readers[TOKENS.index(token)]
            if reader is not None and (reader.grant, reader.phase) == (grant, "reads"):
                raise Broken(f"S12: {name} reads {token} under grant {grant}, which is released")

    # ---- readers ----------------------------------------------------------------------------------------------

    def _reads(self, state: State, at: int, place: int, known: Partition | None) -> Iterator[Step]:
        name, token, reader = MEMBERS[at], TOKENS[place], state.readers[at][place]
        mine = known if known is not None and known.owner == name else None
        if reader is None:
            if mine is not None and mine.to:
                yield f"{name} has not begun {token}", lambda: _with(state, at, place, Reader(mine.grant, "stopped"))
            elif mine is not None:
                yield from self._opens(state, at, place, mine.grant)
            return
        if reader.phase == "reads":
            yield f"{name} commits the end of {token}", lambda: self._commits(state, at, place, reader)
        if mine is None or mine.grant != reader.grant:
            yield f"{name} gives up {token}", lambda: _with(state, at, place, None)
        elif reader.phase == "ended":
            yield from self._sends(state, name, Finish(token, reader.grant, CHILDREN[token]))
        elif mine.to:
            yield from self._hands_over(state, at, place, reader)
        elif reader.phase == "stopped":
            yield f"{name} begins {token} anew", lambda: _with(state, at, place, None)

    def _opens(self, state: State, at: int, place: int, grant: int) -> Iterator[Step]:
        position = state.positions[place]
        if grant >= position.grant:
            reader = Reader(grant, "ended" if position.is_at_end else "reads")
            opened = _committed(state, place, position._replace(grant=grant))
            yield f"{MEMBERS[at]} opens {TOKENS[place]} under {grant}", lambda: self._sound(_with(opened, at, place, reader), at, place)

    def _commits(self, state: State, at: int, place: int, reader: Reader) -> State:
        position = state.positions[place]
        if self._rules.positions_are_fenced and position.grant != reader.grant:
            return _with(state, at, place, None)
        if position.is_at_end:
            raise Broken(f"S2: {MEMBERS[at]} hands {TOKENS[place]} on under {reader.grant}, as its owner under {position.grant} has")
        return _committed(_with(state, at, place, reader._replace(phase="ended")), place, position._replace(is_at_end=True))

    def _hands_over(self, state: State, at: int, place: int, reader: Reader) -> Iterator[Step]:
        name, token = MEMBERS[at], TOKENS[place]
        if reader.phase == "reads":
            yield f"{name} stops {token}", lambda: _with(state, at, place, reader._replace(phase="stopped"))
        if reader.phase == "stopped" or not self._rules.stops_before_it_releases:
            yield from self._sends(state, name, Release(token, reader.grant))

    def _sound(self, state: State, at: int, place: int) -> State:
        """Check what the member has begun to read."""
        token, reader = TOKENS[place], state.readers[at][place]
        assert reader is not None
        true = facts(self._rules, state.log)
        missing = [parent for parent in TOKENS if parent not in true.finished and any(token == born.token for born in CHILDREN[parent])]
        if missing:
            raise Broken(f"S3: {MEMBERS[at]} reads {token} before {missing[0]} has finished")
        if (token, reader.grant) in true.released:
            raise Broken(f"S12: {MEMBERS[at]} reads {token} under grant {reader.grant}, which is released")
        return state

    # ---- decisions --------------------------------------------------------------------------------------------

    def _decisions(self, known: Folded, name: str) -> Iterator[Record]:
        """What the member may append to the log by what it knows: a leader decides anything, and anybody may call for a term."""
        if known.term < self._rules.terms:
            yield Term(known.term + 1, name, MEMBERS)
            yield Term(known.term + 1, name, (name,))
        if known.leader != name:
            return
        for token, each in known.partitions.items():
            for other in known.members:
                if each.phase == "ready":
                    yield Assign(known.term, {token: other})
                elif each.phase == "owned" and not each.to and other != each.owner:
                    yield Move(known.term, {token: other})
            if each.to:
                yield CancelMove(known.term, (token,))


@cache
def facts(rules: Rules, log: tuple[bytes, ...]) -> Facts:
    """What the log says under these rules. Raises Broken where it says what no log may say."""
    return follow(rules, facts(rules, log[:-1]), len(log), decode(log[-1])) if log else Facts(Folded())


def follow(rules: Rules, before: Facts, seq: int, record: Record) -> Facts:
    """What the log says with one more record, of that number. Raises Broken where no log may say so."""
    state = _fold(rules, before.state, seq, record)
    finished, released = before.finished, before.released
    for token, was in before.state.partitions.items():
        now = state.partitions.get(token)
        if was.phase != "finished" and (now is None or now.phase == "finished"):
            finished |= {token}
        if isinstance(record, Release) and record.token == token and was.owner and (now is None or now.grant != was.grant or not now.owner):
            released |= {(token, was.grant)}
    for token, each in state.partitions.items():
        if token in finished and each.phase != "finished":
            raise Broken(f"S6: {token} comes back")
    return Facts(state, finished, released)


def _fold(rules: Rules, before: Folded, seq: int, record: Record) -> Folded:
    partitions = before.partitions
    if not rules.grants_are_checked and isinstance(record, (Release, Finish)) and record.token in partitions:
        record = replace(record, grant=partitions[record.token].grant)
    after = fold(before, seq, record)
    if not rules.children_wait_for_parents:
        ready = {token: replace(each, phase="ready") if each.phase == "created" else each for token, each in after.partitions.items()}
        after = replace(after, partitions=ready)
    if not rules.cancelled_moves_give_grants and isinstance(record, CancelMove):
        same = {token: replace(each, grant=partitions[token].grant) for token, each in after.partitions.items()}
        after = replace(after, partitions=same)
    return after


def _with(state: State, at: int, place: int, reader: Reader | None) -> State:
    mine = state.readers[at]
    changed = (*mine[:place], reader, *mine[place + 1 :])
    return state._replace(readers=(*state.readers[:at], changed, *state.readers[at + 1 :]))


def _committed(state: State, place: int, position: Position) -> State:
    return state._replace(positions=(*state.positions[:place], position, *state.positions[place + 1 :]))


ABLATIONS = {
    "a child does not wait for its parents": Rules(children_wait_for_parents=False, records=2, terms=1, late=0),
    "the position store does not fence": Rules(positions_are_fenced=False, records=2, late=0),
    "a cancelled move leaves the grant": Rules(cancelled_moves_give_grants=False, records=3, terms=1),
    "records count under any grant": Rules(grants_are_checked=False, records=3, terms=1),
    "an owner releases before it has stopped": Rules(stops_before_it_releases=False, records=3, terms=1),
}
"""The rules without one, by what is missing."""
