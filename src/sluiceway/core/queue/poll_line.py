"""Polls of other instances that wait at this one until a queue that they name has items here.

A poll that is told of items ends, and its instance fetches some. Telling all would cost a call for each of them, for items that one may
take. So some are told at first. Those that come back leave room for others, and one more, so that twice as many are told after each round
trip: an instance whose consumers need nothing any more delays others by no more than a few of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from sluiceway.kernel.clock import Millis

FEW = 10
"""Polls that are told at once. If no more wait, all are: in a small cluster no consumer waits for another instance's answer."""
RETELL: Millis = 100
"""Time after which an instance that was told and has not polled again leaves its room to others. It may be dead."""


@dataclass
class _Line:
    """The polls that wait for one queue."""

    waiting: dict[str, None] = field(default_factory=dict)
    """Names of the instances, longest wait first."""
    told: dict[str, Millis] = field(default_factory=dict)
    """When each instance that was told, and has not polled again, leaves its room to others."""
    room: int = 0

    def give_back(self, asker: str) -> None:
        if self.told.pop(asker, None) is not None:
            self.room += 1


class PollLine:
    """The waiting polls, by instance and queue. Hints only: what is lost here costs an instance the time of its poll."""

    def __init__(self) -> None:
        self._wanted: dict[str, tuple[str, ...]] = {}
        self._lines: dict[str, _Line] = {}
        self._told: dict[str, str] = {}
        """Of each instance that was told, and has not polled again: of which queue."""

    def join(self, asker: str, wanted: Iterable[str]) -> list[str]:
        """The instance `asker` polls for these queues (incarnations). Its earlier poll, if it has one here, is over.

        Returns the queues to call `tell` for: those, and the one of which it was told, as others may be told now.
        """
        self.leave(asker)
        told = self._told.pop(asker, None)
        line = None if told is None else self._lines.get(told)
        if line is not None:
            line.give_back(asker)
        self._wanted[asker] = tuple(dict.fromkeys(wanted))
        for incarnation in self._wanted[asker]:
            line = self._lines.get(incarnation)
            if line is None:
                line = self._lines[incarnation] = _Line()
            line.waiting[asker] = None
        return [*self._wanted[asker], *([told] if told is not None and told not in self._wanted[asker] else [])]

    def leave(self, asker: str) -> None:
        """The instance's poll is over."""
        for incarnation in self._wanted.pop(asker, ()):
            line = self._lines[incarnation]
            del line.waiting[asker]
            if not line.waiting:
                del self._lines[incarnation]

    def waits(self, incarnation: str) -> bool:
        """Whether a poll waits for items of that queue."""
        return incarnation in self._lines

    def tell(self, incarnation: str, ready: int, now: Millis) -> list[str]:
        """The instances whose polls end now, as the queue has so many ready items here. Their polls have left the line."""
        line = self._lines.get(incarnation)
        if line is None:
            return []
        if ready <= 0:
            line.told.clear()
            line.room = 0
            return []
        for asker in [asker for asker, until in line.told.items() if until <= now]:
            line.give_back(asker)
        line.room = max(line.room, FEW if len(line.waiting) <= FEW else min(FEW, ready))
        chosen = list(islice(line.waiting, max(0, line.room - len(line.told))))
        for asker in chosen:
            self.leave(asker)
            line.told[asker] = now + RETELL
            self._told[asker] = incarnation
        return chosen

    def next_look(self, incarnation: str) -> Millis | None:
        """When to call `tell` again if nothing changes; None: then it need not be."""
        line = self._lines.get(incarnation)
        return None if line is None else min(line.told.values(), default=None)
