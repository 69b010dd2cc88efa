"""A few items as they came, before they are put into columns: for one item, columns cost more than all the rest of its way.

Where rows are `Rows`, both forms say the same, and `in_columns` makes one of the other. Whoever handles many items handles columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from sluiceway.model.items import ENQUEUE_AT, HEADERS, OPTIONAL, PAYLOAD, stored_schema
from sluiceway.model.leased import Slice, placed, served

MOST = 16
"""Items of one request that are worth handling so."""
MOST_BYTES = 64 << 10
"""Bytes of one request that are worth it: whoever looks at items in columns sees where they lie, and has a copy of these."""
_VALUE_BYTES = 64
"""What a value takes beside its bytes."""
_BITS = {field.name: 1 << bit for bit, field in enumerate(OPTIONAL)}


class Few:
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

    def take(self, rows: Sequence[int]) -> Few:
        """Those rows, in their order."""
        if len(rows) == len(self.payloads):
            return self
        payloads = [self.payloads[row] for row in rows]
        others = {name: [values[row] for row in rows] for name, values in self.others.items()}
        kept = {name: values for name, values in others.items() if values.count(None) < len(values)}
        return Few(payloads, kept, self.nbytes * len(payloads) // len(self.payloads))


Rows: TypeAlias = Few | pa.RecordBatch


class ServedFew:
    """`model.leased.served` of few rows, before it is put into columns."""

    __slots__ = ("blob", "lease", "partition", "piece")

    def __init__(self, partition: int, lease: int, piece: Slice, blob: Few) -> None:
        self.partition = partition
        self.lease = lease
        self.piece = piece
        self.blob = blob

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes * len(self.piece.rows) // self.blob.num_rows

    def batch(self) -> pa.RecordBatch:
        few = self.blob.take(self.piece.rows.tolist())
        return placed(self.partition, self.lease, self.piece, few.arrays(), stored_schema(few.columns))


def join(pieces: Sequence[Few]) -> Few:
    """All of their rows, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    payloads = [payload for piece in pieces for payload in piece.payloads]
    names = {name for piece in pieces for name in piece.others}
    others = {name: [value for piece in pieces for value in piece.others.get(name) or [None] * piece.num_rows] for name in names}
    return Few(payloads, others, sum(piece.nbytes for piece in pieces))


def as_few(batch: pa.RecordBatch) -> Few | None:
    """The rows by their values; None for many, large or due ones, and where there are headers, whose names may repeat."""
    names = batch.schema.names
    if batch.num_rows > MOST or ENQUEUE_AT.name in names or "headers" in names:
        return None
    nbytes = batch.nbytes
    if nbytes > MOST_BYTES:
        return None
    others = {name: batch.column(name).to_pylist() for name in names if name != PAYLOAD.name}
    given = {name: values for name, values in others.items() if values.count(None) < len(values)}
    return Few(batch.column(PAYLOAD.name).to_pylist(), given, nbytes)


def in_columns(rows: Any) -> pa.RecordBatch:
    """Rows, or what is served of them, in columns."""
    return rows.batch() if isinstance(rows, Few | ServedFew) else rows


def serve(partition: int, lease: int, piece: Slice, blob: Rows) -> ServedFew | pa.RecordBatch:
    """The rows of one slice on their way to a consumer, in the form that they are in."""
    return ServedFew(partition, lease, piece, blob) if isinstance(blob, Few) else served(partition, lease, piece, blob)
