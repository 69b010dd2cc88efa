"""Slopes, their intervals and the limits, on made-up figures."""

from __future__ import annotations

import random

import pytest

from tests.campaigns.soak.drift import HOUR, Limit, Point, judge, slope


def line(per_hour: float, count: int = 40, base: float = 100.0, noise: float = 0.0, seed: int = 1, start: float = 0.0) -> list[Point]:
    chance = random.Random(seed)
    return [Point(start + 5.0 * n, base + per_hour * 5.0 * n / HOUR + chance.gauss(0, noise)) for n in range(count)]


def test_a_line_has_its_slope_and_no_doubt() -> None:
    found = slope([line(60.0)])
    assert found is not None
    assert (found.per_hour, found.low, found.high) == pytest.approx((60.0, 60.0, 60.0))
    assert found.hours == pytest.approx(195 / HOUR)
    assert found.points == 40


def test_what_does_not_change_has_no_slope() -> None:
    found = slope([line(0.0)])
    assert found is not None
    assert (found.per_hour, found.low, found.high) == (0.0, 0.0, 0.0)


def test_a_few_points_that_a_fault_has_disturbed_do_not_move_it() -> None:
    points = line(60.0, noise=0.01)
    for number in (5, 6, 25, 26, 27):
        points[number] = points[number]._replace(value=5_000.0)
    found = slope([points])
    assert found is not None
    assert found.per_hour == pytest.approx(60.0, abs=5.0)


def test_a_process_that_is_started_again_begins_anew() -> None:
    """Each grows by the same, the second from where the first began; across both the figure falls."""
    found = slope([line(60.0, base=100.0), line(60.0, base=50.0, start=1_000.0)])
    assert found is not None
    assert found.per_hour == pytest.approx(60.0)


def test_the_interval_has_the_true_slope_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(200):
        found = slope([line(60.0, noise=1.0, seed=2 * seed), line(60.0, noise=1.0, seed=2 * seed + 1, start=1_000.0)])
        assert found is not None
        hits += found.low <= 60.0 <= found.high
    assert 182 <= hits <= 200


def wander(seed: int, count: int = 60) -> list[Point]:
    """A figure that does not grow, but of which each value is near the one before."""
    chance, value, found = random.Random(seed), 0.0, []
    for n in range(count):
        value = 0.8 * value + chance.gauss(0, 1.0)
        found.append(Point(5.0 * n, value))
    return found


def test_neighbours_that_are_alike_make_it_less_certain() -> None:
    hits = 0
    for seed in range(200):
        found = slope([wander(seed)])
        assert found is not None
        hits += found.low <= 0.0 <= found.high
    # As if they were independent, it would be some 110.
    assert hits >= 170


def test_too_few_points_are_not_judged() -> None:
    assert slope([line(60.0, count=7)]) is None
    assert judge([line(60.0, count=7)], Limit(0.0, 1.0)).verdict == "undecided"
    found = slope([line(60.0, count=7), line(10.0)])
    assert found is not None
    assert found.per_hour == pytest.approx(10.0)


@pytest.mark.parametrize(("per_hour", "verdict"), [(-500.0, "within"), (0.0, "within"), (90.0, "within"), (120.0, "over")])
def test_the_limit_is_what_may_grow_once_and_in_each_hour(per_hour: float, verdict: str) -> None:
    # 195 seconds: 5 once are 92 in an hour.
    found = judge([line(per_hour)], Limit(once=5.0, per_hour=10.0))
    assert found.allowed == pytest.approx(10.0 + 5.0 / (195 / HOUR))
    assert found.verdict == verdict


def test_a_longer_run_has_a_stricter_limit() -> None:
    limit = Limit(once=5.0, per_hour=10.0)
    assert limit.allowed(0.1, 0.0) == pytest.approx(60.0)
    assert limit.allowed(1.0, 0.0) == pytest.approx(15.0)


def test_a_relative_limit_is_a_share_of_the_level() -> None:
    limit = Limit(once=0.5, per_hour=0.1, relative=True)
    assert limit.allowed(1.0, 20.0) == pytest.approx(12.0)
    assert judge([line(100.0, base=1.0)], limit).verdict == "over"
    assert judge([line(100.0, base=1_000.0)], limit).verdict == "within"


def test_what_noise_hides_is_undecided() -> None:
    found = judge([line(100.0, noise=30.0, count=20)], Limit(0.0, 100.0))
    assert found.verdict == "undecided"
