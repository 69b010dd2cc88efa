from __future__ import annotations

import base64
import struct
from collections.abc import Mapping

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_HEADER_BYTES, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES, MAX_TEXT_BYTES
from sluiceway.model.items import (
    OPTIONAL,
    PAYLOAD,
    batch_from_rows,
    check_sizes,
    decode_blob,
    digest,
    encode_blob,
    narrow,
    stored_schema,
    widen,
)

Row = Mapping[str, object]

TEXTS = st.none() | st.text(max_size=4)
ROWS = st.fixed_dictionaries(
    {"payload": st.binary(max_size=6)},
    optional={
        "kind": TEXTS,
        "encoding": TEXTS,
        "reference": TEXTS,
        "key": st.none() | st.text(min_size=1, max_size=4),
        "priority": st.none() | st.integers(0, 9),
        "unique_key": st.none() | st.text(min_size=1, max_size=4),
        "headers": st.none() | st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=2),
        "enqueue_at": st.none() | st.integers(0, 4_102_444_800_000),
    },
)
BATCHES = st.lists(ROWS, min_size=1, max_size=8)


def said(rows: list[Row]) -> list[Row]:
    """What rows say: a field that is null is a field that is absent."""
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def stored(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "enqueue_at"} for row in rows]


# Digest: the same rows, however they lie in memory


@given(BATCHES, st.data())
def test_a_slice_has_the_digest_of_its_rows(rows: list[Row], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows) - 1))
    length = data.draw(st.integers(1, len(rows) - start))
    assert digest(batch_from_rows(rows).slice(start, length)) == digest(batch_from_rows(rows[start : start + length]))


@given(BATCHES)
def test_a_batch_that_was_copied_has_the_same_digest(rows: list[Row]) -> None:
    batch = batch_from_rows(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    (copy,) = pa.ipc.open_stream(sink.getvalue())
    assert digest(copy) == digest(batch)
    assert digest(batch.take(pa.array(range(len(rows))))) == digest(batch)


@given(BATCHES)
def test_rows_put_together_from_pieces_have_the_same_digest(rows: list[Row]) -> None:
    batch = batch_from_rows(rows)
    pieces = [batch.slice(at, 1) for at in range(len(rows))]
    (together,) = pa.Table.from_batches(pieces).combine_chunks().to_batches()
    assert digest(together) == digest(batch)


@given(BATCHES)
def test_columns_without_a_value_and_the_order_of_columns_say_nothing(rows: list[Row]) -> None:
    batch = batch_from_rows(rows)
    names = batch.schema.names
    padded = pa.RecordBatch.from_arrays(
        [pa.nulls(len(rows), field.type) for field in OPTIONAL if field.name not in names]
        + [batch.column(name) for name in reversed(names)],
        schema=pa.schema([field for field in OPTIONAL if field.name not in names] + [batch.schema.field(name) for name in reversed(names)]),
    )
    assert digest(padded) == digest(batch)


def test_bytes_under_a_null_say_nothing() -> None:
    kinds = [pa.array(["a", hidden, "b"]) for hidden in ("", "rubbish")]
    validity = pa.py_buffer(bytes([0b101]))
    batches = [
        pa.RecordBatch.from_arrays(
            [pa.array([b"1", b"2", b"3"]), pa.Array.from_buffers(pa.utf8(), 3, [validity, *kind.buffers()[1:]])],
            schema=pa.schema([PAYLOAD, pa.field("kind", pa.utf8())]),
        )
        for kind in kinds
    ]
    assert batches[0].column("kind").to_pylist() == batches[1].column("kind").to_pylist() == ["a", None, "b"]
    assert digest(batches[0]) == digest(batches[1])


def test_a_time_that_python_has_no_date_for_has_a_digest() -> None:
    times = [digest(batch_from_rows([{"payload": b"1", "enqueue_at": at}])) for at in (2**62, -(2**62), 2**62)]
    assert times[0] == times[2] != times[1]


# Digest: other rows


@given(BATCHES, BATCHES)
def test_the_digest_tells_rows_apart(one: list[Row], other: list[Row]) -> None:
    assert (digest(batch_from_rows(one)) == digest(batch_from_rows(other))) == (said(one) == said(other))


@given(BATCHES, st.data())
def test_the_digest_tells_one_changed_row(rows: list[Row], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(rows) - 1))
    changed = [*rows[:at], data.draw(ROWS), *rows[at + 1 :]]
    assert (digest(batch_from_rows(rows)) == digest(batch_from_rows(changed))) == (said(rows) == said(changed))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([b"ab", b"c"], [b"a", b"bc"]),
        ([b"", b"a"], [b"a", b""]),
        ([b"a"], [b"a", b""]),
        ([b"a", b"b"], [b"b", b"a"]),
    ],
)
def test_the_digest_tells_where_rows_end(one: list[bytes], other: list[bytes]) -> None:
    assert digest(batch_from_rows([{"payload": p} for p in one])) != digest(batch_from_rows([{"payload": p} for p in other]))


@pytest.mark.parametrize("field", ["kind", "encoding", "reference"])
def test_the_digest_tells_null_from_empty_and_column_from_column(field: str) -> None:
    variants: list[list[Row]] = [
        [{"payload": b"p", field: "x"}, {"payload": b"q"}],
        [{"payload": b"p", field: "x"}, {"payload": b"q", field: ""}],
        [{"payload": b"p", "kind" if field != "kind" else "reference": "x"}, {"payload": b"q"}],
        [{"payload": b"p"}, {"payload": b"q"}],
    ]
    assert len({digest(batch_from_rows(rows)) for rows in variants}) == len(variants)


def test_the_digest_tells_which_row_is_null() -> None:
    one, other = (batch_from_rows([{"payload": b"", "kind": kind} for kind in kinds]) for kinds in (["x", None, ""], ["x", "", None]))
    assert digest(one) != digest(other)


def test_a_payload_cannot_pose_as_another_column() -> None:
    forged: list[Row] = [{"payload": b"kind"}, {"payload": b"0" + struct.pack("<i", 1) + b"x"}]
    posed: list[Row] = [{"payload": struct.pack("<i", 6), "kind": "x"}]
    assert digest(batch_from_rows(forged)) != digest(batch_from_rows(posed))


# Blobs


@given(BATCHES)
def test_a_blob_gives_its_rows_back(rows: list[Row]) -> None:
    batch, columns = narrow(batch_from_rows(rows))
    read = decode_blob(encode_blob(batch), columns)
    assert read.schema.equals(stored_schema(columns))
    assert said(read.to_pylist()) == said(stored(rows))


@given(BATCHES)
def test_narrow_keeps_exactly_the_columns_with_a_value(rows: list[Row]) -> None:
    batch, columns = narrow(batch_from_rows(rows))
    expected = [field.name for field in OPTIONAL if any(row.get(field.name) is not None for row in rows)]
    assert batch.schema.names == ["payload", *expected]
    assert columns == sum(1 << bit for bit, field in enumerate(OPTIONAL) if field.name in expected)


def test_the_blob_of_a_slice_holds_no_other_rows() -> None:
    batch, _ = narrow(batch_from_rows([{"payload": bytes(1_000)} for _ in range(1_000)]))
    assert len(encode_blob(batch.slice(500, 1))) < 2_000


@given(BATCHES, BATCHES)
def test_widened_batches_can_be_put_together(one: list[Row], other: list[Row]) -> None:
    (first, a), (second, b) = narrow(batch_from_rows(one)), narrow(batch_from_rows(other))
    both = pa.Table.from_batches([widen(first, a | b), widen(second, a | b)])
    assert said(both.to_pylist()) == said(stored([*one, *other]))


STORED = base64.b64decode(
    "/////2gCAAAUAAAAAAAAAAwAFgAGAAUACAAMAAwAAAAAAwQAGAAAANgAAAAAAAAAAAAKABgADAAEAAgACgAAAJwBAAAQAAAAAgAAAAAAAAAAAAAAGAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAwAAAAAAAAAEAAAAAAAAAACAAAAAAAAABgAAAAAAAAAAQAAAAAAAAAgAAAAAAAAAAwAAAAAAAAAMAAAAAAAAAABAAAA"
    "AAAAADgAAAAAAAAAAQAAAAAAAABAAAAAAAAAAAwAAAAAAAAAUAAAAAAAAAABAAAAAAAAAFgAAAAAAAAAAQAAAAAAAABgAAAAAAAAAAwAAAAAAAAAcAAAAAAA"
    "AAABAAAAAAAAAHgAAAAAAAAAAQAAAAAAAACAAAAAAAAAAAwAAAAAAAAAkAAAAAAAAAAAAAAAAAAAAJAAAAAAAAAAAAAAAAAAAACQAAAAAAAAAAgAAAAAAAAA"
    "mAAAAAAAAAABAAAAAAAAAKAAAAAAAAAAAAAAAAAAAACgAAAAAAAAAAgAAAAAAAAAqAAAAAAAAAABAAAAAAAAALAAAAAAAAAAAQAAAAAAAAC4AAAAAAAAAAwA"
    "AAAAAAAAyAAAAAAAAAAMAAAAAAAAAAAAAAAJAAAAAgAAAAAAAAAAAAAAAAAAAAIAAAAAAAAAAQAAAAAAAAACAAAAAAAAAAEAAAAAAAAAAgAAAAAAAAABAAAA"
    "AAAAAAIAAAAAAAAAAQAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAQAAAAAAAAAAAAAAAAAAAAEAAAAAAAAAAAAAAAAAAAACAAAAAAAAAAEAAAAAAAAAAAAAAAEA"
    "AAACAAAAAAAAAGFiAAAAAAAAAQAAAAAAAAAAAAAAAQAAAAEAAAAAAAAAawAAAAAAAAABAAAAAAAAAAAAAAABAAAAAQAAAAAAAABlAAAAAAAAAAEAAAAAAAAA"
    "AAAAAAEAAAABAAAAAAAAAHIAAAAAAAAAAQAAAAAAAAAAAAAAAQAAAAEAAAAAAAAAAAAAAAEAAABoAAAAAAAAAAAAAAABAAAAMQAAAAAAAAABAAAAAAAAAAAA"
    "AAAMAAAADAAAAAAAAABrN2YzcTJtYS4wLjMAAAAA"
)
"""A blob as it was written before there were keys: two rows, the first with a value in each column."""


def test_a_blob_that_was_written_before_there_were_keys_is_read() -> None:
    columns = 0b11111
    read = decode_blob(STORED, columns)
    read.validate(full=True)
    first = {"kind": "k", "encoding": "e", "reference": "r", "headers": [("h", "1")], "origin": "k7f3q2ma.0.3"}
    assert said(read.to_pylist()) == [{"payload": b"a", **first}, {"payload": b"b"}]
    # The same rows still have the same columns; a key widens them.
    assert narrow(batch_from_rows(read.to_pylist()))[1] == columns
    keyed, more = narrow(batch_from_rows([{"payload": b"c", "key": "customer-7"}]))
    both = pa.Table.from_batches([widen(read, columns | more), widen(keyed, columns | more)])
    assert both["key"].to_pylist() == [None, None, "customer-7"]


# Limits


@pytest.mark.parametrize("name", ["key", "unique_key"])
def test_a_key_has_1_to_256_bytes(name: str) -> None:
    rows: list[Row] = [{"payload": b""}, {"payload": b"", name: "k"}, {"payload": b"", name: "é" * (MAX_KEY_BYTES // 2)}]
    check_sizes(batch_from_rows(rows))
    for bad, what in (("", "must not be empty"), ("é" * (MAX_KEY_BYTES // 2) + "a", f"larger than {MAX_KEY_BYTES} bytes")):
        batch = batch_from_rows([*rows, {"payload": b"", name: bad}])
        with pytest.raises(SluicewayError, match=rf"items\[3\]\.{name}: {what}"):
            check_sizes(batch)
        with pytest.raises(SluicewayError, match=rf"items\[1\]\.{name}"):
            check_sizes(batch.slice(2))


@pytest.mark.parametrize("column", ["kind", "encoding", "reference"])
def test_a_text_over_the_limit_is_refused_by_row_and_column(column: str) -> None:
    rows: list[Row] = [{"payload": b"", column: "a" * MAX_TEXT_BYTES}, {"payload": b"", column: "é" * (MAX_TEXT_BYTES // 2) + "a"}]
    check_sizes(batch_from_rows(rows[:1]))
    with pytest.raises(SluicewayError, match=rf"items\[1\]\.{column}: larger than {MAX_TEXT_BYTES} bytes"):
        check_sizes(batch_from_rows(rows))
    with pytest.raises(SluicewayError, match=rf"items\[0\]\.{column}"):
        check_sizes(batch_from_rows(rows).slice(1))


def test_bytes_where_there_is_no_value_do_not_count() -> None:
    """As a column may have them that was masked."""
    long = pa.array(["short", "x" * (MAX_TEXT_BYTES + 1)])
    masked = pa.Array.from_buffers(pa.utf8(), 2, [pa.py_buffer(b"\x01"), *long.buffers()[1:]])
    assert masked.to_pylist() == ["short", None]
    batch = pa.RecordBatch.from_arrays([pa.array([b"", b""]), masked], names=["payload", "reference"])
    check_sizes(batch)
    check_sizes(batch.slice(1))


def test_a_payload_over_the_limit_is_refused() -> None:
    check_sizes(batch_from_rows([{"payload": bytes(MAX_PAYLOAD_BYTES)}]))
    with pytest.raises(SluicewayError, match=r"items\[1\]\.payload: larger than"):
        check_sizes(batch_from_rows([{"payload": b""}, {"payload": bytes(MAX_PAYLOAD_BYTES + 1)}]))


def test_headers_are_measured_together_names_included() -> None:
    fits = [("a", "x" * (MAX_HEADER_BYTES - 2)), ("b", "")]
    check_sizes(batch_from_rows([{"payload": b"", "headers": fits}]))
    with pytest.raises(SluicewayError, match=rf"items\[1\]\.headers: larger than {MAX_HEADER_BYTES} bytes"):
        check_sizes(batch_from_rows([{"payload": b"", "headers": fits}, {"payload": b"", "headers": [*fits, ("c", "")]}]))
    some = batch_from_rows([{"payload": b"", "headers": [*fits, ("c", "")]}, {"payload": b""}, {"payload": b"", "headers": fits}])
    check_sizes(some.slice(1))
    with pytest.raises(SluicewayError, match=r"items\[1\]\.headers"):
        check_sizes(pa.concat_batches([some.slice(1, 1), some]))


def test_no_rows_are_within_every_limit() -> None:
    check_sizes(batch_from_rows([{"payload": b"x", "kind": "k"}]).slice(1))
