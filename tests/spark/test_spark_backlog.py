"""The backlog of a query's queues, as the query's progress has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from sluiceway.spark import backlog
from sluiceway.spark.backlog import Backlog, of_queue
from sluiceway.spark.options import source_options
from sluiceway.spark.source import LeaseStreamReader
from tests.spark.spark_world import Server, server, until


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


def test_the_backlog_is_that_of_all_partitions() -> None:
    partitions = [{"ready": 3, "total_leased": 1, "scheduled": 2}, {"ready": 4, "total_leased": 0, "scheduled": 0}]
    stats = {"logical_queues": [{"partitions": partitions[:1]}, {"partitions": partitions[1:]}]}
    levels = {"ready": 7, "leased": 1, "scheduled": 2}
    assert of_queue(stats, {"series": {"oldest_s": [24]}}) == {**levels, "oldest_s": 24}
    assert of_queue(stats, {"series": {"oldest_s": [None]}}) == levels
    assert of_queue(stats, {"series": {}}) == levels


def test_a_reader_reports_the_backlog_of_each_queue(world: Server) -> None:
    one, other = world.create("one"), world.create("other")
    world.produce(one, ["a", "b"])
    driver = LeaseStreamReader(source_options({"url": world.url, "queue": f"{one},{other}", "consumer": "c"}))
    assert driver.reportLatestOffset() is None
    driver.latestOffset(driver.initialOffset(), ReadAllAvailable())
    until("it is known", driver.reportLatestOffset)
    told = driver.reportLatestOffset()
    assert told is not None
    assert told[one]["ready"] + told[one]["leased"] == 2
    assert told[other] == {"ready": 0, "leased": 0, "scheduled": 0}
    driver.stop()


def test_a_server_that_does_not_answer_has_no_known_backlog(world: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "READ_AGAIN", 0.0)
    queue = world.create("gone")
    found = Backlog(source_options({"url": world.url, "queue": queue, "consumer": "c", "requestTimeout": "1s"}))

    def read() -> dict[str, dict[str, int]] | None:
        found.refresh()
        return found.latest()

    until("it is known", read)
    world.call("/v1/queues.delete", queue_name=queue)
    until("it is forgotten", lambda: read() is None)


def test_the_server_is_asked_again_after_a_while(world: Server) -> None:
    queue = world.create("again")
    found = Backlog(source_options({"url": world.url, "queue": queue, "consumer": "c"}))
    found.refresh()
    first = found._reading
    assert first is not None
    first.join()
    found.refresh()
    assert found._reading is first
    found._due = 0.0
    found.refresh()
    assert found._reading is not first
