"""What the clients of a queue were told of its items, in a byte for each: a run of hours has millions of them. Pure.

Items of a queue are numbered. A queue and its dead queue share a book, as an item keeps its number on its way there and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

STORED: Final = 1
"""Its produce was answered."""
REFUSED: Final = 2
"""It surely was not stored."""
SEEN: Final = 4
"""It was delivered."""
TRIED: Final = 8
"""A call that may have ended it was sent."""
DONE: Final = 16
"""It surely was completed."""

MAX_TOLD: Final = 20
"""Findings of a kind that are told one by one."""


class ItemBook:
    """Calls before a request say what may happen, calls after its answer what did."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.wrong: list[str] = []
        self._states = bytearray()
        self._untried = 0

    @property
    def items(self) -> int:
        return len(self._states)

    @property
    def outstanding(self) -> int:
        """Items that may be there, and that no call has tried to end."""
        return self._untried

    def new(self, count: int) -> range:
        """Numbers for items that are about to be sent."""
        first = len(self._states)
        self._states.extend(bytes(count))
        self._untried += count
        return range(first, first + count)

    def stored(self, numbers: Iterable[int]) -> None:
        self._mark(numbers, STORED)

    def refused(self, numbers: Sequence[int]) -> None:
        self._mark(numbers, REFUSED)
        self._untried -= len(numbers)

    def delivered(self, number: int | None, id: str) -> bool:
        """Whether the item is one of this book. None: its bytes were never sent."""
        if number is None or number >= len(self._states):
            self.wrong.append(f"invented: {id} of {self.queue} has bytes that were never sent")
            return False
        if self._states[number] & REFUSED:
            self.wrong.append(f"invented: {self.queue} {number} was refused, and is {id}")
        self._states[number] |= SEEN
        return True

    def trying(self, numbers: Iterable[int]) -> None:
        """A call that completes or drops these is about to be sent."""
        for number in numbers:
            if not self._states[number] & TRIED:
                self._states[number] |= TRIED
                self._untried -= 1

    def completed(self, numbers: Iterable[int]) -> None:
        """The server has counted these as completed by this call."""
        for number in numbers:
            if self._states[number] & DONE:
                self.wrong.append(f"doubled: {self.queue} {number} was completed twice")
            self._states[number] |= DONE

    def _mark(self, numbers: Iterable[int], state: int) -> None:
        for number in numbers:
            self._states[number] |= state

    # ---- judging --------------------------------------------------------------------------------------------------

    def close(self, counters: Mapping[str, Mapping[str, int]], keeps_counts: bool = True) -> list[str]:
        """All that is wrong, once the queue and its dead queue are empty. `counters`: what their partitions count, by queue; the first is
        the queue itself. `keeps_counts`: no rebalance has taken partitions with their counts away."""
        lost = [number for number, state in enumerate(self._states) if state & STORED and not state & TRIED]
        found = [*self.wrong[:MAX_TOLD], *(f"lost: {self.queue} {number} was stored, and is nowhere" for number in lost[:MAX_TOLD])]
        more = max(len(lost) - MAX_TOLD, 0) + max(len(self.wrong) - MAX_TOLD, 0)
        if more:
            found.append(f"and {more} more of {self.queue}")
        for queue, counts in counters.items():
            found += _imbalance(queue, counts)
        if keeps_counts:
            found += self._counted(counters)
        return found

    def _counted(self, counters: Mapping[str, Mapping[str, int]]) -> list[str]:
        """The server's counters against the book."""
        found = []
        completed = sum(each["completed"] for each in counters.values())
        sure = sum(bool(state & DONE) for state in self._states)
        most = sum(bool(state & (DONE | TRIED)) for state in self._states)
        if not sure <= completed <= most:
            found.append(f"books: {self.queue} counts {completed} as completed; the book has {sure} to {most}")
        # What dies is produced once more in the dead queue, and what is redriven where it came from.
        dies = counters[self.queue]["dead"] if len(counters) > 1 else 0
        again = dies + sum(each["redriven"] for each in counters.values())
        produced = sum(each["produced"] for each in counters.values())
        landed = sum(bool(state & (STORED | SEEN)) for state in self._states)
        if produced != landed + again:
            found.append(f"books: {self.queue} counts {produced} items; {landed} landed, and {again} died or were redriven")
        return found


def _imbalance(queue: str, counts: Mapping[str, int]) -> list[str]:
    came = counts["produced"] + counts["moved_in"]
    went = sum(counts[each] for each in ("completed", "dead", "cleared", "redriven", "moved", "total", "transferring"))
    return [] if came == went else [f"books: of {queue}, {came} came and {went} went or are there: {dict(counts)}"]
