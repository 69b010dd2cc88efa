"""How a source's leases are divided among read tasks."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway import testing
from sluiceway.client import CallError
from sluiceway.client.answers import Lease, Leased
from sluiceway.client.arrow import BrowsedTable
from tests.client.test_consumer import total
from tests.engines.engine_imports import engine

engine("ray")

from sluiceway.ray.address import Address  # noqa: E402 - not without ray
from sluiceway.ray.queue_sink import QueueSink  # noqa: E402
from sluiceway.ray.queue_source import QueueSource, Slice, tasks  # noqa: E402


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


class Failing:
    """A client whose first call leases, and whose second one fails."""

    def __init__(self, error: BaseException) -> None:
        self._error, self.calls = error, list[str]()

    def lease(self, queue_name: str, **options: object) -> Leased:
        self.calls.append("lease")
        if len(self.calls) > 1:
            raise self._error
        lease = Lease(lease_id="aaaaaaaa.0.L1", partition=0, count=3, lease_deadline=datetime(2026, 1, 1, tzinfo=UTC))
        return Leased(queue_name=queue_name, leases=[lease])

    def release(self, queue_name: str, *, lease_ids: list[str]) -> None:
        self.calls += ["release", *lease_ids]

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize(
    ("error", "after"),
    [(CallError("unavailable", "no partition answers"), ["close"]), (KeyboardInterrupt(), ["release", "aaaaaaaa.0.L1", "close"])],
)
def test_what_was_leased_before_a_failure_is_not_kept_for_good(
    error: BaseException, after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has the source then, and the thread that extends its leases would go on for as long as the driver lives."""
    client = Failing(error)
    monkeypatch.setattr(Address, "client", lambda *_: client)
    before = {*threading.enumerate()}
    with pytest.raises(type(error)):
        QueueSource("photos", lease_timeout="30d")
    for extender in {*threading.enumerate()} - before:
        extender.join(60)
        assert not extender.is_alive()
    assert client.calls == ["lease", "lease", *after]


@pytest.mark.parametrize("own_rows", [0, 1, 2])
def test_items_of_another_source_are_not_counted_for_those_without_an_outcome(
    served: testing.TestServer, queue: str, own_rows: int
) -> None:
    """As in the union of two datasets: an item that no row names must not be completed because there are rows enough, or just as many."""
    client = served.client
    client.produce(queue, [str(number) for number in range(6)])
    with QueueSource(queue, url=served.url, max_items=3) as source, QueueSource(queue, url=served.url, max_items=3) as other:
        (own,) = (client.peek_arrow(queue, lease_id).ids() for lease_id in source._leases)
        (others,) = (client.peek_arrow(queue, lease_id).ids() for lease_id in other._leases)
        source.settle([own.slice(0, own_rows).combine_chunks(), others.combine_chunks()])
        assert [total(client, queue, name) for name in ("completed", "ready", "total_leased")] == [own_rows, 3 - own_rows, 3]


def test_settling_goes_on_when_a_partition_has_got_another_owner(
    served: testing.TestServer, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot is gone then. The results are stored already, so a job that failed now would do all of them again."""
    client = served.client
    client.produce(queue, [str(number) for number in range(3)])
    with QueueSource(queue, url=served.url) as source:
        (own,) = (client.peek_arrow(queue, lease_id).ids() for lease_id in source._leases)
        browse, gone = source._client.browse_arrow, iter([True, True])

        def browse_arrow(*where: Any, **how: Any) -> BrowsedTable:
            if next(gone, False):
                raise CallError("snapshot_gone", "the partition was opened again")
            return browse(*where, **how)

        monkeypatch.setattr(source._client, "browse_arrow", browse_arrow)
        source.settle([own.slice(0, 2).combine_chunks()])
        assert [total(client, queue, name) for name in ("completed", "ready", "total_leased")] == [2, 1, 0]


def test_a_block_whose_rows_have_no_value_in_a_column_is_produced(served: testing.TestServer, queue: str) -> None:
    """As `map` makes blocks of a source's rows: the type of such a column is null, and the job could never end."""
    blocks = [pa.table({"payload": [b"a"], "kind": pa.nulls(1), "headers": pa.nulls(1)}), pa.table({"payload": [b"b"], "kind": ["k"]})]
    assert QueueSink(queue, url=served.url).write(blocks, SimpleNamespace(task_idx=0)) == 2
    found = served.client.lease(queue, batch_size=2, max_partitions=4).items
    assert {(item.payload, item.kind) for item in found} == {(b"a", None), (b"b", "k")}
