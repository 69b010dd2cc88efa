"""What Spark does behind a stream source's back: planning, stopping, catalogs, logs that lag behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sluiceway.spark import session
from tests.spark.spark_world import Server, server, until

pytestmark = pytest.mark.spark

PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> SparkSession:
    return session("traps", **{"spark.sql.shuffle.partitions": 2, "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))})


def read(spark: SparkSession, world: Server, queue: str, **options: str) -> DataFrame:
    return spark.readStream.format("sluiceway").options(url=world.url, queue=queue, consumer="traps", **options).load()


def to_files(stream: DataFrame, folder: Path, every: str | None = None) -> StreamingQuery:
    """What is there now, or what comes."""
    out = {"path": str(folder / "out"), "checkpointLocation": str(folder / "checkpoint")}
    writer = stream.writeStream.format("parquet").options(**out)
    return (writer.trigger(processingTime=every) if every else writer.trigger(availableNow=True)).start()


def written(spark: SparkSession, folder: Path) -> list[str]:
    return sorted(row[0] for row in spark.read.parquet(str(folder / "out")).selectExpr("cast(payload as string)").collect())


def test_planning_takes_no_lease_and_filters_may_be_pushed_or_not(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("planned")
    world.produce(queue, ["a", "b", "c"])
    before = str(spark.conf.get(PUSH_DOWN))
    spark.conf.set(PUSH_DOWN, "true")
    try:
        some = read(spark, world, queue).where("payload <> cast('b' as binary)")
        some.explain(extended=True)
        assert world.count(queue, "total_leased") == world.count(queue, "leased") == 0
        to_files(some, tmp_path).awaitTermination()
    finally:
        spark.conf.set(PUSH_DOWN, before)
    assert written(spark, tmp_path) == ["a", "c"]
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (3, 0)


def test_a_table_of_the_catalog_is_read_in_small_batches(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queues = ",".join(world.create(f"table-{n}", partitions=1) for n in (1, 2))
    for queue in queues.split(","):
        world.produce(queue, [f"{queue} {n}" + " " * 500 for n in range(20)])
    options = {"url": world.url, "Queue": queues, "CONSUMER": "traps", "maxBytesPerTrigger": "8K", "MaxItemsPerTrigger": "1000"}
    told = ", ".join(f"{name} '{value}'" for name, value in options.items())
    spark.sql(f"CREATE TABLE waiting USING sluiceway OPTIONS ({told})")
    try:
        # Spark keeps a table's options to itself when it starts a query.
        stream = spark.readStream.options(**options).table("waiting")
        query = to_files(stream, tmp_path)
        query.awaitTermination()
        sizes = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
        assert len(sizes) >= 3
        assert max(sizes) <= 2 * (4_096 // 500)
        assert [text.strip() for text in written(spark, tmp_path)] == sorted(f"table-{q} {n}" for q in (1, 2) for n in range(20))
        assert [world.count(queue, "leases") for queue in queues.split(",")] == [0, 0]
    finally:
        spark.sql("DROP TABLE waiting")


@pytest.mark.slow
def test_a_query_that_is_stopped_in_mid_batch_keeps_its_leases_and_one_that_is_idle_has_none(
    spark: SparkSession, world: Server, tmp_path: Path
) -> None:
    queue = world.create("stopped")
    reached, go = tmp_path / "reached", tmp_path / "go"

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        tick = threading.Event()
        for batch in batches:
            if b"slow" in batch.column("payload").to_pylist():
                reached.touch()
                while not go.exists():
                    tick.wait(0.02)
            yield batch

    stream = read(spark, world, queue)
    query = to_files(stream.mapInArrow(wait, stream.schema), tmp_path, "100 milliseconds")
    try:
        world.produce(queue, ["quick"])
        until("the query is idle again", lambda: query.exception() or world.count(queue, "completed"))
        assert (query.exception(), world.count(queue, "leases")) == (None, 0)
        world.produce(queue, ["slow"])
        until("a task is in mid-batch", lambda: query.exception() or reached.exists())
    finally:
        query.stop()
        go.touch()
    assert (query.exception(), world.count(queue, "leases"), world.count(queue, "leased")) == (None, 1, 2)
    to_files(stream.mapInArrow(wait, stream.schema), tmp_path).awaitTermination()
    assert written(spark, tmp_path) == ["quick", "slow"]
    assert {name: world.count(queue, name) for name in ("leases", "leased", "expired", "completed")} == {
        "leases": 0,
        "leased": 2,
        "expired": 0,
        "completed": 2,
    }


@pytest.mark.slow
def test_a_replay_whose_leases_are_all_gone(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("gone")
    world.produce(queue, ["a", "b"])
    failing = read(spark, world, queue).selectExpr("*", "raise_error('not now') as failed")
    with pytest.raises(PySparkException, match="not now"):
        to_files(failing, tmp_path).awaitTermination()
    held = world.call("/v1/queue.explain", queue_name=queue, id=world.call("/v1/storage/items.list", queue_name=queue)["items"][0]["id"])
    world.call("/v1/queue.release", queue_name=queue, lease_ids=[held["lease_id"]])
    with pytest.raises(PySparkException, match=rf"lease {held['lease_id']} of this batch was released.*failOnLeaseLoss=false"):
        to_files(read(spark, world, queue), tmp_path).awaitTermination()
    to_files(read(spark, world, queue, failOnLeaseLoss="false"), tmp_path).awaitTermination()
    assert written(spark, tmp_path) == ["a", "b"]
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (2, 0)


def test_a_committed_batch_whose_leases_ran_out_is_refused_and_not_done_twice(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    """`once` ends with the commit of its batch, and leaves the leases to the next start."""
    queue = world.create("once")
    world.produce(queue, ["a", "b"])

    def run(**options: str) -> None:
        out = {"path": str(tmp_path / "out"), "checkpointLocation": str(tmp_path / "checkpoint")}
        read(spark, world, queue, **options).writeStream.format("parquet").options(**out).trigger(once=True).start().awaitTermination()

    run(holdFor="1s")
    assert (tmp_path / "checkpoint" / "commits" / "0").exists()
    until("the leases run out", lambda: world.count(queue, "leases") == 0)
    with pytest.raises(PySparkException, match=r"batch 0 of consumer 'traps' on once is done.*2 of its 2 items"):
        run()
    assert written(spark, tmp_path) == ["a", "b"]
    assert world.count(queue, "total_leased") == 0
    run(failOnLeaseLoss="false")
    assert written(spark, tmp_path) == ["a", "a", "b", "b"]


def test_asynchronous_progress_tracking_is_refused_and_the_checkpoint_stays_good(
    spark: SparkSession, world: Server, tmp_path: Path
) -> None:
    queue = world.create("async")
    world.produce(queue, ["a", "b"])
    lagging = {"asyncProgressTrackingEnabled": "true", "asyncProgressTrackingCheckpointIntervalMs": "3600000"}
    writer = read(spark, world, queue, maxItemsPerTrigger="1").writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    query = writer.options(**lagging).start()
    try:
        with pytest.raises(PySparkException, match=r"leave out asyncProgressTrackingEnabled"):
            query.awaitTermination()
    finally:
        query.stop()
    assert world.count(queue, "completed") == 1
    again = read(spark, world, queue).writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    again.trigger(availableNow=True).start().awaitTermination()
    assert {name: world.count(queue, name) for name in ("leases", "leased", "completed")} == {"leases": 0, "leased": 2, "completed": 2}
