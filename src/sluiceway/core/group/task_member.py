"""Member of a group of tasks: from the log and the state of its readers it decides what to read, to stop and to append.

It compares the log with the desired state and appends the difference, repeating until the log shows it. So lost or duplicated records are
harmless, and what it has already said matters only for brevity.

It starts from the log: a member joins the group only when it has folded all existing records, reaches the position store, and has seen its
own `Join`. From then on it may be given partitions at any moment.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sluiceway.core.group.task_fold import broken_rule, fold_all, may_cross
from sluiceway.core.group.task_leader import Division, divide, hints, next_term
from sluiceway.core.group.task_parts import RECORD_BYTES, cut_owners, cut_seeds, cut_tokens
from sluiceway.core.group.task_state import (
    Assign,
    CancelMove,
    Entry,
    Finish,
    Join,
    Leave,
    Move,
    Partition,
    Reach,
    Record,
    Release,
    Seeds,
    State,
    Supersede,
)
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import AnnouncedPartition, Group

Preset = Literal["log-leader", "finisher-hint"]
"""Placer of a new child: the leader, once it is ready; or the member that finishes its last parent, with the leader as the fallback."""


@dataclass(frozen=True)
class Pace:
    """Intervals in ms. `repeat_after`: a record the log does not show by then is appended again. `reopen_after`: delay before a broken-off
    reader is reopened. `patience`: how long a member named by the election leaves alone a leader named at the same time or later."""

    repeat_after: Millis = 1_000
    reopen_after: Millis = 1_000
    patience: Millis = 10_000


# ---- events ------------------------------------------------------------------------------------------------------------


class Folded(NamedTuple):
    """The next records of the log, without gaps."""

    entries: tuple[Entry, ...]


class Restored(NamedTuple):
    """Event: the state, restored from a log that was trimmed beyond this member's position."""

    state: State


class Prepared(NamedTuple):
    """The position store is reached; `end` is where the log ended when this member began."""

    end: int


class Elected(NamedTuple):
    group: Group


class SeedsFound(NamedTuple):
    """All seeds of the stream between two points; if these are equal there is nothing new."""

    after: str
    upto: str
    partitions: tuple[AnnouncedPartition, ...]


class ChildrenFound(NamedTuple):
    """Children of a partition that has not ended."""

    token: str
    children: tuple[AnnouncedPartition, ...]


class Opened(NamedTuple):
    """The position store refuses commits under lower grants from now on. `position`: the committed one; None: none ever was."""

    token: str
    grant: int
    position: str | None


class Stopped(NamedTuple):
    """Nothing is read or committed under this grant any more: the answer to `Stop`."""

    token: str
    grant: int


class Ended(NamedTuple):
    """The partition has ended, and its last position is committed under this grant. `ended_at`: lower bound for records of its children."""

    token: str
    grant: int
    children: tuple[AnnouncedPartition, ...]
    ended_at: Millis


class Reached(NamedTuple):
    """Everything up to a barrier is committed under this grant, and the reader waits for `Cross`. The other fields are those of `Reach`."""

    token: str
    grant: int
    mark: int
    gives: tuple[str, ...]
    takes: tuple[str, ...]


class BrokenOff(NamedTuple):
    """Opening or reading failed, and nothing continues under this grant until it is reopened. The partition has not ended.

    `fenced`: the position store knows a higher grant. `unknown`: the stream no longer knows the position.
    """

    token: str
    grant: int
    why: Literal["", "fenced", "unknown"] = ""


class Going(NamedTuple):
    """Request to stop everything and leave."""


class Tick(NamedTuple):
    """Time has passed."""


Event = Folded | Restored | Prepared | Elected | SeedsFound | ChildrenFound | Opened | Reached | Stopped | Ended | BrokenOff | Going | Tick


# ---- effects -----------------------------------------------------------------------------------------------------------


class Append(NamedTuple):
    """Append to the log; the record may be lost, late or duplicated."""

    record: Record


class Open(NamedTuple):
    """Raise the partition's fence to the grant and return the committed position. Answered by `Opened` or `BrokenOff`."""

    token: str
    grant: int


class Read(NamedTuple):
    """Read from that position, committing under the grant. Ends with `Ended`, `BrokenOff` or, on request, `Stopped`."""

    token: str
    grant: int
    position: str


class Cross(NamedTuple):
    """Read on past the barrier with that mark."""

    token: str
    grant: int
    mark: int


class Stop(NamedTuple):
    """Commit all records read, and end all activity under this grant. Answered by `Stopped`, `Ended` or `BrokenOff`."""

    token: str
    grant: int


class JoinGroup(NamedTuple):
    """Take part in the election."""


class LeaveGroup(NamedTuple):
    """Leave the election: no work is left."""


class AskSeeds(NamedTuple):
    """Ask for seeds after that point. Answered by `SeedsFound`."""

    after: str


class Alarm(NamedTuple):
    """A partition cannot proceed without an operator."""

    token: str
    why: str


Effect = Append | Open | Read | Cross | Stop | JoinGroup | LeaveGroup | AskSeeds | Alarm


@dataclass
class _Reader:
    grant: int
    phase: Literal["opening", "reading", "stopping", "idle", "ended", "waiting", "broken"]
    """`idle`: stopped. `waiting`: to be reopened at `again_at`. `broken`: not to be reopened under this grant."""
    again_at: Millis = 0
    ended: Ended | None = None
    reached: Reached | None = None
    """The barrier that it waits at."""

    @property
    def runs(self) -> bool:
        return self.phase in ("opening", "reading", "stopping")


class TaskMember:
    """One member, for the lifetime of its process; `name` is never reused."""

    def __init__(
        self,
        name: str,
        preset: Preset = "log-leader",
        pace: Pace | None = None,
        state: State | None = None,
        record_bytes: int = RECORD_BYTES,
    ) -> None:
        """`record_bytes`: where records are cut into parts, the same for all members."""
        self.name, self.preset, self.pace, self._record_bytes = name, preset, pace or Pace(), record_bytes
        self.state = state or State()
        self.leaving = False
        self._prepared_at: int | None = None
        self._in_group = self._left = False
        self._group: Group | None = None
        self._term_seen_at: Millis = 0
        self._readers: dict[str, _Reader] = {}
        self._said: dict[Hashable, Millis] = {}
        self._wanted: set[Hashable] = set()
        self._seeds: SeedsFound | None = None
        self._seed_parts: list[tuple[AnnouncedPartition, ...]] = []
        self._mine: tuple[State, dict[str, Partition]] | None = None
        self._children: dict[str, ChildrenFound] = {}
        self._divided: tuple[State, Division] | None = None

    def step(self, event: Event, now: Millis) -> list[Effect]:
        """Return the effects of that event."""
        return self.step_all((event,), now)

    def step_all(self, events: Iterable[Event], now: Millis) -> list[Effect]:
        """Return the effects of these events, in order: the same as one after the other, at the cost of one."""
        told = [effect for event in events for effect in self._learn(event, now)]
        self._wanted = set()
        effects = [*told, *self._read(now), *self._take_part(now), *self._lead(now), *self._report(now)]
        self._said = {key: at for key, at in self._said.items() if key in self._wanted}
        return effects

    # ---- event handling ---------------------------------------------------------------------------------------------

    def _learn(self, event: Event, now: Millis) -> list[Effect]:
        match event:
            case Folded():
                self._fold(event.entries, now)
            case Restored():
                if event.state.seq > self.state.seq:
                    self._become(event.state, now)
            case Prepared():
                self._prepared_at = event.end
            case Elected():
                self._group = event.group
            case SeedsFound():
                self._seeds, self._seed_parts = event, cut_seeds(event.partitions, self._record_bytes)
            case ChildrenFound():
                self._children[event.token] = event
            case Going():
                self.leaving = True
            case Opened() | Reached() | Stopped() | Ended() | BrokenOff():
                return list(self._fare(event, now))
            case Tick():
                pass
        return []

    def _fold(self, entries: tuple[Entry, ...], now: Millis) -> None:
        self._become(fold_all(self.state, entries), now)

    def _become(self, state: State, now: Millis) -> None:
        if state.term != self.state.term:
            self._term_seen_at = now
        self.state = state

    def _fare(self, event: Opened | Reached | Stopped | Ended | BrokenOff, now: Millis) -> Iterator[Effect]:
        reader = self._readers.get(event.token)
        if reader is None or reader.grant != event.grant or not reader.runs:
            return
        match event:
            case Opened():
                if reader.phase == "opening":
                    reader.phase = "reading"
                    yield Read(event.token, event.grant, self._start(event))
            case Reached():
                reader.reached = event
            case Stopped():
                reader.phase = "idle"
            case Ended():
                reader.phase, reader.ended = "ended", event
            case BrokenOff():
                reader.phase = "waiting" if not event.why else "broken"
                reader.again_at = now + self.pace.reopen_after
                if event.why == "unknown":
                    # Restarting from the beginning is no remedy: records in between would be read twice, or not at all.
                    yield Alarm(event.token, "the stream does not know the position any more")

    def _start(self, opened: Opened) -> str:
        if opened.position is not None:
            return opened.position
        partition = self.state.partitions.get(opened.token)
        return partition.start if partition else ""

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _read(self, now: Millis) -> Iterator[Effect]:
        """Stop readers that have lost their partition, open those that may read."""
        # Looked for once in each state: there may be very many.
        if self._mine is None or self._mine[0] is not self.state:
            self._mine = self.state, self.state.owned(self.name)
        mine = self._mine[1]
        for token, reader in list(self._readers.items()):
            partition = mine.get(token)
            if partition is None or partition.grant != reader.grant:
                yield from self._give_up(token, reader)
            elif partition.to or self.leaving:
                if reader.phase in ("opening", "reading"):
                    reader.phase = "stopping"
                    yield Stop(token, reader.grant)
                elif reader.phase in ("waiting", "broken"):
                    reader.phase = "idle"
            elif reader.phase == "idle" or (reader.phase == "waiting" and now >= reader.again_at):
                del self._readers[token]
        for token, partition in mine.items():
            if token not in self._readers and not self.leaving:
                yield from self._begin(partition)

    def _give_up(self, token: str, reader: _Reader) -> Iterator[Effect]:
        if reader.phase in ("opening", "reading"):
            reader.phase = "stopping"
            yield Stop(token, reader.grant)
        elif not reader.runs:
            del self._readers[token]

    def _begin(self, partition: Partition) -> Iterator[Effect]:
        if partition.to:
            # It never began, so it counts as stopped.
            self._readers[partition.token] = _Reader(partition.grant, "idle")
        else:
            self._readers[partition.token] = _Reader(partition.grant, "opening")
            yield Open(partition.token, partition.grant)

    # ---- appending --------------------------------------------------------------------------------------------------

    def _say(self, key: Hashable, now: Millis) -> bool:
        """Whether it is time to append this, for the first time or again."""
        self._wanted.add(key)
        at = self._said.get(key)
        if at is not None and now - at < self.pace.repeat_after:
            return False
        self._said[key] = now
        return True

    def _take_part(self, now: Millis) -> Iterator[Effect]:
        joined = self.name in self.state.joined
        if self.leaving:
            at_rest = all(reader.phase in ("idle", "waiting", "broken") for reader in self._readers.values())
            if joined and at_rest and self._say("leave", now):
                yield Append(Leave(self.name))
            if not joined and at_rest and not self._left:
                self._left = True
                yield LeaveGroup()
            return
        if self._prepared_at is None or self.state.seq < self._prepared_at:
            return
        if not joined:
            if self._say("join", now):
                yield Append(Join(self.name))
        elif not self._in_group:
            self._in_group = True
            yield JoinGroup()

    def _report(self, now: Millis) -> Iterator[Effect]:
        """Report the outcomes of its readers."""
        for token, reader in self._readers.items():
            partition = self.state.partitions.get(token)
            if partition is None or partition.owner != self.name or partition.grant != reader.grant:
                continue
            if reader.ended is not None:
                yield from self._finish(reader, reader.ended, now)
            elif reader.reached is not None and reader.phase == "reading":
                yield from self._cross(partition, reader, reader.reached, now)
            elif reader.phase == "idle" and partition.to and self._say(("release", token, reader.grant), now):
                yield Append(Release(token, reader.grant))

    def _finish(self, reader: _Reader, ended: Ended, now: Millis) -> Iterator[Effect]:
        breach = broken_rule(self.state, ended.token, ended.children)
        if breach is not None:
            # It would not count, whichever member reported it.
            reader.phase, reader.ended = "broken", None
            yield Alarm(ended.token, breach)
        elif self._say(("finish", ended.token, ended.grant), now):
            wishes = hints(self.state, self.name, ended.token, ended.children) if self.preset == "finisher-hint" else {}
            yield Append(Finish(ended.token, ended.grant, ended.children, ended.ended_at, wishes))

    def _cross(self, partition: Partition, reader: _Reader, reached: Reached, now: Millis) -> Iterator[Effect]:
        """Report a barrier, unless an earlier reader has, and let the reader go on once the log shows that it may."""
        if partition.barrier < reached.mark:
            if self._say(("reach", reached.token, reached.grant, reached.mark), now):
                yield Append(Reach(*reached))
        elif may_cross(self.state, reached.token):
            reader.reached = None
            yield Cross(reached.token, reached.grant, reached.mark)

    # ---- leading ----------------------------------------------------------------------------------------------------

    def _lead(self, now: Millis) -> Iterator[Effect]:
        yield from self._contend(now)
        state = self.state
        if state.leader != self.name or self.leaving:
            return
        yield from self._sow(now)
        if self._divided is None or self._divided[0] is not state:
            self._divided = (state, divide(state))
        division, term = self._divided[1], state.term
        assign = {token: to for token, to in division.assign.items() if self._say(("assign", term, token), now)}
        for owners in cut_owners(assign, self._record_bytes):
            yield Append(Assign(term, owners))
        cancel = tuple(token for token in division.cancel if self._say(("cancel", term, token, state.partitions[token].grant), now))
        for tokens in cut_tokens(cancel, self._record_bytes):
            yield Append(CancelMove(term, tokens))
        move = {token: to for token, to in division.move.items() if self._say(("move", term, token), now)}
        for owners in cut_owners(move, self._record_bytes):
            yield Append(Move(term, owners))

    def _contend(self, now: Millis) -> Iterator[Effect]:
        """Call for the term it leads, if the election names it leader."""
        group, state = self._group, self.state
        if group is None or group.leader != self.name or self.leaving:
            return
        term = next_term(state, group)
        if term is None:
            return
        # Two members that both believe to be leader would otherwise depose each other for ever.
        newer = state.leader not in ("", self.name) and state.generation >= group.generation
        if newer and now - self._term_seen_at < self.pace.patience:
            return
        if self._say(("term", term.term, term.members), now):
            yield Append(term)

    def _sow(self, now: Millis) -> Iterator[Effect]:
        """Bring new seeds and children from the stream into the log."""
        state, seeds = self.state, self._seeds
        if seeds is None or seeds.after != state.sown:
            if self._say(("ask", state.sown), now):
                yield AskSeeds(state.sown)
        elif seeds.upto != seeds.after:
            point, begun = state.sowing
            for part in range(begun if point == seeds.upto else 0, len(self._seed_parts)):
                if self._say(("seeds", seeds.upto, part), now):
                    yield Append(Seeds(state.term, seeds.after, seeds.upto, self._seed_parts[part], part, len(self._seed_parts)))
        for token, found in list(self._children.items()):
            new = any(born.token not in state.partitions for born in found.children)
            if not new or token not in state.partitions or state.partitions[token].phase == "finished":
                del self._children[token]
            elif self._say(("supersede", token), now):
                yield Append(Supersede(state.term, token, found.children))
