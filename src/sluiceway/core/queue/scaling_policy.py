"""How many logical queues a queue has where the cluster chooses: twice as many soon after one is busy, half as many after a quiet while."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluiceway.contract.queue_settings import LogicalQueues
from sluiceway.kernel.clock import Millis

REQUESTS = 1_500
"""Small requests that one instance does in a second of processor time where this was measured, and ..."""
ITEMS = 2_500_000
"""... items of 100 B: a call with 1,000 of them takes about 0.65 ms, and 0.4 µs for each (docs/performance.md).

They weigh requests against items, and the work of one queue against that of another. What an instance can do here and now is measured.
"""
SLOWEST = 10
"""Times. No machine is taken to need more for the same work than the one where it was measured: a queue with next to nothing to do is not
what makes an instance busy, though it be the only one there."""


class Pace(NamedTuple):
    """When a queue is spread further and when it is gathered. Loads are in thousandths of what one instance can do.

    `grow` is what makes a logical queue busy: well below the whole, as an instance serves other queues, too, and asks peers. `shrink` is
    what two together may have to become one: half of that, so that the one is far from busy. What was seen for a moment
    (less than `grow_after`, `shrink_after`) counts for nothing. To spread is urgent, to gather saves a little: hence a minute.
    For `settle` after each change nothing is decided: `average`, over which loads are measured, has to forget how it was before.
    """

    grow: int = 600
    shrink: int = 300
    grow_after: Millis = 3_000
    shrink_after: Millis = 60_000
    settle: Millis = 15_000
    average: Millis = 10_000


PACE = Pace()


def wanted(logical_queues: LogicalQueues, at_first: int) -> int:
    """On how many instances a queue with that setting lies to begin with; `at_first` if the cluster chooses."""
    assert logical_queues is not None, "it lies on all"
    return at_first if logical_queues == "auto" else logical_queues


class Average:
    """A moving average of something in thousandths, over `PACE.average`."""

    def __init__(self) -> None:
        self._average = PACE.average
        self._at: Millis | None = None
        self.value = 0.0

    def note(self, now: Millis, sample: float) -> int:
        """It was so since the last time; the first time only begins."""
        if self._at is not None and now > self._at:
            self.value += (sample - self.value) * -math.expm1((self._at - now) / self._average)
        self._at = now
        return round(self.value)


def load_of(work: int, all_work: int, busy: int, queued: int) -> int:
    """How busy a share is, in thousandths of what its instance can do.

    `busy`: for so much of the time the instance's event loop had something to do; the share has that part of it which its `work` is of all
    that the instance did. `queued`: for so much of the time requests waited behind a commit in each of its partitions.
    """
    own = busy * work // max(1, work, all_work)
    return min(max(own, queued), SLOWEST * work)


class Meter:
    """What a share does, in thousandths of what one instance did where that was measured: a moving average, from what it had done at each
    moment at which it was asked."""

    def __init__(self) -> None:
        self._average = Average()
        self._at: Millis | None = None
        self._requests = 0
        self._items: Mapping[int, int] = {}

    def note(self, now: Millis, requests: int, items: Mapping[int, int]) -> int:
        """What it has done so far: requests, and items by partition. What a partition had done before it came here does not count."""
        if self._at is not None and now > self._at:
            moved = sum(max(0, count - self._items[number]) for number, count in items.items() if number in self._items)
            seconds = (now - self._at) / 1_000
            self._average.note(now, 1_000 * ((requests - self._requests) / REQUESTS + moved / ITEMS) / seconds)
        elif self._at is None:
            self._average.note(now, 0)
        self._at, self._requests, self._items = now, requests, dict(items)
        return round(self._average.value)


class Spreader:
    """Decides for one queue. Tell it about every second how things are; times between two of these are not judged."""

    def __init__(self) -> None:
        self._pace = PACE
        self._count: int | None = None
        self._decide_at: Millis = 0
        self._busy_since: Millis | None = None
        self._calm_since: Millis | None = None

    def decide(self, now: Millis, count: int, most: int, loads: Sequence[int | None]) -> int | None:
        """How many logical queues there should be, where there are `count`, and could be `most`; None: as many as there are.

        `loads` are those of the owners; None: not known.
        """
        if count != self._count:
            self._decide_at = 0 if self._count is None else now + self._pace.settle
            self._count = count
            self._busy_since = self._calm_since = None
        known = sorted((load for load in loads if load is not None), reverse=True)
        busy = count < most and known[:1] >= [self._pace.grow]
        calm = count > 1 and len(known) == len(loads) > 0 and sum(known[:2]) <= self._pace.shrink
        self._busy_since = _since(self._busy_since, now, busy)
        self._calm_since = _since(self._calm_since, now, calm)
        if now < self._decide_at:
            return None
        if self._busy_since is not None and now - self._busy_since >= self._pace.grow_after:
            return min(2 * count, most)
        if self._calm_since is not None and now - self._calm_since >= self._pace.shrink_after:
            return (count + 1) // 2
        return None


def _since(before: Millis | None, now: Millis, holds: bool) -> Millis | None:
    return (now if before is None else before) if holds else None
