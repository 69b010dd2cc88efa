"""The sink against a real server: all or nothing, rows that no queue takes, a server that asks to wait."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, MapType, StringType, StructField, StructType, TimestampType

from sluiceway.client._sync import channel
from sluiceway.client.protocol import Call
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session, sink
from sluiceway.spark.options import sink_options
from sluiceway.spark.server_calls import Client
from sluiceway.spark.sink import BatchSink, StreamSink, Written
from tests.server.server_guarded import guarded
from tests.spark.spark_world import Server, server

KINDS = {
    "payload": BinaryType(),
    "value": StringType(),
    "kind": StringType(),
    "reference": StringType(),
    "key": StringType(),
    "unique_key": StringType(),
    "headers": MapType(StringType(), StringType()),
    "enqueue_at": TimestampType(),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Makes this the third task of a write; of a query's batch, once it has its properties."""
    told: dict[str, str] = {}
    monkeypatch.setattr(sink, "_task", lambda: SimpleNamespace(partitionId=lambda: 3, getLocalProperty=told.get))
    return told


def batch_sink(world: Server, queue: str, rows: pa.Table, **options: str) -> BatchSink:
    schema = StructType([StructField(name, KINDS[name]) for name in rows.column_names])
    return BatchSink(schema, sink_options({"url": world.url, "queue": queue, "writeId": "w", **options}))


def items(world: Server, queue: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.call("/v1/queue.peek", queue_name=queue, limit=100)["items"]
    return found


def table(**columns: Any) -> pa.Table:
    return pa.table({name: column if isinstance(column, pa.Array) else pa.array(column) for name, column in columns.items()})


# ---- all or nothing ---------------------------------------------------------------------------------------------------


def test_a_task_that_is_atomic_lies_whole_in_one_partition(world: Server, task: dict[str, str]) -> None:
    queue = world.create("whole", partitions=3)
    rows = table(value=[str(n) for n in range(7_000)])
    writer = batch_sink(world, queue, rows, atomic="true")
    assert writer.write(iter(rows.to_batches(max_chunksize=900))) == Written(7_000, 1, 0)
    assert writer.write(iter(rows.to_batches(max_chunksize=500))) == Written(7_000, 1, 1)
    stats = world.call("/v1/queue.stats", queue_name=queue)["logical_queues"]
    assert sorted(each["total"] for logical in stats for each in logical["partitions"]) == [0, 0, 7_000]


@pytest.mark.parametrize(("rows", "size", "times"), [(10_001, 1, 2), (25_000, 1, 3), (60, 1 << 20, 4)])
def test_a_task_that_is_too_large_for_that_writes_nothing(world: Server, task: dict[str, str], rows: int, size: int, times: int) -> None:
    queue = world.create(f"large-{rows}")
    much = table(value=["x" * size] * rows)
    with pytest.raises(
        SluicewayError, match=rf"task 3 has {rows:,} rows of .* nothing of the task is written. Use {times} times"
    ) as refused:
        batch_sink(world, queue, much, atomic="true").write(iter(much.to_batches(max_chunksize=1_000)))
    assert refused.value.field == "atomic"
    assert world.count(queue, "produced") == 0


def test_atomic_batches_of_a_query_lie_in_several_partitions_and_are_known_again(world: Server, task: dict[str, str]) -> None:
    queue = world.create("whole-stream", partitions=4)
    rows = table(value=["a", "b"])
    writer = StreamSink(
        StructType([StructField("value", StringType())]), sink_options({"url": world.url, "queue": queue, "atomic": "true"})
    )
    for batch_id in range(24):
        task.update({sink.QUERY_ID: "q", sink.BATCH_ID: str(batch_id)})
        assert [writer.write(iter(rows.to_batches())).deduplicated for _ in range(2)] == [0, 1]
    stats = world.call("/v1/queue.stats", queue_name=queue)["logical_queues"]
    filled = [each["total"] for logical in stats for each in logical["partitions"]]
    assert sum(filled) == 48
    assert sum(each > 0 for each in filled) > 1


def stream_sink(world: Server, queue: str, **options: str) -> StreamSink:
    return StreamSink(StructType([StructField("value", StringType())]), sink_options({"url": world.url, "queue": queue, **options}))


def test_a_batch_that_is_repeated_adds_nothing_however_many_chunks_it_and_those_before_have(world: Server, task: dict[str, str]) -> None:
    queue = world.create("chunks-of-a-stream", partitions=4)
    writer = stream_sink(world, queue, chunkItems="1")
    for batch_id, chunks in enumerate((40, 1, 17, 2, 33)):
        task.update({sink.QUERY_ID: "q", sink.BATCH_ID: str(batch_id)})
        rows = table(value=[f"{batch_id}/{n}" for n in range(chunks)])
        assert [writer.write(iter(rows.to_batches())) for _ in range(2)] == [Written(chunks, chunks, 0), Written(chunks, chunks, chunks)]


def test_a_batch_that_is_repeated_with_other_options_is_known_again_or_refused(world: Server, task: dict[str, str]) -> None:
    queue = world.create("changed", partitions=4)
    task.update({sink.QUERY_ID: "q", sink.BATCH_ID: "7"})
    rows = table(value=[str(n) for n in range(5)])
    found = [stream_sink(world, queue, atomic=atomic).write(iter(rows.to_batches())).deduplicated for atomic in ("false", "true", "false")]
    assert found == [0, 1, 1]
    task[sink.BATCH_ID] = "8"
    more = table(value=[str(n) for n in range(1_500)])
    stream_sink(world, queue, chunkItems="1000").write(iter(more.to_batches()))
    with pytest.raises(SluicewayError, match="was written before with other rows"):
        stream_sink(world, queue, atomic="true").write(iter(more.to_batches()))
    assert world.count(queue, "produced") == 1_505


def test_rows_whose_unique_keys_are_taken_are_not_stored(world: Server, task: dict[str, str]) -> None:
    queue = world.create("unique", partitions=3, unique="until_settled")
    rows = table(value=["a", "b", "c", "d", "e"], unique_key=["1", "2", None, "1", "2"])
    writer = batch_sink(world, queue, rows)
    assert writer.write(iter(rows.to_batches(max_chunksize=2))).items == 5
    assert world.count(queue, "produced") == 3
    again = batch_sink(world, queue, rows, writeId="another")
    again.write(iter(rows.to_batches()))
    found = {item["unique_key"]: item["bytes"] for item in items(world, queue)}
    assert {name: base64.b64decode(payload) for name, payload in found.items()} == {"1": b"a", "2": b"b", None: b"c"}
    assert world.count(queue, "produced") == 4


def test_an_empty_unique_key_is_a_bad_row_and_its_item_has_none(world: Server, task: dict[str, str]) -> None:
    queue, bad = world.create("unique-bad", unique="until_settled"), world.create("unique-the-bad", partitions=1)
    rows = table(value=["a", "b", "c"], unique_key=["k", "", "ż" * 129])
    writer = batch_sink(world, queue, rows, badRows=bad)
    assert writer.write(iter(rows.to_batches())) == Written(1, 1, 0, bad=2)
    found = items(world, bad)
    assert [item["headers"]["sluiceway-reason"].partition(":")[0] for item in found] == ["unique_key", "unique_key"]
    assert [item["unique_key"] for item in found] == [None, None]
    assert [item["unique_key"] for item in items(world, queue)] == ["k"]


# ---- rows that no queue takes -----------------------------------------------------------------------------------------


def bad_rows(**others: Any) -> pa.Table:
    """Eleven rows, of which the first and the last are good."""
    return table(
        payload=pa.array([b"ok", None, b"x" * ((8 << 20) + 1), b"k", b"r", b"h", b"t", b"n", b"e", b"l", b"ok too"], pa.binary()),
        kind=pa.array(["k", None, None, "k" * 2_049, None, None, None, None, None, None, None]),
        reference=pa.array(["r", "row 1", None, None, "ż" * 1_025, None, None, None, None, None, "r"]),
        key=pa.array(["c-7", "c-8", None, None, None, None, None, None, "", "ż" * 129, None]),
        headers=pa.array(
            [[("a", "b")], None, None, None, None, [("a", "b" * 8_192)], None, [("a", None)], None, None, []], pa.map_(pa.utf8(), pa.utf8())
        ),
        enqueue_at=pa.array([0, None, None, None, None, None, -1, None, None, None, None], pa.timestamp("us", "UTC")),
        **others,
    )


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        (1, "payload", "no value, and every item needs a payload (a row; the first is row 1000 of task 3, reference 'row 1')"),
        (2, "payload", "larger than 8,388,608 bytes (a row"),
        (3, "kind", "longer than 2,048 bytes"),
        (4, "reference", "longer than 2,048 bytes"),
        (5, "headers", "larger than 8,192 bytes"),
        (6, "enqueue_at", "before 1970"),
        (7, "headers", "a header has no value"),
        (8, "key", "empty"),
        (9, "key", "longer than 256 bytes"),
    ],
)
def test_a_bad_row_ends_the_write_and_is_told(world: Server, task: dict[str, str], row: int, column: str, says: str) -> None:
    queue = world.create(f"bad-{row}")
    rows = bad_rows()
    good, bad = rows.slice(0, 1).combine_chunks(), rows.slice(row, 1).combine_chunks()
    writer = batch_sink(world, queue, rows, chunkItems="10")
    with pytest.raises(SluicewayError) as refused:
        writer.write(iter([batch for _ in range(1_000) for batch in good.to_batches()] + bad.to_batches()))
    assert refused.value.field == column
    assert says in refused.value.detail
    assert "badRows=QUEUE" in refused.value.detail


def test_bad_rows_go_to_a_queue_of_their_own_once(world: Server, task: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    queue, bad = world.create("some-bad"), world.create("the-bad", partitions=1)
    rows = bad_rows()
    writer = batch_sink(world, queue, rows, badRows=bad)
    first = writer.write(iter(rows.to_batches()))
    assert first == Written(2, 1, 0, bad=9)
    # Repeated, with rows that come in other batches, nothing is added.
    assert writer.write(iter(rows.to_batches(max_chunksize=3))) == Written(2, 1, 1, bad=9)
    assert [world.count(each, "produced") for each in (queue, bad)] == [2, 9]
    found = items(world, bad)
    assert [item["headers"]["sluiceway-reason"].partition(":")[0] for item in found] == [
        "payload", "payload", "kind", "reference", "headers", "enqueue_at", "headers", "key", "key",
    ]  # fmt: skip
    assert [item["headers"]["sluiceway-row"] for item in found] == [f"3/{n}" for n in range(1, 10)]
    assert [found[at]["key"] for at in (0, 7, 8)] == ["c-8", None, "ż" * 64]
    assert {item["key"] for item in items(world, queue)} == {"c-7", None}
    assert (found[0]["reference"], found[2]["kind"], found[3]["reference"]) == ("row 1", "k" * 512, "ż" * 512)
    with caplog.at_level(logging.WARNING):
        writer.commit([first, None, first])
        writer.commit([Written(0, 0, 0, bad=1)])
    assert "w: 18 rows that no queue takes are in the queue for bad rows" in caplog.text
    assert "w: 1 row that no queue takes is in the queue" in caplog.text


def unchecked(*values: bytes | None) -> pa.Array:
    """A column of texts that may be any bytes, as Spark makes them of binary columns."""
    valid, ends, data = pa.array(values, pa.binary()).buffers()
    return pa.StringArray.from_buffers(len(values), ends, data, valid)


def rows_that_are_no_text() -> pa.Table:
    """The first two are good: a payload may be any bytes."""
    long = b"\xff" * ((8 << 20) + 1)
    return table(
        value=unchecked(b"a", b"b\xff", b"c", b"d", long),
        key=unchecked(b"k", None, b"caf\xe9", None, None),
        reference=unchecked(None, None, b"n\xb0 3", None, None),
        headers=pa.MapArray.from_arrays([0, 0, 0, 0, 1, 1], pa.array(["city"]), unchecked(b"K\xf6ln")),
    )


def test_bytes_that_are_no_text_are_told(world: Server, task: dict[str, str]) -> None:
    queue = world.create("no-text-refused")
    rows = rows_that_are_no_text().slice(0, 3)
    with pytest.raises(SluicewayError) as refused:
        batch_sink(world, queue, rows).write(iter(rows.to_batches()))
    assert refused.value.field == "reference"
    assert "not UTF-8 (a row; the first is row 2 of task 3, reference 'n\ufffd 3')" in refused.value.detail


def test_bytes_that_are_no_text_do_not_hold_up_the_other_rows(world: Server, task: dict[str, str]) -> None:
    queue, bad = world.create("no-text"), world.create("no-text-bad", partitions=1)
    rows = rows_that_are_no_text()
    writer = batch_sink(world, queue, rows, badRows=bad)
    assert writer.write(iter(rows.to_batches())) == Written(2, 1, 0, bad=3)
    assert writer.write(iter(rows.to_batches(max_chunksize=2))) == Written(2, 1, 1, bad=3)
    assert sorted(base64.b64decode(item["bytes"]) for item in items(world, queue)) == [b"a", b"b\xff"]
    found = items(world, bad)
    assert [item["headers"]["sluiceway-reason"] for item in found] == [
        "reference: not UTF-8", "headers: not UTF-8", "value: larger than 8,388,608 bytes",
    ]  # fmt: skip
    assert (found[0]["key"], found[0]["reference"], found[1]["headers"]["city"]) == ("caf\ufffd", "n\ufffd 3", "K\ufffdln")


def test_writes_into_several_queues_share_one_for_bad_rows(world: Server, task: dict[str, str]) -> None:
    """Under one `writeId`, as of one batch that goes to all of them."""
    bad = world.create("shared-bad", partitions=1)
    for n, values in enumerate((["x", None], ["x", None], [None, "x", None])):
        rows = table(value=pa.array(values, pa.utf8()))
        queue = world.create(f"one-of-several-{n}")
        for _ in range(2):
            batch_sink(world, queue, rows, badRows=bad).write(iter(rows.to_batches()))
    assert world.count(bad, "produced") == 4


def test_keys_of_bad_rows_are_not_too_long(world: Server, task: dict[str, str]) -> None:
    bad, queue = world.create("long-bad"), world.create("l" * 128)
    rows = table(value=pa.array(["x", None], pa.utf8()))
    given = {"url": world.url, "queue": queue, "badRows": bad}
    with pytest.raises(SluicewayError, match="expected 1 to 772 bytes") as refused:
        sink_options({**given, "writeId": "w" * 773})
    assert refused.value.field == "writeId"
    batch_sink(world, queue, rows, badRows=bad, writeId="w" * 772).write(iter(rows.to_batches()))
    batch_sink(world, queue, rows.slice(0, 1), writeId="w" * 900).write(iter(rows.slice(0, 1).to_batches()))
    assert [world.count(each, "produced") for each in (queue, bad)] == [2, 1]


def test_a_bad_row_keeps_headers_that_can_be_sent(world: Server, task: dict[str, str]) -> None:
    queue, bad = world.create("with-headers"), world.create("with-headers-bad", partitions=1)
    long = [("k", "v" * 8_190)]
    own = [[("trace", "7"), ("sluiceway-reason", "mine")], None, [], long]
    rows = table(payload=pa.nulls(4, pa.binary()), headers=pa.array(own, pa.map_(pa.utf8(), pa.utf8())))
    batch_sink(world, queue, rows, badRows=bad).write(iter(rows.to_batches()))
    reason = "payload: there is no value, and every item needs a payload"
    told = [{"sluiceway-reason": reason, "sluiceway-row": f"3/{n}"} for n in range(4)]
    assert [item["headers"] for item in items(world, bad)] == [{"trace": "7", **told[0]}, *told[1:]]


def test_a_queue_for_bad_rows_that_is_not_there_is_told_before_anything_is_written(
    world: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, rows = world.create("no-bad"), table(value=["x"])
    with pytest.raises(SluicewayError, match="badRows: there is no queue 'nosuch'") as refused:
        batch_sink(world, queue, rows, badRows="nosuch")
    assert refused.value.field == "badRows"
    with guarded(tmp_path / "data") as served:
        served.client("manage:*").post("/v1/queues.create", json={"queue_name": "bad"}).raise_for_status()
        # A key that may write, and not look.
        monkeypatch.setenv("WRITE_KEY", served.key("produce:*"))
        schema = StructType([StructField("value", StringType())])
        given = {"url": served.url, "queue": "q", "apiKey": "env:WRITE_KEY"}
        BatchSink(schema, sink_options({**given, "badRows": "bad"}))


def test_more_bad_rows_than_can_be_chance_end_the_write(world: Server, task: dict[str, str]) -> None:
    queue, bad = world.create("all-bad"), world.create("all-the-bad")
    rows = pa.table({"payload": pa.nulls(10_001, pa.binary())})
    with pytest.raises(SluicewayError, match="more than 10,000 rows of task 3 are bad; the last: payload: there is no value") as refused:
        batch_sink(world, queue, rows, badRows=bad).write(iter(rows.to_batches(max_chunksize=1_000)))
    assert refused.value.field == "badRows"


def test_more_bytes_of_bad_rows_than_are_kept_end_the_write(world: Server, task: dict[str, str]) -> None:
    queue, bad = world.create("much-bad"), world.create("much-the-bad")
    rows = table(payload=[b"x" * (8 << 20)] * 9, kind=["k" * 2_049] * 9)
    with pytest.raises(SluicewayError, match="more than 64 MiB of the rows of task 3 are bad; the last: kind: longer") as refused:
        batch_sink(world, queue, rows, badRows=bad).write(iter(rows.to_batches(max_chunksize=3)))
    assert refused.value.field == "badRows"


def test_options_of_the_sink_that_do_not_go_together() -> None:
    given = {"url": "http://localhost:1", "queue": "q"}
    for wrong, field in (
        ({"atomic": "yes"}, "atomic"),
        ({"atomic": "true", "chunkItems": "5"}, "chunkItems"),
        ({"badRows": "q"}, "badRows"),
        ({"badRows": "../q"}, "badRows"),
        ({"badRows": "r", "mode": "settle"}, "badRows"),
    ):
        with pytest.raises(SluicewayError) as refused:
            sink_options({**given, **wrong})
        assert refused.value.field == field, wrong


# ---- chunks that are made ahead ---------------------------------------------------------------------------------------


def test_the_next_chunk_is_made_while_one_is_stored_and_sent_when_it_is(
    world: Server, task: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = world.create("ahead", partitions=1)
    events: list[str] = []

    def noted(name: str) -> None:
        honest = getattr(Client, name)

        def call(self: Client, sent: Call[Any]) -> Any:
            events.append(f"{name} {sent.path.rpartition('%2F')[2]}")
            return honest(self, sent)

        monkeypatch.setattr(Client, name, call)

    def rows() -> Iterator[pa.RecordBatch]:
        for n in range(3):
            events.append(f"rows {n}")
            yield from table(value=[str(n)]).to_batches()

    noted("start")
    noted("finish")
    schema = table(value=["0"])
    assert batch_sink(world, queue, schema, chunkItems="1").write(rows()) == Written(3, 3, 0)
    assert events == ["rows 0", "start 0", "rows 1", "finish 0", "start 1", "rows 2", "finish 1", "start 2", "finish 2"]
    assert [base64.b64decode(item["bytes"]) for item in items(world, queue)] == [b"0", b"1", b"2"]


def test_chunks_are_cut_by_bytes_but_not_those_of_an_atomic_task(world: Server, task: dict[str, str]) -> None:
    queue = world.create("wide")
    rows = table(value=["x" * (1 << 20)] * 6)
    assert batch_sink(world, queue, rows).write(iter(rows.to_batches(max_chunksize=4))) == Written(6, 2, 0)
    assert batch_sink(world, queue, rows, atomic="true", writeId="whole").write(iter(rows.to_batches())) == Written(6, 1, 0)


def test_a_chunk_that_is_refused_fails_the_write_before_the_next_is_sent(world: Server, task: dict[str, str]) -> None:
    queue = world.create("refused-ahead", partitions=1)
    first, other = table(value=["a", "b", "c"]), table(value=["a", "x", "c"])
    writer = batch_sink(world, queue, first, chunkItems="1")
    writer.write(iter(first.slice(0, 2).to_batches()))
    with pytest.raises(SluicewayError, match=r"chunk w/3/1 was written before with other rows"):
        writer.write(iter(other.to_batches()))
    assert [base64.b64decode(item["bytes"]) for item in items(world, queue)] == [b"a", b"b"]


# ---- back-pressure ----------------------------------------------------------------------------------------------------


def test_a_write_waits_as_long_as_the_server_asks(task: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server, and a key that may make two requests a second."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with guarded(tmp_path / "data") as served:
        served.client("manage:*").post("/v1/queues.create", json={"queue_name": "slow"}).raise_for_status()
        monkeypatch.setenv("SLOW_KEY", served.key("produce:*", requests_per_second=2))
        rows = table(value=[str(n) for n in range(50)])
        options = sink_options({"url": served.url, "queue": "slow", "chunkItems": "10", "apiKey": "env:SLOW_KEY"})
        written = BatchSink(StructType([StructField("value", StringType())]), options).write(iter(rows.to_batches()))
        stats = served.client("read:*").post("/v1/queue.stats", json={"queue_name": "slow"}).json()
    assert written == Written(50, 5, 0)
    assert sum(each["produced"] for logical in stats["logical_queues"] for each in logical["partitions"]) == 50
    # Five requests were too many; each refusal asked for a second at least.
    assert slept
    assert min(slept) >= 1


# ---- in Spark ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("tests", **{"spark.sql.shuffle.partitions": 2})


@pytest.mark.spark
def test_spark_writes_atomic_tasks_and_sorts_out_bad_rows(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue, bad = world.create("in-spark", partitions=4), world.create("in-spark-bad", partitions=1)
    rows = spark.range(0, 4_000, 1, 4).select(F.when(F.col("id") % 1_000 != 7, F.concat(F.lit("item "), "id")).alias("value"))
    given = {"url": world.url, "queue": queue, "writeId": "w"}
    with pytest.raises(PySparkException, match=r"there is no value.*row 7 of task [0-3]"):
        rows.write.format("sluiceway").mode("append").options(atomic="true", **given).save()
    assert world.count(queue, "produced") == 0
    for _ in range(2):
        rows.write.format("sluiceway").mode("append").options(atomic="true", badRows=bad, **given).save()
    assert [world.count(each, "produced") for each in (queue, bad)] == [3_996, 4]
    assert sorted(item["headers"]["sluiceway-row"] for item in items(world, bad)) == [f"{task}/7" for task in range(4)]
    source = tmp_path / "in"
    source.mkdir()
    (source / "1").write_text("good\nbad\n")
    stream = spark.readStream.text(str(source)).selectExpr("nullif(value, 'bad') as value")
    query = stream.writeStream.format("sluiceway").options(url=world.url, queue=queue, badRows=bad, atomic="true")
    query.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start().awaitTermination()
    assert [world.count(each, "produced") for each in (queue, bad)] == [3_997, 5]
