"""How long consumers handle the items of a queue, as they say: counts by duration, since the start and of the last minutes."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from sluiceway.kernel.clock import Millis

BOUNDS: Final[tuple[Millis, ...]] = (
    *(1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700),
    *(1_000, 1_500, 2_000, 3_000, 5_000, 7_000, 10_000, 15_000, 20_000, 30_000, 60_000, 120_000, 300_000, 600_000, 1_800_000, 3_600_000),
)
"""Upper bounds of the buckets, mostly half as much again as the one before. One more bucket has what takes longer."""
MINUTES: Final = 5
"""Minutes that `recent` covers."""

Buckets = list[int]


class Durations:
    """Counts of durations by bucket, and their sum in milliseconds."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets: Buckets = [0] * (len(BOUNDS) + 1)
        self.total = 0

    def add(self, pairs: Iterable[tuple[Millis, int]]) -> None:
        """Count durations: pairs of milliseconds and number of items."""
        for millis, count in pairs:
            self.buckets[bisect_left(BOUNDS, millis)] += count
            self.total += millis * count


class HandlerTimes:
    """The durations of one queue's items that were completed, and of those that failed."""

    def __init__(self) -> None:
        self.done, self.failed = Durations(), Durations()
        self._minutes: deque[tuple[int, Durations]] = deque(maxlen=MINUTES)

    def note(self, pairs: Iterable[tuple[Millis, int]], now: Millis, *, is_done: bool) -> None:
        """Count durations: pairs of milliseconds and number of items."""
        pairs = list(pairs)
        (self.done if is_done else self.failed).add(pairs)
        minute = now // 60_000
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, Durations()))
        self._minutes[-1][1].add(pairs)

    def recent(self, now: Millis) -> Buckets:
        """The items of the last MINUTES minutes, by bucket, whatever their outcome."""
        since = now // 60_000 - MINUTES
        found = [each.buckets for minute, each in self._minutes if minute > since]
        return [sum(counts) for counts in zip(*found, strict=True)] if found else [0] * (len(BOUNDS) + 1)


def percentile(buckets: Buckets, share: float) -> Millis | None:
    """An upper bound of the duration of that share (0 to 1) of the items; None: there are none. The longest bucket has its lower bound."""
    total = sum(buckets)
    if not total:
        return None
    at = next(at for at, below in enumerate(accumulate(buckets)) if below >= max(1.0, share * total))
    return BOUNDS[min(at, len(BOUNDS) - 1)]
