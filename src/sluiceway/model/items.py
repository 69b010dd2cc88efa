"""Columnar items: the schema in which they arrive, are stored and leave.

A blob is one Arrow record batch of `payload` and the optional columns in which any row has a value; the bit mask `columns` names them.
Its bytes are one IPC message without the schema, so reading it copies nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_HEADER_BYTES, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES, MAX_TEXT_BYTES

HEADERS = pa.map_(pa.utf8(), pa.utf8())
TIME = pa.timestamp("ms", tz="UTC")

PAYLOAD = pa.field("payload", pa.binary(), nullable=False)
OPTIONAL = (
    pa.field("kind", pa.utf8()),
    pa.field("encoding", pa.utf8()),
    pa.field("reference", pa.utf8()),
    pa.field("headers", HEADERS),
    pa.field("origin", pa.utf8()),
    pa.field("key", pa.utf8()),
    pa.field("priority", pa.int8()),
    pa.field("unique_key", pa.utf8()),
)
"""Stored columns beside `payload`. `origin` is set on items that came from another partition. The order is on disk: append only."""

ENQUEUE_AT = pa.field("enqueue_at", TIME)
TRACEPARENT = "traceparent"
"""Header with the W3C Trace Context of the span that produced the item."""

PRODUCED = ("kind", "encoding", "reference", "headers", "key", "priority", "unique_key")
"""Optional columns that a producer may send; in addition `enqueue_at`, which is not stored but sets the due time."""


@lru_cache(64)
def stored_schema(columns: int) -> pa.Schema:
    """Schema of a blob with that column mask."""
    return pa.schema([PAYLOAD] + [field for bit, field in enumerate(OPTIONAL) if columns >> bit & 1])


def narrow(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """Drop the optional columns that are all null. Returns the batch in stored order, and its column mask."""
    columns, mask = [batch.column("payload")], 0
    names = batch.schema.names
    for bit, field in enumerate(OPTIONAL):
        if field.name in names:
            column = batch.column(field.name)
            if column.null_count < len(column):
                mask |= 1 << bit
                columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=stored_schema(mask)), mask


def encode_blob(batch: pa.RecordBatch) -> bytes:
    """Encode a blob in stored order (`narrow`) as one IPC message."""
    data: bytes = batch.serialize().to_pybytes()
    return data


def decode_blob(data: bytes, columns: int) -> pa.RecordBatch:
    """Decode a blob with that column mask, without copying its rows."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), stored_schema(columns))


def fit(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Add all-null columns up to the schema, so that batches can be concatenated."""
    if batch.schema.equals(schema):
        return batch
    present = set(batch.schema.names)
    arrays = [batch.column(field.name) if field.name in present else pa.nulls(batch.num_rows, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def widen(batch: pa.RecordBatch, columns: int) -> pa.RecordBatch:
    """Add all-null columns up to a column mask."""
    return fit(batch, stored_schema(columns))


def batch_from_rows(rows: Sequence[Mapping[str, object]]) -> pa.RecordBatch:
    """Convert the rows of a JSON request: `payload` as bytes, the optional fields as they are, `headers` as a list of pairs."""
    names = {name for row in rows for name in row}
    fields = [PAYLOAD] + [field for field in (*OPTIONAL, ENQUEUE_AT) if field.name in names]
    return pa.RecordBatch.from_arrays(
        [pa.array([row.get(field.name) for row in rows], field.type) for field in fields], schema=pa.schema(fields)
    )


def with_traceparent(batch: pa.RecordBatch, traceparent: str) -> pa.RecordBatch:
    """Add the header to the rows that do not have it. Works by column unless the batch has headers already."""
    count = batch.num_rows
    if "headers" in batch.schema.names:
        given = [dict(pairs or ()) for pairs in batch.column("headers").to_pylist()]
        column = pa.array([list(({TRACEPARENT: traceparent} | pairs).items()) for pairs in given], HEADERS)
        return batch.set_column(batch.schema.get_field_index("headers"), batch.schema.field("headers"), column)
    one_each = pa.array(np.arange(count + 1, dtype=np.int32))
    column = pa.MapArray.from_arrays(one_each, pa.repeat(pa.scalar(TRACEPARENT), count), pa.repeat(pa.scalar(traceparent), count))
    names = batch.schema.names
    at = next((names.index(name) for name in ("origin", "key", "priority", "unique_key", ENQUEUE_AT.name) if name in names), len(names))
    return batch.add_column(at, pa.field("headers", HEADERS), column)


def digest(batch: pa.RecordBatch) -> bytes:
    """Digest of the rows' values, independent of their buffers' layout: the same rows give the same digest.

    Ignores the header `traceparent`: a repeated call has another span.
    """
    state = hashlib.blake2b(batch.num_rows.to_bytes(8), digest_size=16)
    for field in (PAYLOAD, *OPTIONAL, ENQUEUE_AT):
        if field.name not in batch.schema.names:
            continue
        column = batch.column(field.name)
        if field.name == "headers":
            column = _untraced(column)
        if column.null_count == len(column):
            continue
        # A round trip through take() rebases offsets and clears the bytes under nulls.
        plain = column.take(pa.array(np.arange(len(column)))).fill_null("") if column.null_count and field.type == pa.utf8() else column
        state.update(field.name.encode())
        state.update(column.null_count.to_bytes(8))
        if field.type == PAYLOAD.type or field.type == pa.utf8():
            _digest_binary(state, plain)
            if column.null_count:
                state.update(np.packbits(column.is_null().to_numpy(zero_copy_only=False)).tobytes())
        else:
            state.update(repr(_values(column)).encode())
    return state.digest()


def _values(column: pa.Array) -> list[object]:
    """Values of the rows. A time outside of Python's dates becomes a number."""
    try:
        values: list[object] = column.to_pylist()
    except OverflowError:
        values = column.view(pa.int64()).to_pylist()
    return values


def _untraced(headers: pa.Array) -> pa.Array:
    """Remove the header `traceparent`. A row without other headers becomes null."""
    if not pc.any(pc.equal(headers.keys, TRACEPARENT)).as_py():
        return headers
    rows = headers.to_pylist()
    kept = [[pair for pair in row if pair[0] != TRACEPARENT] or None if row else row for row in rows]
    return pa.array(kept, HEADERS)


def _digest_binary(state: hashlib.blake2b, column: pa.Array) -> None:
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    state.update(np.diff(ends).tobytes())
    if data is not None:
        state.update(memoryview(data)[int(ends[0]) : int(ends[-1])])


def check_sizes(batch: pa.RecordBatch) -> None:
    """Check the rows against the size limits. Raises `invalid_request`, naming the column and the first row at fault."""
    for name, limit in (
        ("payload", MAX_PAYLOAD_BYTES),
        ("kind", MAX_TEXT_BYTES),
        ("encoding", MAX_TEXT_BYTES),
        ("reference", MAX_TEXT_BYTES),
    ):
        if name in batch.schema.names:
            _check_lengths(batch.column(name), name, limit)
    for name in ("key", "unique_key"):
        if name in batch.schema.names:
            _check_lengths(batch.column(name), name, MAX_KEY_BYTES, may_be_empty=False)
    if "headers" in batch.schema.names:
        headers = batch.column("headers")
        if headers.null_count < len(headers) and headers.get_total_buffer_size() > MAX_HEADER_BYTES:
            _check_headers(headers)


def _check_headers(headers: pa.MapArray) -> None:
    each = pc.add(pc.binary_length(headers.keys), pc.fill_null(pc.binary_length(headers.items), 0))
    upto = np.concatenate(([0], np.cumsum(each.to_numpy(zero_copy_only=False), dtype=np.int64)))
    lengths = np.diff(upto[headers.offsets.to_numpy(zero_copy_only=False)])
    over = np.flatnonzero((lengths > MAX_HEADER_BYTES) & headers.is_valid().to_numpy(zero_copy_only=False))
    if len(over):
        raise SluicewayError("invalid_request", f"items[{over[0]}].headers: larger than {MAX_HEADER_BYTES} bytes", "items")


def _check_lengths(column: pa.Array, name: str, limit: int, *, may_be_empty: bool = True) -> None:
    if len(column) == 0:
        return
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    if may_be_empty and int(ends[-1]) - int(ends[0]) <= limit:
        # The whole column is within the limit of one row, so no row needs a check.
        return
    lengths = np.diff(ends)
    if column.null_count:
        # Null rows may have bytes.
        lengths = np.where(column.is_null().to_numpy(zero_copy_only=False), 1, lengths)
    if int(lengths.max()) > limit:
        raise SluicewayError("invalid_request", f"items[{int(np.argmax(lengths > limit))}].{name}: larger than {limit} bytes", "items")
    if not (may_be_empty or lengths.all()):
        detail = f"items[{int(np.argmin(lengths))}].{name}: must not be empty; leave it out, or pass null"
        raise SluicewayError("invalid_request", detail, "items")
