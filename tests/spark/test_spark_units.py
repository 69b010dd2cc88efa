"""The parts of the Spark side that need neither Spark nor a server: options, offsets, chunks, rows."""

from __future__ import annotations

import json
import pickle
import re
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, ByteType, DataType, IntegerType, LongType, ShortType, StringType, StructField, StructType

from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.chunks import recut, row_bytes
from sluiceway.model.items import HEADERS
from sluiceway.spark import sink
from sluiceway.spark.bad_rows import Sieve
from sluiceway.spark.format import SluicewaySource
from sluiceway.spark.jobs import shape
from sluiceway.spark.offsets import LEAST_TASK, LEAST_TASKS, HeldLease, Offset, Slice
from sluiceway.spark.options import consumes, sink_options, source_options
from sluiceway.spark.rows import SCHEMA, to_rows
from sluiceway.spark.settle import BatchSettle
from sluiceway.spark.settle import check_columns as check_outcome_columns

SOURCE = {"url": "http://127.0.0.1:1", "queue": "q", "consumer": "c"}
SINK = {"url": "http://127.0.0.1:1", "queue": "q"}


def refusal(call: object, *arguments: object) -> SluicewayError:
    with pytest.raises(SluicewayError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value


# ---- options ----------------------------------------------------------------------------------------------------


def test_options_have_defaults_and_arrive_in_lower_case() -> None:
    options = source_options({**SOURCE, "maxitemspertrigger": "7", "holdfor": "2h"})
    assert (options.max_items_per_trigger, options.min_partitions, options.hold_for) == (7, 1, 7_200_000)
    assert options.server.request_timeout == 120_000
    assert sink_options(SINK).chunk_items == 10_000


@pytest.mark.parametrize("name", ["url", "queue", "consumer"])
def test_a_missing_option_is_named(name: str) -> None:
    error = refusal(source_options, {key: value for key, value in SOURCE.items() if key != name})
    assert error.field == name
    assert "required" in error.detail


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"maxitemspertriger": "5"}, "maxitemspertriger", "did you mean maxItemsPerTrigger?"),
        ({"chunkitems": "5"}, "chunkItems", "not an option for reading"),
        ({"maxitemspertrigger": "0"}, "maxItemsPerTrigger", "whole number"),
        ({"holdfor": "a while"}, "holdFor", "duration"),
        ({"holdfor": "31d"}, "holdFor", "out of range"),
        ({"url": "localhost:80"}, "url", "address of a server"),
        ({"queue": "../q"}, "queue", "queue name"),
        ({"queue": "q,"}, "queue", "required"),
        ({"queue": "a,b, a"}, "queue", "twice"),
        ({"queue": "a,b,c", "maxitemspertrigger": "2"}, "maxItemsPerTrigger", "divided among 3 queues"),
        ({"queue": "a,b,c", "maxbytespertrigger": "2"}, "maxBytesPerTrigger", "divided among 3 queues"),
        ({"maxbytespertrigger": "64 m"}, "maxBytesPerTrigger", "number of bytes"),
        ({"maxbytespertrigger": "0k"}, "maxBytesPerTrigger", "number of bytes"),
        ({"failonleaseloss": "no"}, "failOnLeaseLoss", "true nor false"),
        ({"apikey": "slw_k7f3q2ma_verysecret"}, "apiKey", "env:NAME or file:PATH"),
        ({"api_key": "env:KEY"}, "api_key", "did you mean apiKey?"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], field: str, says: str) -> None:
    error = refusal(source_options, {**SOURCE, **options})
    assert error.field == field
    assert says in error.detail
    assert "verysecret" not in str(error)


@pytest.mark.parametrize(
    ("options", "field"), [({"mode": "send"}, "mode"), ({"chunkitems": "10001"}, "chunkItems"), ({"consumer": "c"}, "consumer")]
)
def test_a_wrong_option_of_the_sink_is_named(options: dict[str, str], field: str) -> None:
    assert refusal(sink_options, {**SINK, **options}).field == field


def test_what_is_no_mode_at_all_is_told_with_those_there_are() -> None:
    for mode, reads in (("consume", True), ("produce", False), ("settle", False)):
        assert consumes({**SINK, "mode": mode}) is reads
    assert "'take' is not a mode; expected consume" in refusal(consumes, {**SINK, "mode": "take"}).detail


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("kafka.bootstrap.servers", "see url ("),
        ("kafka.group.id", "see consumer ("),
        ("kafka.sasl.mechanism", "see an https url, caFile and apiKey ("),
        ("kafka.fetch.min.bytes", "leave it out"),
        ("startingoffsets", "leave it out"),
        ("subscribe", "see queue"),
        ("maxOffsetsPerTrigger", "see maxItemsPerTrigger"),
    ],
)
def test_options_of_kafka_that_are_left_over_are_refused(option: str, says: str) -> None:
    for parse, said in ((source_options, SOURCE), (sink_options, SINK)):
        error = refusal(parse, {**said, option: "x"})
        assert error.field == option
        assert says in error.detail


def test_all_options_of_kafka_are_told_at_once() -> None:
    query = {"kafka.bootstrap.servers": "broker:9092", "subscribe": "orders", "startingoffsets": "earliest", "maxoffsetspertrigger": "9"}
    error = refusal(source_options, query)
    assert error.field == "kafka.bootstrap.servers"
    assert "see url; maxoffsetspertrigger: see maxItemsPerTrigger; subscribe: see queue; startingoffsets: leave it out (" in error.detail


def test_what_the_page_for_kafkas_users_promises_is_what_they_are_told(repository: Path) -> None:
    page = (repository / "docs" / "guides" / "from-kafka.md").read_text()
    table = page.partition("If options of Kafka's connector are left")[2].partition("Columns:")[0]
    seen = 0
    for line in table.splitlines():
        cells = line.split("|")
        if len(cells) < 3 or cells[1].strip().startswith(("column", "any other", "-", "Kafka")):
            continue
        ours = None if cells[2].strip().startswith("none") else re.search(r"`([A-Za-z]+)`", cells[2])
        for option in re.findall(r"`([A-Za-z.]+\*?)`", cells[1]):
            if option != "minPartitions":
                detail = refusal(source_options, {**SOURCE, option.replace("*", "x"): "1"}).detail
                assert (ours[1] if ours else "see queue" if option == "subscribePattern" else "leave it out") in detail, option
                seen += 1
    assert seen > 20


def test_sparks_own_options_pass() -> None:
    sink_options({**SINK, "checkpointLocation": "/tmp/x", "queryName": "n", "path": "/p"})


def test_the_options_of_a_table_come_twice() -> None:
    said = {**SOURCE, "maxitemspertrigger": "7"}
    assert source_options({**said, **{f"option.{name}": value for name, value in said.items()}}).max_items_per_trigger == 7


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("64k", 65_536), ("8MB", 8 << 20), ("1g", 1 << 30), ("2T", 2 << 40)])
def test_a_number_of_bytes_is_said_as_spark_says_it(text: str, size: int) -> None:
    assert source_options({**SOURCE, "maxbytespertrigger": text}).max_bytes_per_trigger == size


def test_several_queues_are_read_and_one_is_written() -> None:
    options = source_options({**SOURCE, "queue": "orders, returns"})
    assert (options.queues, options.server.queue) == (("orders", "returns"), "orders")
    assert refusal(sink_options, {**SINK, "queue": "orders,returns"}).field == "queue"


# ---- offsets ----------------------------------------------------------------------------------------------------


def test_an_offset_survives_sparks_log_as_the_same_text() -> None:
    offset = Offset("n", 3).following([HeldLease("q.0.L1", 5), HeldLease("q.1.L2", 2)], 1)
    text = json.dumps(offset.to_dict())
    assert json.dumps(json.loads(text)) == text
    assert Offset.parse(json.loads(text)) == offset
    assert list(offset.to_dict()) == sorted(offset.to_dict())


def test_an_offset_names_the_queue_of_each_lease_if_there_are_several() -> None:
    leases = [HeldLease("q.0.L1", 5, "orders"), HeldLease("r.0.L1", 2, "returns"), HeldLease("r.1.L4", 1, "returns")]
    offset = Offset("n", 3).following(leases, 1)
    text = json.dumps(offset.to_dict())
    assert json.dumps(json.loads(text)) == text
    assert Offset.parse(json.loads(text)) == offset
    assert [part.queue for task in offset.tasks() for part in task] == ["orders", "returns", "returns"]
    assert offset.without(["q.0.L1"]).lease_ids == ["r.0.L1", "r.1.L4"]


@given(st.lists(st.integers(1, 25_000), min_size=1, max_size=8), st.integers(1, 40))
def test_tasks_cover_every_item_once_in_order(counts: list[int], min_partitions: int) -> None:
    offset = Offset("n").following([HeldLease(f"q.0.L{n}", count) for n, count in enumerate(counts)], min_partitions)
    tasks = list(offset.tasks())
    read = [(part.lease_id, part.start + n) for task in tasks for part in task for n in (0, part.count - 1)]
    assert read == sorted(read, key=lambda place: (int(place[0].rpartition("L")[2]), place[1]))
    for n, count in enumerate(counts):
        parts = [part for task in tasks for part in task if part.lease_id == f"q.0.L{n}"]
        assert parts[0].start == 0
        assert [part.start + part.count for part in parts] == [*[part.start for part in parts[1:]], count]
    assert max(sum(part.count for part in task) for task in tasks) <= max(LEAST_TASK, sum(counts) // LEAST_TASKS)
    assert len(tasks) >= min(min_partitions, sum(counts))


@pytest.mark.parametrize(
    ("items", "partitions", "min_partitions", "tasks"),
    [
        (1, 4, 1, 1),
        (10_000, 4, 1, 1),
        (50_000, 4, 1, 4),
        (50_000, 4, 8, 8),
        (50_000, 1, 1, 4),
        (400_000, 4, 1, 4),
        (640_000, 64, 1, 64),
        (200_000, 64, 1, 20),
        (1_000_000, 4, 1, 4),
        (1_000_000, 4, 16, 16),
    ],
)
def test_a_large_batch_has_a_task_for_each_partition(items: int, partitions: int, min_partitions: int, tasks: int) -> None:
    each, rest = divmod(items, partitions)
    leases = [HeldLease(f"q.{number}.L1", each + (number < rest)) for number in range(min(items, partitions))]
    assert len(list(Offset("n").following(leases, min_partitions).tasks())) == tasks


def test_a_task_is_read_in_pieces() -> None:
    pieces = list(Slice("q.0.L1", 7, 25, "orders").pieces(10))
    assert [(piece.start, piece.count) for piece in pieces] == [(7, 10), (17, 10), (27, 5)]
    assert {(piece.lease_id, piece.queue) for piece in pieces} == {("q.0.L1", "orders")}


# ---- chunks -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.binary(max_size=30), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=6),
    st.integers(1, 10),
    st.integers(1, 80),
)
def test_chunks_do_not_depend_on_how_rows_arrive(payloads: list[bytes], cuts: list[int], chunk_items: int, chunk_bytes: int) -> None:
    whole = pa.record_batch({"payload": pa.array(payloads, pa.binary())})
    edges = [0, *sorted(min(cut, len(payloads)) for cut in cuts), len(payloads)]
    pieces = [whole.slice(start, end - start) for start, end in pairwise(edges)]
    expected = [chunk.column("payload").to_pylist() for chunk in recut([whole], chunk_items, chunk_bytes)]
    assert [chunk.column("payload").to_pylist() for chunk in recut(pieces, chunk_items, chunk_bytes)] == expected
    assert [payload for chunk in expected for payload in chunk] == payloads
    for chunk in expected:
        assert len(chunk) <= chunk_items
        assert len(chunk) == 1 or sum(map(len, chunk)) <= chunk_bytes


def test_row_bytes_count_texts_and_headers_of_a_slice() -> None:
    batch = pa.record_batch(
        {
            "payload": pa.array([b"abc", b"", b"0123456789"], pa.binary()),
            "kind": pa.array(["a", None, "bb"]),
            "headers": pa.array([[("k", "v")], None, [("aa", "bbb"), ("c", "")]], HEADERS),
        }
    )
    assert row_bytes(batch).tolist() == [6, 0, 18]
    assert row_bytes(batch.slice(1)).tolist() == [0, 18]
    assert row_bytes(batch.slice(3)).tolist() == []


# ---- rows -------------------------------------------------------------------------------------------------------


def test_leased_items_become_rows() -> None:
    batch = pa.record_batch(
        {
            "partition": pa.array([3, 3], pa.int32()),
            "lease": pa.array([9, 9], pa.int64()),
            "offset": pa.array([40, 41], pa.int64()),
            "origin_offset": pa.array([4, 41], pa.int64()),
            "attempts": pa.array([2, 1], pa.int32()),
            "enqueued_at": pa.array([1_000, 2_000], pa.timestamp("ms", "UTC")),
            "payload": pa.array([b"x", b"y"], pa.binary()),
            "origin": pa.array([None, "other.0.7"]),
            "key": pa.array(["customer-7", None]),
            "priority": pa.array([0, None], pa.int8()),
        }
    ).replace_schema_metadata({"sluiceway": json.dumps({"incarnation": "k7f3q2ma"})})
    rows = to_rows(batch, "q", "k7f3q2ma.3.L9", to_arrow_schema(SCHEMA, timezone="UTC")).to_pylist()
    assert [row["id"] for row in rows] == ["k7f3q2ma.3.40", "k7f3q2ma.3.41"]
    assert [row["origin"] for row in rows] == ["k7f3q2ma.3.4", "other.0.7"]
    assert [(row["queue"], row["lease_id"], row["kind"], row["headers"]) for row in rows] == [("q", "k7f3q2ma.3.L9", None, None)] * 2
    assert [(row["key"], row["priority"]) for row in rows] == [("customer-7", 0), (None, None)]
    assert [row["enqueued_at"].timestamp() for row in rows] == [1, 2]


# ---- columns of the sinks ---------------------------------------------------------------------------------------


def schema(**columns: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        (schema(id=LongType()), "payload"),
        (schema(value=StringType(), payload=BinaryType()), "payload"),
        (schema(value=LongType()), "value"),
        (schema(value=StringType(), colour=StringType()), "colour"),
        (schema(value=StringType(), key=BinaryType()), "key"),
        (schema(value=StringType(), priority=StringType()), "priority"),
        (schema(value=StringType(), headers=StringType()), "headers"),
        (schema(value=StringType(), enqueue_at=StringType()), "enqueue_at"),
    ],
)
def test_a_wrong_column_of_items_is_named(columns: StructType, field: str) -> None:
    assert refusal(sink.check_columns, columns).field == field


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        (schema(id=StringType()), "outcome"),
        (schema(outcome=StringType()), "id"),
        (schema(outcome=StringType(), offset=LongType()), "id"),
        (schema(id=StringType(), outcome=LongType()), "outcome"),
        (schema(id=StringType(), outcome=StringType(), retry_after=LongType()), "retry_after"),
    ],
)
def test_a_wrong_column_of_outcomes_is_named(columns: StructType, field: str) -> None:
    assert refusal(check_outcome_columns, columns).field == field


def test_names_of_columns_may_be_in_any_case() -> None:
    assert sink.check_columns(schema(VALUE=StringType(), Kind=StringType())) == "value"
    check_outcome_columns(schema(ID=StringType(), Outcome=StringType(), RETRY_AFTER_MS=LongType()))
    assert refusal(sink.check_columns, schema(VALUE=StringType(), kind=StringType(), KIND=StringType())).field == "kind"
    assert refusal(check_outcome_columns, schema(id=StringType(), outcome=StringType(), Outcome=StringType())).field == "outcome"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"outcome": None}, "outcome: null of item k.0.2 is not an outcome; expected done, retry or dead"),
        ({"outcome": "later"}, "outcome: 'later' of item k.0.2 is not an outcome; expected done, retry or dead"),
        ({"retry_after_ms": -5}, "retry_after_ms: -5 of item k.0.2 is not from 0 to 31,622,400,000 milliseconds"),
        ({"retry_after_ms": 10**15}, "retry_after_ms: 1,000,000,000,000,000 of item k.0.2 is not from 0 to 31,622,400,000 milliseconds"),
        ({"outcome": "done"}, "retry_after_ms: 7 of item k.0.2 requires the outcome retry; it is null with others"),
        ({"reason": "é" * 1_025}, f"reason: '{'é' * 40}' of item k.0.2 is longer than 2,048 bytes"),
    ],
)
def test_a_wrong_value_of_an_outcome_is_named_with_its_item_before_anything_is_sent(values: dict[str, object], says: str) -> None:
    good = {"ID": "k.0.1", "outcome": "retry", "retry_after_ms": 7, "reason": "é" * 1_024}
    wrong = {**good, "ID": "k.0.2", **values}
    kinds = schema(ID=StringType(), outcome=StringType(), retry_after_ms=LongType(), reason=StringType())
    writer = BatchSettle(kinds, sink_options({**SINK, "mode": "settle"}))
    rows = pa.Table.from_pylist([good, wrong], to_arrow_schema(kinds))
    error = refusal(writer.write, iter(rows.to_batches()))
    assert (error.code, str(error)) == ("invalid_request", says)


@pytest.mark.parametrize(
    ("partition", "offset", "says"),
    [
        (2**31, 1, "partition: 2,147,483,648 is not the position of an item"),
        (0, -1, "offset: -1 is not the position of an item"),
        (None, 1, "partition: null is not the position of an item"),
    ],
)
def test_a_position_that_no_item_can_have_is_told_in_one_line(partition: int | None, offset: int, says: str) -> None:
    kinds = schema(partition=LongType(), offset=LongType(), outcome=StringType())
    writer = BatchSettle(kinds, sink_options({**SINK, "mode": "settle"}))
    rows = pa.Table.from_pylist([{"partition": partition, "offset": offset, "outcome": "done"}], to_arrow_schema(kinds))
    assert str(refusal(writer.write, iter(rows.to_batches()))) == says


@pytest.mark.parametrize(
    ("options", "columns", "field"),
    [({"consumer": ""}, SCHEMA, "consumer"), ({}, schema(payload=StringType()), "schema"), ({"mode": "settle"}, SCHEMA, "mode")],
)
def test_a_stream_that_cannot_be_is_refused_when_spark_asks_for_an_offset(options: dict[str, str], columns: StructType, field: str) -> None:
    """Not before: PySpark would bury the error under one of its own, for want of a reader to stop."""
    reader = SluicewaySource({**SOURCE, **options}).streamReader(columns)
    offset: dict[str, object] = {}
    for call in (reader.initialOffset, reader.getDefaultReadLimit, reader.prepareForTriggerAvailableNow):
        assert refusal(call).field == field
    assert refusal(reader.latestOffset, offset, None).field == refusal(reader.partitions, offset, offset).field == field
    reader.stop()


def test_options_that_spark_did_not_hand_over_are_told() -> None:
    assert "Spark does not pass the OPTIONS of a catalog's table to SELECT, INSERT" in refusal(SluicewaySource, {}).detail


def test_writers_can_be_sent_to_tasks() -> None:
    writer = sink.BatchSink(schema(value=StringType()), sink_options({**SINK, "writeid": "w"}))
    assert isinstance(pickle.loads(pickle.dumps(writer)), sink.BatchSink)


@pytest.mark.parametrize("kind", [ByteType(), ShortType(), IntegerType(), LongType()])
def test_a_priority_may_be_any_whole_number_of_spark_from_0_to_9(kind: DataType) -> None:
    assert sink.check_columns(schema(value=StringType(), priority=kind)) == "value"
    column = to_arrow_schema(schema(priority=kind)).field("priority").type
    rows = pa.record_batch({"value": pa.array(["a", "b", "c"]), "priority": pa.array([0, None, 9], column)})
    (good,) = Sieve("value", 3, keep=False).good(iter([rows]))
    assert sink.to_items(good, "value")["priority"].to_pylist() == [0, None, 9]
    for wrong in (-1, 10, 100):
        bad = pa.record_batch({"value": pa.array(["a", "b"]), "priority": pa.array([None, wrong], column)})
        with pytest.raises(SluicewayError, match=r"not between 0 and 9 \(a row; the first is row 1 of task 3") as raised:
            list(Sieve("value", 3, keep=False).good(iter([bad])))
        assert raised.value.field == "priority"


def test_lines_that_are_items_are_read_with_all_columns_of_an_item() -> None:
    assert tuple(field.split()[0] for field in shape._ITEM.split(", ")) == shape._COLUMNS
