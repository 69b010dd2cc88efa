"""Simulated process of a task group: one member, and its readers, which keep running while the member is paused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from simulation.promises import check
from simulation.tasks_checks import TruthLog
from simulation.tasks_stream import Barrier, Fence, Part, Positions, Stream, index_of
from sluiceway.core.group.task_fold import restore
from sluiceway.core.group.task_member import (
    Alarm,
    Append,
    AskSeeds,
    BrokenOff,
    Cross,
    Effect,
    Ended,
    Event,
    Folded,
    JoinGroup,
    LeaveGroup,
    Open,
    Opened,
    Reached,
    Read,
    Restored,
    SeedsFound,
    Stop,
    Stopped,
    TaskMember,
    Tick,
)
from sluiceway.core.group.task_state import Record
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import AnnouncedPartition


class Around(Protocol):
    """Environment of a process."""

    now: Millis
    stream: Stream
    positions: Positions
    log: TruthLog

    def append(self, author: str, record: Record) -> None: ...
    def call(self, actor: Actor, done: object) -> None: ...
    def later(self, done: Callable[[], object]) -> None: ...
    def chance(self, probability: float) -> bool: ...
    def breaks(self, probability: float) -> bool: ...
    def some(self, most: int) -> int: ...
    def joins_group(self, actor: Actor) -> None: ...
    def leaves_group(self, actor: Actor) -> None: ...
    def alarm(self, actor: Actor, token: str, why: str) -> None: ...
    def note(self, *parts: object) -> None: ...


@dataclass
class Run:
    """Reader of one partition under one grant."""

    token: str
    grant: int
    opening: bool = True
    reading: bool = False
    stop: bool = False
    index: int = 0
    kept: int = 0
    fence: Fence | None = None
    in_flight: bool = False
    """A commit's outcome is pending. The reader keeps running until it is known."""
    refused: bool = False
    told: int = 0
    """Mark of the last barrier that it has told its member of."""
    crossed: int = 0
    """Mark of the last barrier that it was let past."""


@dataclass
class Actor:
    member: TaskMember
    began_end: int
    most: int
    """Maximum number of log records folded at a time."""
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)
    mail: list[Event] = field(default_factory=list)
    dead: bool = False
    left: bool = False
    going: bool = False
    in_group: bool = False
    told: int = 0
    """Number of the latest election news. Older news is ignored."""
    frozen_until: Millis = 0
    """Until then the whole process is paused."""
    deaf_until: Millis = 0
    """Until then the member is paused while its readers keep running."""
    lagging: bool = False

    @property
    def name(self) -> str:
        return self.member.name

    # ---- turn -------------------------------------------------------------------------------------------------------

    def turn(self, around: Around) -> None:
        if around.now < self.frozen_until:
            return
        if around.now >= self.deaf_until:
            self._fold(around)
            mail, self.mail = self.mail, []
            for event in mail:
                self._step(event, around)
            self._step(Tick(), around)
        for run in list(self.runs.values()):
            if run.reading:
                self._read(run, around)
            elif run.stop and not run.opening:
                self._over(run, Stopped(run.token, run.grant))

    def _fold(self, around: Around) -> None:
        log, at = around.log, self.member.state.seq
        end = len(log.history) - 1
        if self.lagging and around.chance(0.7):
            return
        if at >= end:
            return
        if log.entries and log.entries[0][0] > at + 1:
            self._step(Restored(restore(log.entries)), around)
        else:
            first = at + 1 - log.entries[0][0]
            self._step(Folded(tuple(log.entries[first : first + self.most])), around)
        log.check_fold(self.member.state)

    def _step(self, event: Event, around: Around) -> None:
        for effect in self.member.step(event, around.now):
            self._carry_out(effect, around)

    def _carry_out(self, effect: Effect, around: Around) -> None:
        match effect:
            case Append():
                around.note(self.name, "says", effect.record)
                around.append(self.name, effect.record)
            case Open():
                self._open(effect, around)
            case Read():
                self._begin_reading(effect, around)
            case Cross():
                self._cross(effect, around)
            case Stop():
                self._stop(effect, around)
            case JoinGroup():
                check(self.member.state.seq >= self.began_end, f"L6: {self.name} joins before it has read the log")
                around.joins_group(self)
            case LeaveGroup():
                check(not self.runs, f"S12: {self.name} has left and still reads")
                self.left = True
                around.leaves_group(self)
            case AskSeeds():
                upto, seeds = around.stream.seeds(effect.after)
                around.call(self, SeedsFound(effect.after, upto, seeds))
            case Alarm():
                around.alarm(self, effect.token, effect.why)

    # ---- readers ----------------------------------------------------------------------------------------------------

    def _open(self, effect: Open, around: Around) -> None:
        key = effect.token, effect.grant
        around.note(self.name, "opens", *key)
        check(all(token != effect.token for token, _ in self.runs), f"S1: {self.name} opens {effect.token} twice")
        check(around.log.givers.get(key) == self.name, f"S1: {self.name} opens {key}, which is not its own")
        run = self.runs[key] = Run(*key)

        if around.breaks(0.1):
            # No answer comes, yet the opening may still be done at any time.
            self._over(run, BrokenOff(*key))
            around.later(lambda: around.positions.open(*key))
            return

        def lands() -> None:
            """Takes effect even if the process is gone by then."""
            run.opening = False
            fence = None if around.breaks(0.2) else around.positions.open(*key)
            if fence is None:
                self._over(run, self._refused(run, around))
                return
            run.fence = fence
            if run.stop:
                self._over(run, Stopped(*key))
            else:
                self.mail.append(Opened(*key, around.positions.position(effect.token)))

        around.call(self, lands)

    def _refused(self, run: Run, around: Around) -> BrokenOff:
        """Build the event of a refused opening or commit. A second opening of the same grant is no reason to give up."""
        holds = around.positions.fences.get(run.token)
        return BrokenOff(run.token, run.grant, "fenced" if holds is not None and holds.grant > run.grant else "")

    def _begin_reading(self, effect: Read, around: Around) -> None:
        run = self.runs[effect.token, effect.grant]
        kept = around.positions.committed.get(effect.token)
        token, index = effect.position.rpartition(":")[0], index_of(effect.position)
        around.note(self.name, "reads", *effect)
        check(token == effect.token, f"S13: {effect.token} is read from {effect.position}")
        # A reader paused since its opening may start at a stale position: its commits are fenced off.
        fenced = run.fence != around.positions.fences[effect.token]
        check(fenced or index == (kept or 0), f"S13: {effect.token} is read from {index}, and committed is {kept}")
        if around.breaks(0.03):
            self._over(run, BrokenOff(effect.token, effect.grant, "unknown"))
            return
        run.reading, run.index, run.kept = True, index, index

    def _cross(self, effect: Cross, around: Around) -> None:
        around.note(self.name, "crosses", *effect)
        run = self.runs.get((effect.token, effect.grant))
        if run is not None:
            run.crossed = effect.mark

    def _stop(self, effect: Stop, around: Around) -> None:
        run = self.runs.get((effect.token, effect.grant))
        if run is None:
            # Its final event is already in the mail.
            return
        run.stop = True

    def _over(self, run: Run, last: Event) -> None:
        self.runs.pop((run.token, run.grant), None)
        self.mail.append(last)

    def _read(self, run: Run, around: Around) -> None:
        """Read a few records. Commits now and then, and at the end."""
        key = run.token, run.grant
        part = around.stream.parts[run.token]
        if run.in_flight:
            return
        if run.refused:
            self._over(run, self._refused(run, around))
            return
        if around.breaks(0.02):
            self._over(run, BrokenOff(*key))
            return
        if run.stop and (run.kept == run.index or around.chance(0.3)):
            self._over(run, Stopped(*key))
            return
        if not run.stop:
            around.log.check_reading(self.name, *key)
            self._take(run, part, around)
        barrier = self._barrier(run, part)
        held = barrier is not None and barrier.records == run.index
        at_end = run.index == part.records and around.stream.ends(run.token) and not held
        if at_end and self._is_kept(run, around):
            self._over(run, Ended(*key, self._children(run, around), part.end))
        elif held and barrier is not None and not run.stop and self._may_report(run, around):
            self._reach(run, barrier)
        elif run.stop or held or run.index == part.records or around.chance(0.3):
            self._commit(run, around)

    def _take(self, run: Run, part: Part, around: Around) -> None:
        """Read some records, up to the next barrier."""
        barrier = self._barrier(run, part)
        end = min(part.records if barrier is None else barrier.records, run.index + around.some(4))
        around.log.check_order(run.token, run.index, end)
        run.index = end

    def _barrier(self, run: Run, part: Part) -> Barrier | None:
        """The next barrier that the reader was not let past. One that an earlier reader was let past shows up again at the position."""
        return next((each for each in part.barriers if each.records >= run.index and each.mark > run.crossed), None)

    def _is_kept(self, run: Run, around: Around) -> bool:
        return run.kept == run.index == around.positions.committed.get(run.token, 0)

    def _may_report(self, run: Run, around: Around) -> bool:
        return self._is_kept(run, around)

    def _children(self, run: Run, around: Around) -> tuple[AnnouncedPartition, ...]:
        return around.stream.children(run.token)

    def _reach(self, run: Run, barrier: Barrier) -> None:
        if run.told < barrier.mark:
            run.told = barrier.mark
            self.mail.append(Reached(run.token, run.grant, barrier.mark, barrier.gives, barrier.takes))

    def _commit(self, run: Run, around: Around) -> None:
        if run.kept == run.index and run.index:
            return
        index, fence = run.index, run.fence
        assert fence is not None
        run.in_flight = True
        if around.breaks(0.25):
            self._over(run, BrokenOff(run.token, run.grant))
            around.later(lambda: around.positions.commit(run.token, fence, index))
            return

        def lands() -> None:
            run.in_flight = False
            if around.positions.commit(run.token, fence, index):
                run.kept = index
            else:
                run.refused = True
            around.log.check_watermark()

        around.call(self, lands)
