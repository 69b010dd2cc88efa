"""Specification of the compatibility level (ADR 59): instances of two releases that join and leave, and operators that finalize an upgrade.

The decisions are those of the code (`core/group/levels.py`, `heartbeats.py`). Whoever has looked may sleep before its commit lands, for
good or until all else has changed. Promised: no member is there that does not understand the level, and the level never falls.

`python -m spec` checks it, and that each rule is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import msgspec

from sluiceway.core.group.group_records import GroupView, Keys, Level, MemberRecord, Resource, Writes
from sluiceway.core.group.heartbeats import Beating
from sluiceway.core.group.levels import admits, next_step, understood
from sluiceway.kernel.compatibility import Levels
from sluiceway.model.meta import Entry, View
from spec.checker import Broken

KEYS = Keys("g")
OLD, NEW = 1, 2
RELEASES = (Levels(OLD, OLD), Levels(OLD, NEW), Levels(OLD, OLD))
"""The releases of the processes: two earlier ones and a later one."""


@dataclass(frozen=True)
class Rules:
    """The bounds, and the rules, which can be left out one by one."""

    operators: int = 2
    stamps: int = 6
    """Changes of the level's record."""
    joins_check_the_level: bool = True
    announces: bool = True
    raises_check_the_level: bool = True
    waits_for_all: bool = True


class Shot(NamedTuple):
    """A commit that was decided, and the stamp of the level's record that it checks; None: it checks none."""

    level: Level | None
    stamp: int | None


class State(NamedTuple):
    level: Level = Level(level=OLD)
    stamp: int = 1
    members: frozenset[int] = frozenset()
    joining: tuple[Shot | None, ...] = (None,) * len(RELEASES)
    raising: tuple[Shot | None, ...] = ()


Step = tuple[str, Callable[[], State]]


class CompatibilityLevels:
    """The model under these rules."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def first(self) -> State:
        return State(raising=(None,) * self._rules.operators)

    def steps(self, state: State) -> Iterator[Step]:
        for number, release in enumerate(RELEASES):
            yield from self._of_process(state, number, release)
        for number in range(self._rules.operators):
            yield from self._of_operator(state, number)

    def _of_process(self, state: State, number: int, release: Levels) -> Iterator[Step]:
        name = f"process {number} ({release.newest})"
        if number in state.members:
            yield f"{name} leaves", lambda: state._replace(members=state.members - {number})
        elif (shot := state.joining[number]) is not None:
            yield f"{name} commits", lambda: self._joined(state, number, shot)
        elif admits(state.level, release):
            checks = _checked(state.level, state.stamp, release) if self._rules.joins_check_the_level else None
            yield f"{name} decides to join", lambda: state._replace(joining=_with(state.joining, number, Shot(None, checks)))

    def _joined(self, state: State, number: int, shot: Shot) -> State:
        after = state._replace(joining=_with(state.joining, number, None))
        if shot.stamp is not None and shot.stamp != state.stamp:
            return after
        return _sound(after._replace(members=state.members | {number}))

    def _of_operator(self, state: State, number: int) -> Iterator[Step]:
        shot = state.raising[number]
        if shot is not None:
            yield f"operator {number} commits {shot.level}", lambda: self._raised(state, number, shot)
        elif state.stamp < self._rules.stamps and (level := self._decided(state)) is not None:
            checks = state.stamp if self._rules.raises_check_the_level else None
            yield f"operator {number} decides on {level}", lambda: state._replace(raising=_with(state.raising, number, Shot(level, checks)))

    def _decided(self, state: State) -> Level | None:
        members = state.members if self._rules.waits_for_all else frozenset(each for each in state.members if RELEASES[each].newest == NEW)
        look = _look(state.level, state.stamp, members)
        target = understood(look, NEW)
        if not self._rules.announces and target > state.level.level:
            return Level(level=target)
        writes = next_step(look, KEYS, target)
        return None if writes is None else msgspec.json.decode(writes.puts[KEYS.level], type=Level)

    def _raised(self, state: State, number: int, shot: Shot) -> State:
        after = state._replace(raising=_with(state.raising, number, None))
        if shot.stamp is not None and shot.stamp != state.stamp:
            return after
        assert shot.level is not None, "an operator commits a level"
        if shot.level.level < state.level.level:
            raise Broken(f"the level falls from {state.level.level} to {shot.level.level}")
        return _sound(after._replace(level=shot.level, stamp=state.stamp + 1))


def _sound(state: State) -> State:
    for member in state.members:
        if RELEASES[member].newest < state.level.level:
            raise Broken(f"process {member}, which understands {RELEASES[member].newest}, is a member at level {state.level.level}")
    return state


def _with(shots: tuple[Shot | None, ...], number: int, shot: Shot | None) -> tuple[Shot | None, ...]:
    return (*shots[:number], shot, *shots[number + 1 :])


@cache
def _look(level: Level, stamp: int, members: frozenset[int]) -> GroupView:
    records = {f"m{each}": MemberRecord(beat=1, lease_timeout=1, levels=RELEASES[each]) for each in members}
    view = View(stamp, {KEYS.level: Entry(b"", stamp)})
    return GroupView(view, 0, None, None, None, records, frozenset(), {}, level=level)


@cache
def _checked(level: Level, stamp: int, release: Levels) -> int | None:
    """The stamp of the level's record that a member checks when it joins."""
    writes = Beating(KEYS, "joins", levels=release).beat(_look(level, stamp, frozenset()), Resource(items=()), Writes())
    return writes.checks.get(KEYS.level)


ABLATIONS = {
    "joins without a check of the level": Rules(joins_check_the_level=False),
    "raises without an announcement": Rules(announces=False),
    "raises without a check of the level": Rules(raises_check_the_level=False),
    "raises before all understand the level": Rules(waits_for_all=False),
}
