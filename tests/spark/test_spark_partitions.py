"""A stream while its queue is rebalanced, and one that reads some partitions only. Against a real server, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import options
from sluiceway.spark.jobs import Place, redrive_job
from sluiceway.spark.offsets import Offset, Part
from sluiceway.spark.options import source_options
from sluiceway.spark.server_calls import Client
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


def rows(driver: LeaseStreamReader, start: dict[str, Any], end: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the tasks of a batch read, one after the other."""
    for task in driver.partitions(start, end):
        assert isinstance(task, Task)
        for batch in driver.read(task):
            yield from batch.to_pylist()


def filled(world: Server, name: str, partitions: int, items: int) -> str:
    """A queue with items in each of its partitions."""
    queue = world.create(name, partitions=partitions)
    for start in range(0, items, 10):
        world.produce(queue, [f"{n}" for n in range(start, start + 10)])
    until("all partitions have some", lambda: all(ready(world, queue).values()))
    return queue


def ready(world: Server, queue: str) -> dict[int, int]:
    stats = world.call("/v1/queue.stats", queue_name=queue)["logical_queues"]
    return {each["partition"]: each["ready"] for logical in stats for each in logical["partitions"]}


def rebalance(world: Server, queue: str, partitions: int, drain: str = "natural") -> str:
    """Begin one; returns its id once partitions are draining."""
    begun = world.call("/v1/queue.rebalance", queue_name=queue, requested_partitions=partitions, drain=drain)
    until("it has flipped", lambda: state(world, str(begun["id"]))["step"] in ("drain", "finish"))
    return str(begun["id"])


def state(world: Server, rebalance_id: str) -> dict[str, Any]:
    return world.call("/v1/rebalances.get", id=rebalance_id)


def is_done(world: Server, rebalance_id: str) -> bool:
    return bool(state(world, rebalance_id)["state"] == "done")


def draining(world: Server, queue: str) -> list[int]:
    found = world.call("/v1/queues.info", queue_name=queue)["partitions"]
    return [each["partition"] for each in found if each["state"] == "draining"]


@pytest.mark.parametrize("drain", ["natural", "copy"])
def test_a_batch_is_read_again_and_closed_although_its_partitions_are_drained(world: Server, drain: str) -> None:
    queue = filled(world, f"moved-{drain}", 4, 400)
    first = reader(world, queue)
    start = first.initialOffset()
    # So many that each partition has some of them leased: none can be removed before it is closed.
    end = first.latestOffset(start, ReadMaxRows(380))
    reading = rows(first, start, end)
    seen = [next(reading) for _ in range(10)]
    rebalance_id = rebalance(world, queue, 2, drain)
    assert len(draining(world, queue)) == 2
    seen += reading
    assert len(seen) == 380
    # A driver that was killed in mid-batch finds the same, where its items were leased.
    second = reader(world, queue)
    assert list(rows(second, start, end)) == seen
    at, all_rows = end, list(seen)
    while (then := second.latestOffset(at, ReadMaxRows(120))) != at:
        second.commit(at)
        all_rows += rows(second, at, then)
        at = then
    assert sorted(int(row["payload"]) for row in all_rows) == list(range(400))
    assert len({row["origin"] for row in all_rows}) == 400
    until("the rebalance is over", lambda: state(world, rebalance_id)["state"] == "done")
    assert sorted(ready(world, queue).values()) == [0, 0]
    assert (world.count(queue, "total"), world.count(queue, "leases")) == (0, 0)
    second.stop()


def test_a_redrive_looks_at_the_partitions_that_rebalances_have_left(world: Server) -> None:
    """Its preview, which each redrive begins with, asked for all numbers up to the highest, and failed for one that is gone."""
    queue = world.create("looked-at", partitions=2)
    for requested in (1, 2):
        begun = str(world.call("/v1/queue.rebalance", queue_name=queue, requested_partitions=requested)["id"])
        until("the rebalance is over", partial(is_done, world, begun))
    world.produce(queue, ["a"])
    client = Client(options.Server(world.url, queue, 60_000))
    there = redrive_job._partitions(client, queue)
    client.close()
    assert there == [0, 2]
    # Number 1 is as if it had been removed since.
    peek = redrive_job._Peek(Place(world.url, queue), [*there, 1])
    found = peek(iter([pa.record_batch({"id": [0, 1, 2]})]))
    assert [row["payload"] for batch in found for row in batch.to_pylist()] == [b"a"]


def test_queries_of_one_queue_share_it(world: Server) -> None:
    queue = filled(world, "shared", 3, 300)
    drivers = [reader(world, queue, consumer=f"query-{n}") for n in range(3)]
    at = [driver.initialOffset() for driver in drivers]
    read: list[list[str]] = [[], [], []]
    while world.count(queue, "ready"):
        for n, driver in enumerate(drivers):
            then = driver.latestOffset(at[n], ReadMaxRows(25))
            if then != at[n]:
                driver.commit(at[n])
                read[n] += [row["origin"] for row in rows(driver, at[n], then)]
                at[n] = then
    for n, driver in enumerate(drivers):
        assert driver.latestOffset(at[n], ALL) == at[n]
        driver.stop()
    assert all(read)
    assert len({origin for some in read for origin in some}) == sum(map(len, read)) == 300
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (300, 0)


def test_only_the_partitions_that_are_named_are_read_each_its_part(world: Server) -> None:
    queue = filled(world, "named", 4, 400)
    before = ready(world, queue)
    driver = reader(world, queue, partitions="1, 3")
    start = driver.initialOffset()
    end = driver.latestOffset(start, ReadMaxRows(20))
    found = list(rows(driver, start, end))
    assert [sum(row["partition"] == number for row in found) for number in (1, 3)] == [10, 10]
    # A driver that died finds them again, and no others.
    assert reader(world, queue, partitions="1,3")._lease(Offset.parse(start), ReadMaxRows(20)).keys() == {Part(queue, 1), Part(queue, 3)}
    assert world.count(queue, "total_leased") == len(found) == 20
    driver.prepareForTriggerAvailableNow()
    at = end
    while (then := driver.latestOffset(at, ReadMaxRows(50))) != at:
        at = then
        world.produce(queue, ["more"] * 40)
    left = ready(world, queue)
    assert sum(left.values()) > before[0] + before[2]
    assert world.count(queue, "completed") == before[1] + before[3]
    assert world.count(queue, "leases") == 0


def test_a_partition_that_the_queue_never_had_is_refused(world: Server) -> None:
    queue = world.create("never", partitions=2)
    with pytest.raises(SluicewayError, match=r"partitions: the queue never has no partition 77, 99; it has 0, 1") as refused:
        reader(world, queue, partitions="1,99,77").latestOffset(Offset("n").to_dict(), ALL)
    assert (refused.value.code, refused.value.field) == ("invalid_request", "partitions")


def test_what_drains_is_read_until_it_is_gone(world: Server, caplog: pytest.LogCaptureFixture) -> None:
    queue = filled(world, "drained", 3, 300)
    idle = reader(world, queue, partitions="draining")
    start = idle.initialOffset()
    assert idle.latestOffset(start, ALL) is start
    idle.prepareForTriggerAvailableNow()
    assert idle.latestOffset(start, ALL) is start
    there = ready(world, queue)
    rebalance_id = rebalance(world, queue, 1)
    gone = draining(world, queue)
    driver = reader(world, queue, partitions="draining", maxBytesPerTrigger="1k")
    driver.prepareForTriggerAvailableNow()
    at, read = driver.initialOffset(), list[dict[str, Any]]()
    while (then := driver.latestOffset(at, ReadMaxRows(150))) != at:
        if read:
            driver.commit(at)
        read += rows(driver, at, then)
        at = then
    assert {row["partition"] for row in read} == set(gone)
    assert len(read) == sum(there[number] for number in gone)
    until("the rebalance is over", lambda: state(world, rebalance_id)["state"] == "done")
    assert ready(world, queue) == {number: there[number] for number in there if number not in gone}
    assert driver.latestOffset(at, ALL) == at
    # Those that are named and gone are passed over, with a warning.
    again = reader(world, queue, partitions=",".join(map(str, gone)))
    assert again.latestOffset(start, ALL) is start
    assert again.latestOffset(start, ALL) is start
    assert caplog.text.count(f"a rebalance has removed partitions {', '.join(map(str, sorted(gone)))} of {queue}") == 1
    driver.stop()


@pytest.mark.parametrize("options", [{}, {"maxBytesPerTrigger": "1m"}])
def test_a_partition_that_goes_while_it_is_leased_from_gives_nothing(
    world: Server, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    queue = filled(world, f"going-{len(options)}", 2, 40)
    rebalance_id = rebalance(world, queue, 1)
    driver = reader(world, queue, partitions="draining", **options)
    at, parts = driver.initialOffset(), driver._parts()
    assert parts
    # It is emptied by the trigger that finds nothing more, and removed at any time from then on.
    while draining(world, queue):
        if (then := driver.latestOffset(at, ALL)) != at:
            driver.commit(at)
            assert list(rows(driver, at, then))
            at = then
    until("the rebalance is over", lambda: state(world, rebalance_id)["state"] == "done")
    monkeypatch.setattr(driver, "_parts", lambda: parts)
    assert driver.latestOffset(at, ALL) == at
    driver.stop()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partitions": ""}, "neither draining nor numbers"),
        ({"partitions": "1,1"}, "each once"),
        ({"partitions": "one"}, "neither draining nor numbers"),
        ({"partitions": "-1"}, "neither draining nor numbers"),
        ({"partitions": "1", "queue": "a,b"}, "those of one queue"),
    ],
)
def test_partitions_that_cannot_be_meant_are_told(options: dict[str, str], says: str) -> None:
    with pytest.raises(SluicewayError, match=says) as refused:
        source_options({"url": "http://localhost:1", "queue": "q", "consumer": "c", **options})
    assert refused.value.field == "partitions"
