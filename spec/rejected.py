"""The verdict of a trace check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from spec.checker import Broken

E = TypeVar("E")


class Rejected(NamedTuple, Generic[E]):
    """The first event of a history that is no step of the specification: its index, and why."""

    at: int
    event: E
    why: str

    def __str__(self) -> str:
        return f"event {self.at}, {self.event}, is no step of the specification: {self.why}"


def first_rejected(history: Iterable[E], step: Callable[[E], None]) -> Rejected[E] | None:
    """Take one event after the other, until one raises Broken. Returns None if the history is accepted."""
    for at, event in enumerate(history):
        try:
            step(event)
        except Broken as error:
            return Rejected(at, event, str(error))
    return None
