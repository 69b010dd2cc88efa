"""How long items are handled: counts by duration, and percentiles of the last minutes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.queue.handler_times import BOUNDS, HandlerTimes, percentile

MINUTE = 60_000


def test_done_and_failed_are_counted_apart_and_recent_has_both() -> None:
    times = HandlerTimes()
    times.note([(3, 2), (40, 1)], 0, is_done=True)
    times.note([(40, 5)], 0, is_done=False)
    assert (sum(times.done.buckets), times.done.total) == (3, 46)
    assert (sum(times.failed.buckets), times.failed.total) == (5, 200)
    assert sum(times.recent(0)) == 8


def test_recent_forgets_what_is_older_than_five_minutes() -> None:
    times = HandlerTimes()
    for minute in range(8):
        times.note([(1, 1)], minute * MINUTE, is_done=True)
    assert sum(times.recent(7 * MINUTE)) == 5
    assert sum(times.recent(9 * MINUTE)) == 3
    assert sum(times.recent(100 * MINUTE)) == 0
    assert sum(times.done.buckets) == 8


@given(st.lists(st.integers(0, 10_000_000), min_size=1, max_size=200), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_the_bound_of_its_bucket(durations: list[int], share: float) -> None:
    times = HandlerTimes()
    times.note([(each, 1) for each in durations], 0, is_done=True)
    found = percentile(times.recent(0), share)
    exact = sorted(durations)[max(0, -(-int(share * 1000) * len(durations) // 1000) - 1)]
    assert found is not None
    assert found >= min(exact, BOUNDS[-1])
    smaller = [bound for bound in BOUNDS if bound < found]
    assert not smaller or exact > smaller[-1]


def test_without_items_there_is_no_percentile() -> None:
    assert percentile(HandlerTimes().recent(0), 0.5) is None
