"""Explicit-state model checker: visits every state that a model can reach, breadth first, so that a counterexample is a shortest one."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=Hashable)


class Broken(Exception):
    """Raised by a model's step: a promise does not hold in the state that it leads to."""


class Result(NamedTuple):
    """`broken`: the promise that does not hold, if any; `trace`: the steps that lead there."""

    states: int
    depth: int
    seconds: float
    broken: str | None
    trace: list[str]


class Checker(Generic[S]):
    """`steps` yields each step that is possible in a state: what it does, and a function that returns the next state or raises Broken."""

    def __init__(self, steps: Callable[[S], Iterable[tuple[str, Callable[[], S]]]]) -> None:
        self._steps = steps

    def check(self, first: S, tell: Callable[[int, int], None] = lambda states, depth: None) -> Result:
        """Visit all states. `tell` is called at each depth with the number of states so far."""
        began = time.monotonic()
        came: dict[S, tuple[S, str] | None] = {first: None}
        level, depth = [first], 0
        while level:
            tell(len(came), depth)
            following: list[S] = []
            for state in level:
                for what, step in self._steps(state):
                    try:
                        reached = step()
                    except Broken as error:
                        return Result(len(came), depth, time.monotonic() - began, str(error), [*self._trace(came, state), what])
                    if reached not in came:
                        came[reached] = state, what
                        following.append(reached)
            level, depth = following, depth + 1
        return Result(len(came), depth, time.monotonic() - began, None, [])

    @staticmethod
    def _trace(came: dict[S, tuple[S, str] | None], state: S) -> list[str]:
        steps: list[str] = []
        while (before := came[state]) is not None:
            state, what = before
            steps.append(what)
        return steps[::-1]
