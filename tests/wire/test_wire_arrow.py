"""Arrow requests and answers: accepted forms, refusals by column, hostile streams, round trips."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_PAYLOAD_BYTES, MAX_SCHEDULE, MAX_TEXT_BYTES
from sluiceway.model.items import HEADERS, TIME
from sluiceway.model.leased_items import Slice, served
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import Disposition, Leased, LeaseInfo, ProduceKey
from sluiceway.model.small_batch import in_columns
from sluiceway.wire import answers
from sluiceway.wire.arrow_codec import METADATA_KEY, produce_request, settle_request
from sluiceway.wire.decoding import from_query
from sluiceway.wire.json_items import ProduceFields
from sluiceway.wire.json_outcomes import SettleQuery

NOW = 1_700_000_000_000
RECORD = QueueRecord("q", "k7f3q2ma", NOW, NOW, tuple(PartitionRecord(n) for n in range(3)))
Columns = dict[str, pa.Array]


def stream(*batches: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def produced(body: bytes) -> pa.RecordBatch:
    return in_columns(produce_request(ProduceFields(queue_name="q"), body, RECORD, NOW).batch)


def payload(*values: bytes | str | None, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, kind or pa.binary())


def refusal(body: bytes) -> SluicewayError:
    with pytest.raises(SluicewayError) as caught:
        produced(body)
    assert caught.value.kind.status == 400
    return caught.value


ALL = batch(
    payload=payload(b"a", b"", b"ccc"),
    kind=pa.array(["k", None, ""]),
    encoding=pa.array([None, None, "gzip"]),
    reference=pa.array(["r", "s", "t"]),
    headers=pa.array([[("a", "1"), ("b", "2")], None, []], HEADERS),
    key=pa.array([None, "é" * 128, "k"]),
    priority=pa.array([None, 0, 9], pa.int8()),
    unique_key=pa.array(["u", None, "é" * 128]),
    enqueue_at=pa.array([NOW, None, NOW + 5], TIME),
)


def test_all_columns() -> None:
    got = produced(stream(ALL))
    assert got.to_pydict() == ALL.to_pydict()
    assert not got.schema.field("payload").nullable
    got.validate(full=True)


def test_columns_in_any_order_come_out_in_one() -> None:
    assert produced(stream(ALL.select(list(reversed(ALL.schema.names))))).schema.names == ALL.schema.names


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.utf8(), pa.large_utf8()])
def test_payload_types_that_are_taken(kind: pa.DataType) -> None:
    got = produced(stream(batch(payload=payload("x", "yé", kind=kind))))
    assert got.column("payload").type == pa.binary()
    assert got.column("payload").to_pylist() == [b"x", "yé".encode()]


@pytest.mark.parametrize(
    ("columns", "field", "said"),
    [
        ({"payload": pa.array([1])}, "payload", ("binary", "int64")),
        ({"payload": pa.array([b"x"], pa.binary_view())}, "payload", ("binary", "binary_view")),
        ({"payload": pa.array([b"x"], pa.binary(1))}, "payload", ("binary", "fixed_size_binary[1]")),
        ({"payload": pa.array([None], pa.null())}, "payload", ("binary", "null")),
        ({"payload": pa.array([b"x"]).dictionary_encode()}, "payload", ("binary", "dictionary")),
        ({"payload": payload(b"x"), "kind": pa.array(["x"]).dictionary_encode()}, "kind", ("string", "dictionary")),
        ({"payload": payload(b"x"), "kind": pa.array([b"x"])}, "kind", ("string", "binary")),
        ({"payload": payload(b"x"), "headers": pa.array(["{}"])}, "headers", ("map<string, string>", "string")),
        ({"payload": payload(b"x"), "headers": pa.array([[("a", 1)]], pa.map_(pa.utf8(), pa.int64()))}, "headers", ("map<string, int64>",)),
        ({"payload": payload(b"x"), "enqueue_at": pa.array([1])}, "enqueue_at", ("timestamp[ms, tz=UTC]", "int64")),
        ({"payload": payload(b"x"), "enqueue_at": pa.array([1], pa.timestamp("ms"))}, "enqueue_at", ("timestamp[ms, tz=UTC]",)),
        ({"payload": payload(b"x"), "colour": pa.array([1])}, "colour", ("unknown",)),
        ({"payload": payload(b"x"), "origin": pa.array(["a.0.1"])}, "origin", ("unknown",)),
        ({"kind": pa.array(["x"])}, "payload", ("missing",)),
        ({"payload": payload(b"x", None)}, "items[1].payload", ("null",)),
        ({"payload": payload(b"x", b"x" * (MAX_PAYLOAD_BYTES + 1))}, "items[1].payload", (str(MAX_PAYLOAD_BYTES),)),
        ({"payload": payload(b"x"), "kind": pa.array(["x" * (MAX_TEXT_BYTES + 1)])}, "items[0].kind", (str(MAX_TEXT_BYTES),)),
        ({"payload": payload(b"x", b"y"), "key": pa.array(["k", "é" * 129])}, "items[1].key", ("256",)),
        ({"payload": payload(b"x", b"y"), "key": pa.array([None, ""])}, "items[1].key", ("empty",)),
        ({"payload": payload(b"x", b"y"), "priority": pa.array([None, 10], pa.int8())}, "items[1].priority", ("10", "between 0 and 9")),
        ({"payload": payload(b"x", b"y"), "priority": pa.array([0, -1], pa.int64())}, "items[1].priority", ("-1",)),
        ({"payload": payload(b"x"), "priority": pa.array([1 << 63], pa.uint64())}, "items[0].priority", ("9223372036854775808",)),
        ({"payload": payload(b"x"), "priority": pa.array([1.0])}, "priority", ("int8", "double")),
        ({"payload": payload(b"x", b"y"), "unique_key": pa.array(["k", "é" * 129])}, "items[1].unique_key", ("256",)),
        ({"payload": payload(b"x", b"y"), "unique_key": pa.array([None, ""])}, "items[1].unique_key", ("empty",)),
        ({"payload": payload(b"x"), "headers": pa.array([[("a", "x" * 8_192)]], HEADERS)}, "items[0].headers", ("8192",)),
        ({"payload": payload(b"x"), "headers": pa.array([[("a", None)]], HEADERS)}, "headers", ("null",)),
        ({"payload": payload(b"x"), "enqueue_at": pa.array([NOW + MAX_SCHEDULE + 1], TIME)}, "items[0].enqueue_at", ("366 days",)),
        # Such a time is no datetime: with a key it made the partition fail, and everybody's requests with it.
        ({"payload": payload(b"x"), "enqueue_at": pa.array([-(2**60)], TIME)}, "items[0].enqueue_at", ("before 1970",)),
        ({"payload": payload()}, "items", ("empty",)),
    ],
)
def test_refusal_names_the_column(columns: Columns, field: str, said: Sequence[str]) -> None:
    error = refusal(stream(batch(**columns)))
    assert (error.code, error.field) == ("invalid_request", field)
    assert all(part in error.detail for part in said), error.detail


def test_a_column_twice_is_refused() -> None:
    twice = pa.RecordBatch.from_arrays([payload(b"x"), payload(b"y")], names=["payload", "payload"])
    assert refusal(stream(twice)).field == "payload"


def test_several_batches_are_one_request() -> None:
    empty = batch(payload=payload())
    got = produced(stream(batch(payload=payload(b"a")), empty, batch(payload=payload(b"b", b"c"))))
    assert got.column("payload").to_pylist() == [b"a", b"b", b"c"]


def test_a_single_batch_is_not_copied() -> None:
    body = stream(batch(payload=payload(b"x" * 100_000)))
    start = pa.py_buffer(body).address
    assert start <= produced(body).column("payload").buffers()[2].address < start + len(body)


def test_the_most_rows_pass_and_one_more_is_too_many() -> None:
    half = batch(payload=payload(*[b"x"] * (MAX_ITEMS_ARROW // 2)))
    assert produced(stream(half, half)).num_rows == MAX_ITEMS_ARROW
    error = refusal(stream(half, half, batch(payload=payload(b"x"))))
    assert (error.code, error.field) == ("too_many_items", "items")
    assert f"{MAX_ITEMS_ARROW:,}" in error.detail


def test_endless_empty_batches_are_refused() -> None:
    empty = batch(payload=payload())
    assert refusal(stream(*[empty] * (MAX_ITEMS_ARROW + 2))).code == "too_many_items"


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_buffers_are_refused_before_they_are_unpacked(compression: str) -> None:
    error = refusal(stream(batch(payload=payload(b"x" * 1_000_000)), compression=compression))
    assert error.code == "invalid_body"
    assert "compressed" in error.detail


def test_every_truncation_is_refused() -> None:
    body = stream(ALL, ALL)
    for end in range(len(body)):
        assert refusal(body[:end]).code == "invalid_body", end


@pytest.mark.parametrize("body", [b"", b"{}", b"ARROW1\0\0", bytes(100), b"\xff" * 100])
def test_what_is_no_stream_is_refused(body: bytes) -> None:
    assert refusal(body).code == "invalid_body"


def test_messages_in_another_order_are_refused() -> None:
    whole = stream(ALL)
    schema = pa.ipc.MessageReader.open_stream(pa.py_buffer(whole)).read_next_message().serialize().to_pybytes()
    assert whole.startswith(schema)
    assert refusal(whole[len(schema) :]).code == "invalid_body"
    assert refusal(schema + whole).code == "invalid_body"
    assert refusal(schema + whole[-8:]).field == "items"


def test_text_that_is_not_utf8_is_refused() -> None:
    bad = pa.Array.from_buffers(pa.utf8(), 1, pa.array([b"\xff\xfe"]).buffers())
    assert refusal(stream(batch(payload=payload(b"x"), kind=bad))).code == "invalid_body"


@pytest.mark.parametrize("ends", [(0, 1 << 30), (0, -4), (4, 0), (-4, 4)])
def test_offsets_that_point_outside_are_refused(ends: tuple[int, int]) -> None:
    body = stream(batch(payload=payload(b"abcd")))
    sound = np.array([0, 4], np.int32).tobytes()
    before, _, after = body.rpartition(sound)
    assert refusal(before + np.array(ends, np.int32).tobytes() + after).code == "invalid_body"


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_damaged_stream_is_refused_or_sound(seed: int, changes: int) -> None:
    """Whatever bytes come, the answer is a refusal, or a batch that can be used."""
    body = bytearray(stream(ALL, ALL))
    chance = random.Random(seed)
    for _ in range(changes):
        body[chance.randrange(len(body))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    try:
        got = produced(bytes(body))
    except SluicewayError as error:
        assert error.kind.status == 400
    else:
        got.validate(full=True)
        assert got.num_rows <= MAX_ITEMS_ARROW
        got.to_pydict()


def test_query_parameters() -> None:
    fields = {"queue_name": "q", "request_timeout": "5s", "idempotency_key": "k", "idempotency_group": "g", "idempotency_sequence": "7"}
    request = produce_request(from_query(fields, ProduceFields), stream(ALL), RECORD, NOW)
    assert (request.request_timeout, request.key) == (5_000, ProduceKey("k", "g", 7))
    for change, field in (({"colour": "1"}, "colour"), ({"idempotency_sequence": "x"}, "idempotency_sequence")):
        with pytest.raises(SluicewayError) as caught:
            from_query({**fields, **change}, ProduceFields)
        assert (caught.value.code, caught.value.field) == ("invalid_request", field)


@pytest.mark.parametrize("text", ["null", "NULL", "5.0", "1e1", "", "٣", "-1", " 7", "1" * 30])
def test_a_number_in_a_query_string_is_written_in_digits(text: str) -> None:
    with pytest.raises(SluicewayError) as caught:
        from_query({"queue_name": "q", "idempotency_sequence": text}, ProduceFields)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "idempotency_sequence")
    assert from_query({"queue_name": "q", "idempotency_key": "null"}, ProduceFields).idempotency_key == "null"


# -- settle -------------------------------------------------------------------------------------------------------------------


def settle_batch(rows: Iterable[tuple[int, int, str, int | None, str | None]]) -> pa.RecordBatch:
    kinds = [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("outcome", pa.utf8()),
        ("retry_after_ms", pa.int64()),
        ("reason", pa.utf8()),
    ]
    columns = list(zip(*rows, strict=True))
    return batch(**{name: pa.array(column, kind) for (name, kind), column in zip(kinds, columns, strict=True)})


def settled(rows: pa.RecordBatch, incarnation: str = "k7f3q2ma") -> Any:
    return settle_request(SettleQuery(queue_name="q", incarnation=incarnation), stream(rows), RECORD)


dispositions = st.one_of(
    st.just(("done", None, None)),
    st.tuples(st.just("retry"), st.sampled_from([None, 0, 5]), st.just(None)),
    st.tuples(st.just("dead"), st.just(None), st.sampled_from([None, "", "a", "b"])),
)


@given(st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 50)), dispositions, min_size=1, max_size=60))
def test_settle_groups_rows_as_a_loop_would(wanted: dict[tuple[int, int], tuple[str, int | None, str | None]]) -> None:
    expected: dict[int, dict[Disposition, list[int]]] = {}
    for (partition, offset), (outcome, delay, reason) in wanted.items():
        disposition = Disposition(outcome, retry_after=delay, reason=reason or "")  # type: ignore[arg-type]
        expected.setdefault(partition, {}).setdefault(disposition, []).append(offset)
    request = settled(settle_batch((partition, offset, *disposition) for (partition, offset), disposition in wanted.items()))
    got: dict[int, dict[Disposition, list[int]]] = {}
    for partition, chosen in request.selections.items():
        for selection in chosen:
            assert selection.offsets.tolist() == sorted(set(selection.offsets.tolist()))
            got.setdefault(partition, {}).setdefault(selection.disposition, []).extend(selection.offsets.tolist())
    assert {p: {f: sorted(o) for f, o in by.items()} for p, by in got.items()} == {
        p: {f: sorted(o) for f, o in by.items()} for p, by in expected.items()
    }
    assert request.foreign == [], "which partitions there were is for the queue to say"
    assert request.stage


def test_settle_of_another_incarnation_is_foreign() -> None:
    request = settled(settle_batch([(0, 7, "done", None, None)]), "other")
    assert (request.selections, request.foreign) == ({}, ["other.0.7"])


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ((-1, 2, "done", None, None), "items[1].partition"),
        ((0, -2, "done", None, None), "items[1].offset"),
        ((0, 2, "perhaps", None, None), "items[1].outcome"),
        ((0, 2, "release", None, None), "items[1].outcome"),
        ((0, 2, "done", 5, None), "items[1].retry_after_ms"),
        ((0, 2, "retry", -5, None), "items[1].retry_after_ms"),
        ((0, 2, "retry", MAX_SCHEDULE + 1, None), "items[1].retry_after_ms"),
        ((0, 2, "dead", None, "x" * (MAX_TEXT_BYTES + 1)), "items[1].reason"),
        ((0, 2, None, None, None), "items[1].outcome"),
        ((0, 1, "dead", None, None), "items"),
    ],
)
def test_settle_refusal_names_the_row(row: Any, field: str) -> None:
    with pytest.raises(SluicewayError) as caught:
        settled(settle_batch([(0, 1, "done", None, None), row]))
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)


# -- answers ------------------------------------------------------------------------------------------------------------------


def test_leased_answer_as_a_stream() -> None:
    plain = batch(payload=payload(b"a", b"b", b"c")).cast(pa.schema([pa.field("payload", pa.binary(), nullable=False)]))
    rich = produced(stream(batch(payload=payload(b"d"), kind=pa.array(["k"]))))
    rows = np.array([1, 2], np.int64)
    batches = [
        served(0, 4, Slice(10, rows, rows + 90, 3, NOW), plain),
        served(1, 5, Slice(0, np.array([0]), np.array([7]), 1, NOW), rich),
    ]
    leased = Leased([LeaseInfo(0, 4, 2, NOW + 1000), LeaseInfo(1, 5, 1, NOW + 1000)], batches)
    reader = pa.ipc.open_stream(pa.py_buffer(answers.leased(RECORD, leased, arrow=True)))
    about = json.loads(reader.schema.metadata[METADATA_KEY])
    table = reader.read_all()
    assert about["incarnation"] == "k7f3q2ma"
    assert [lease["lease_id"] for lease in about["leases"]] == ["k7f3q2ma.0.L4", "k7f3q2ma.1.L5"]
    assert table.column_names == ["partition", "lease", "offset", "origin_offset", "attempts", "enqueued_at", "payload", "kind"]
    got = table.to_pydict()
    assert got["payload"] == [b"b", b"c", b"d"]
    assert got["kind"] == [None, None, "k"]
    assert (got["offset"], got["origin_offset"], got["lease"]) == ([91, 92, 7], [11, 12, 0], [4, 4, 5])
    assert table.schema.field("partition").type == pa.int32()


def test_an_answer_without_items_is_a_stream_too() -> None:
    reader = pa.ipc.open_stream(pa.py_buffer(answers.leased(RECORD, Leased([]), arrow=True)))
    assert json.loads(reader.schema.metadata[METADATA_KEY])["leases"] == []
    assert reader.read_all().num_rows == 0
