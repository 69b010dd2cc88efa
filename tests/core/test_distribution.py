"""Which partition takes a request, and how ready items are dealt: founding document A's examples and what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.partition.key_slots import slot
from sluiceway.core.queue.distribution import Candidate, deal
from sluiceway.model.requests import ProduceKey

WANTS = st.lists(st.integers(0, 30), max_size=12)


@pytest.mark.parametrize(
    ("available", "wants", "shares"),
    [
        (23, [20, 6, 1], [16, 6, 1]),
        (23, [1, 6, 20], [1, 6, 16]),
        (100, [20, 6, 1], [20, 6, 1]),
        (3, [20, 6, 1], [1, 1, 1]),
        (2, [20, 6, 1], [1, 1, 0]),
        (1, [1, 5], [1, 0]),
        (5, [2, 2, 2], [2, 2, 1]),
        (0, [3, 1], [0, 0]),
        (7, [], []),
        (7, [0, 9], [0, 7]),
    ],
)
def test_deal(available: int, wants: list[int], shares: list[int]) -> None:
    assert deal(available, wants) == shares


@given(st.integers(0, 200), WANTS)
def test_a_deal_is_what_dealing_one_by_one_gives(available: int, wants: list[int]) -> None:
    shares = [0] * len(wants)
    while available and shares != wants:
        for index, want in enumerate(wants):
            if available and shares[index] < want:
                shares[index] += 1
                available -= 1
    left = sum(shares) + available
    assert deal(left, wants) == shares


@given(st.integers(0, 200), WANTS)
def test_a_deal_gives_all_it_can_and_nobody_too_much_and_is_max_min_fair(available: int, wants: list[int]) -> None:
    shares = deal(available, wants)
    assert sum(shares) == min(available, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    hungry = [share for share, want in zip(shares, wants, strict=True) if share < want]
    # Whoever wants more has no less than anybody else, but for the odd item.
    assert not hungry or max(shares) - min(hungry) <= 1


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [([50, 30, 100], 1), ([20, 100, 100], 0), ([100, 100, 20], 2), ([7], 0)],
)
def test_a_produce_goes_to_the_partition_with_the_fewest_waiting_items(waiting: list[int], chosen: int) -> None:
    assert min(Candidate(count, 0, 0, number) for number, count in enumerate(waiting)).partition == chosen


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([Candidate(5, 9, 0, 0), Candidate(5, 2, 9, 1)], 1),  # fewest leased and scheduled
        ([Candidate(5, 2, 9, 0), Candidate(5, 2, 3, 1)], 1),  # least recently chosen
        ([Candidate(5, 2, 3, 1), Candidate(5, 2, 3, 0)], 0),  # number
        ([Candidate(4, 99, 99, 1), Candidate(5, 0, 0, 0)], 1),  # but what waits comes first
    ],
)
def test_ties(candidates: list[Candidate], chosen: int) -> None:
    assert min(candidates).partition == chosen


@given(st.text(min_size=1), st.integers(1, 50))
def test_a_key_has_one_home_and_a_group_has_one_for_all_its_keys(text: str, partitions: int) -> None:
    assert 0 <= slot(ProduceKey(text), partitions) < partitions
    assert slot(ProduceKey("a", text, 1), partitions) == slot(ProduceKey("b", text, 2), partitions)


def test_homes_do_not_depend_on_the_process() -> None:
    # On disk for good: a key whose home moved would be taken a second time.
    assert [slot(ProduceKey(f"key-{n}"), 4) for n in range(8)] == [0, 2, 0, 2, 1, 3, 1, 3]


def test_homes_are_spread() -> None:
    counts = [0] * 4
    for n in range(4_000):
        counts[slot(ProduceKey(f"order-{n * 7}"), 4)] += 1
    assert min(counts) > 800
