"""How many logical queues a queue gets by its load: over histories of loads, without a clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.queue.scaling_policy import ITEMS, PACE, REQUESTS, SLOWEST, Average, Meter, Spreader, load_of, wanted

SECOND = 1_000
Load = Callable[[int], float]
"""What the whole queue takes at that second, in thousandths of what one instance can do."""


def live(load: Load, seconds: int, most: int, noise: float = 0.0, seed: int = 1) -> list[tuple[int, int]]:
    """When the number changed, and to what: each share has its part of the load, give or take, and more than it can do it does not."""
    rng = random.Random(seed)
    spreader, count, changes = Spreader(), 1, list[tuple[int, int]]()
    averages: list[float] = [0.0]
    for second in range(seconds):
        shares = [min(1_000.0, load(second) / count * (1 + rng.uniform(-noise, noise))) for _ in range(count)]
        averages = (averages + [0.0] * count)[:count]
        weight = -math.expm1(-SECOND / PACE.average)
        averages = [before + (now - before) * weight for before, now in zip(averages, shares, strict=True)]
        decided = spreader.decide(second * SECOND, count, most, [round(each) for each in averages])
        if decided is not None:
            assert decided != count
            assert 1 <= decided <= most
            count = decided
            changes.append((second, count))
    return changes


def counts(changes: Sequence[tuple[int, int]]) -> list[int]:
    return [count for _, count in changes]


def test_a_queue_with_little_to_do_stays_as_it_is() -> None:
    assert live(lambda _: 500, 3_600, 8) == []


def test_a_load_for_three_instances_gets_four_logical_queues_and_keeps_them() -> None:
    assert counts(live(lambda _: 2_000, 3_600, 8)) == [2, 4]


def test_never_more_than_there_can_be() -> None:
    assert counts(live(lambda _: 50_000, 600, 6)) == [2, 4, 6]
    assert live(lambda _: 50_000, 600, 1) == []


def test_when_the_load_ends_the_queue_is_gathered_step_by_step() -> None:
    changes = live(lambda second: 4_000 if second < 600 else 10, 1_800, 8)
    assert counts(changes) == [2, 4, 8, 4, 2, 1]
    downward = [second for second, count in changes[2:]]
    assert all(later - earlier >= PACE.shrink_after // SECOND for earlier, later in itertools.pairwise(downward))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("height", [100, 300, 550, 600, 700, 900, 1_200, 1_800, 2_400, 3_600])
def test_noise_makes_a_queue_grow_to_what_it_needs_and_never_shrink(height: int, seed: int) -> None:
    changes = live(lambda _: height, 3_600, 8, noise=0.3, seed=seed)
    assert counts(changes) == [2, 4, 8][: len(changes)]
    if changes:
        # None without need: before the last doubling one of them can have had as much as that.
        assert 1.3 * height / (counts(changes)[-1] // 2) >= PACE.grow


def test_a_slow_ramp_up_and_down_changes_once_at_each_height() -> None:
    up_and_down = live(lambda second: 4_000 * (1 - abs(second - 3_600) / 3_600), 7_200, 8, noise=0.1)
    assert counts(up_and_down) == [2, 4, 8, 4, 2, 1]


def test_bursts_of_a_second_change_nothing_and_bursts_of_a_minute_do_not_flap() -> None:
    assert live(lambda second: 3_000 if second % 20 == 0 else 0, 3_600, 8) == []
    often = live(lambda second: 3_000 if second % 120 < 60 else 0, 3_600, 8)
    assert counts(often) == sorted(counts(often))


def test_a_load_that_comes_every_five_minutes_costs_a_few_changes_each_time() -> None:
    changes = live(lambda second: 3_000 if second % 300 < 100 else 0, 3_000, 8)
    assert len(changes) <= 10 * 6


@given(st.lists(st.tuples(st.integers(1, 120), st.integers(0, 9_000)), min_size=1, max_size=20), st.integers(1, 9), st.integers(0, 99))
def test_the_rate_of_changes_is_bounded_whatever_the_load_does(steps: list[tuple[int, int]], most: int, seed: int) -> None:
    history = [height for length, height in steps for _ in range(length)]
    changes = live(lambda second: history[second], len(history), most, noise=0.5, seed=seed)
    for (earlier, before), (later, after) in itertools.pairwise(changes):
        assert later - earlier >= (PACE.settle if after > before else PACE.shrink_after) // SECOND
        assert after in (min(2 * before, most), (before + 1) // 2)


def run(machine: Spreader, start: int, seconds: int, count: int, most: int, loads: Sequence[int | None]) -> list[int]:
    found = (machine.decide((start + second) * SECOND, count, most, loads) for second in range(seconds))
    return [each for each in found if each is not None]


def test_an_owner_that_does_not_say_how_busy_it_is_keeps_the_queue_from_being_gathered() -> None:
    assert run(Spreader(), 0, 600, 4, 8, [0, 0, 0, None]) == []
    assert run(Spreader(), 0, 600, 4, 8, [])[:1] == []
    assert run(Spreader(), 0, 100, 4, 8, [0, 0, 0, 0])[:1] == [2]
    assert run(Spreader(), 0, 10, 4, 8, [900, None, None, None])[:1] == [8]


def test_what_others_have_changed_is_given_time_too() -> None:
    machine = Spreader()
    assert run(machine, 0, 3, 1, 8, [900]) == []
    # Somebody has just spread it: the old load says nothing.
    assert run(machine, 3, PACE.settle // SECOND, 2, 8, [900, 900]) == []
    assert run(machine, 3 + PACE.settle // SECOND, 1, 2, 8, [900, 900]) == [4]


def test_members_that_went_and_came_are_used_when_there_is_need() -> None:
    machine = Spreader()
    assert run(machine, 0, 100, 2, 2, [900, 900]) == []
    assert run(machine, 100, 10, 2, 3, [900, 900])[:1] == [3]


def test_two_that_together_are_too_much_for_one_stay_apart() -> None:
    assert run(Spreader(), 0, 600, 2, 8, [PACE.shrink // 2 + 1] * 2) == []
    assert run(Spreader(), 0, 600, 4, 8, [PACE.shrink, 1, 0, 0]) == []
    assert run(Spreader(), 0, 600, 4, 8, [PACE.shrink, 0, 0, 0])[:1] == [2]


# ---- measuring ----------------------------------------------------------------------------------------------------------


def metered(requests: int, items: int, seconds: int) -> int:
    """After so many seconds with so many in each."""
    meter = Meter()
    found = [meter.note(second * SECOND, second * requests, {0: 10**9 + second * items, 1: 7}) for second in range(seconds)]
    assert found == sorted(found)
    return found[-1]


def test_the_average_comes_to_what_is_done() -> None:
    assert metered(REQUESTS, 0, 100) == 1_000
    assert metered(REQUESTS // 2, ITEMS // 4, 100) == 750
    assert metered(0, 0, 100) == 0
    # About two thirds of it after the time of the average.
    assert 600 <= metered(REQUESTS, 0, 1 + PACE.average // SECOND) <= 660


def test_what_a_partition_had_done_before_it_came_does_not_count() -> None:
    meter = Meter()
    meter.note(0, 0, {0: 5})
    assert meter.note(SECOND, 0, {0: 5, 1: 10**12}) == 0
    assert meter.note(2 * SECOND, 0, {1: 10**12}) == 0
    assert meter.note(3 * SECOND, 0, {0: 10**12, 1: 10**12}) == 0


def test_the_same_moment_twice_changes_nothing() -> None:
    meter = Meter()
    meter.note(0, 0, {})
    before = meter.note(SECOND, 900, {})
    assert meter.note(SECOND, 900, {}) == before > 0


def test_what_was_idle_is_forgotten() -> None:
    meter = Meter()
    for second in range(60):
        meter.note(second * SECOND, second * REQUESTS, {})
    assert meter.note(120 * SECOND, 59 * REQUESTS, {}) <= 3


def test_the_documentation_has_these_numbers(repository: Path) -> None:
    text = (repository / "docs" / "guides" / "cluster.md").read_text()
    assert PACE.grow_after == 3_000
    assert f"was busy for three seconds, at {PACE.grow // 10} % of" in text
    assert PACE.shrink_after == 60_000
    assert f"stayed below {PACE.shrink // 10} % for a minute" in text
    assert f"averages over {PACE.average // SECOND} s" in text


def test_a_setting_is_a_number_to_begin_with() -> None:
    assert (wanted(3, 1), wanted("auto", 1), wanted("auto", 4)) == (3, 1, 4)


# ---- how busy an instance is --------------------------------------------------------------------------------------------


def test_a_queue_has_its_part_of_what_keeps_its_instance_busy() -> None:
    # 330 calls a second on a machine that can do no more: its constants would say 220.
    assert load_of(220, 220, 1_000, 0) == 1_000
    assert load_of(220, 440, 1_000, 0) == 500
    # A fast machine does as many with little.
    assert load_of(900, 900, 300, 0) == 300


def test_requests_that_wait_behind_commits_make_a_queue_busy() -> None:
    assert load_of(200, 200, 100, 900) == 900


def test_a_queue_with_next_to_nothing_to_do_is_not_what_keeps_an_instance_busy() -> None:
    assert load_of(0, 0, 1_000, 1_000) == 0
    assert load_of(3, 3, 1_000, 0) == 3 * SLOWEST < PACE.grow


def test_an_instance_that_is_busy_for_long_makes_its_queue_grow_and_for_a_moment_does_not() -> None:
    def growth(seconds: int) -> list[int]:
        average, machine = Average(), Spreader()
        decided = [
            machine.decide(second * SECOND, 1, 4, [load_of(220, 220, average.note(second * SECOND, 1_000 * (second < seconds)), 0)])
            for second in range(60)
        ]
        return [count for count in decided if count is not None]

    assert growth(5) == []
    assert growth(30)[:1] == [2]
