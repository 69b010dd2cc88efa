"""Bug planting: replaces an attribute of the real code for the length of a block. Shipped code knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Change = Callable[[Any], Any]
"""Takes the original and returns its replacement."""


class Bug(NamedTuple):
    name: str
    what: str
    target: Any
    """The class or module whose attribute is replaced."""
    attribute: str
    change: Change


def shelf(bugs: list[Bug]) -> Callable[[Any, str], Callable[[Change], Change]]:
    """Return a decorator that appends a bug to `bugs`. The function's name becomes `Bug.name`, its docstring `Bug.what`."""

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
