"""Spark in `local[2]` against a real server: rows go in, come out, are settled, and mistakes are told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session, settle
from tests.spark.spark_world import PATIENCE, Server, server, until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("tests", **{"spark.sql.shuffle.partitions": 2})


def write(df: DataFrame, world: Server, queue: str, **options: str) -> None:
    df.write.format("sluiceway").mode("append").options(url=world.url, queue=queue, **options).save()


def read(spark: SparkSession, world: Server, queue: str, **options: str) -> DataFrame:
    return spark.readStream.format("sluiceway").options(url=world.url, queue=queue, consumer="tests", **options).load()


def each_batch(stream: DataFrame, checkpoint: Path, work: Callable[[DataFrame, int], None]) -> StreamingQuery:
    """Run what is there now through `work`, to the end."""
    options = {"checkpointLocation": str(checkpoint)}
    query = stream.writeStream.foreachBatch(work).options(**options).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def rows(spark: SparkSession, texts: list[str], slices: int = 2) -> DataFrame:
    return spark.createDataFrame([(text,) for text in texts], "value string").repartition(slices)


def test_rows_come_out_as_they_went_in(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("round-trip", partitions=3)
    sent = spark.range(0, 3_000, 1, 3).select(
        F.col("id").cast("string").cast("binary").alias("payload"),
        F.when(F.col("id") % 2 == 0, F.concat(F.lit("kind "), F.col("id") % 5)).alias("kind"),
        F.lit("text").alias("encoding"),
        F.concat(F.lit("ref "), "id").alias("reference"),
        F.when(F.col("id") % 3 == 0, F.create_map(F.lit("n"), F.col("id").cast("string"))).alias("headers"),
        F.lit("2020-01-01 00:00:00").cast("timestamp").alias("enqueue_at"),
    )
    write(sent, world, queue, chunkItems="300")
    out = {"path": str(tmp_path / "out"), "checkpointLocation": str(tmp_path / "checkpoint")}
    stream = read(spark, world, queue, maxItemsPerTrigger="1000", minPartitions="2")
    stream.writeStream.format("parquet").options(**out).trigger(availableNow=True).start().awaitTermination()
    got = spark.read.parquet(out["path"]).collect()
    columns = ("payload", "kind", "encoding", "reference", "headers")
    assert {row.payload: tuple(row[name] for name in columns) for row in got} == {
        row.payload: tuple(row) for row in sent.select(*columns).collect()
    }
    assert len(got) == 3_000
    assert len({row.id for row in got}) == 3_000
    for row in got:
        assert row.id == row.origin == f"{row.lease_id.split('.')[0]}.{row.partition}.{row.offset}"
        assert (row.queue, row.attempts, row.enqueued_at.year >= 2025) == (queue, 1, True)
    assert {name: world.count(queue, name) for name in ("produced", "completed", "leases", "ready")} == {
        "produced": 3_000,
        "completed": 3_000,
        "leases": 0,
        "ready": 0,
    }


def test_a_repeated_write_adds_nothing(spark: SparkSession, world: Server) -> None:
    queue = world.create("repeated")
    sent = spark.range(0, 500, 1, 2).selectExpr("concat('item ', id) as value")
    for _ in range(2):
        write(sent, world, queue, writeId="load-1", chunkItems="100")
    assert (world.count(queue, "produced"), world.count(queue, "deduplicated")) == (500, 500)
    with pytest.raises(PySparkException, match=r"chunk load-1/[01]/0 was written before with other rows"):
        write(sent.selectExpr("upper(value) as value"), world, queue, writeId="load-1", chunkItems="100")
    write(sent, world, queue)
    assert world.count(queue, "produced") == 1_000


def test_a_streaming_batch_that_runs_again_adds_nothing(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("streamed")
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()

    def run() -> None:
        writer = spark.readStream.text(str(source)).writeStream.format("sluiceway").trigger(availableNow=True)
        writer.options(url=world.url, queue=queue, chunkItems="10", checkpointLocation=str(checkpoint)).start().awaitTermination()

    (source / "1").write_text("\n".join(f"one {n}" for n in range(95)))
    run()
    (source / "2").write_text("\n".join(f"two {n}" for n in range(95)))
    run()
    assert (world.count(queue, "produced"), world.count(queue, "deduplicated")) == (190, 0)
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    run()
    assert (world.count(queue, "produced"), world.count(queue, "deduplicated")) == (190, 95)


@pytest.mark.slow
def test_outcomes_take_effect_when_the_batch_is_closed(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    world.create("graveyard", partitions=1)
    queue = world.create("settled", dead_queue="graveyard")
    write(rows(spark, [f"good {n}" for n in range(60)] + [f"late {n}" for n in range(30)] + [f"bad {n}" for n in range(9)]), world, queue)
    seen: list[tuple[str, int]] = []

    def work(batch: DataFrame, batch_id: int) -> None:
        text = F.col("payload").cast("string")
        outcome = F.when(text.startswith("bad"), "dead").when(text.startswith("late") & (F.col("attempts") == 1), "retry").otherwise("done")
        judged = batch.withColumn("outcome", outcome).withColumn("reason", F.when(F.col("outcome") == "dead", "it is bad"))
        settle(judged, url=world.url, queue=queue)
        # Settled or not, the batch reads the same until it is closed.
        seen.extend((row.text.split()[0], row.attempts) for row in batch.select(text.alias("text"), "attempts").collect())

    stream = read(spark, world, queue)
    each_batch(stream, tmp_path, work)
    assert {kind: seen.count(kind) for kind in set(seen)} == {("good", 1): 60, ("late", 1): 30, ("bad", 1): 9}
    assert {name: world.count(queue, name) for name in ("completed", "retried", "ready", "leases")} == {
        "completed": 60,
        "retried": 30,
        "ready": 30,
        "leases": 0,
    }
    seen.clear()
    each_batch(stream, tmp_path, work)
    assert seen == [("late", 2)] * 30
    until("the dead are buried", lambda: world.count(queue, "dead") == 9)
    assert (world.count(queue, "completed"), world.count(queue, "dead"), world.count(queue, "total")) == (90, 9, 0)
    dead = world.call("/v1/queue.peek", queue_name="graveyard", limit=20)["items"]
    assert len(dead) == 9
    assert all("it is bad" in item["headers"].values() for item in dead)


@pytest.mark.slow
def test_outcomes_by_position_and_as_a_streaming_sink(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("by-position")
    write(rows(spark, [str(n) for n in range(20)]), world, queue)
    judged = read(spark, world, queue).selectExpr("partition", "offset", "'retry' as outcome", "3600000L as retry_after_ms")
    sink = judged.writeStream.format("sluiceway").options(url=world.url, queue=queue, mode="settle", checkpointLocation=str(tmp_path))
    sink.trigger(availableNow=True).start().awaitTermination()
    assert (world.count(queue, "completed"), world.count(queue, "scheduled"), world.count(queue, "leases")) == (0, 20, 0)


@pytest.mark.parametrize(("outcome", "named"), [("'later'", "'later'"), ("cast(null as string)", "null")])
def test_an_unknown_outcome_is_named(spark: SparkSession, world: Server, outcome: str, named: str) -> None:
    judged = spark.range(1).selectExpr("'k7f3q2ma.0.1' as id", f"{outcome} as outcome")
    with pytest.raises(SluicewayError, match=f"^outcome: {named} of item k7f3q2ma.0.1 is not an outcome; expected done, retry or dead$"):
        settle(judged, url=world.url, queue=world.create(f"unknown-{len(outcome)}"))


@pytest.mark.slow
def test_wrong_columns_are_told_before_anything_is_written(spark: SparkSession, world: Server) -> None:
    queue = world.create("wrong")
    with pytest.raises(PySparkException, match=r"expected exactly one column named payload or value .* the columns are id"):
        write(spark.range(3), world, queue)
    with pytest.raises(PySparkException, match="keys: unknown column of an item"):
        write(spark.range(3).selectExpr("'x' as value", "'y' as keys"), world, queue)
    overwriting = spark.range(3).selectExpr("'x' as value").write.format("sluiceway").mode("overwrite")
    with pytest.raises(PySparkException, match="a queue cannot be overwritten"):
        overwriting.options(url=world.url, queue=queue).save()
    with pytest.raises(PySparkException, match=r"value: there is no value, and every item needs a payload \(a row; the first is row 0"):
        write(spark.range(1).selectExpr("cast(null as string) as value"), world, queue)
    with pytest.raises(PySparkException, match=r"url: neither url nor queue is given.*CREATE TABLE … AS SELECT"):
        spark.sql("CREATE TABLE made USING sluiceway OPTIONS (url 'http://127.0.0.1:1', queue 'q') AS SELECT 'x' AS value")
    assert world.count(queue, "produced") == 0
    write(spark.range(3).selectExpr("'x' as VALUE", "'y' as Kind"), world, queue)
    assert world.count(queue, "produced") == 3


def test_a_missing_consumer_is_told_when_the_query_starts(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    stream = spark.readStream.format("sluiceway").options(url=world.url, queue="q").load()
    with pytest.raises(PySparkException, match="consumer: this option is required") as caught:
        each_batch(stream, tmp_path / "checkpoint", lambda batch, number: None)
    assert "UnboundLocalError" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_options_of_kafka_are_refused_by_load_in_one_line(spark: SparkSession) -> None:
    left = {"kafka.bootstrap.servers": "broker:9092", "subscribe": "orders", "startingOffsets": "earliest"}
    with pytest.raises(PySparkException) as caught:
        spark.readStream.format("sluiceway").options(**left).load()
    line, *more = str(caught.value).splitlines()
    assert "kafka.bootstrap.servers: this is an option of Kafka's connector, and has no effect here; see url; subscribe: see queue" in line
    assert "startingoffsets: leave it out (docs/guides/from-kafka.md)" in line.lower()
    assert all(each.strip().startswith("SQLSTATE") for each in more)


def test_the_progress_of_a_query_has_the_backlog_of_its_queue(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("progress")
    world.produce(queue, [str(n) for n in range(3)])
    stream = read(spark, world, queue, maxItemsPerTrigger="1")
    query = each_batch(stream, tmp_path / "checkpoint", lambda batch, number: batch.foreach(lambda row: None))
    told = [progress.sources[0].latestOffset for progress in query.recentProgress]
    found = [json.loads(each)[queue] for each in told if each.startswith("{")]
    assert found, told
    assert all(each["ready"] + each["leased"] <= 3 and each.keys() >= {"ready", "leased", "scheduled"} for each in found)


@pytest.mark.slow
def test_a_server_killed_in_mid_batch_does_not_fail_the_query(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("killed")
    write(rows(spark, [str(n) for n in range(400)]), world, queue)
    got: list[str] = []

    def work(batch: DataFrame, batch_id: int) -> None:
        world.kill()
        restart = threading.Thread(target=world.start)
        restart.start()
        judged = batch.selectExpr("id", "'done' as outcome")
        settle(judged, url=world.url, queue=queue)
        restart.join()
        got.extend(row[0] for row in batch.select(F.col("payload").cast("string")).collect())

    each_batch(read(spark, world, queue), tmp_path, work)
    assert sorted(got, key=int) == [str(n) for n in range(400)]
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (400, 0)


@pytest.mark.slow
def test_a_continuous_query_takes_items_as_they_come(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("continuous")
    got: list[Any] = []
    arrived = threading.Condition()

    def work(batch: DataFrame, batch_id: int) -> None:
        found = [row[0] for row in batch.select(F.col("payload").cast("string")).collect()]
        with arrived:
            got.extend(found)
            arrived.notify_all()

    query = read(spark, world, queue).writeStream.foreachBatch(work).option("checkpointLocation", str(tmp_path)).start()
    try:
        for text in ("first", "second"):
            world.produce(queue, [text])
            with arrived:
                assert arrived.wait_for(lambda text=text: text in got, PATIENCE), query.exception()  # type: ignore[misc]
    finally:
        query.stop()
    assert got == ["first", "second"]
