"""Items on their way to a consumer: the answer to a lease or a peek, in columns.

Columns, in this order: `partition`, `lease`, `offset`, `origin_offset`, `attempts`, `enqueued_at`, `payload`, then those of
`model.items.OPTIONAL` in which any row has a value.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.model.items import OPTIONAL, PAYLOAD, TIME
from sluiceway.model.requests import Offsets

POSITION = (
    pa.field("partition", pa.int32(), nullable=False),
    pa.field("lease", pa.int64(), nullable=False),
    pa.field("offset", pa.int64(), nullable=False),
    pa.field("origin_offset", pa.int64(), nullable=False),
    pa.field("attempts", pa.int32(), nullable=False),
    pa.field("enqueued_at", TIME, nullable=False),
)


class Slice(NamedTuple):
    """Rows of one blob that are served together: `rows` and `offsets` are parallel, `rows` sorted.

    A blob is numbered by its first offset, so row r of blob b was first given the offset b + r: its origin. `columns` are those of the blob
    as it is stored.
    """

    blob: int
    rows: Offsets
    offsets: Offsets
    attempts: int
    enqueued_at: Millis
    columns: int = 0


def take_rows(batch: pa.RecordBatch, rows: Offsets) -> pa.RecordBatch:
    """Those rows of a blob; a contiguous run is a view, not a copy."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first + 1 == count:
        return batch if count == batch.num_rows else batch.slice(first, count)
    return batch.take(pa.array(rows))


def served(partition: int, lease: int, piece: Slice, blob: pa.RecordBatch) -> pa.RecordBatch:
    """The answer's batch for one slice; `lease` is 0 for items that are only looked at."""
    return placed(partition, lease, piece, take_rows(blob, piece.rows))


def placed(partition: int, lease: int, piece: Slice, rows: pa.RecordBatch) -> pa.RecordBatch:
    """The same, of the slice's rows."""
    count = len(piece.rows)
    arrays = [
        pa.array(np.full(count, partition, np.int32)),
        pa.array(np.full(count, lease, np.int64)),
        pa.array(piece.offsets),
        pa.array(piece.rows + piece.blob),
        pa.array(np.full(count, piece.attempts, np.int32)),
        pa.array(np.full(count, piece.enqueued_at, np.int64)).view(TIME),
        *rows.columns,
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*POSITION, *rows.schema]))


def common_schema(batches: list[pa.RecordBatch]) -> pa.Schema:
    """The narrowest schema that all the batches fit into."""
    names = {name for batch in batches for name in batch.schema.names}
    return pa.schema([*POSITION, PAYLOAD, *(field for field in OPTIONAL if field.name in names)])
