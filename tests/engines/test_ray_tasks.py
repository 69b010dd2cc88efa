"""How a source's leases are divided among read tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.engine_imports import engine

engine("ray")

from sluiceway.ray.queue_source import Slice, tasks  # noqa: E402 - not without ray


@given(st.lists(st.integers(1, 25_000), max_size=12), st.integers(-1, 300))
def test_each_item_is_in_one_task_in_order(counts: list[int], parallelism: int) -> None:
    leases = {f"aaaaaaaa.{number}.L1": count for number, count in enumerate(counts)}
    made = tasks(leases, parallelism)
    at = dict.fromkeys(leases, 0)
    for lease_id, start, count in (each for slices in made for each in slices):
        assert (start, count > 0) == (at[lease_id], True)
        at[lease_id] += count
    assert at == leases
    sizes = [sum(each.length for each in slices) for slices in made]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all(0 < size <= 10_000 for size in sizes)
    total = sum(counts)
    assert len(made) == min(total, max(1, parallelism, -(-total // 10_000)))


@pytest.mark.parametrize(("parallelism", "sizes"), [(1, [7]), (3, [2, 2, 3]), (50, [1] * 7)])
def test_small_leases_share_a_task(parallelism: int, sizes: list[int]) -> None:
    made = tasks({"a.0.L1": 4, "a.1.L1": 3}, parallelism)
    assert [sum(each.length for each in slices) for slices in made] == sizes
    assert (made[0][0], made[-1][-1].lease_id) == (Slice("a.0.L1", 0, made[0][0].length), "a.1.L1")
