"""Scaling policy: the number of a queue's logical queues in `auto` mode: doubled soon after one is busy, halved after a quiet while."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluiceway.contract.queue_settings import LogicalQueues
from sluiceway.kernel.clock import Millis

REQUESTS = 1_500
"""Small requests per second of processor time of one instance, as measured."""
ITEMS = 2_500_000
"""Items of 100 B per second of processor time, as measured: a call with 1,000 takes about 0.65 ms, and 0.4 µs for each
(docs/explanation/performance.md).

These weigh requests against items, and one queue's work against another's. The actual capacity of an instance is measured at run time.
"""
SLOWEST = 10
"""Times. No machine is assumed to be slower than the measured one by more than this: a nearly idle queue does not make its instance busy,
even if it is the only one there."""


class Pace(NamedTuple):
    """Thresholds and delays for spreading and gathering a queue. Loads are in thousandths of one instance's capacity.

    `grow`: load at which a logical queue is busy, well below capacity, since an instance serves other queues, too, and asks peers.
    `shrink`: maximum combined load of the busiest two, half of `grow`, so that a merged one is far from busy. Conditions shorter than
    `grow_after` or `shrink_after` are ignored: spreading is urgent, gathering saves little, hence a minute. For `settle` after each change
    nothing is decided: `average`, the window over which loads are measured, must forget the previous layout.
    """

    grow: int = 600
    shrink: int = 300
    grow_after: Millis = 3_000
    shrink_after: Millis = 60_000
    settle: Millis = 15_000
    average: Millis = 10_000


PACE = Pace()


def wanted(logical_queues: LogicalQueues, at_first: int) -> int:
    """The initial number of instances for a queue with that setting; `at_first` if the cluster chooses."""
    assert logical_queues is not None, "it lies on all"
    return at_first if logical_queues == "auto" else logical_queues


class Average:
    """A moving average in thousandths, over `PACE.average`."""

    def __init__(self) -> None:
        self._average = PACE.average
        self._at: Millis | None = None
        self.value = 0.0

    def note(self, now: Millis, sample: float) -> int:
        """Add a sample that held since the last call, and return the average. The first call only starts the clock."""
        if self._at is not None and now > self._at:
            self.value += (sample - self.value) * -math.expm1((self._at - now) / self._average)
        self._at = now
        return round(self.value)


def load_of(work: int, all_work: int, busy: int, queued: int) -> int:
    """The load of a share, in thousandths of its instance's capacity.

    `busy`: fraction of time the instance's event loop had work, of which the share is charged the part that its `work` is of `all_work`.
    `queued`: fraction of time requests waited behind a commit in each of its partitions.
    """
    own = busy * work // max(1, work, all_work)
    return min(max(own, queued), SLOWEST * work)


class Meter:
    """The work of a share, in thousandths of the measured instance's capacity: a moving average over cumulative counts."""

    def __init__(self) -> None:
        self._average = Average()
        self._at: Millis | None = None
        self._requests = 0
        self._items: Mapping[int, int] = {}

    def note(self, now: Millis, requests: int, items: Mapping[int, int]) -> int:
        """Add the cumulative counts: requests, and items by partition. Items from before a partition came here do not count. Returns the
        average."""
        if self._at is not None and now > self._at:
            moved = sum(max(0, count - self._items[number]) for number, count in items.items() if number in self._items)
            seconds = (now - self._at) / 1_000
            self._average.note(now, 1_000 * ((requests - self._requests) / REQUESTS + moved / ITEMS) / seconds)
        elif self._at is None:
            self._average.note(now, 0)
        self._at, self._requests, self._items = now, requests, dict(items)
        return round(self._average.value)


class Spreader:
    """Decides for one queue. Call it about every second; conditions between two calls are not judged."""

    def __init__(self) -> None:
        self._pace = PACE
        self._count: int | None = None
        self._decide_at: Millis = 0
        self._busy_since: Millis | None = None
        self._calm_since: Millis | None = None

    def decide(self, now: Millis, count: int, most: int, loads: Sequence[int | None]) -> int | None:
        """Return the new number of logical queues, given `count` of `most` possible; None: no change.

        `loads` are those of the owners; None: unknown.
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
