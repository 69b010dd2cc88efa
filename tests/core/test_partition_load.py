"""What a partition costs its instance, by what it has done."""

from __future__ import annotations

import pytest

from sluiceway.core.queue.partition_load import AVERAGE, LEAST, Counts, PartitionMeter, Rates
from sluiceway.core.queue.scaling_policy import ITEMS, REQUESTS

SECOND = 1_000


def live(meter: PartitionMeter, seconds: int, per_second: dict[str, Counts], since: int = 0) -> None:
    for second in range(since, since + seconds + 1, 5):
        meter.note(second * SECOND, {name: Counts(*(each * second for each in rate)) for name, rate in per_second.items()})


def test_requests_items_and_bytes_weigh_what_they_cost() -> None:
    assert Rates(REQUESTS, 0, 0).load == pytest.approx(1_000_000)
    assert Rates(0, ITEMS, 0).load == pytest.approx(1_000_000)
    # Many small requests cost more than as many items at once, and large items more than small ones.
    assert Rates(1_000, 1_000, 100_000).load > 100 * Rates(1, 1_000, 100_000).load
    assert Rates(10, 10_000, 100_000_000).load > 5 * Rates(10, 10_000, 1_000_000).load


def test_a_steady_rate_is_known_after_the_second_sample() -> None:
    meter = PartitionMeter()
    live(meter, 5, {"a": Counts(150, 150, 15_000), "b": Counts(15, 15, 1_500)})
    assert meter.loads(10) == {"a": pytest.approx(100_090, rel=0.01), "b": pytest.approx(10_009, rel=0.01)}
    assert meter.total().items == pytest.approx(165)


def test_bursts_are_averaged() -> None:
    meter = PartitionMeter()
    live(meter, 60, {"a": Counts(0, 0, 0)})
    meter.note(65 * SECOND, {"a": Counts(REQUESTS * 5, 0, 0)})
    assert 0 < meter.loads(1)["a"] < 1_000_000 * 5 * SECOND / AVERAGE


def test_a_partition_that_comes_counts_from_then_on_and_one_that_goes_is_forgotten() -> None:
    meter = PartitionMeter()
    meter.note(0, {"a": Counts(0, 10**9, 0)})
    assert meter.loads(10) == {}
    meter.note(5 * SECOND, {"a": Counts(1_500, 10**9, 0), "b": Counts(0, 10**9, 0)})
    assert meter.loads(10).keys() == {"a"}
    meter.note(10 * SECOND, {"b": Counts(1_500, 10**9, 0)})
    assert meter.loads(10).keys() == {"b"}


def test_a_partition_that_is_opened_again_here_begins_anew() -> None:
    meter = PartitionMeter()
    live(meter, 10, {"a": Counts(150, 150, 0)})
    meter.note(15 * SECOND, {"a": Counts(0, 0, 0)})
    assert 0 < meter.loads(10)["a"] < 100_100


def test_only_the_busiest_are_told_and_none_that_does_next_to_nothing() -> None:
    meter = PartitionMeter()
    live(meter, 10, {f"p{n:02}": Counts(n, n, 0) for n in range(50)})
    assert meter.loads(3).keys() == {"p49", "p48", "p47"}
    assert "p00" not in meter.loads(50)
    assert min(meter.loads(50).values()) >= LEAST


def test_an_instance_without_partitions_has_no_load() -> None:
    meter = PartitionMeter()
    live(meter, 10, {})
    assert meter.loads(10) == {}
    assert meter.total() == Rates(0, 0, 0)
