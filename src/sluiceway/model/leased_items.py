"""Leased items: the answer to a lease or a peek, in columns.

Columns, in this order: `partition`, `lease`, `offset`, `origin_offset`, `attempts`, `enqueued_at`, `payload`, then those of
`model.items.OPTIONAL` in which any row has a value.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.model.items import OPTIONAL, PAYLOAD, TIME
from sluiceway.model.requests import Offsets
from sluiceway.model.sparse import SparseBatch

POSITION = (
    pa.field("partition", pa.int32(), nullable=False),
    pa.field("lease", pa.int64(), nullable=False),
    pa.field("offset", pa.int64(), nullable=False),
    pa.field("origin_offset", pa.int64(), nullable=False),
    pa.field("attempts", pa.int32(), nullable=False),
    pa.field("enqueued_at", TIME, nullable=False),
)
_PARTITION, _LEASE, _ATTEMPTS = (POSITION[at].type for at in (0, 1, 4))


class Slice(NamedTuple):
    """Rows of one blob that are served together: `rows` and `offsets` are parallel, `rows` sorted.

    A blob is numbered by its first offset, so row r of blob b was first given the offset b + r: its origin. `columns`: mask of the blob's
    stored columns.
    """

    blob: int
    rows: Offsets
    offsets: Offsets
    attempts: int
    enqueued_at: Millis
    columns: int = 0


def present(piece: Slice, blob: Any) -> Slice | None:
    """Drop the rows that a compaction has since removed from the blob, because they were settled. None if none is left."""
    if not isinstance(blob, SparseBatch):
        return piece
    here = blob.has(piece.rows)
    if here.all():
        return piece
    return piece._replace(rows=piece.rows[here], offsets=piece.offsets[here]) if here.any() else None


def with_columns(blob: pa.RecordBatch | SparseBatch, names: Sequence[str]) -> pa.RecordBatch | SparseBatch:
    """The blob with only those of its columns."""
    return blob._replace(batch=blob.batch.select(names)) if isinstance(blob, SparseBatch) else blob.select(names)


def take_rows(blob: pa.RecordBatch | SparseBatch, rows: Offsets) -> pa.RecordBatch:
    """Take these rows of a blob, which must have all of them; a contiguous run is a view, not a copy."""
    if isinstance(blob, SparseBatch):
        return take_rows(blob.batch, blob.places(rows))
    batch = blob
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first + 1 == count:
        return batch if count == batch.num_rows else batch.slice(first, count)
    return batch.take(pa.array(rows))


def served(partition: int, lease: int, piece: Slice, blob: pa.RecordBatch | SparseBatch) -> pa.RecordBatch:
    """Build the answer's batch for one slice. `lease` is 0 for items that are only peeked at."""
    rows = take_rows(blob, piece.rows)
    return placed(partition, lease, piece, rows.columns, rows.schema)


def placed(partition: int, lease: int, piece: Slice, columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Build the answer's batch from the slice's rows, given as columns of that schema."""
    count = len(piece.rows)
    arrays = [
        _all(partition, _PARTITION, 4, count),
        _all(lease, _LEASE, 8, count),
        pa.array(piece.offsets),
        pa.array(piece.rows + piece.blob),
        _all(piece.attempts, _ATTEMPTS, 4, count),
        _all(piece.enqueued_at, TIME, 8, count),
        *columns,
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_with_position(schema))


def _all(value: int, kind: pa.DataType, width: int, count: int) -> pa.Array:
    """Constant column, made from bytes: converting each value would dominate the cost of a small batch."""
    data = value.to_bytes(width, sys.byteorder, signed=True) * count
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)], 0)


@lru_cache(64)
def _with_position(stored: pa.Schema) -> pa.Schema:
    return pa.schema([*POSITION, *stored])


def common_schema(batches: Sequence[pa.RecordBatch]) -> pa.Schema:
    """Return the narrowest schema that covers all batches."""
    if len(batches) == 1:
        return batches[0].schema
    names = {name for batch in batches for name in batch.schema.names}
    return pa.schema([*POSITION, PAYLOAD, *(field for field in OPTIONAL if field.name in names)])
