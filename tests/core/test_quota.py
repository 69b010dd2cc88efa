from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.queue.token_bucket import Bucket

NOW = 1_700_000_000_000
rates = st.integers(1, 1 << 40)
steps = st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 1 << 33)), max_size=50)


@given(rates, steps)
def test_in_any_span_no_more_goes_out_than_the_rate_allows(rate: int, steps: list[tuple[int, int]]) -> None:
    bucket, now = Bucket(rate, NOW), NOW
    taken: list[tuple[int, int]] = []
    for elapsed, tokens in steps:
        now += elapsed
        if not bucket.wait(rate, now):
            bucket.take(tokens)
            taken.append((now, tokens))
    for first, (begin, _) in enumerate(taken):
        for last in range(first, len(taken)):
            # The last one may overdraw; those before it were paid for.
            out = sum(tokens for _, tokens in taken[first:last])
            assert out * 1_000 <= rate * (taken[last][0] - begin + 1_000)


@given(rates, steps)
def test_after_the_wait_that_it_names_and_not_before_it_gives(rate: int, steps: list[tuple[int, int]]) -> None:
    bucket, now = Bucket(rate, NOW), NOW
    for elapsed, tokens in steps:
        now += elapsed
        wait = bucket.wait(rate, now)
        if wait:
            assert bucket.wait(rate, now + wait - 1) == 1
            now += wait
        assert bucket.wait(rate, now) == 0
        bucket.take(tokens)


def test_a_second_without_use_is_the_most_that_is_saved_up() -> None:
    bucket = Bucket(3, NOW)
    later = NOW + 3_600_000
    for _ in range(3):
        assert bucket.wait(3, later) == 0
        bucket.take(1)
    assert bucket.wait(3, later) > 0


def test_another_rate_counts_from_now_on() -> None:
    bucket = Bucket(1, NOW)
    bucket.wait(1, NOW)
    bucket.take(11)
    assert bucket.wait(1, NOW) == 10_001
    assert bucket.wait(1_000, NOW) == 11


def test_a_clock_that_stands_still_gives_nothing() -> None:
    bucket = Bucket(1, NOW)
    bucket.take(1)
    assert all(bucket.wait(1, NOW - back) > 0 for back in (0, 5_000, 0))
