"""`mode=consume`: a batch read takes what is ready, keeps it until it is settled, and every action on it reads the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session, settle
from sluiceway.spark.consume import take as taking
from sluiceway.spark.options import browse_options, consume_options, sink_options, source_options
from sluiceway.spark.settle import BatchSettle
from tests.spark.spark_world import Server, server

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("tests", **{"spark.sql.shuffle.partitions": 2})


def take(spark: SparkSession, world: Server, queue: str, consumer: str = "nightly", **options: str) -> DataFrame:
    given = {"url": world.url, "queue": queue, "consumer": consumer, **options}
    return spark.read.format("sluiceway").options(mode="consume", **given).load()


def texts(df: DataFrame) -> list[str]:
    return [row[0] for row in df.selectExpr("cast(payload as string)").collect()]


@pytest.mark.slow
def test_every_action_reads_what_was_taken_when_the_table_was_loaded(spark: SparkSession, world: Server) -> None:
    queue = world.create("taken", partitions=3)
    for n in range(5):
        world.produce(queue, [f"{n}/{m}" for m in range(20)])
    df = take(spark, world, queue, minPartitions="4")
    assert world.count(queue, "total_leased") == 100
    world.produce(queue, ["later"])
    df.explain(extended=True)
    first = texts(df)
    assert len(set(first)) == 100
    assert "later" not in first
    assert df.join(df.selectExpr("id", "kind as other"), "id").count() == 100
    assert texts(df.where("kind is null")) == first
    # Nothing was completed by reading; another consumer gets what came later, and no more.
    assert (world.count(queue, "completed"), world.count(queue, "leased")) == (0, 100)
    assert texts(take(spark, world, queue, "another")) == ["later"]


@pytest.mark.slow
def test_what_is_settled_is_closed_and_what_is_not_is_found_again(spark: SparkSession, world: Server) -> None:
    world.create("consumed-dead", partitions=1)
    queue = world.create("consumed", partitions=2, dead_queue="consumed-dead")
    world.produce(queue, [f"good {n}" for n in range(40)])
    world.produce(queue, ["late", "bad"])
    df = take(spark, world, queue)
    before = texts(df)
    # A job that has crashed is run again: the same items, and also what has come since.
    world.produce(queue, ["new"])
    again = take(spark, world, queue)
    assert sorted(texts(again)) == sorted([*before, "new"])
    outcome = "case when text like 'good%' then 'done' when text = 'bad' then 'dead' else 'retry' end as outcome"
    judged = again.selectExpr("id", "lease_id", "cast(payload as string) as text").selectExpr("id", "lease_id", outcome)
    # Stated without `close`, nothing takes effect.
    settle(judged, url=world.url, queue=queue)
    assert (world.count(queue, "completed"), world.count(queue, "leased")) == (0, 43)
    settle(judged, url=world.url, queue=queue, close=True)
    assert {name: world.count(queue, name) for name in ("completed", "retried", "leases", "ready")} == {
        "completed": 40,
        "retried": 2,
        "leases": 0,
        "ready": 2,
    }
    with pytest.raises(PySparkException, match=r"lease \S+ is closed or expired.*load again"):
        texts(again)
    assert sorted(texts(take(spark, world, queue))) == ["late", "new"]


@pytest.mark.slow
def test_a_part_of_what_is_ready_and_columns_of_payloads(spark: SparkSession, world: Server) -> None:
    queue = world.create("some", partitions=1)
    world.produce(queue, [f'{{"n": {n}}}' for n in range(30)])
    options = {"url": world.url, "queue": queue, "consumer": "c", "maxItems": "12", "payloadFormat": "json", "mode": "consume"}
    df = spark.read.format("sluiceway").schema("n int, _item struct<id: string, lease_id: string>").options(**options).load()
    assert [row.n for row in df.select("n").collect()] == list(range(12))
    assert world.count(queue, "total_leased") == 12
    told = "case when n = 3 then 'retry' else 'done' end as outcome"
    settle(df.selectExpr("_item.id as id", "_item.lease_id as lease_id", told), url=world.url, queue=queue, close=True)
    assert (world.count(queue, "completed"), world.count(queue, "ready")) == (11, 19)
    empty = world.create("nothing")
    assert take(spark, world, empty).count() == 0


@pytest.mark.slow
def test_leases_are_not_closed_while_an_item_of_them_has_no_outcome(spark: SparkSession, world: Server) -> None:
    queue = world.create("unnamed", partitions=2)
    world.produce(queue, [str(n) for n in range(30)])
    world.produce(queue, ["a", "b"])
    taken = take(spark, world, queue, minPartitions="3").selectExpr("id", "partition", "offset", "lease_id", "'done' as outcome")
    df = spark.createDataFrame(taken.collect(), taken.schema)
    for some, says in (
        (df.limit(1), r"close: the rows name 1 items, but (30|2) are open in the leases"),
        (df.where("offset % 2 = 0"), "close: the rows name 16 items, but 32 are open .* No lease was closed"),
    ):
        with pytest.raises(SluicewayError, match=says):
            settle(some, url=world.url, queue=queue, close=True)
    assert (world.count(queue, "completed"), world.count(queue, "total_leased")) == (0, 32)
    # Each once, or oftener; what something else has completed is not missed.
    gone = world.call("/v1/queue.browse", queue_name=queue, partition=0, states=["leased"], limit=1)["items"][0]["id"]
    world.call("/v1/queue.complete", queue_name=queue, ids=[gone])
    settle(df.union(df).drop("id"), url=world.url, queue=queue, close=True)
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (32, 0)


def test_leases_of_a_queue_that_allows_short_ones_only_are_closed(world: Server) -> None:
    queue = world.create("short", max_lease_timeout="5m")
    world.produce(queue, ["a", "b"])
    options = consume_options({"url": world.url, "queue": queue, "consumer": "c", "holdFor": "4m"})
    leases = taking(options)
    found = world.call("/v1/queue.peek", queue_name=queue, lease_id=leases[0].lease_id)["items"]
    rows = pa.table({"id": [item["id"] for item in found], "outcome": ["done", "done"], "lease_id": [leases[0].lease_id] * 2})
    schema = StructType([StructField(name, StringType()) for name in rows.column_names])
    writer = BatchSettle(schema, sink_options({"url": world.url, "queue": queue, "mode": "settle", "close": "true"}))
    writer.commit([writer.write(iter(rows.to_batches()))])
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (2, 0)


def test_a_query_does_not_close_its_leases_itself(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("stream")
    world.produce(queue, ["a"])

    def work(batch: DataFrame, batch_id: int) -> None:
        settle(batch.selectExpr("id", "lease_id", "'done' as outcome"), url=world.url, queue=queue, close=True)

    stream = spark.readStream.format("sluiceway").options(url=world.url, queue=queue, consumer="c").load()
    query = stream.writeStream.foreachBatch(work).option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    with pytest.raises(PySparkException, match="the stream source closes the leases of its batches itself"):
        query.awaitTermination()
    assert world.count(queue, "leases") == 1


def test_what_was_taken_for_something_else_than_a_read_is_given_back(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("not-a-read")
    world.produce(queue, ["a"])
    options = {"url": world.url, "queue": queue, "consumer": "c", "mode": "consume"}
    stream = spark.readStream.format("sluiceway").options(**options).load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(PySparkException, match=r"mode: mode=consume is for spark\.read only"):
        query.awaitTermination()
    with pytest.raises(PySparkException, match=r"mode: mode=consume is for spark\.read only"):
        spark.range(1).selectExpr("'x' as value").write.format("sluiceway").mode("append").options(**options).save()
    assert {name: world.count(queue, name) for name in ("ready", "leases", "produced")} == {"ready": 1, "leases": 0, "produced": 1}
    assert [row.attempts for row in take(spark, world, queue).collect()] == [1]


def test_options_that_do_not_go_together_are_named() -> None:
    given = {"url": "http://localhost:1", "queue": "q"}
    for parse, wrong, field in (
        (consume_options, {"mode": "consume"}, "consumer"),
        (consume_options, {"mode": "consume", "consumer": "c", "maxItemsPerTrigger": "5"}, "maxItemsPerTrigger"),
        (consume_options, {"mode": "consume", "consumer": "c", "queue": "a,b"}, "queue"),
        (source_options, {"mode": "consume", "consumer": "c"}, "mode"),
        (browse_options, {"maxItems": "5"}, "maxItems"),
        (sink_options, {"mode": "consume"}, "mode"),
        (sink_options, {"close": "true"}, "close"),
        (sink_options, {"mode": "settle", "atomic": "true"}, "atomic"),
    ):
        with pytest.raises(SluicewayError) as refused:
            parse({**given, **wrong})
        assert refused.value.field == field, wrong
