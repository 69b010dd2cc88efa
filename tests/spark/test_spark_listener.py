"""Streaming queries tell the server that they read from how they get on, and are neither slowed nor stopped by it."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryProgress,
)
from pyspark.sql.streaming.query import StreamingQuery

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import listener as listening
from sluiceway.spark import options, session, watch
from sluiceway.spark.listener import QueryListener, QueryReport, error_of, query_reports
from tests.spark.spark_world import Server, server, until

URL = "http://127.0.0.1:2319"
ID, RUN = "6b179be2-e822-4c1b-a049-40d87aff59ee", "d5cad4a0-2e77-4441-b254-8213234cf223"
OTHER = "http://127.0.0.1:1"


def offset(sequence: int = 2, **fields: object) -> dict[str, object]:
    found = {"consumer": "billing", "leases": '[["k7f3q2ma.0.L1",200]]', "nonce": "n", "queue": "orders", "rows_per_task": 200}
    return {**found, "sequence": sequence, "url": URL, **fields}


def progress(end: object, start: object = None, rows: int = 400, **fields: object) -> StreamingQueryProgress:
    """As Spark tells it of a batch that read each row twice."""
    source: dict[str, object] = {
        "description": "PythonMicroBatchStream@1",
        "startOffset": json.dumps(start),
        "endOffset": json.dumps(end),
        "latestOffset": None,
    }
    source |= {"numInputRows": rows, "inputRowsPerSecond": 40.0, "processedRowsPerSecond": 800.0, "metrics": {}}
    told = {"id": ID, "runId": RUN, "name": "bill", "timestamp": "2026-11-22T16:34:38.294Z", "batchId": 1, "batchDuration": 500}
    told |= {"durationMs": {}, "eventTime": {}, "stateOperators": [], "observedMetrics": {}, "numInputRows": rows}
    told |= {"inputRowsPerSecond": 40.0, "processedRowsPerSecond": 800.0}
    sink = {"description": "ForeachBatchSink", "numOutputRows": -1, "metrics": {}}
    made: StreamingQueryProgress = StreamingQueryProgress.fromJson({**told, "sources": [source], "sink": sink, **fields})
    return made


WORD = QueryReport("orders", "billing", ID, RUN, "bill", 1, 200, 20.0, 400.0, 500)


def test_items_are_those_that_were_leased_however_often_they_are_read() -> None:
    assert list(query_reports(progress(offset(), offset(1)), URL)) == [WORD]
    assert list(query_reports(progress(offset(), offset(1)), f"{URL}/")) == [WORD]
    assert list(query_reports(progress(offset(), offset(2), rows=0), URL)) == [
        QueryReport("orders", "billing", ID, RUN, "bill", 1, 0, 0.0, 0.0, 500),
    ]


def test_each_queue_of_a_query_has_its_own_part() -> None:
    leases = '{"orders":[["k7f3q2ma.0.L1",150]],"returns":[["k7f3q2mb.0.L1",30],["k7f3q2mb.1.L1",20]]}'
    found = list(query_reports(progress(offset(queue="orders,returns", leases=leases)), URL))
    assert [(word.queue, word.items, word.input_per_s, word.processed_per_s) for word in found] == [
        *(("orders", 150, 15.0, 300.0), ("returns", 50, 5.0, 100.0))
    ]


@pytest.mark.parametrize(
    "end",
    [
        None,
        5,
        {"orders": {"0": 17}},
        offset(url=OTHER),
        {name: value for name, value in offset().items() if name not in ("consumer", "queue", "url")},
    ],
    ids=["none", "a number", "of Kafka", "of another server", "of an old checkpoint"],
)
def test_what_is_not_read_from_that_server_is_not_told(end: object) -> None:
    assert list(query_reports(progress(end), URL)) == []


def test_an_error_is_cut_to_its_end_before_the_places_in_spark() -> None:
    raised = "py4j.Py4JException: Traceback (most recent call last):\n  File x\nValueError: boom\n\n\tat py4j.Protocol\n\tat java"
    assert error_of(raised) == "py4j.Py4JException: Traceback (most recent call last):\n  File x\nValueError: boom"
    assert error_of("é" * 600 + "!") == "é" * 499 + "!"


@pytest.mark.slow
def test_while_the_server_is_away_the_latest_word_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "BEAT", 0.1)
    with server(tmp_path) as running:
        running.create("orders")
        running.kill()
        listener = QueryListener(options.Server(running.url, "any", 1_000))
        try:
            with caplog.at_level(logging.WARNING, "sluiceway.spark"):
                for batch in range(50):
                    listener.onQueryProgress(QueryProgressEvent(progress(offset(url=running.url), batchId=batch)))
                until("it says so", lambda: "reporting of queries is off" in caplog.text)
                running.start()
                until("the latest is told", lambda: [each["batch"] for each in queries(running, "orders")] == [49])
                assert caplog.text.count("reporting of queries is off") == 1
            first = queries(running, "orders")[0]["told_at"]
            # Again and again, or the server would forget it.
            until("it is told again", lambda: queries(running, "orders")[0]["told_at"] > first)
            running.kill()
            listener.onQueryTerminated(QueryTerminatedEvent(UUID(ID), UUID(RUN), "ValueError: boom", None))
            running.start()
            until("it is told that it failed", lambda: [each["error"] for each in queries(running, "orders")] == ["ValueError: boom"])
            until("that is over", lambda: not listener._words)
        finally:
            listener.close()
    assert not listener._thread.is_alive()


def test_spark_is_not_kept_waiting_by_a_server_that_does_not_answer() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        listener = QueryListener(options.Server(url, "any", 1_000))
        try:
            listener.onQueryProgress(QueryProgressEvent(progress(offset(url=url))))
            connection, _ = silent.accept()
            with connection:
                connection.recv(1)
                # It is in the middle of a call now, and all of these return.
                for batch in range(1_000):
                    listener.onQueryProgress(QueryProgressEvent(progress(offset(url=url), batchId=batch)))
                assert [word.batch for word in listener._words.values()] == [999]
        finally:
            listener.close()


def test_what_is_not_understood_is_no_matter_to_spark(caplog: pytest.LogCaptureFixture) -> None:
    listener = QueryListener(options.Server(URL, "any", 1_000))
    try:
        listener.onQueryProgress(QueryProgressEvent(progress(offset(leases="{"))))
        listener.onQueryIdle(QueryIdleEvent(UUID(ID), UUID(RUN), "2026-11-22T16:34:38.294Z"))
        listener.onQueryTerminated(QueryTerminatedEvent(UUID(ID), UUID(RUN), None, None))
        assert caplog.text.count("could not be processed") == 1
        for call in (listener.onQueryStarted, listener.onQueryProgress, listener.onQueryIdle, listener.onQueryTerminated):
            call(None)  # type: ignore[arg-type]
        assert caplog.text.count("could not be processed") == 5
    finally:
        listener.close()


def test_what_is_no_text_is_told_without_it() -> None:
    assert error_of("ValueError: \ud800 boom") == "ValueError: ? boom"
    (word,) = query_reports(progress(offset(), name="bill \udc00"), URL)
    assert word.name == "bill ?"


def test_an_end_that_is_heard_of_late_is_told_before_the_program_ends(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        running.create("orders")

        def ended() -> set[str]:
            """Spark's queries. It tells of the end of one when somebody has looked already."""
            listener.onQueryProgress(QueryProgressEvent(progress(offset(url=running.url), batchId=9)))
            listener.onQueryTerminated(QueryTerminatedEvent(UUID(ID), UUID(RUN), None, None))
            return set()

        listener = QueryListener(options.Server(running.url, "any", 10_000), ended)
        listener.onQueryStarted(QueryStartedEvent(UUID(ID), UUID(RUN), "bill", "2026-11-22T16:34:38.294Z", set()))
        listener.close()
        assert [(each["batch"], each["state"]) for each in queries(running, "orders")] == [(9, "stopped")]


def test_a_wrong_option_is_named() -> None:
    for wrong, field in (({"api_key": "slw_key"}, "apiKey"), ({"url": "nowhere"}, "url")):
        with pytest.raises(SluicewayError) as caught:
            watch(None, **({"url": URL} | wrong))  # type: ignore[arg-type]
        assert caught.value.field == field


# ---- real queries -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("tests", **{"spark.sql.shuffle.partitions": 2, "spark.sql.streaming.noDataProgressEventInterval": "200ms"})


@pytest.fixture(scope="module")
def sluiceway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def watched(spark: SparkSession, sluiceway: Server) -> Iterator[QueryListener]:
    made = watch(spark, sluiceway.url)
    yield made
    spark.streams.removeListener(made)
    made.close()


def start(spark: SparkSession, url: str, queue: str, folder: Path, work: Any, **more: str) -> StreamingQuery:
    stream = spark.readStream.format("sluiceway").options(url=url, queue=queue, consumer="billing", **more).load()
    return stream.writeStream.queryName("bill").foreachBatch(work).option("checkpointLocation", str(folder / "checkpoint")).start()


def queries(sluiceway: Server, queue: str) -> list[dict[str, Any]]:
    (found,) = sluiceway.call("/v1/consumers.list", queue_name=queue)["items"]
    return [query for consumer in found["consumers"] if consumer["client_id"] == "billing" for query in consumer["queries"]]


@pytest.mark.usefixtures("watched")
def test_a_query_is_shown_while_it_runs_idles_and_after_it_failed(spark: SparkSession, sluiceway: Server, tmp_path: Path) -> None:
    queue = sluiceway.create("orders")
    sluiceway.produce(queue, ["x"] * 30)

    def work(batch: DataFrame, batch_id: int) -> None:
        texts = [row.payload for row in batch.select("payload").collect()]
        batch.count()
        if b"poison" in texts:
            raise ValueError(f"batch {batch_id} is poisoned")

    query = start(spark, sluiceway.url, queue, tmp_path, work, maxItemsPerTrigger="30")
    until("the batch is shown", lambda: queries(sluiceway, queue))
    (told,) = queries(sluiceway, queue)
    assert (told["id"], told["run_id"], told["name"]) == (str(query.id), str(query.runId), "bill")
    assert (told["state"], told["batch"], told["error"]) == ("running", 0, "")
    until("it is idle", lambda: queries(sluiceway, queue)[0]["items"] == 0)
    sluiceway.produce(queue, ["x"] * 20)
    until("the next batch is shown", lambda: queries(sluiceway, queue)[0]["batch"] == 1)
    sluiceway.produce(queue, ["poison"])
    until("it has failed", lambda: queries(sluiceway, queue)[0]["state"] == "failed")
    (told,) = queries(sluiceway, queue)
    assert told["error"].endswith("ValueError: batch 2 is poisoned")
    assert query.exception() is not None


def test_one_that_ends_is_shown_stopped_even_if_the_program_ends_with_it(
    spark: SparkSession, sluiceway: Server, watched: QueryListener, tmp_path: Path
) -> None:
    queue = sluiceway.create("returns")
    sluiceway.produce(queue, ["x"] * 30)
    stream = (
        spark.readStream.format("sluiceway").options(url=sluiceway.url, queue=queue, consumer="billing", maxItemsPerTrigger="20").load()
    )
    written = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    written.trigger(availableNow=True).start().awaitTermination()
    # As at the end of the program. What Spark tells comes a little later than the end that it tells of.
    watched.close()
    assert [(each["state"], each["batch"], each["items"]) for each in queries(sluiceway, queue)] == [("stopped", 1, 10)]
