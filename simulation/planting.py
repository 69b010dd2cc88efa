"""Planting bugs: for the length of a block, something of the real code is replaced. Nothing that is shipped knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Change = Callable[[Any], Any]
"""From what stands there to what stands in its place."""


class Bug(NamedTuple):
    name: str
    what: str
    target: Any
    """A class or a module."""
    attribute: str
    change: Change


def shelf(bugs: list[Bug]) -> Callable[[Any, str], Callable[[Change], Change]]:
    """A decorator that puts bugs there: the function's name is the bug's, its docstring says what the bug does."""

    def at(target: Any, attribute: str) -> Callable[[Change], Change]:
        def put(change: Change) -> Change:
            bugs.append(Bug(change.__name__, change.__doc__ or "", target, attribute, change))
            return change

        return put

    return at


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    original = vars(bug.target)[bug.attribute]
    setattr(bug.target, bug.attribute, bug.change(original))
    try:
        yield
    finally:
        setattr(bug.target, bug.attribute, original)
