"""Trace check of groups: whether a recorded history is one of the orders of steps that `group_rounds` or `group_claims` allows.

A history says what each member saw when it looked, what it served from then on and decided to commit, which commits landed, and when leases
were over. A member may serve less than it could, and a commit may be lost, which has no event. Everything else has to be a step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from spec import group_claims, group_rounds
from spec.checker import Broken
from spec.rejected import Rejected, first_rejected


class Looked(NamedTuple):
    """Member number `at` looks at the group as it was by `stamp`, and serves some items."""

    at: int
    stamp: int
    seen: Any
    serves: Any


class Decided(NamedTuple):
    """It decides on commit number `number` by what it has seen."""

    at: int
    number: int
    commit: Any


class Landed(NamedTuple):
    """That commit takes effect, with that stamp, and the group is like this; None: nobody has looked."""

    number: int
    stamp: int
    after: Any


class Changed(NamedTuple):
    """An operator has changed the group's items, or placed or removed some: it is like this."""

    stamp: int
    after: Any


class Defined(NamedTuple):
    """An operator has changed nothing but the group's items."""

    stamp: int
    items: tuple[str, ...]
    limits: tuple[tuple[str, int], ...]


class RanOut(NamedTuple):
    """The lease of that beat of the member is over, by its own clock."""

    at: int
    beat: int


Event = Looked | Decided | Landed | Changed | Defined | RanOut


class GroupHistory(NamedTuple):
    """The members by name, all items that the group ever had, those that it has at first, and the events."""

    names: tuple[str, ...]
    items: tuple[str, ...]
    first: tuple[str, ...]
    events: list[Event]


class GroupModel(Protocol):
    """What the two specifications have in common."""

    def looks(self, state: Any, at: int, seen: Any) -> Any: ...

    def serves_only(self, state: Any, at: int, serves: Any) -> Any | None: ...

    def sound(self, state: Any, at: int) -> Any: ...

    def decisions(self, state: Any, at: int, seen: Any, only: frozenset[int] | None = None) -> Iterable[Any]: ...

    def decides(self, state: Any, at: int, commit: Any) -> Any: ...

    def lands(self, state: Any, at: int, commit: Any) -> Any: ...

    def changes(self, state: Any, after: Any) -> Any | None: ...

    def runs_out(self, state: Any, at: int, beat: int) -> Any: ...


class GroupTraceCheck:
    """Checks one history against the steps of a specification."""

    def __init__(self, model: GroupModel, first: Any) -> None:
        self._model, self._state = model, first
        self._stores = [(0, first.store)]
        """The group as of each stamp with which a commit has landed."""
        self._seen: dict[int, Any] = {}
        """What each member has seen at its last look."""
        self._commits: dict[int, tuple[int, Any]] = {}
        """Those that may land yet, with their members."""

    def check(self, events: Sequence[Event]) -> Rejected[Event] | None:
        """Return None if the history is accepted. A check is for one history."""
        return first_rejected(events, self._take)

    def _take(self, event: Event) -> None:
        match event:
            case Looked():
                self._look(event)
            case Decided():
                self._decide(event)
            case Landed():
                if event.number not in self._commits:
                    raise Broken("no such commit is under way")
                before, self._state = self._state, self._model.lands(self._state, *self._commits.pop(event.number))
                if self._state.store == before.store:
                    raise Broken("what it checks has changed")
                if event.after is not None and self._state.store != event.after:
                    raise Broken(f"the group would be like this: {self._state.store}")
                self._stores.append((event.stamp, self._state.store))
            case Changed():
                changed = self._model.changes(self._state, event.after)
                if changed is None:
                    raise Broken("an operator does not change it like this")
                self._state = changed
                self._stores.append((event.stamp, self._state.store))
            case Defined():
                if isinstance(self._state, group_rounds.State):
                    after = self._state.store._replace(items=event.items, limits=event.limits)
                    self._state = self._state._replace(store=after)
                self._stores.append((event.stamp, self._state.store))
            case RanOut():
                self._state = self._model.runs_out(self._state, event.at, event.beat)

    def _look(self, event: Looked) -> None:
        store = next(store for stamp, store in reversed(self._stores) if stamp <= event.stamp)
        if store != event.seen:
            raise Broken(f"the group was like this: {store}")
        self._seen[event.at] = event.seen
        looking = self._model.looks(self._state, event.at, event.seen)
        serving = self._model.serves_only(looking, event.at, event.serves)
        if serving is None:
            raise Broken(f"it may serve no more than {looking.members[event.at].serves}")
        self._state = self._model.sound(serving, event.at)

    def _decide(self, event: Decided) -> None:
        seen, only = self._seen[event.at], given_up(event.commit)
        decisions = list(self._model.decisions(self._state, event.at, seen, only))
        # They are told in other words than the recorder's.
        commit = next((each for each in decisions if each[1:] == event.commit[1:]), None)
        if commit is None:
            raise Broken("it may decide on nothing but " + "; ".join(str(each) for each in decisions))
        self._commits[event.number] = event.at, commit
        decided = self._model.decides(self._state, event.at, commit)
        members = [*decided.members]
        # From here on the commit may land at any time, or never.
        members[event.at] = members[event.at]._replace(commit=None)
        self._state = decided._replace(members=tuple(members))


def given_up(commit: group_rounds.Commit | group_claims.Commit) -> frozenset[int]:
    """The members whose records the commit removes, apart from its own."""
    if isinstance(commit, group_rounds.Commit):
        return frozenset(at for at, _ in commit.given_up)
    return frozenset() if commit.other is None else frozenset({commit.other})


def check_rounds(history: GroupHistory) -> Rejected[Event] | None:
    """Check the history of a group that goes by rounds. Returns None if it is accepted."""
    count = len(history.names)
    rules = group_rounds.Rules(members=count, rounds=sys.maxsize, leavers=count)
    nothing = group_rounds.Store(NO_ROUND, NO_PLAN, (None,) * count, history.first)
    members = (group_rounds.Member(beats=0),) * count
    first = group_rounds.State(nothing, members, (0,) * count, highest=((0, -1),) * len(history.items))
    return GroupTraceCheck(group_rounds.RoundsModel(rules, history.names, history.items), first).check(history.events)


def check_claims(history: GroupHistory) -> Rejected[Event] | None:
    """Check the history of one item of a group that goes by claims. Returns None if it is accepted."""
    count = len(history.names)
    rules = group_claims.Rules(members=count, leavers=count)
    members = (group_claims.Member(beats=0),) * count
    first = group_claims.State(group_claims.Store(group_claims.Claim(), (None,) * count), members, (0,) * count)
    return GroupTraceCheck(group_claims.ClaimsModel(rules, history.names), first).check(history.events)


NO_ROUND = group_rounds.Open(0, True, ())
"""A group without any round yet."""
NO_PLAN = group_rounds.Division(0, ())
