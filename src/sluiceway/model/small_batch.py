"""A few items as they came, before they are put into columns: for one item, columns cost more than all the rest of its way.

Where rows are `Rows`, both forms say the same, and `in_columns` makes one of the other. Whoever handles many items handles columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from sluiceway.model.items import ENQUEUE_AT, HEADERS, OPTIONAL, PAYLOAD, stored_schema
from sluiceway.model.leased_items import Slice, placed, served, take_rows
from sluiceway.model.sparse import SparseBatch

MOST = 16
"""Items of one request that are worth handling so."""
MAX_BYTES = 64 << 10
"""Bytes of one request that are worth it: whoever looks at items in columns sees where they lie, and has a copy of these."""
_VALUE_BYTES = 64
"""What a value takes beside its bytes."""
_BITS = {field.name: 1 << bit for bit, field in enumerate(OPTIONAL)}


class SmallBatch:
    """Rows by their values: payloads, and of the optional columns in which any row has one, a value or None for each row. Never changed.

    Headers are a mapping. `nbytes` is about what the same rows take in columns.
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
        """What they take in memory, roughly."""
        values = len(self.payloads) * (1 + len(self.others))
        # A mapping takes room for each pair, and a name and a text of their own.
        values += 3 * sum(1 + len(pairs) for pairs in self.others.get("headers", ()) if pairs is not None)
        return self.nbytes + _VALUE_BYTES * values

    @property
    def columns(self) -> int:
        """The mask of `stored_schema`."""
        return sum(_BITS[name] for name in self.others)

    def batch(self) -> pa.RecordBatch:
        """The same rows in columns, as a blob has them."""
        return pa.RecordBatch.from_arrays(self.arrays(), schema=stored_schema(self.columns))

    def arrays(self) -> list[pa.Array]:
        """Those columns."""
        schema = stored_schema(self.columns)
        arrays = [pa.array(self.payloads, PAYLOAD.type)]
        for field in list(schema)[1:]:
            values = self.others[field.name]
            if field.type == HEADERS:
                values = [None if pairs is None else list(pairs.items()) for pairs in values]
            arrays.append(pa.array(values, field.type))
        return arrays

    def take(self, rows: Sequence[int]) -> SmallBatch:
        """Those rows, in their order."""
        if len(rows) == len(self.payloads):
            return self
        payloads = [self.payloads[row] for row in rows]
        others = {name: [values[row] for row in rows] for name, values in self.others.items()}
        kept = {name: values for name, values in others.items() if values.count(None) < len(values)}
        return SmallBatch(payloads, kept, self.nbytes * len(payloads) // len(self.payloads))


Rows: TypeAlias = SmallBatch | pa.RecordBatch
StoredRows: TypeAlias = Rows | SparseBatch
"""What is at hand of a stored blob: all of its rows, or (compacted) those that were open."""


class Served:
    """The rows of one slice on their way to a consumer, put into the form in which they leave only when that is known."""

    __slots__ = ("blob", "lease", "partition", "piece")

    def __init__(self, partition: int, lease: int, piece: Slice, blob: StoredRows) -> None:
        self.partition = partition
        self.lease = lease
        self.piece = piece
        self.blob = blob

    @property
    def nbytes(self) -> int:
        """What the rows take in columns, about; of some that are scattered over their blob, at most."""
        blob, rows = self.blob, self.piece.rows
        if isinstance(blob, SmallBatch):
            return blob.nbytes * len(rows) // blob.num_rows
        if isinstance(blob, SparseBatch):
            return blob.nbytes * len(rows) // len(blob.rows)
        first, last = int(rows[0]), int(rows[-1])
        return int(blob.nbytes if last - first + 1 == blob.num_rows else blob.slice(first, last - first + 1).nbytes)

    def batch(self) -> pa.RecordBatch:
        """In columns, as `model.leased.served` says."""
        if not isinstance(self.blob, SmallBatch):
            return served(self.partition, self.lease, self.piece, self.blob)
        few = self.few()
        return placed(self.partition, self.lease, self.piece, few.arrays(), stored_schema(few.columns))

    def few(self) -> SmallBatch:
        """By their values, however many they are."""
        if isinstance(self.blob, SmallBatch):
            return self.blob.take(self.piece.rows.tolist())
        return _by_value(take_rows(self.blob, self.piece.rows), 0)


def join(pieces: Sequence[SmallBatch]) -> SmallBatch:
    """All of their rows, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    payloads = [payload for piece in pieces for payload in piece.payloads]
    names = {name for piece in pieces for name in piece.others}
    others = {name: [value for piece in pieces for value in piece.others.get(name) or [None] * piece.num_rows] for name in names}
    return SmallBatch(payloads, others, sum(piece.nbytes for piece in pieces))


def as_few(batch: pa.RecordBatch) -> SmallBatch | None:
    """The rows by their values; None for many, large or due ones, and where there are headers, whose names may repeat."""
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
    """Rows, or what is served of them, in columns."""
    return rows.batch() if isinstance(rows, SmallBatch | Served) else rows
