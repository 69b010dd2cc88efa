"""What a worker's processes have done, and its metrics."""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sluiceway.client.consumer_common import DeadItem, RetryItem

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of handler times, in seconds."""
OUTCOMES = ("done", "retry", "dead", "failed")
"""How a handler ended: it returned, raised `RetryItem` or `DeadItem`, or raised another exception. A handler of several items may return
other outcomes of some of them, which count for these."""


class Times(msgspec.Struct):
    """Handlers that ended in one way: their number by BUCKETS (the last: above), their total time in seconds, and their items."""

    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    seconds: float = 0.0
    items: int = 0


class Counts(msgspec.Struct):
    """Counts of one process since it started."""

    outcomes: dict[str, Times] = msgspec.field(default_factory=lambda: {name: Times() for name in OUTCOMES})
    running: int = 0
    """Items being handled now."""
    problem: str | None = None
    """Why it gets no items, if it cannot ask for any."""
    stopping: bool = False


def total(counts: Iterable[Counts]) -> Counts:
    """The sums of the counts of several processes."""
    result = Counts()
    for each in counts:
        for name, times in each.outcomes.items():
            into = result.outcomes[name]
            into.buckets = [mine + more for mine, more in zip(into.buckets, times.buckets, strict=True)]
            into.seconds += times.seconds
            into.items += times.items
        result.running += each.running
    return result


class Meter:
    """Counts handlers of all threads of a process."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._lock = threading.Lock()

    @contextmanager
    def handling(self, items: int) -> Iterator[Counter[str]]:
        """Count a handler of so many items, whose outcome is what the block raises. The block adds the items with another outcome to what
        it is given."""
        with self._lock:
            self.counts.running += items
        since = time.monotonic()
        outcome = "failed"
        others = Counter[str]()
        try:
            yield others
            outcome = "done"
        except RetryItem:
            outcome = "retry"
            raise
        except DeadItem:
            outcome = "dead"
            raise
        finally:
            took = time.monotonic() - since
            with self._lock:
                self.counts.running -= items
                times = self.counts.outcomes[outcome]
                times.buckets[bisect.bisect_left(BUCKETS, took)] += 1
                times.seconds += took
                times.items += max(0, items - others.total())
                for name, count in others.items():
                    self.counts.outcomes[name].items += count


def mapped_outcomes(returned: Mapping[object, object]) -> Counter[str]:
    """The items that a handler of several has given another outcome than done, by what it returned."""
    return Counter({name: sum(isinstance(each, kind) for each in returned.values()) for kind, name in _NAMED.items()})


_NAMED = {RetryItem: "retry", DeadItem: "dead"}


class WorkerMetrics(Collector):
    """Metrics of a worker: sums over its processes. `read` returns the counts of each, also of those that have ended."""

    def __init__(self, queue_name: str, read: Callable[[], Iterable[Counts]]) -> None:
        self._queue_name, self._read = queue_name, read

    def collect(self) -> Iterator[Metric]:
        counts = total(self._read())
        items = CounterMetricFamily("sluiceway_worker_items", "Items handled, by outcome", labels=("queue", "outcome"))
        times = HistogramMetricFamily("sluiceway_worker_handler_seconds", "Time of a handler, by outcome", labels=("queue", "outcome"))
        for outcome, measured in counts.outcomes.items():
            labels = (self._queue_name, outcome)
            items.add_metric(labels, measured.items)
            bounds = (*map(str, BUCKETS), "+Inf")
            times.add_metric(labels, list(zip(bounds, accumulate(measured.buckets), strict=True)), measured.seconds)
        yield items
        yield times
        running = GaugeMetricFamily("sluiceway_worker_items_running", "Items being handled", labels=("queue",))
        running.add_metric((self._queue_name,), counts.running)
        yield running
