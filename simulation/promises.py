"""Errors of the checkers, and `check`."""

from __future__ import annotations


class BrokenPromiseError(Exception):
    """The history violates a guarantee."""


class InjectedMistakeError(Exception):
    """An injected fault in the middle of a cycle, like a bug in the code."""


def check(holds: bool, promise: str) -> None:
    """Raise BrokenPromiseError unless `holds`. Not `assert`, which `python -O` would silence."""
    if not holds:
        raise BrokenPromiseError(promise)
