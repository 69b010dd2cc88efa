"""How a queue's partitions are divided among backends."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.queue.backend_placement import interleave, place
from sluiceway.kernel.errors import SluicewayError

AFFINITIES = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(0, 1), min_size=1, max_size=6).filter(
    lambda affinities: any(affinities.values())
)
REQUESTED = st.integers(-2, 1_000)


@pytest.mark.parametrize(
    ("requested", "affinities", "counts"),
    [
        (4, {"a": 1.0, "b": 1.0}, {"a": 2, "b": 2}),
        (5, {"a": 1.0, "b": 1.0}, {"a": 3, "b": 2}),
        (10, {"a": 1.0, "b": 0.5}, {"a": 7, "b": 3}),
        (10, {"a": 1.0, "b": 0.0}, {"a": 10, "b": 0}),
        (3, {"a": 0.01}, {"a": 3}),
        (1, {"a": 0.4, "b": 0.6}, {"a": 0, "b": 1}),
        (0, {"a": 1.0}, {"a": 1}),
        (3, {"b": 1.0, "a": 1.0, "c": 1.0, "d": 1.0}, {"a": 1, "b": 1, "c": 1, "d": 0}),
    ],
)
def test_place(requested: int, affinities: dict[str, float], counts: dict[str, int]) -> None:
    assert place(requested, affinities) == counts


@given(REQUESTED, AFFINITIES)
def test_every_partition_has_a_place_and_every_backend_its_share(requested: int, affinities: dict[str, float]) -> None:
    counts = place(requested, affinities)
    wanted = max(1, requested)
    total = sum(map(Fraction, affinities.values()))
    assert sum(counts.values()) == wanted
    assert counts.keys() == affinities.keys()
    for name, affinity in affinities.items():
        share = wanted * Fraction(affinity) / total
        assert abs(counts[name] - share) < 1
        assert counts[name] == 0 or affinity > 0


@given(REQUESTED, AFFINITIES)
def test_who_is_worth_more_never_has_less(requested: int, affinities: dict[str, float]) -> None:
    counts = place(requested, affinities)
    by_affinity = sorted(affinities, key=lambda name: (affinities[name], counts[name]))
    assert [counts[name] for name in by_affinity] == sorted(counts.values())


@given(REQUESTED, AFFINITIES)
def test_the_order_of_the_backends_does_not_matter(requested: int, affinities: dict[str, float]) -> None:
    assert place(requested, affinities) == place(requested, dict(reversed(affinities.items())))


@pytest.mark.parametrize("affinities", [{}, {"a": 0.0}, {"a": 0.0, "b": 0.0}])
def test_without_any_affinity_there_is_no_place(affinities: dict[str, float]) -> None:
    with pytest.raises(SluicewayError, match="above 0"):
        place(3, affinities)


@pytest.mark.parametrize(
    ("counts", "order"),
    [
        ({"a": 2, "b": 2}, "abab"),
        ({"a": 3, "b": 1}, "aaba"),
        ({"a": 1, "b": 3}, "babb"),
        ({"a": 0, "b": 2}, "bb"),
        ({"b": 1, "a": 1}, "ab"),
    ],
)
def test_interleave(counts: dict[str, int], order: str) -> None:
    assert interleave(counts) == list(order)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 60), max_size=5))
def test_of_any_first_partitions_every_backend_has_its_share(counts: dict[str, int]) -> None:
    order = interleave(counts)
    assert {name: order.count(name) for name in counts} == counts
    for length in range(len(order)):
        for name, count in counts.items():
            # Each is within half a step of its own even spread; the others can shift it by half a step each.
            assert abs(order[:length].count(name) - Fraction(count * length, len(order))) <= max(1.0, len(counts) / 2)
