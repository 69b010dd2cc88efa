"""Small batches: a few items as values before they are put into columns. For one item, columns cost more than all the rest of its way.

Both forms of `Rows` are equivalent, and `in_columns` converts to columns. Code for many items handles columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from sluiceway.model.items import ENQUEUE_AT, HEADERS, OPTIONAL, PAYLOAD, TRACEPARENT, stored_schema
from sluiceway.model.items import digest as digest_of_columns
from sluiceway.model.leased_items import Slice, placed, served, take_rows
from sluiceway.model.sparse import SparseBatch

MOST = 16
"""Maximum number of items of a request handled as values."""
MAX_BYTES = 64 << 10
"""Maximum bytes of a request handled as values: columns refer to the items where they lie, values are a copy."""
_VALUE_BYTES = 64
"""Memory of a value beside its bytes."""
_BITS = {field.name: 1 << bit for bit, field in enumerate(OPTIONAL)}


class SmallBatch:
    """Immutable rows as values: payloads, and for each optional column with a value in any row, a value or None for each row.

    Headers are a mapping. `nbytes`: approximate size of the same rows in columns.
    """

    __slots__ = ("nbytes", "others", "payloads")

    def __init__(self, payloads: Sequence[bytes], others: Mapping[str, Sequence[Any]], nbytes: int) -> None:
        self.payloads = payloads
        self.others = others
        self.nbytes = nbytes

    @property
    def num_rows(self) -> int:
        return len(self.payloads)

    @property
    def held_bytes(self) -> int:
        """Approximate size in memory."""
        values = len(self.payloads) * (1 + len(self.others))
        # A mapping has an entry for each pair, and separate objects for its name and text.
        values += 3 * sum(1 + len(pairs) for pairs in self.others.get("headers", ()) if pairs is not None)
        return self.nbytes + _VALUE_BYTES * values

    @property
    def columns(self) -> int:
        """Column mask for `stored_schema`."""
        return sum(_BITS[name] for name in self.others)

    def batch(self) -> pa.RecordBatch:
        """Convert the rows to columns, in the form of a blob."""
        return pa.RecordBatch.from_arrays(self.arrays(), schema=stored_schema(self.columns))

    def arrays(self) -> list[pa.Array]:
        """Convert the rows to the columns of `batch`."""
        schema = stored_schema(self.columns)
        arrays = [pa.array(self.payloads, PAYLOAD.type)]
        for field in list(schema)[1:]:
            values = self.others[field.name]
            if field.type == HEADERS:
                values = [None if pairs is None else list(pairs.items()) for pairs in values]
            arrays.append(pa.array(values, field.type))
        return arrays

    def take(self, rows: Sequence[int]) -> SmallBatch:
        """Return these rows, in the given order."""
        if list(rows) == [*range(len(self.payloads))]:
            return self
        payloads = [self.payloads[row] for row in rows]
        others = {name: [values[row] for row in rows] for name, values in self.others.items()}
        kept = {name: values for name, values in others.items() if values.count(None) < len(values)}
        return SmallBatch(payloads, kept, self.nbytes * len(payloads) // len(self.payloads))


Rows: TypeAlias = SmallBatch | pa.RecordBatch
StoredRows: TypeAlias = Rows | SparseBatch
"""Available rows of a stored blob: all of them, or (compacted) those that were open."""


class Served:
    """Rows of one slice on their way to a consumer, converted only once the form of the answer is known."""

    __slots__ = ("blob", "lease", "partition", "piece")

    def __init__(self, partition: int, lease: int, piece: Slice, blob: StoredRows) -> None:
        self.partition = partition
        self.lease = lease
        self.piece = piece
        self.blob = blob

    @property
    def nbytes(self) -> int:
        """Approximate size of the rows in columns; an upper bound for rows scattered over their blob."""
        blob, rows = self.blob, self.piece.rows
        if isinstance(blob, SmallBatch):
            return blob.nbytes * len(rows) // blob.num_rows
        if isinstance(blob, SparseBatch):
            return blob.nbytes * len(rows) // len(blob.rows)
        first, last = int(rows[0]), int(rows[-1])
        return int(blob.nbytes if last - first + 1 == blob.num_rows else blob.slice(first, last - first + 1).nbytes)

    def batch(self) -> pa.RecordBatch:
        """Convert to columns, as `model.leased_items.served` does."""
        if not isinstance(self.blob, SmallBatch):
            return served(self.partition, self.lease, self.piece, self.blob)
        few = self.few()
        return placed(self.partition, self.lease, self.piece, few.arrays(), stored_schema(few.columns))

    def few(self) -> SmallBatch:
        """Convert to values, whatever the number of rows."""
        if isinstance(self.blob, SmallBatch):
            return self.blob.take(self.piece.rows.tolist())
        return _by_value(take_rows(self.blob, self.piece.rows), 0)


def digest(rows: Rows) -> bytes:
    """Digest of the rows' values, the same in both forms; `model.items.digest` says of what."""
    if not isinstance(rows, SmallBatch):
        return digest_of_columns(rows)
    state = hashlib.blake2b(rows.num_rows.to_bytes(8), digest_size=16)
    _digest_values(state, PAYLOAD.name, rows.payloads)
    for field in OPTIONAL:
        values = rows.others.get(field.name)
        if values is None:
            continue
        if field.name == "headers":
            _digest_headers(state, values)
        elif field.type != pa.utf8():
            _digest_numbers(state, field.name, values)
        else:
            _digest_values(state, field.name, [None if value is None else value.encode() for value in values])
    return state.digest()


def _digest_values(state: hashlib.blake2b, name: str, values: Sequence[bytes | None]) -> None:
    nulls = values.count(None)
    if nulls == len(values):
        return
    present = [value or b"" for value in values] if nulls else values
    state.update(name.encode() + nulls.to_bytes(8))
    # As Arrow's offsets: 32 bits, least byte first.
    state.update(b"".join([len(value).to_bytes(4, "little") for value in present]))  # type: ignore[arg-type]
    state.update(b"".join(present))  # type: ignore[arg-type]
    if nulls:
        state.update(np.packbits([value is None for value in values]).tobytes())


def _digest_numbers(state: hashlib.blake2b, name: str, values: Sequence[int | None]) -> None:
    nulls = values.count(None)
    if nulls < len(values):
        state.update(name.encode() + nulls.to_bytes(8) + repr(list(values)).encode())


def _digest_headers(state: hashlib.blake2b, rows: Sequence[Mapping[str, str] | None]) -> None:
    pairs = [None if headers is None else list(headers.items()) for headers in rows]
    if any(headers and TRACEPARENT in headers for headers in rows):
        pairs = [[pair for pair in row if pair[0] != TRACEPARENT] or None if row else row for row in pairs]
    nulls = pairs.count(None)
    if nulls < len(pairs):
        state.update(b"headers" + nulls.to_bytes(8))
        state.update(repr(pairs).encode())


def join(pieces: Sequence[SmallBatch]) -> SmallBatch:
    """Concatenate the pieces' rows."""
    if len(pieces) == 1:
        return pieces[0]
    payloads = [payload for piece in pieces for payload in piece.payloads]
    names = {name for piece in pieces for name in piece.others}
    others = {name: [value for piece in pieces for value in piece.others.get(name) or [None] * piece.num_rows] for name in names}
    return SmallBatch(payloads, others, sum(piece.nbytes for piece in pieces))


def as_few(batch: pa.RecordBatch) -> SmallBatch | None:
    """Convert the rows to values; None if they are many, large or scheduled, or have headers, whose names may repeat."""
    names = batch.schema.names
    if batch.num_rows > MOST or ENQUEUE_AT.name in names or "headers" in names:
        return None
    nbytes = batch.nbytes
    if nbytes > MAX_BYTES:
        return None
    return _by_value(batch, nbytes)


def _by_value(batch: pa.RecordBatch, nbytes: int) -> SmallBatch:
    others: dict[str, list[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == PAYLOAD.name:
            payloads = column.to_pylist()
        elif column.null_count < len(column):
            values = column.to_pylist()
            others[name] = [None if pairs is None else dict(pairs) for pairs in values] if column.type == HEADERS else values
    return SmallBatch(payloads, others, nbytes)


def in_columns(rows: Any) -> pa.RecordBatch:
    """Convert rows, or served rows, to columns."""
    return rows.batch() if isinstance(rows, SmallBatch | Served) else rows
