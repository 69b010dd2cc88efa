"""How a broken promise is told."""

from __future__ import annotations


class BrokenPromiseError(Exception):
    """The history shows something that must never happen."""


class InjectedMistakeError(Exception):
    """Raised in the middle of a turn, as a mistake in the code would be."""


def check(holds: bool, promise: str) -> None:
    """Not `assert`: a checker must not fall silent under `python -O`."""
    if not holds:
        raise BrokenPromiseError(promise)
