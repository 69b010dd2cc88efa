"""Spark reads a queue as a table, and the queue does not notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In
from pyspark.sql.types import IntegerType, StructField, StructType

from sluiceway.adapters.system import now
from sluiceway.kernel.clock import format_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import browse, session
from sluiceway.spark.browse import BROWSED, BrowseReader, Part
from sluiceway.spark.format import SluicewaySource
from sluiceway.spark.options import browse_options
from sluiceway.spark.rows import SCHEMA
from sluiceway.spark.server_calls import Client
from sluiceway.spark.source import LeaseStreamReader
from tests.spark.spark_world import Server, server

pytestmark = pytest.mark.spark

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("tests", **{"spark.sql.shuffle.partitions": 2})


@pytest.fixture(scope="module")
def queue(world: Server) -> str:
    """Three partitions; in all, 3 leased items, 20 ready ones and 2 scheduled ones."""
    made = world.create("looked-at", partitions=3, lease_timeout="1d")
    for text in "abc":
        world.produce(made, [f"leased {text}"])
    while left := 3 - world.count(made, "total_leased"):
        # A call takes from the partitions that are not busy.
        world.call("/v1/queue.lease", queue_name=made, client_id="somebody", batch_size=left, max_partitions=3, request_timeout="30s")
    for number in range(10):
        items = [
            {"utf8": f"{number}/{n}", "kind": f"k{n}", "headers": {"n": str(n)}, "reference": "r", "key": f"c{n}", "priority": n}
            for n in range(2)
        ]
        world.call("/v1/queue.produce", queue_name=made, items=items)
    due = format_time(now() + 3_600_000)
    world.call("/v1/queue.produce", queue_name=made, items=[{"utf8": "due", "enqueue_at": due}, {"utf8": "due", "enqueue_at": due}])
    return made


def read(spark: SparkSession, world: Server, queue: str, **options: str) -> DataFrame:
    return spark.read.format("sluiceway").options(url=world.url, queue=queue, **options).load()


def reader(world: Server, queue: str, schema: StructType = BROWSED, **options: str) -> BrowseReader:
    return BrowseReader(schema, browse_options({"url": world.url, "queue": queue, "requestTimeout": "1m", **options}))


def rows(found: BrowseReader, columns: str = "payload") -> list[list[object]]:
    """What each task reads of that column."""
    return [[row for batch in found.read(task) for row in batch.column(columns).to_pylist()] for task in found.partitions()]


# ---- in Spark ----------------------------------------------------------------------------------------------------------


def test_a_queue_is_read_as_a_table_and_is_as_before(spark: SparkSession, world: Server, queue: str) -> None:
    before = world.call("/v1/queue.stats", queue_name=queue)
    df = read(spark, world, queue, state="ready, scheduled,leased")
    assert df.schema.simpleString() == BROWSED.simpleString()
    found = df.collect()
    assert {row.state: sum(each.state == row.state for each in found) for row in found} == {"leased": 3, "ready": 20, "scheduled": 2}
    listed = world.call("/v1/queue.browse", queue_name=queue, partition=0, states=["leased", "ready", "scheduled"])["items"]
    by_id = {row.id: row for row in found}
    for item in listed:
        row = by_id[item["id"]]
        assert (row.origin, row.state, row.lease_id, row.kind, row.attempts) == (
            item["origin"],
            item["state"],
            item["lease_id"],
            item["kind"],
            item["attempts"],
        )
        assert [time is None for time in (row.enqueue_at, row.expire_deadline, row.lease_deadline)] == [
            item[name] is None for name in ("enqueue_at", "expire_deadline", "lease_deadline")
        ]
    ready = [row for row in found if row.state == "ready"]
    assert {bytes(row.payload).decode() for row in ready} == {f"{number}/{n}" for number in range(10) for n in range(2)}
    assert {(row.headers["n"], row.kind, row.reference, row.key, row.priority, row.queue) for row in ready} == {
        ("0", "k0", "r", "c0", 0, queue),
        ("1", "k1", "r", "c1", 1, queue),
    }
    after = world.call("/v1/queue.stats", queue_name=queue)
    for stats in (before, after):
        for partition in stats["logical_queues"][0]["partitions"]:
            del partition["commit_time_ms"], partition["degraded"]
    assert after == before


def test_filters_are_right_with_push_down_and_without(spark: SparkSession, world: Server, queue: str) -> None:
    df = read(spark, world, queue, state="ready,leased,scheduled")
    chosen = df.where("partition in (0, 2) and state = 'ready' and kind = 'k1'")
    pushed = chosen.collect()
    assert {(row.state, row.kind) for row in pushed} == {("ready", "k1")}
    assert df.where("partition = 0 and partition = 1").count() == 0
    spark.conf.set(PUSHDOWN, "false")
    try:
        assert sorted(row.id for row in chosen.select("id").collect()) == sorted(row.id for row in pushed)
    finally:
        spark.conf.set(PUSHDOWN, "true")


def test_the_columns_that_are_named_are_read(spark: SparkSession, world: Server, queue: str) -> None:
    named = spark.read.format("sluiceway").schema("kind string, id string").options(url=world.url, queue=queue).load()
    assert sorted(row.asDict()["kind"] for row in named.collect()) == ["k0"] * 10 + ["k1"] * 10
    with pytest.raises(PySparkException, match="there is no column 'colour'"):
        spark.read.format("sluiceway").schema("colour string").options(url=world.url, queue=queue).load().collect()


def test_mistakes_are_told_when_the_table_is_loaded(spark: SparkSession, world: Server) -> None:
    with pytest.raises(PySparkException, match=r"consumer: spark\.read only browses the queue"):
        read(spark, world, "q", consumer="c").collect()
    with pytest.raises(PySparkException, match="state: expected one or more of ready, leased and scheduled"):
        read(spark, world, "q", state="dead")
    with pytest.raises(PySparkException, match="there is no queue 'nowhere'"):
        read(spark, world, "nowhere").collect()


# ---- without Spark -----------------------------------------------------------------------------------------------------


def test_a_task_reads_its_partition_page_by_page_as_it_was(world: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browse, "MAX_ITEMS_ARROW", 2)
    made = world.create("paged", partitions=1)
    for n in range(5):
        world.produce(made, [str(n)])
    found = reader(world, made)
    (task,) = found.partitions()
    batches = found.read(task)
    first = next(batches)
    world.call("/v1/queue.clear", queue_name=made)
    world.produce(made, ["later"])
    got = [first, *batches]
    assert [batch.num_rows for batch in got] == [2, 2, 1]
    assert [row for batch in got for row in batch.column("payload").to_pylist()] == [b"0", b"1", b"2", b"3", b"4"]
    assert rows(found) == [[b"later"]]


def test_a_snapshot_that_is_gone_in_the_middle_fails_the_task_and_says_so(world: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browse, "MAX_ITEMS_ARROW", 2)
    made = world.create("gone", partitions=1)
    world.produce(made, ["a", "b", "c"])
    found = reader(world, made)
    batches = found.read(*found.partitions())
    next(batches)
    world.kill()
    world.start()
    with pytest.raises(SluicewayError, match="run the read again") as gone:
        next(batches)
    assert gone.value.code == "snapshot_gone"


def test_only_what_is_wanted_is_asked_for(world: Server, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mapping[str, object]] = []
    fetch = Client.fetch_arrow

    def told(self: Client, path: str, body: Mapping[str, object]) -> pa.RecordBatchReader:
        asked.append(body)
        return fetch(self, path, body)

    monkeypatch.setattr(Client, "fetch_arrow", told)
    found = reader(world, queue, StructType([BROWSED["id"]]), state="ready,leased")
    others: list[Filter] = [EqualTo(("kind",), "k"), GreaterThan(("partition",), 0), EqualTo(("payload", "x"), 1)]
    wanted: list[Filter] = [In(("partition",), (1, 2, "x")), EqualTo(("partition",), 2), EqualTo(("state",), "leased")]
    assert found.pushFilters([*others, *wanted]) == others
    assert [task.number for task in found.partitions() if isinstance(task, Part)] == [2]
    rows(found, "id")
    assert [(each["partition"], each["states"], each["payload"]) for each in asked] == [(2, ["leased"], False)]
    found.pushFilters([EqualTo(("state",), "ready")])
    assert found.partitions() == []


def test_columns_and_options_are_checked() -> None:
    given = {"url": "http://localhost:1", "queue": "q"}
    assert browse_options(given).states == ("ready",)
    assert browse_options({**given, "STATE": "scheduled,leased"}).states == ("leased", "scheduled")
    for wrong, field in (
        ({"state": "ready,ready"}, "state"),
        ({"state": "ready,"}, "state"),
        ({"holdFor": "1h"}, "holdFor"),
        ({"mode": "x"}, "mode"),
    ):
        with pytest.raises(SluicewayError) as refused:
            browse_options({**given, **wrong})
        assert refused.value.field == field
    with pytest.raises(SluicewayError, match="is of the type string, not int"):
        BrowseReader(StructType([StructField("id", IntegerType())]), browse_options(given))
    source = SluicewaySource(given)
    assert (source.schema(), SluicewaySource({**given, "consumer": "c"}).schema()) == (BROWSED, SCHEMA)
    with pytest.raises(SluicewayError, match="consumer: this option is required"):
        source.streamReader(BROWSED).initialOffset()
    assert isinstance(SluicewaySource({**given, "consumer": "c"}).streamReader(SCHEMA), LeaseStreamReader)
