"""Walks through a specification, as steps with the states before and after: at random, and to where a rule that was left out is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple, TypeVar

from spec.checker import Broken, Checker

H = TypeVar("H")
Steps = Callable[[Any], Iterable[tuple[str, Callable[[], Any]]]]


class Taken(NamedTuple):
    """A step: what it does, and the states before and after it."""

    what: str
    before: Any
    after: Any


def walk(steps: Steps, state: Any, random: Random, most: int) -> Iterator[Taken]:
    """Take up to so many steps at random. Raises Broken."""
    for _ in range(most):
        possible = list(steps(state))
        if not possible:
            return
        what, step = random.choice(possible)
        before, state = state, step()
        yield Taken(what, before, state)


def counterexample(steps: Steps, unchecked: Steps, first: Any) -> list[Taken]:
    """A shortest way to a broken promise. `unchecked`: the same steps, which do not look at promises, for the last one."""
    trace = Checker[Any](steps).check(first).trace
    assert trace, "no promise is broken"
    paths: dict[Any, list[Taken]] = {first: []}
    # Several steps of a state may have the same words.
    for what in trace[:-1]:
        following: dict[Any, list[Taken]] = {}
        for state, path in paths.items():
            for after in _after(steps, state, what):
                following.setdefault(after, [*path, Taken(what, state, after)])
        paths = following
    for state, path in paths.items():
        for (what, step), (_, free) in zip(steps(state), unchecked(state), strict=True):
            if what == trace[-1] and _is_broken(step):
                return [*path, Taken(what, state, free())]
    raise AssertionError("the way is not found again")


def assert_rejected(name: str, mutate: Callable[[H], Iterable[H]], histories: Sequence[H], rejected: Callable[[H], bool]) -> None:
    """Check that all mutated histories are rejected, at most two of each history. At least four must have been tried."""
    random, tried, accepted = Random(name), 0, 0
    for history in histories:
        mutated = list(mutate(history))
        for changed in random.sample(mutated, min(2, len(mutated))):
            tried += 1
            accepted += not rejected(changed)
    assert tried >= 4
    assert not accepted, f"{accepted} of {tried}"


def _after(steps: Steps, state: Any, what: str) -> Iterator[Any]:
    for text, step in steps(state):
        if text == what and not _is_broken(step):
            yield step()


def _is_broken(step: Callable[[], Any]) -> bool:
    try:
        step()
    except Broken:
        return True
    return False
