"""Trace check: whether the recorded history of a real partition is one of the orders of steps that `partition_fences` allows.

A history says what the owners asked of the store and heard from it, and what their clients were told and asked for. At which moment
between question and answer the store acted is not seen, nor whether it did where the answer was lost. So the check follows every
possibility, and a history is accepted if one is left at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from spec.checker import Broken
from spec.partition_fences import SETTLED, Change, Contents, Fence, FencedPartition, Place, Rules, State, first_state
from spec.rejected import Rejected


class Opening(NamedTuple):
    """Owner number `at` asks to open the partition."""

    at: int
    fence: Fence


class Opened(NamedTuple):
    """It has, and found these items, as of cycle `txn`."""

    at: int
    fence: Fence
    txn: int
    alive: Contents


class Sent(NamedTuple):
    """The owner sends a commit."""

    at: int
    fence: Fence
    txn: int
    changes: tuple[Change, ...]


class Heard(NamedTuple):
    """The outcome of the owner's commit under that fence. If it has opened the partition again meanwhile, it does not listen any more."""

    at: int
    fence: Fence
    outcome: Literal["done", "refused", "unknown"]


class Told(NamedTuple):
    """The owner, or one of them if `at` is None, has told a client that these items are stored (READY), settled, or the client's by that
    lease."""

    at: int | None
    items: tuple[int, ...]
    place: Place


class GaveUp(NamedTuple):
    """The client of that lease has asked to settle these items or to put them back."""

    items: tuple[int, ...]
    lease: int


class RanOut(NamedTuple):
    """The deadline of the lease has passed, by the clock of the owner that acts on it."""

    lease: int


Event = Opening | Opened | Sent | Heard | Told | GaveUp | RanOut


class Case(NamedTuple):
    """A state that the history may have led to, and the openings that may yet take effect."""

    state: State
    openings: frozenset[tuple[int, Fence]] = frozenset()


class TraceCheck:
    """Checks histories of one partition against the steps of the specification."""

    def __init__(self) -> None:
        self._partition = FencedPartition(Rules())

    def check(self, history: Sequence[Event]) -> Rejected[Event] | None:
        """Return None if the history is accepted."""
        owners = max((event.at for event in history if isinstance(event, Opening | Opened)), default=0) + 1
        cases = {Case(first_state(owners))}
        for at, event in enumerate(history):
            reasons: list[str] = []
            cases = {after for case in self._unseen(cases, reasons) for after in self._take(case, event, reasons)}
            if not cases:
                return Rejected(at, event, reasons[0] if reasons else "it is not possible here")
        return None

    def _unseen(self, cases: set[Case], reasons: list[str]) -> set[Case]:
        """These cases, and what becomes of them where the store acts unseen."""
        found, new = set(cases), list(cases)
        while new:
            case = new.pop()
            for after in self._acts(case, reasons):
                if after not in found:
                    found.add(after)
                    new.append(after)
        return found

    def _acts(self, case: Case, reasons: list[str]) -> Iterator[Case]:
        state, openings = case
        for cycle in state.net:
            if (landed := _tried(lambda cycle=cycle: self._partition.lands(state, cycle), reasons)) is not None:  # type: ignore[misc]
                yield Case(landed, openings)
        for at, fence in openings:
            opened = _tried(lambda at=at, fence=fence: self._partition.opens(state, at, fence), reasons)  # type: ignore[misc]
            if opened is not None:
                yield Case(opened, frozenset(each for each in openings if each[1] > fence))

    def _take(self, case: Case, event: Event, reasons: list[str]) -> Iterator[Case]:
        if isinstance(event, Opening):
            yield case._replace(openings=case.openings | {(event.at, event.fence)})
        elif (after := _tried(lambda: self._step(case.state, event), reasons)) is not None:
            yield case._replace(state=after)

    def _step(self, state: State, event: Event) -> State | None:
        partition = self._partition
        match event:
            case Opened():
                owner = state.owners[event.at]
                alive = frozenset((item, place) for item, place in owner.sure if place != SETTLED)
                is_so = (owner.phase, owner.fence, owner.txn, alive) == ("open", event.fence, event.txn, event.alive)
                return state if is_so else None
            case Sent():
                owner = state.owners[event.at]
                is_next = (event.fence, event.txn) == (owner.fence, owner.txn + 1)
                return partition.sends(state, event.at, event.changes) if is_next else None
            case Heard() if event.fence != state.owners[event.at].fence:
                return state
            case Heard(outcome="done"):
                return partition.is_done(state, event.at)
            case Heard(outcome="refused"):
                return partition.is_refused(state, event.at)
            case Heard():
                return partition.is_unknown(state, event.at)
            case Told():
                return self._tell(state, event)
            case GaveUp():
                for item in event.items:
                    state = partition.gives_up(state, item, event.lease)
                return state
            case RanOut():
                return partition.runs_out(state, event.lease)
        return None

    def _tell(self, state: State, event: Told) -> State | None:
        owners = range(len(state.owners)) if event.at is None else [event.at]
        told = (self._partition.tells(state, at, event.items, event.place) for at in owners)
        return next((after for after in told if after is not None), None)


def _tried(step: Callable[[], State | None], reasons: list[str]) -> State | None:
    """The state after the step; None if it is not possible, or breaks a promise, which is noted."""
    try:
        return step()
    except Broken as broken:
        reasons.append(str(broken))
        return None
