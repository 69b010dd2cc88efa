"""Rows without a client: to produce, and as leased."""

from __future__ import annotations

import pyarrow as pa

from sluiceway.model.items import batch_from_rows
from sluiceway.model.small_batch import MOST, Rows, Served, SmallBatch, in_columns


def rows_of(items: int, payload: int) -> Rows:
    """Make `items` rows, in the form that a call with that many has."""
    if items <= MOST:
        return SmallBatch([b"p" * payload] * items, {}, items * payload)
    return batch_from_rows([{"payload": b"p" * payload}] * items)


def payload_of(leased: Served | pa.RecordBatch) -> int:
    """Total bytes of the payloads."""
    if isinstance(leased, Served) and isinstance(leased.blob, SmallBatch):
        return sum(len(leased.blob.payloads[row]) for row in leased.piece.rows)
    column = in_columns(leased).column("payload")
    ends = memoryview(column.buffers()[1]).cast("i")
    return int(ends[column.offset + len(column)]) - int(ends[column.offset])
