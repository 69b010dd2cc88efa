"""The stream reader against a real server, without Spark: what a driver finds again after it died at any point."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from sluiceway.kernel.clock import Millis, parse_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import source
from sluiceway.spark.offsets import Offset
from sluiceway.spark.options import source_options
from sluiceway.spark.source import LeaseStreamReader, Task
from spark_world import Server, server, until

ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


def reader(world: Server, queue: str, **options: str) -> LeaseStreamReader:
    """A driver that has just started."""
    return LeaseStreamReader(source_options({"url": world.url, "queue": queue, "consumer": "c", "requestTimeout": "1m", **options}))


def texts(driver: LeaseStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[list[str]]:
    """What each task of the batch reads."""
    tasks = driver.partitions(start, end)
    assert all(isinstance(task, Task) for task in tasks)
    return [[row.as_py().decode() for batch in driver.read(task) for row in batch.column("payload")] for task in tasks]


def test_a_batch_is_leased_read_and_closed_by_the_next(world: Server) -> None:
    queue = world.create("closed")
    world.produce(queue, ["a", "b", "c"])
    driver = reader(world, queue)
    start = driver.initialOffset()
    end = driver.latestOffset(start, ALL)
    assert sorted(text for task in texts(driver, start, end) for text in task) == ["a", "b", "c"]
    assert world.count(queue, "completed") == 0
    assert driver.latestOffset(end, ALL) == end
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (3, 0)
    driver.stop()


def test_no_item_no_batch(world: Server) -> None:
    queue = world.create("empty")
    driver = reader(world, queue)
    start = driver.initialOffset()
    assert driver.latestOffset(start, ALL) is start
    world.produce(queue, ["late"])
    assert Offset.parse(driver.latestOffset(start, ALL)).sequence == 1


def test_a_driver_that_died_before_the_log_finds_its_leases_again(world: Server) -> None:
    queue = world.create("found")
    world.produce(queue, [str(n) for n in range(50)])
    first = reader(world, queue)
    start = first.latestOffset(first.initialOffset(), ReadMaxRows(20))
    lost = first.latestOffset(start, ReadMaxRows(20))
    assert reader(world, queue).latestOffset(start, ReadMaxRows(20)) == lost
    assert world.count(queue, "total_leased") == 20


def test_a_driver_that_died_between_its_calls_goes_on_where_it_stopped(world: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.spark.source.MAX_ITEMS_ARROW", 10)
    queue = world.create("between")
    world.produce(queue, [str(n) for n in range(60)])
    start = Offset("nonce", 4).to_dict()
    reader(world, queue).latestOffset(start, ReadMaxRows(20))
    again = Offset.parse(reader(world, queue).latestOffset(start, ReadMaxRows(50)))
    assert sum(lease.count for lease in again.leases) == 50
    assert world.count(queue, "total_leased") == 50


def test_two_checkpoints_of_one_consumer_do_not_take_each_others_leases(world: Server) -> None:
    queue = world.create("two")
    world.produce(queue, [str(n) for n in range(20)])
    one, two = reader(world, queue), reader(world, queue)
    ours = Offset.parse(one.latestOffset(one.initialOffset(), ReadMaxRows(10)))
    theirs = Offset.parse(two.latestOffset(two.initialOffset(), ReadMaxRows(10)))
    assert not set(ours.lease_ids) & set(theirs.lease_ids)


def test_closing_again_after_a_restart_is_harmless(world: Server) -> None:
    queue = world.create("again")
    world.produce(queue, ["a"])
    first = reader(world, queue)
    end = first.latestOffset(first.initialOffset(), ALL)
    assert first.latestOffset(end, ALL) == end
    assert reader(world, queue).latestOffset(end, ALL) == end
    assert world.count(queue, "completed") == 1


def test_a_replay_reads_the_same_rows_although_outcomes_are_staged(world: Server) -> None:
    queue = world.create("staged")
    world.produce(queue, [str(n) for n in range(10)])
    first = reader(world, queue)
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    seen = texts(first, start, end)
    items = world.call("/v1/queue.peek", queue_name=queue, lease_id=Offset.parse(end).lease_ids[0])["items"]
    outcomes = [{"id": item["id"], "outcome": "retry" if n % 2 else "done"} for n, item in enumerate(items)]
    world.call("/v1/queue.settle", queue_name=queue, items=outcomes)
    second = reader(world, queue)
    assert texts(second, second.initialOffset(), end) == seen
    assert second.latestOffset(end, ReadMaxRows(1)) != end
    assert world.count(queue, "retried") == len(items) // 2


def test_a_lease_that_is_gone_stops_the_replay_with_its_name(world: Server) -> None:
    queue = world.create("gone")
    world.produce(queue, ["a"])
    first = reader(world, queue)
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    task = first.partitions(start, end)[0]
    (lease_id,) = Offset.parse(end).lease_ids
    world.call("/v1/queue.complete", queue_name=queue, lease_ids=[lease_id])
    for attempt in (lambda: reader(world, queue).partitions(start, end), lambda: list(first.read(task))):
        with pytest.raises(SluicewayError, match=rf"lease {lease_id} of this batch is closed or expired.*new checkpoint") as caught:
            attempt()
        assert caught.value.code == "lease_not_found"


def test_items_that_something_else_settled_are_missed(world: Server) -> None:
    queue = world.create("short", partitions=1)
    world.produce(queue, ["a", "b", "c"])
    driver = reader(world, queue)
    start = driver.initialOffset()
    end = driver.latestOffset(start, ALL)
    second = world.call("/v1/queue.peek", queue_name=queue, lease_id=Offset.parse(end).lease_ids[0])["items"][1]["id"]
    world.call("/v1/queue.complete", queue_name=queue, ids=[second])
    with pytest.raises(SluicewayError, match="short of 1 items"):
        texts(driver, start, end)


def test_a_batch_is_cut_as_it_was_logged(world: Server) -> None:
    queue = world.create("cut", partitions=1)
    world.produce(queue, [str(n) for n in range(10)])
    first = reader(world, queue, minPartitions="3")
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    cut = texts(first, start, end)
    assert [len(task) for task in cut] == [3, 3, 3, 1]
    assert texts(reader(world, queue, minPartitions="1"), start, end) == cut


def test_an_empty_range_has_no_tasks_and_a_skipped_batch_is_refused(world: Server) -> None:
    driver = reader(world, "unused")
    offset = Offset("n", 3).to_dict()
    assert driver.partitions(offset, offset) == []
    with pytest.raises(SluicewayError, match=r"batches 2 to 3 at once.*asynchronous progress"):
        driver.partitions(Offset("n", 1).to_dict(), offset)


def test_available_now_takes_what_is_there_and_no_more(world: Server) -> None:
    queue = world.create("quota")
    world.produce(queue, [str(n) for n in range(30)])
    driver = reader(world, queue)
    driver.prepareForTriggerAvailableNow()
    at, sizes = driver.initialOffset(), []
    for _ in range(10):
        end = driver.latestOffset(at, ReadMaxRows(20))
        if end == at:
            break
        at = end
        sizes.append(sum(lease.count for lease in Offset.parse(end).leases))
        world.produce(queue, [f"more {n}" for n in range(40)])
    assert sizes == [20, 10]
    assert world.count(queue, "leases") == 0
    assert world.count(queue, "ready") == 80


def test_available_now_counts_what_is_ready_beside_leases_found_again(world: Server) -> None:
    queue = world.create("quota-found")
    world.produce(queue, [str(n) for n in range(30)])
    start = Offset("nonce", 4).to_dict()
    reader(world, queue).latestOffset(start, ReadMaxRows(20))
    driver = reader(world, queue)
    driver.prepareForTriggerAvailableNow()
    first = driver.latestOffset(start, ReadMaxRows(20))
    second = driver.latestOffset(first, ReadMaxRows(20))
    assert [sum(lease.count for lease in Offset.parse(end).leases) for end in (first, second)] == [20, 10]
    assert driver.latestOffset(second, ReadMaxRows(20)) == second


def test_the_first_batch_is_held_as_long_as_the_others_once_it_is_logged(world: Server) -> None:
    queue = world.create("held", partitions=1)
    world.produce(queue, ["a"])
    driver = reader(world, queue, holdFor="10d")
    start = driver.initialOffset()
    end = driver.latestOffset(start, ALL)
    lease_ids = Offset.parse(end).lease_ids
    taken = world.call("/v1/queue.lease", queue_name=queue, client_id="c", lease_key=f"{Offset.parse(end).nonce}/1/0")["leases"][0]
    driver.partitions(start, end)
    held = world.call("/v1/queue.lease", queue_name=queue, client_id="c", lease_key=f"{Offset.parse(end).nonce}/1/0")["leases"][0]
    assert [taken["lease_id"], held["lease_id"]] == lease_ids * 2
    assert held["lease_deadline"][:10] > taken["lease_deadline"][:10]
    driver.stop()


def test_a_running_batch_keeps_its_leases_beyond_their_timeout(world: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    class Hurried(threading.Event):
        """Notes how long it was to wait, and does not."""

        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0)
            return super().wait(0.01)

    monkeypatch.setattr(source, "threading", SimpleNamespace(Event=Hurried, Lock=threading.Lock, Thread=threading.Thread))
    queue = world.create("kept", partitions=1)
    world.produce(queue, ["a"])
    driver = reader(world, queue, holdFor="1h")
    start = driver.initialOffset()
    end = driver.latestOffset(start, ALL)
    driver.partitions(start, end)

    def deadline() -> Millis:
        key = f"{Offset.parse(end).nonce}/1/0"
        (lease,) = world.call("/v1/queue.lease", queue_name=queue, client_id="c", lease_key=key)["leases"]
        return parse_time(lease["lease_deadline"], "")

    first = deadline()
    until("the lease lives longer", lambda: deadline() > first)
    second = deadline()
    until("and longer", lambda: deadline() > second)
    assert set(pauses) == {20 * 60}
    assert texts(driver, start, end) == [["a"]]
    driver.stop()
