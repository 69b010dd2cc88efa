"""A query while the backend of some of its partitions is away, against a real server: what it goes on with, and what it makes up for."""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.datasource import ReadAllAvailable

from sluiceway.instance.service import Service
from sluiceway.model.backends import SqliteBackend
from sluiceway.spark import batch_leases, session, source
from sluiceway.spark.offsets import Offset
from sluiceway.spark.options import source_options
from sluiceway.spark.source import LeaseStreamReader, Task
from tests.instance.instance_rig import Store, down, fine
from tests.server.server_running import Running, eventually, running

ALL = ReadAllAvailable()
Batch = list[tuple[int, str]]
"""Partition and payload of each row."""


class Outage:
    """A server whose queue has two partitions on each of two backends, `a` and `b`."""

    def __init__(self, served: Running, stores: dict[str, Store]) -> None:
        self.served = served
        self._store = stores["b"]
        self.queue = served.queue(requested_partitions=4)
        info = served.ask("queues.info", queue_name=self.queue)
        self.on_b = {each["partition"] for each in info["partitions"] if each["backend"] == "b"}
        assert len(self.on_b) == 2
        self.produced: list[str] = []

    def fill(self, *numbers: int) -> None:
        """An item for each of these partitions."""
        for number in numbers:
            text = f"{len(self.produced)}"
            item = {"payload": base64.b64encode(text.encode()).decode()}
            self.served.ask("storage/items.import", queue_name=self.queue, partition=number, items=[item])
            self.produced.append(text)

    def begin(self) -> None:
        """The backend does not answer, and what its partitions hold must be read anew."""
        self._store.on_open = down
        answer = self.served.post("queue.reload", queue_name=self.queue, request_timeout="1s")
        assert answer.status_code == 503, answer.text
        eventually(lambda: self.closed() == self.on_b)

    def end(self) -> None:
        self._store.on_open = fine
        eventually(lambda: not self.closed())

    def closed(self) -> set[int]:
        stats = self.served.ask("queue.stats", queue_name=self.queue)["logical_queues"]
        return {each["partition"] for logical in stats for each in logical["partitions"] if each["next_offset"] is None}

    def reader(self, **options: str) -> LeaseStreamReader:
        """A driver that has just started."""
        given = {"url": self.served.url, "queue": self.queue, "consumer": "c", "requestTimeout": "1m"}
        return LeaseStreamReader(source_options({**given, **options}))


@contextmanager
def outage(data: Path) -> Iterator[Outage]:
    backends = {"a": SqliteBackend(), "b": SqliteBackend()}
    stores = {name: Store(data / name) for name in backends}
    with running(data, make=lambda path: Service(path, backends, open_store=lambda name, *_: stores[name])) as served:
        yield Outage(served, stores)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    for module in (batch_leases, source):
        monkeypatch.setattr(module, "PATIENCE", 100)
    with outage(tmp_path) as made:
        yield made


def rows(driver: LeaseStreamReader, start: dict[str, Any], end: dict[str, Any]) -> Batch:
    """What the tasks of the batch read."""
    tasks = driver.partitions(start, end)
    assert all(isinstance(task, Task) for task in tasks)
    batches = [batch for task in tasks for batch in driver.read(task)]
    return [(row["partition"], row["payload"].decode()) for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("options", [{}, {"partitions": "0,1,2,3"}, {"maxBytesPerTrigger": "1k"}], ids=["queue", "partitions", "bytes"])
def test_a_query_goes_on_beside_partitions_that_are_away_and_takes_them_up_again(world: Outage, options: dict[str, str]) -> None:
    world.fill(0, 1, 2, 3)
    first = world.reader(**options)
    at = first.initialOffset()
    end = first.latestOffset(at, ALL)
    read = rows(first, at, end)
    assert len(read) == 4
    at = first.latestOffset(end, ALL)
    assert at == end, "the batch is closed"
    world.fill(0, 1, 2, 3)
    world.begin()
    during = first.latestOffset(at, ALL)
    first.commit(at)
    seen = rows(first, at, during)
    assert {number for number, _ in seen} == {0, 1, 2, 3} - world.on_b
    assert Offset.parse(during).unanswered
    # A driver that was killed before it was logged plans the same, and one that was killed after it reads the same.
    second = world.reader(**options)
    assert Offset.parse(second.latestOffset(at, ALL)).leases == Offset.parse(during).leases
    third = world.reader(**options)
    assert rows(third, at, during) == seen
    read += seen
    world.fill(*({0, 1, 2, 3} - world.on_b))
    later = third.latestOffset(during, ALL)
    third.commit(during)
    read += rows(third, during, later)
    world.end()
    while (then := third.latestOffset(later, ALL)) != later:
        third.commit(later)
        read += rows(third, later, then)
        later = then
    assert Counter(text for _, text in read) == Counter(world.produced), "each item is in one batch"
    sums = world.served.totals(world.queue)
    assert (sums["completed"], sums["leases"], sums["total"]) == (len(world.produced), 0, 0)
    for driver in (first, second, third):
        driver.stop()


def test_a_batch_whose_partitions_are_away_when_it_is_closed_is_closed_later(world: Outage, caplog: pytest.LogCaptureFixture) -> None:
    world.fill(0, 1, 2, 3)
    first = world.reader()
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    assert len(rows(first, start, end)) == 4
    world.begin()
    world.fill(*({0, 1, 2, 3} - world.on_b))
    then = first.latestOffset(end, ALL)
    first.commit(end)
    left = {int(lease.lease_id.split(".")[1]) for lease in Offset.parse(then).unclosed}
    assert left == world.on_b
    assert "2 of its leases are closed when their partitions are back" in caplog.text
    assert len(rows(first, end, then)) == 2
    # The driver dies. Its successor closes what was left, once it can.
    second = world.reader()
    assert len(rows(second, end, then)) == 2
    assert second.latestOffset(then, ALL) == then
    world.end()
    assert second.latestOffset(then, ALL) == then
    sums = world.served.totals(world.queue)
    assert (sums["completed"], sums["leases"], sums["total"]) == (6, 0, 0)
    for driver in (first, second):
        driver.stop()


def test_leases_that_could_not_be_closed_are_kept_alive(world: Outage, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hurried(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return super().wait(0.01)

    own = SimpleNamespace(Event=Hurried, Lock=threading.Lock, Thread=threading.Thread)
    monkeypatch.setattr(source, "threading", own)
    world.fill(0, 1, 2, 3)
    driver = world.reader(holdFor="1h")
    start = driver.initialOffset()
    end = driver.latestOffset(start, ALL)
    rows(driver, start, end)
    world.begin()
    world.fill(*({0, 1, 2, 3} - world.on_b))
    then = driver.latestOffset(end, ALL)
    driver.commit(end)
    rows(driver, end, then)
    world.end()
    lease_ids = [lease.lease_id for lease in Offset.parse(then).unclosed]

    def deadlines() -> dict[str, str]:
        """Of the leases of the first batch, found again by its key."""
        found = world.served.lease(world.queue, lease_key=f"{Offset.parse(end).nonce}/1/0", before_offsets={})["leases"]
        return {each["lease_id"]: each["lease_deadline"] for each in found}

    before = deadlines()
    assert sorted(before) == sorted(lease_ids)
    eventually(lambda: all(deadlines()[lease_id] > before[lease_id] for lease_id in lease_ids))
    driver.stop()


@pytest.mark.spark
def test_a_streaming_query_outlives_an_outage(tmp_path: Path) -> None:
    spark = session("outages")
    seen: list[list[str]] = []

    def work(batch: DataFrame, _: int) -> None:
        seen.append([row[0] for row in batch.selectExpr("cast(payload as string)").collect()])

    with outage(tmp_path / "data") as world:
        options = {"url": world.served.url, "queue": world.queue, "consumer": "c", "requestTimeout": "5s"}
        stream = spark.readStream.format("sluiceway").options(**options).load()
        query = stream.writeStream.foreachBatch(work).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            world.fill(0, 1, 2, 3)
            eventually(lambda: world.served.totals(world.queue)["completed"] == 4)
            world.begin()
            open_ones = {0, 1, 2, 3} - world.on_b
            for number in range(1, 4):
                world.fill(*open_ones)
                until = 4 + 2 * number
                eventually(lambda until=until: sum(map(len, seen)) == until)  # type: ignore[misc]
            progress = query.lastProgress
            assert progress is not None
            assert "unanswered" in json.loads(progress.sources[0].endOffset)
            world.end()
            world.fill(*world.on_b)
            eventually(lambda: world.served.totals(world.queue)["total"] == 0)
            assert query.isActive
        finally:
            query.stop()
        assert sorted(text for batch in seen for text in batch) == sorted(world.produced)
        assert world.served.totals(world.queue)["leases"] == 0
