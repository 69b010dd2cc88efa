"""The stream reader against a real server, without Spark: what a driver finds again after it died at any point."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from sluiceway.kernel.clock import Millis, parse_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import source
from sluiceway.spark.columns import ItemColumns
from sluiceway.spark.offsets import HeldLease, Offset
from sluiceway.spark.options import sink_options, source_options
from sluiceway.spark.rows import SCHEMA
from sluiceway.spark.server_calls import Client
from sluiceway.spark.settle import BatchSettle
from sluiceway.spark.source import LeaseStreamReader, Task
from tests.spark.spark_world import Server, server, until

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


def test_only_the_wanted_columns_are_built(world: Server) -> None:
    queue = world.create("columns")
    world.produce(queue, ["a"])
    wanted = StructType([StructField("payload", BinaryType()), StructField("origin", StringType())])
    options = source_options({"url": world.url, "queue": queue, "consumer": "c"})
    driver = LeaseStreamReader(options, ItemColumns(wanted, SCHEMA))
    start = driver.initialOffset()
    end = driver.latestOffset(start, ALL)
    rows = [row for task in driver.partitions(start, end) for batch in driver.read(task) for row in batch.to_pylist()]
    assert rows == [{"payload": b"a", "origin": f"{Offset.parse(end).leases[0].lease_id.split('.')[0]}.0.0"}]
    driver.stop()


def test_a_query_that_ends_leaves_no_connection_open(world: Server) -> None:
    queue = world.create("ended")
    world.produce(queue, ["a"])
    driver = reader(world, queue)
    start = driver.initialOffset()
    driver.partitions(start, driver.latestOffset(start, ALL))
    clients = [each._client for each in (driver, driver._keeper) if each is not None]
    sockets = [each._socket for client in clients if client is not None for each in client._connections._links._all]
    assert len([each for each in sockets if each.fileno() >= 0]) == 2
    driver.stop()
    until("both are closed", lambda: all(each.fileno() < 0 for each in sockets))


def test_a_queue_that_is_away_does_not_cost_the_leases_of_others() -> None:
    """They would run out, though their servers are there, if a batch runs for longer than `holdFor` meanwhile."""
    asked: list[object] = []

    class Away:
        server_wait = "20s"

        def call(self, path: str, body: Mapping[str, object], patience: Millis | None = None) -> dict[str, Any]:
            asked.append(body["queue_name"])
            if body["queue_name"] == "a":
                raise SluicewayError("unavailable", "it is away")
            return {"ignored": []}

    options = source_options({"url": "http://127.0.0.1:1", "queue": "a,b", "consumer": "c"})
    leases = (HeldLease("aaaaaaaa.0.L1", 1, "a"), HeldLease("bbbbbbbb.0.L1", 1, "b"))
    with pytest.raises(SluicewayError, match="it is away"):
        source.extend(Away(), leases, options, 1_000)  # type: ignore[arg-type]
    assert asked == ["a", "b"]


def test_an_error_that_nobody_expects_does_not_end_the_extension(caplog: pytest.LogCaptureFixture) -> None:
    """Such as an answer that lacks a field, as a proxy may give one: all leases would run out, and nothing would say so."""

    def fails() -> dict[str, str]:
        raise KeyError("ignored")

    keeper = source.LeaseKeeper(source_options({"url": "http://127.0.0.1:1", "queue": "a", "consumer": "c"}))
    try:
        assert not keeper._try(fails)
    finally:
        keeper.stop()
    assert "will retry" in caplog.text


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
    monkeypatch.setattr("sluiceway.spark.admission.MAX_ITEMS_UNREAD", 10)
    queue = world.create("between")
    world.produce(queue, [str(n) for n in range(60)])
    start = Offset("nonce", 4).to_dict()
    reader(world, queue).latestOffset(start, ReadMaxRows(20))
    again = Offset.parse(reader(world, queue).latestOffset(start, ReadMaxRows(50)))
    assert sum(lease.count for lease in again.leases) == 50
    assert world.count(queue, "total_leased") == 50


Calls = list[tuple[str, Mapping[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of all clients: path and body."""
    made: Calls = []
    call = Client.call

    def note(self: Client, path: str, body: Mapping[str, object], patience: Millis | None = None) -> dict[str, Any]:
        made.append((path, body))
        return call(self, path, body, patience)

    monkeypatch.setattr(Client, "call", note)
    return made


def test_a_full_batch_in_mid_run_costs_the_driver_one_call(world: Server, calls: Calls) -> None:
    queue = world.create("one-call", partitions=1)
    world.produce(queue, ["a", "b", "c"])
    driver = reader(world, queue)
    start = driver.initialOffset()
    first = driver.latestOffset(start, ReadMaxRows(1))
    driver.partitions(start, first)
    calls.clear()
    second = driver.latestOffset(first, ReadMaxRows(1))
    driver.commit(first)
    assert texts(driver, first, second) == [["b"]]
    ((path, body),) = calls
    assert (path, body["complete"]) == ("/v1/queue.lease", {"lease_ids": Offset.parse(first).lease_ids})
    assert (world.count(queue, "completed"), world.count(queue, "total_leased")) == (1, 1)
    driver.stop()


def test_only_leases_that_were_taken_just_now_are_not_extended_before_they_are_read(
    world: Server, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: passed[0], sleep=time.sleep))
    queue = world.create("extended", partitions=1)
    world.produce(queue, [str(n) for n in range(10)])

    def extends(driver: LeaseStreamReader, start: dict[str, Any], end: dict[str, Any]) -> bool:
        calls.clear()
        driver.commit(start)
        driver.partitions(start, end)
        return "/v1/queue.extend" in [path for path, _ in calls]

    first = reader(world, queue, holdFor="30m")
    start = first.initialOffset()
    one = first.latestOffset(start, ReadMaxRows(1))
    assert extends(first, start, one), "its nonce was stored nowhere before"
    two = first.latestOffset(one, ReadMaxRows(1))
    assert not extends(first, one, two)
    three = first.latestOffset(two, ReadMaxRows(1))
    passed[0] = 601
    assert extends(first, two, three), "a third of holdFor is over"
    first.latestOffset(three, ReadMaxRows(1))
    # The driver dies. The next one finds what it had leased, some time ago.
    second = reader(world, queue, holdFor="30m")
    four = second.latestOffset(three, ReadMaxRows(1))
    assert extends(second, three, four)
    assert world.count(queue, "total_leased") == 1


def of_one_key(world: Server, name: str) -> str:
    """A queue with three items that are handled one after the other."""
    queue = world.create(name, partitions=1, order="key")
    world.call("/v1/queue.produce", queue_name=queue, items=[{"utf8": str(n), "key": "k"} for n in range(3)])
    return queue


def run_to_the_end(driver: LeaseStreamReader) -> list[list[list[str]]]:
    """What is read in each batch of an `availableNow` run."""
    driver.prepareForTriggerAvailableNow()
    at, found = driver.initialOffset(), []
    while (end := driver.latestOffset(at, ReadMaxRows(100))) != at:
        found.append(texts(driver, at, end))
        driver.commit(end)
        at = end
    driver.stop()
    return found


def test_what_a_closed_batch_has_made_way_for_is_in_the_next(world: Server) -> None:
    queue = of_one_key(world, "made-way")
    assert run_to_the_end(reader(world, queue)) == [[["0"]], [["1"]], [["2"]]]
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (3, 0)


def test_a_batch_is_closed_by_a_call_of_its_own_if_the_lease_does_not_say_that_it_is(
    world: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Client.call

    def unconfirmed(self: Client, path: str, body: Mapping[str, object], patience: Millis | None = None) -> dict[str, Any]:
        left = {name: value for name, value in body.items() if name != "complete"}
        return call(self, path, left, patience)

    monkeypatch.setattr(Client, "call", unconfirmed)
    queue = of_one_key(world, "unconfirmed")
    # The next item is blocked until then, so a run that gave up here would end too early.
    assert run_to_the_end(reader(world, queue)) == [[["0"]], [["1"]], [["2"]]]
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (3, 0)


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
        with pytest.raises(
            SluicewayError, match=rf"lease {lease_id} of this batch was closed by another client.*failOnLeaseLoss=false"
        ) as caught:
            attempt()
        assert caught.value.code == "lease_not_found"


def release(world: Server, queue: str, lease_id: str) -> None:
    """What happens to a lease that runs out, now."""
    world.call("/v1/queue.release", queue_name=queue, lease_ids=[lease_id])


def test_a_replay_goes_on_without_leases_that_are_gone_if_it_may(world: Server, caplog: pytest.LogCaptureFixture) -> None:
    queue = world.create("left-out")
    world.produce(queue, [str(n) for n in range(12)])
    world.produce(queue, [str(n) for n in range(12, 20)])
    first = reader(world, queue)
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    before = [text for task in texts(first, start, end) for text in task]
    lost, kept = Offset.parse(end).leases
    release(world, queue, lost.lease_id)
    second = reader(world, queue, failOnLeaseLoss="false")
    left = [text for task in texts(second, start, end) for text in task]
    assert left == before[lost.count :]
    assert len(left) == kept.count
    assert f"batch 0 is read without {lost.count} of its 20 items: 1 of its 2 leases are gone" in caplog.text
    assert lost.lease_id in caplog.text
    # What was left out is in a later batch, and nothing of it is lost.
    then = second.latestOffset(end, ALL)
    second.commit(end)
    assert world.count(queue, "completed") == kept.count
    assert sorted(text for task in texts(second, end, then) for text in task) == sorted(before[: lost.count])
    assert second.latestOffset(then, ALL) == then
    assert (world.count(queue, "completed"), world.count(queue, "total")) == (20, 0)


def run_out(world: Server, queue: str) -> None:
    until("the leases run out", lambda: world.count(queue, "leases") == 0)


def test_a_batch_that_spark_has_committed_is_not_silently_done_again(world: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Stopped after the commit, for longer than `holdFor`: what the batch has stated is lost with its leases, and its items come again."""
    queue = world.create("ran-out", partitions=1)
    world.produce(queue, [str(n) for n in range(12)])
    first = reader(world, queue, holdFor="1s")
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    assert len(texts(first, start, end)[0]) == 12
    ids = [
        item["id"] for item in world.call("/v1/queue.peek", queue_name=queue, lease_id=Offset.parse(end).lease_ids[0], limit=100)["items"]
    ]
    stated = [{"id": ids[0], "outcome": "dead"}, {"id": ids[1], "outcome": "retry"}]
    world.call("/v1/queue.settle", queue_name=queue, items=stated)
    first.stop()
    run_out(world, queue)
    (lease,) = Offset.parse(end).leases
    for _ in range(2):
        # It is refused until it is decided.
        with pytest.raises(SluicewayError) as refused:
            reader(world, queue).latestOffset(end, ALL)
        assert refused.value.code == "lease_not_found"
        for part in (
            f"batch 0 of consumer 'c' on {queue} is done, but 12 of its 12 items were not completed, because 1 of its 1 leases",
            f"lease {lease.lease_id} with 12 items ran out",
            "outcomes (retry, dead) that were stated for them have no effect",
            "failOnLeaseLoss=false",
            "holdFor",
        ):
            assert part in refused.value.detail
    assert (world.count(queue, "leases"), world.count(queue, "dead"), world.count(queue, "retried")) == (0, 0, 0)
    assert not caplog.records
    again = reader(world, queue, failOnLeaseLoss="false")
    then = again.latestOffset(end, ALL)
    assert "12 of its 12 items were not completed" in caplog.text
    assert "Nothing has been leased" not in caplog.text
    again.commit(end)
    rows = [row for task in again.partitions(end, then) for batch in again.read(task) for row in batch.to_pylist()]
    assert sorted(row["origin"] for row in rows) == sorted(ids)
    assert {row["attempts"] for row in rows} == {2}
    again.stop()


def test_what_is_left_of_a_committed_batch_is_closed_before_it_is_refused(world: Server) -> None:
    queue = world.create("partly")
    world.produce(queue, [str(n) for n in range(12)])
    world.produce(queue, [str(n) for n in range(12, 20)])
    first = reader(world, queue)
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    lost, kept = Offset.parse(end).leases
    release(world, queue, lost.lease_id)
    with pytest.raises(SluicewayError, match=rf"{lost.count} of its 20 items .*1 of its 2 leases.*{lost.lease_id} .* was released"):
        reader(world, queue).latestOffset(end, ALL)
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (kept.count, 0)


def test_a_committed_batch_of_a_queue_that_was_created_anew_is_refused(world: Server) -> None:
    queue = world.create("anew", partitions=1)
    world.produce(queue, ["a"])
    first = reader(world, queue)
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    (task,) = first.partitions(start, end)
    world.call("/v1/queues.delete", queue_name=queue, force=True)
    world.create(queue, partitions=1)
    with pytest.raises(SluicewayError, match=r"the queue was deleted and created again") as refused:
        reader(world, queue).latestOffset(end, ALL)
    assert refused.value.code == "lease_not_found"
    for attempt in (lambda: reader(world, queue).partitions(start, end), lambda: list(first.read(task))):
        with pytest.raises(SluicewayError, match=r"the queue was deleted and created again.*were deleted with the queue") as caught:
            attempt()
        assert "back in the queue" not in caught.value.detail
    first.stop()


def test_a_batch_of_this_run_that_ran_out_is_warned_about(world: Server, caplog: pytest.LogCaptureFixture) -> None:
    queue = world.create("warned", partitions=1)
    world.produce(queue, ["a"])
    driver = reader(world, queue)
    start = driver.initialOffset()
    end = driver.latestOffset(start, ALL)
    texts(driver, start, end)
    release(world, queue, Offset.parse(end).lease_ids[0])
    assert driver.latestOffset(end, ALL) != end
    assert "batch 0 of consumer 'c' on warned is done, but 1 of its 1 items were not completed" in caplog.text
    driver.stop()


def test_how_long_leases_are_held_by_default_is_what_the_queue_allows(world: Server) -> None:
    def held(queue: str, **options: str) -> float:
        world.produce(queue, ["a"])
        driver = reader(world, queue, **options)
        start = driver.initialOffset()
        end = driver.latestOffset(start, ALL)
        driver.partitions(start, end)
        key = f"{Offset.parse(end).nonce}/1/0"
        (lease,) = world.call("/v1/queue.lease", queue_name=queue, client_id="c", lease_key=key)["leases"]
        driver.stop()
        return (parse_time(lease["lease_deadline"], "") - time.time() * 1000) / 86_400_000

    assert 6.9 < held(world.create("week", partitions=1)) < 7.1
    short = world.create("short-leases", partitions=1, max_lease_timeout="2d", lease_timeout="1m")
    assert 1.9 < held(short) < 2.1
    with pytest.raises(SluicewayError, match="lease_timeout"):
        held(short, holdFor="7d")


def test_a_running_batch_goes_on_without_what_is_gone_if_it_may(world: Server, caplog: pytest.LogCaptureFixture) -> None:
    queue = world.create("left-out-later", partitions=1)
    world.produce(queue, ["a", "b", "c"])
    driver = reader(world, queue, failOnLeaseLoss="false")
    start = driver.initialOffset()
    end = driver.latestOffset(start, ALL)
    (task,) = driver.partitions(start, end)
    (lease_id,) = Offset.parse(end).lease_ids
    second = world.call("/v1/queue.peek", queue_name=queue, lease_id=lease_id)["items"][1]["id"]
    world.call("/v1/queue.complete", queue_name=queue, ids=[second])
    assert [row.as_py() for batch in driver.read(task) for row in batch.column("payload")] == [b"a", b"c"]
    assert "1 items are left out of their batch" in caplog.text
    release(world, queue, lease_id)
    assert list(driver.read(task)) == []
    assert "3 items are left out of their batch" in caplog.text
    assert reader(world, queue, failOnLeaseLoss="false").partitions(start, end) == []


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


def sized(world: Server, name: str, sizes: list[int], partitions: int = 1) -> str:
    """A queue with payloads of so many bytes."""
    queue = world.create(name, partitions=partitions)
    for start in range(0, len(sizes), 200):
        world.produce(queue, ["x" * size for size in sizes[start : start + 200]])
    return queue


def items(offset: dict[str, Any]) -> int:
    return sum(lease.count for lease in Offset.parse(offset).leases)


def test_a_batch_has_no_more_bytes_than_it_may(world: Server) -> None:
    queue = sized(world, "bytes", [1_000] * 300, partitions=2)
    driver = reader(world, queue, maxBytesPerTrigger="64k")
    first = driver.latestOffset(driver.initialOffset(), ReadMaxRows(1_000))
    assert 58 <= items(first) <= 65
    # Of both limits the one that is reached first.
    second = driver.latestOffset(first, ReadMaxRows(50))
    assert items(second) == 50
    assert items(driver.latestOffset(second, ALL)) == 300 - items(first) - 50


def test_each_queue_has_its_part_of_the_bytes(world: Server) -> None:
    queues = [sized(world, f"bytes-{n}", [1_000] * 60) for n in (1, 2)]
    driver = reader(world, ",".join(queues), maxBytesPerTrigger="40000")
    end = driver.latestOffset(driver.initialOffset(), ReadMaxRows(1_000))
    by_queue = [sum(lease.count for lease in Offset.parse(end).leases if lease.queue == queue) for queue in queues]
    assert all(18 <= count <= 20 for count in by_queue), by_queue


@pytest.mark.parametrize("size", [6_000, 50_000])
def test_an_item_that_leaves_no_room_for_another_is_alone_in_its_batch(world: Server, size: int) -> None:
    queue = sized(world, f"large-{size}", [size] * 3)
    driver = reader(world, queue, maxBytesPerTrigger="10k")
    at, found = driver.initialOffset(), []
    while (end := driver.latestOffset(at, ReadMaxRows(100))) != at:
        at = end
        found.append(items(end))
    assert found == [1, 1, 1]


def test_bytes_that_nobody_foresaw_end_the_batch(world: Server) -> None:
    """Small items come first, so the first call takes too many; what it took is looked at before there is a second."""
    queue = sized(world, "unforeseen", [100] * 40 + [2_000] * 900)
    driver = reader(world, queue, maxBytesPerTrigger="40000")
    first = driver.latestOffset(driver.initialOffset(), ReadMaxRows(5_000))
    assert items(first) == 400
    # From then on they are known.
    assert 18 <= items(driver.latestOffset(first, ReadMaxRows(5_000))) <= 20


def test_a_driver_that_died_finds_all_leases_of_a_batch_that_is_limited_by_bytes(world: Server) -> None:
    queue = sized(world, "bytes-found", [3_000] * 32 + [100] * 32 + [3_000] * 300, partitions=1)
    start = Offset("nonce", 4).to_dict()
    limit = {"maxBytesPerTrigger": "150000"}
    lost = reader(world, queue, **limit).latestOffset(start, ReadMaxRows(5_000))
    assert len(Offset.parse(lost).leases) > 1
    leased = world.count(queue, "total_leased")
    # What comes next is of another size now.
    assert reader(world, queue, **limit).latestOffset(start, ReadMaxRows(5_000)) == lost
    assert world.count(queue, "total_leased") == leased == items(lost)


def test_several_queues_make_one_batch(world: Server) -> None:
    one, other = world.create("several-1"), world.create("several-2", partitions=1)
    world.produce(one, [f"one {n}" for n in range(30)])
    world.produce(other, [f"other {n}" for n in range(30)])
    driver = reader(world, f"{one}, {other}")
    start = driver.initialOffset()
    end = driver.latestOffset(start, ReadMaxRows(20))
    tasks = driver.partitions(start, end)
    rows = [row for task in tasks for batch in driver.read(task) for row in batch.select(["queue", "payload"]).to_pylist()]
    assert sorted({(row["queue"], row["payload"].split()[0].decode()) for row in rows}) == [(one, "one"), (other, "other")]
    assert [sum(row["queue"] == queue for row in rows) for queue in (one, other)] == [10, 10]
    # Each has its part, also while the other has nothing; and what is closed is closed in both.
    world.call("/v1/queue.pause", queue_name=one, verbs=["lease"])
    assert items(driver.latestOffset(end, ReadMaxRows(20))) == 10
    assert [world.count(queue, "completed") for queue in (one, other)] == [10, 10]


def test_rows_of_several_queues_are_not_settled_in_one_of_them(world: Server) -> None:
    one, other = world.create("settled-1"), world.create("settled-2")
    world.produce(one, ["a"])
    world.produce(other, ["b"])
    driver = reader(world, f"{one},{other}")
    start = driver.initialOffset()
    (task,) = driver.partitions(start, driver.latestOffset(start, ALL))
    rows = pa.Table.from_batches(driver.read(task)).append_column("outcome", pa.array(["retry", "retry"]))
    kinds = {"id": StringType(), "queue": StringType(), "partition": IntegerType(), "offset": LongType(), "outcome": StringType()}

    def settle(rows: pa.Table, *names: str) -> None:
        schema = StructType([StructField(name, kinds[name]) for name in names])
        sink = BatchSettle(schema, sink_options({"url": world.url, "queue": one, "mode": "settle"}))
        sink.write(iter(rows.select(names).to_batches()))

    for names in (("id", "queue", "outcome"), ("partition", "offset", "queue", "outcome")):
        with pytest.raises(SluicewayError, match=f"a row of '{other}' cannot be settled in '{one}'"):
            settle(rows, *names)
    with pytest.raises(SluicewayError, match=rf"{rows['id'][1]} is not an item of the queue '{one}'"):
        settle(rows, "id", "outcome")
    settle(rows.slice(0, 1), "id", "queue", "outcome")


def test_a_driver_that_died_finds_its_leases_of_several_queues_whatever_has_come_since(world: Server) -> None:
    one, other = world.create("came-1"), world.create("came-2")
    world.produce(other, [str(n) for n in range(50)])
    start = Offset("nonce", 4).to_dict()
    lost = reader(world, f"{one},{other}").latestOffset(start, ReadMaxRows(40))
    world.produce(one, [str(n) for n in range(50)])
    found = reader(world, f"{one},{other}").latestOffset(start, ReadMaxRows(40))
    assert set(Offset.parse(lost).leases) < set(Offset.parse(found).leases)
    assert [world.count(queue, "total_leased") for queue in (one, other)] == [20, 20]


def test_only_a_trigger_that_has_nothing_waits_at_the_server(world: Server, calls: Calls) -> None:
    def waits() -> list[object]:
        made = [body["request_timeout"] for path, body in calls if path == "/v1/queue.lease"]
        calls.clear()
        return made

    one, other = world.create("waits-1"), world.create("waits-2")
    driver = reader(world, f"{one},{other}")
    start = driver.initialOffset()
    driver.latestOffset(start, ALL)
    assert waits() == ["250ms", "250ms"]
    world.produce(one, ["a"])
    driver.latestOffset(start, ALL)
    assert waits() == ["250ms", "0s", "0s"]
    driver.prepareForTriggerAvailableNow()
    driver.latestOffset(Offset("other").to_dict(), ALL)
    assert waits() == ["0s", "0s"]


def test_available_now_takes_of_each_queue_what_is_there(world: Server) -> None:
    one, other = world.create("quota-1"), world.create("quota-2")
    world.produce(one, [str(n) for n in range(30)])
    world.produce(other, [str(n) for n in range(5)])
    driver = reader(world, f"{one},{other}")
    driver.prepareForTriggerAvailableNow()
    at, sizes = driver.initialOffset(), []
    while (end := driver.latestOffset(at, ReadMaxRows(20))) != at:
        at = end
        sizes.append(items(end))
        world.produce(other, [f"more {n}" for n in range(10)])
    assert sizes == [15, 10, 10]
    assert [world.count(queue, "leases") for queue in (one, other)] == [0, 0]
    assert [world.count(queue, "ready") for queue in (one, other)] == [0, 30]


def test_a_checkpoint_of_one_queue_goes_on_with_several(world: Server) -> None:
    one, other = world.create("grown-1"), world.create("grown-2")
    world.produce(one, ["a"])
    first = reader(world, one)
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    world.produce(other, ["b"])
    second = reader(world, f"{one},{other}")
    assert texts(second, start, end) == [["a"]]
    then = second.latestOffset(end, ALL)
    assert world.count(one, "completed") == 1
    assert [lease.queue for lease in Offset.parse(then).leases] == [other]


def test_an_empty_range_has_no_tasks_and_a_skipped_batch_is_refused(world: Server) -> None:
    driver = reader(world, "unused")
    offset = Offset("n", 3).to_dict()
    assert driver.partitions(offset, offset) == []
    with pytest.raises(SluicewayError, match=r"batches 2 to 3 at once.*asynchronous progress"):
        driver.partitions(Offset("n", 1).to_dict(), offset)


def test_an_empty_first_batch_that_a_killed_driver_had_logged_is_read_again(world: Server) -> None:
    """Spark logs a batch when it begins, also with nothing in it; whoever starts again has another nonce."""
    logged = reader(world, "unused").initialOffset()
    again = reader(world, "unused")
    assert again.partitions(again.initialOffset(), logged) == []


def test_a_batch_that_runs_ahead_of_sparks_logs_is_refused(world: Server) -> None:
    queue = world.create("ahead")
    world.produce(queue, ["a"])
    driver = reader(world, queue)
    start = driver.initialOffset()
    first = driver.latestOffset(start, ALL)
    assert texts(driver, start, first) == [["a"]]
    world.produce(queue, ["b"])
    second = driver.latestOffset(first, ALL)
    with pytest.raises(SluicewayError, match=r"batch 1 is about to run.*batch 0.*leave out asyncProgressTrackingEnabled"):
        driver.partitions(first, second)
    # A replay is not told of, and what is told of is not refused.
    assert texts(reader(world, queue), first, second) == [["b"]]
    driver.commit(first)
    assert texts(driver, first, second) == [["b"]]


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


def put_back(world: Server, queue: str, end: dict[str, Any], every: int = 1) -> None:
    """Put back every so-many-th item of the batch, without delay."""
    for lease_id in Offset.parse(end).lease_ids:
        found = world.call("/v1/queue.peek", queue_name=queue, lease_id=lease_id, limit=1_000)["items"]
        world.call("/v1/queue.retry", queue_name=queue, items=[{"id": each["id"], "retry_after": "0s"} for each in found[::every]])


def test_available_now_serves_all_that_was_there_once_whatever_is_put_back(world: Server) -> None:
    """Put back at once, an item is at the tail of its partition, and other partitions have not been looked at yet."""
    queue = world.create("put-back", partitions=4)
    for n in range(10):
        world.produce(queue, [str(n * 100 + k) for k in range(100)])
    driver = reader(world, queue)
    driver.prepareForTriggerAvailableNow()
    at, served = driver.initialOffset(), Counter[str]()
    while (end := driver.latestOffset(at, ReadMaxRows(170))) != at:
        before, at = at, end
        served.update(text for task in texts(driver, before, end) for text in task)
        put_back(world, queue, end, every=2)
        driver.commit(end)
    driver.stop()
    assert len(served) == 1_000, "something that was there was not served"
    assert set(served.values()) == {1}, "something that was put back was served again"
    assert world.count(queue, "ready") == world.count(queue, "retried") > 400
    # It is for the next run.
    again = reader(world, queue)
    again.prepareForTriggerAvailableNow()
    assert items(again.latestOffset(at, ALL)) == world.count(queue, "retried")


def test_what_a_batch_that_is_run_again_puts_back_is_for_the_next_run(world: Server) -> None:
    queue = world.create("put-back-again", partitions=1)
    world.produce(queue, [str(n) for n in range(30)])
    first = reader(world, queue)
    start = first.initialOffset()
    end = first.latestOffset(start, ReadMaxRows(10))
    driver = reader(world, queue)
    driver.prepareForTriggerAvailableNow()
    assert texts(driver, start, end) == [[str(n) for n in range(10)]]
    put_back(world, queue, end)
    driver.commit(end)
    then = driver.latestOffset(end, ALL)
    assert texts(driver, end, then) == [[str(n) for n in range(10, 30)]]
    driver.commit(then)
    assert driver.latestOffset(then, ALL) == then
    driver.stop()
    first.stop()


def test_a_lease_up_to_an_offset_does_not_wait(world: Server) -> None:
    queue = world.create("bounded", partitions=1)
    with pytest.raises(SluicewayError, match="must be 0s with before_offsets") as refused:
        world.call("/v1/queue.lease", queue_name=queue, client_id="c", before_offsets={"0": 3}, request_timeout="1s")
    assert refused.value.field == "request_timeout"
    world.produce(queue, ["a", "b"])
    (counts,) = world.call("/v1/queue.stats", queue_name=queue)["logical_queues"][0]["partitions"]
    assert counts["next_offset"] == 2
    leased = world.call("/v1/queue.lease", queue_name=queue, client_id="c", batch_size=5, before_offsets={"0": 1})
    assert [lease["count"] for lease in leased["leases"]] == [1]
    assert not world.call("/v1/queue.lease", queue_name=queue, client_id="c", batch_size=5, before_offsets={"0": 1})["leases"]
    assert not world.call("/v1/queue.lease", queue_name=queue, client_id="c", batch_size=5, before_offsets={})["leases"]


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
