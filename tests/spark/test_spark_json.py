"""Payloads that are JSON become columns, row by row what they were, whatever their neighbours are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.datasource import EqualTo
from pyspark.sql.types import StructType

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import columns as spark_columns
from sluiceway.spark import session, settle
from sluiceway.spark.browse import BROWSED, BrowseReader
from sluiceway.spark.columns import JsonColumns
from sluiceway.spark.options import browse_options
from sluiceway.spark.rows import SCHEMA
from tests.spark.spark_world import Server, server


def columns(fields: dict[str, object]) -> JsonColumns:
    """As of a schema with these columns, by name: a type as Spark writes it in JSON."""
    named = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    return JsonColumns(StructType.fromJson({"type": "struct", "fields": named}), SCHEMA)


def struct(**fields: object) -> dict[str, object]:
    return {"type": "struct", "fields": [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]}


def array(kind: object) -> dict[str, object]:
    return {"type": "array", "elementType": kind, "containsNull": True}


def made(maker: JsonColumns, payloads: list[bytes]) -> list[dict[str, object]]:
    ids = [f"q.0.{n}" for n in range(len(payloads))]
    rows = pa.record_batch({"id": ids, "payload": pa.array(payloads, pa.binary()), "attempts": pa.array([1] * len(ids), pa.int32())})
    found: list[dict[str, object]] = maker.make(rows).to_pylist()
    assert len(found) == len(payloads)
    return found


PLAIN = columns({"a": "integer", "b": "string", "_corrupt_record": "string"})

GOOD = [
    (b'{"a": 1, "b": "x"}', 1, "x"),
    ('{"b": "zażółć \\u00e9 \\ud83d\\ude00 😀"}'.encode(), None, "zażółć é 😀 😀"),
    (b'{\n  "a": 2,\r\n  "b": "two\\nlines"\n}\n', 2, "two\nlines"),
    (b"{}", None, None),
    (b'{"a": null, "c": {"a": [1, "x"]}}', None, None),
    (b'{"b": ""}', None, ""),
]
BAD = [
    b"",
    b" ",
    b"null",
    b"[]",
    b"7",
    b'"text"',
    b'{"a": 1',
    b'{"a": 1}}',
    b'{"a": 1} {"a": 2}',
    b'{"a": 1}} {"v": {"a": 2}',
    b'{"a": 1}}\n{"v": {"a": 2}',
    b'{"a": 1},',
    b'{"a": 1}, {"a": 2}',
    b'{"a": 1}, "w": 2',
    b'{"a": 1}], "v": [{"a": 2}',
    b'{"a": 1}], "v": null, "w": [',
    b'{"a": 1}]}\n{"v": [{"a": 2}',
    b'},{"v":{',
    b'"',
    b"[",
    b"{",
    b"}",
    b'{"a": "1"}',
    b'{"a": 1.5}',
    b'{"a": 3000000000}',
    b'{"b": 1}',
    b'{"b": {"c": 1}}',
    b'{"a": 1, "a": 2}',
    b'{"b": "line\nend"}',
    b'{"b": "open',
    b'{"b": "\\ud800"}',
    b'{"b": "\xff\xfe"}',
    b'\xef\xbb\xbf{"a": 1}',
    b"{'a': 1}",
]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_payload_is_null_and_shown_and_moves_no_other(bad: bytes) -> None:
    payloads = [good for good, _, _ in GOOD]
    found = made(PLAIN, [*payloads[:3], bad, *payloads[3:], bad])
    expected = [{"a": a, "b": b, "_corrupt_record": None} for _, a, b in GOOD]
    shown = {"a": None, "b": None, "_corrupt_record": bad.decode(errors="replace")}
    assert found == [*expected[:3], shown, *expected[3:], shown]


@given(st.lists(st.sampled_from([*(good for good, _, _ in GOOD), *BAD]) | st.binary(max_size=12), max_size=40))
def test_rows_are_made_one_by_one_as_all_at_once(payloads: list[bytes]) -> None:
    """Pieces of JSON that would fit together across rows never do."""
    together = made(PLAIN, payloads)
    assert together == [row for payload in payloads for row in made(PLAIN, [payload])]
    for payload, row in zip(payloads, together, strict=True):
        try:
            value = json.loads(payload.decode())
        except ValueError:
            value = None
        if value is None:
            assert row["_corrupt_record"] is not None


_FRAGMENTS = r"""
null true false 0 1 -1 -0 1.0 1.5 1e2 01 NaN -Infinity 1e400 2147483648 9223372036854775808 -9223372036854775808
[] [1] [null] [1.0] ["x"] {} {"c":1} {"c":"1"} {"c":1,"c":2} {"d":1,"d":2} "" "1" "x" "\ud800"
"2026-01-31" "2026-01-31T08" "2026-01-31T08:00" "2026-01-31T08:00:00Z" "2026-01-31T08:00:00.123456789+02:00" "2026-02-30" "2026-13-01"
"2026-1-3" "2026-01-31T25:00:00" "2026-01-31Z" "20260131" "0000-01-01" "-2026-01-31"
"""
FRAGMENTS = [*_FRAGMENTS.split(), '"2026-01-31 08:00"', '"2026-01-31 noon"', "1" * 5_000]
KINDS = {
    "i": "integer",
    "l": "long",
    "n": "double",
    "b": "boolean",
    "s": "string",
    "t": "timestamp",
    "u": "timestamp_ntz",
    "d": "date",
    "a": array("integer"),
    "o": struct(c="integer"),
    "p": array(struct(c="integer")),
    "m": "decimal(10,2)",
}
EACH = {name: columns({name: kind, "_corrupt_record": "string"}) for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", EACH)
def test_what_is_left_out_unparsed_is_what_the_parser_refuses(name: str) -> None:
    """Each value of each type, together with all others and alone."""
    values = [*FRAGMENTS, *(f"[{value}]" for value in FRAGMENTS)]
    payloads = [f'{{"{name}":{value}}}'.encode() for value in values]
    payloads += [f'{{"z":{value},"{name}":null}}'.encode() for value in values]
    payloads += [f'{{"{name}":null,"{name}":{value}}}'.encode() for value in values] + [b'{"z":1,"z":2}', b'{"z":{"z":1,"z":2}}']
    rows = pa.record_batch({"id": ["q.0.1"] * len(payloads), "payload": pa.array(payloads, pa.binary())})
    together = EACH[name].make(rows)
    for n, payload in enumerate(payloads):
        # As texts: a number that is none is not equal to itself, and a date may be beyond those of Python.
        alone = EACH[name].make(rows.slice(n, 1))
        assert [str(column) for column in alone.columns] == [str(column.slice(n, 1)) for column in together.columns], payload
    assert 0 < together.column("_corrupt_record").null_count < len(payloads)


@pytest.mark.parametrize("bad", [b'{"a": 1', b"no JSON", b'{"a": "1"}', b'{"a": 1, "a": 2}', b'{"b": "\xff"}'])
def test_many_bad_payloads_are_found_in_one_pass(bad: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, calls = spark_columns._parsed, list[int]()

    def counted(payloads: pa.Array, kind: pa.StructType) -> pa.StructArray | None:
        calls.append(len(payloads))
        return parse(payloads, kind)

    monkeypatch.setattr(spark_columns, "_parsed", counted)
    payloads = [bad if n % 3 else b'{"a": %d}' % n for n in range(4_000)]
    found = made(PLAIN, payloads)
    assert [row["a"] for row in found] == [None if n % 3 else n for n in range(4_000)]
    assert len(calls) < 20


def test_nested_values_times_and_numbers() -> None:
    maker = columns(
        {
            "who": struct(name="string", tags=array("string")),
            "lines": array(struct(sku="long", due="date")),
            "at": "timestamp",
            "day": "date",
            "price": "decimal(10,2)",
            "share": "double",
            "paid": "boolean",
            "_item": struct(attempts="integer", id="string"),
        }
    )
    assert maker.read.names == ["id", "attempts", "payload"]
    full = {
        "who": {"name": "Ada", "tags": ["x", None], "more": 1},
        "lines": [{"sku": 1, "due": "2026-01-31"}, {}],
        "at": "2026-01-31T01:02:03.5+01:00",
        "day": "2026-01-31",
        "price": 12.25,
        "share": 3,
        "paid": True,
    }
    first, second, third = made(maker, [json.dumps(full).encode(), b'{"price": 1.255}', b'{"who": {}, "lines": []}'])
    assert str(first["at"]) == "2026-01-31 00:02:03.500000+00:00"
    assert (str(first["day"]), str(first["price"]), first["share"], first["paid"]) == ("2026-01-31", "12.25", 3.0, True)
    assert first["who"] == {"name": "Ada", "tags": ["x", None]}
    assert [(line["sku"], str(line["due"])) for line in first["lines"]] == [(1, "2026-01-31"), (None, "None")]  # type: ignore[attr-defined]
    assert [row["_item"] for row in (first, second)] == [{"attempts": 1, "id": "q.0.0"}, {"attempts": 1, "id": "q.0.1"}]
    assert {name: value for name, value in second.items() if value is not None} == {"_item": second["_item"]}
    assert (third["who"], third["lines"]) == ({"name": None, "tags": None}, [])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"_item": struct(id="string")}, "expected columns for members"),
        ({"a": {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True}}, "use from_json"),
        ({"a": struct(b="binary")}, "a.b is of the type binary"),
        ({"a": array({"type": "array", "elementType": "integer", "containsNull": False})}, "NOT NULL"),
        ({"a": "integer", "_item": "string"}, "_item is a struct"),
        ({"a": "integer", "_item": struct(colour="string")}, "no column 'colour'"),
        ({"a": "integer", "_item": struct(attempts="string")}, "type int, not string"),
        ({"a": "integer", "_corrupt_record": "integer"}, "_corrupt_record is of the type string"),
    ],
)
def test_a_column_that_cannot_be_made_is_named(fields: dict[str, object], says: str) -> None:
    with pytest.raises(SluicewayError, match=says) as refused:
        columns(fields)
    assert refused.value.field == "schema"


def test_members_of_payloads_are_not_taken_for_columns_of_items() -> None:
    """`state` is what a payload says, and `_item.state` what the queue says: only that narrows what is read."""
    schema = StructType.fromJson(struct(state="string", _item=struct(state="string", partition="integer")))
    given = {"url": "http://localhost:1", "queue": "q", "payloadFormat": "json"}
    reader = BrowseReader(schema, browse_options(given))
    members = [EqualTo(("state",), "leased"), EqualTo(("partition",), 1)]
    assert reader.pushFilters([*members, EqualTo(("_item", "state"), "leased")]) == members
    assert reader.partitions() == []
    plain = BrowseReader(BROWSED, browse_options({**given, "payloadFormat": "binary"}))
    assert plain.pushFilters([EqualTo(("_item", "state"), "leased")]) == [EqualTo(("_item", "state"), "leased")]


# ---- in Spark ----------------------------------------------------------------------------------------------------------

TYPED = "shop int, amount double, _item struct<id: string, attempts: int>, _corrupt_record string"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("tests", **{"spark.sql.shuffle.partitions": 2})


@pytest.mark.spark
def test_a_poison_row_never_blocks_its_batch_and_a_replay_is_the_same(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    world.create("json-dead", partitions=1)
    queue = world.create("json", dead_queue="json-dead")
    good = [json.dumps({"shop": n % 7, "amount": n / 2, "id": "mine"}) for n in range(200)]
    world.produce(queue, [*good[:50], "poison", *good[50:], '{"shop": "seven"}'])
    runs: list[list[tuple[object, ...]]] = []

    def work(batch: DataFrame, batch_id: int) -> None:
        runs.append([tuple(row) for row in batch.collect()])
        told = "case when _corrupt_record is null then 'done' else 'dead' end as outcome"
        settle(batch.selectExpr("_item.id as id", told, "'no JSON' as reason"), url=world.url, queue=queue)
        if len(runs) == 1:
            raise ValueError("not now")

    stream = spark.readStream.format("sluiceway").schema(TYPED)
    typed = stream.options(url=world.url, queue=queue, consumer="c", payloadFormat="json", minPartitions="2").load()
    writer = typed.writeStream.foreachBatch(work).option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    with pytest.raises(PySparkException, match="not now"):
        writer.start().awaitTermination()
    writer.start().awaitTermination()
    assert runs[0] == runs[1]
    corrupt = [row for row in runs[0] if row[3] is not None]
    assert sorted(row[:2] + row[3:] for row in corrupt) == [(None, None, "poison"), (None, None, '{"shop": "seven"}')]
    sound = [row[:2] for row in runs[0] if row[3] is None]
    assert sorted(sound, key=lambda row: float(str(row[1]))) == [(n % 7, n / 2) for n in range(200)]
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (200, 0)


@pytest.mark.spark
def test_a_stream_of_some_columns_of_items(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("some-columns")
    world.produce(queue, ["a", "b"])
    seen: list[tuple[list[str], list[str]]] = []

    def work(batch: DataFrame, batch_id: int) -> None:
        seen.append((batch.columns, sorted(bytes(row.payload).decode() for row in batch.collect())))
        settle(batch.selectExpr("id", "'dead' as outcome"), url=world.url, queue=queue)

    def run(columns: str, checkpoint: Path) -> None:
        stream = spark.readStream.format("sluiceway").schema(columns).options(url=world.url, queue=queue, consumer="c").load()
        query = stream.writeStream.foreachBatch(work).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()

    run("payload binary, id string", tmp_path / "some")
    assert seen == [(["payload", "id"], ["a", "b"])]
    assert world.count(queue, "dead") == 2
    with pytest.raises(PySparkException, match="there is no column 'colour'; an item has id, origin"):
        run("payload binary, colour string", tmp_path / "wrong")


@pytest.mark.spark
def test_a_table_of_json_is_filtered_by_its_members(spark: SparkSession, world: Server) -> None:
    queue = world.create("json-table", partitions=2)
    world.produce(queue, ['{"state": "open", "id": 1}', '{"state": "ready", "id": 2}', "not JSON"])

    def read() -> DataFrameReader:
        return spark.read.format("sluiceway").options(url=world.url, queue=queue, payloadFormat="json")

    table = read().schema("state string, id bigint, _item struct<state: string, partition: int>").load()
    assert [tuple(row)[:2] for row in table.where("state = 'open' and _item.state = 'ready'").collect()] == [("open", 1)]
    assert sorted(str(row.id) for row in table.collect()) == ["1", "2", "None"]
    assert table.where("_item.state = 'leased'").count() == 0
    with pytest.raises(PySparkException, match="json requires a schema"):
        read().load()
