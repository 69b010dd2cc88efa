"""Histories of the simulator's captures, for the trace check: what members read of the log, say and do, and what takes effect.

The members are the code's state machines, watched at their edge; the log, the readers and the position store are the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from simulation.planting import Bug, planted
from simulation.task_world import TasksWorld
from simulation.tasks_checks import TruthLog
from simulation.tasks_stream import Fence, Positions
from sluiceway.core.group.task_member import (
    Append,
    BrokenOff,
    Effect,
    Ended,
    Event,
    Open,
    Read,
    Stopped,
    TaskMember,
)
from sluiceway.core.group.task_state import Record
from sluiceway.kernel.clock import Millis
from spec.task_trace import Arrived, Begins, Fenced, Kept, Knows, Reads, Rests, Said, TaskHistory
from spec.task_trace import Event as Noted

StepAll = Callable[[TaskMember, Iterable[Event], Millis], list[Effect]]


class TaskRecorder:
    """What happens in one group."""

    def __init__(self) -> None:
        self.events: list[Noted] = []
        self._known: dict[str, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the steps of all members in the block."""
        with planted(Bug("step", "", TaskMember, "step_all", self._stepping)):
            yield

    def _stepping(self, original: StepAll) -> StepAll:
        def step_all(member: TaskMember, events: Iterable[Event], now: Millis) -> list[Effect]:
            told = list(events)
            effects = original(member, told, now)
            self._note(member, told, effects)
            return effects

        return step_all

    def _note(self, member: TaskMember, told: list[Event], effects: list[Effect]) -> None:
        name, state = member.name, member.state
        if state.seq != self._known.get(name, 0):
            self._known[name] = state.seq
            self.events.append(Knows(name, state.seq, state))
        for event in told:
            if isinstance(event, Ended):
                self.events.append(Rests(name, event.token, event.grant, "ended"))
            elif isinstance(event, Stopped | BrokenOff):
                self.events.append(Rests(name, event.token, event.grant, "stopped"))
        for effect in effects:
            if isinstance(effect, Append):
                self.events.append(Said(name, effect.record))
            elif isinstance(effect, Open):
                self.events.append(Begins(name, *effect))
            elif isinstance(effect, Read):
                self.events.append(Reads(name, effect.token, effect.grant))


class _RecordedPositions(Positions):
    """A position store that notes what takes effect."""

    def __init__(self, note: Callable[[Noted], Any]) -> None:
        super().__init__()
        self._note = note

    def open(self, token: str, grant: int) -> Fence | None:
        fence = super().open(token, grant)
        if fence is not None:
            self._note(Fenced(token, grant))
        return fence

    def commit(self, token: str, fence: Fence, index: int) -> bool:
        is_done = super().commit(token, fence, index)
        if is_done:
            self._note(Kept(token, fence.grant, index))
        return is_done


class RecordedTasks(TasksWorld):
    """A simulated group that is recorded. Nobody but its members writes to the log."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.recorder = TaskRecorder()
        self.weather = replace(self.weather, whims=0)
        self.positions = _RecordedPositions(self.recorder.events.append)
        self.log = TruthLog(self.stream, self.positions)

    def _lands(self, author: str, record: Record) -> None:
        self.recorder.events.append(Arrived(record))
        super()._lands(author, record)

    def history(self) -> TaskHistory:
        """What was recorded so far."""
        parts = self.stream.parts
        return TaskHistory(
            {token: part.parents for token, part in parts.items()},
            {token: part.records for token, part in parts.items()},
            self.recorder.events,
        )


def task_histories(seed: int) -> dict[str, TaskHistory]:
    """Run the seed's history of a group, and return what was recorded. Raises what the history does."""
    world = RecordedTasks(seed)
    with world.recorder.recording():
        world.live()
    return {"tasks": world.history()}
