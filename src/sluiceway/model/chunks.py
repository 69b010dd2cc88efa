"""Deterministic chunks of rows: the cuts depend only on the rows, so a repeated write sends the same chunks again.

The same rows may come in other batch sizes each time; a chunk's idempotency key is its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

Lengths = np.ndarray[tuple[int], np.dtype[np.int64]]

MAX_CHUNK_BYTES = 16 << 20
"""Half of the maximum request body, which leaves room for offsets and validity of many small rows."""


def recut(batches: Iterable[pa.RecordBatch], chunk_items: int, chunk_bytes: int = MAX_CHUNK_BYTES) -> Iterator[pa.RecordBatch]:
    """Cut after `chunk_items` rows, or before the row that would exceed `chunk_bytes`; a larger row gets its own chunk."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        ends = np.cumsum(row_bytes(batch))
        start = 0
        while start < batch.num_rows:
            before = int(ends[start - 1]) if start else 0
            fits = int(np.searchsorted(ends, before + chunk_bytes - size, side="right")) - start
            take = min(fits, chunk_items - rows, batch.num_rows - start)
            if take <= 0 and not rows:
                take = 1
            if take > 0:
                waiting.append(batch.slice(start, take))
                start += take
                rows += take
                size += int(ends[start - 1]) - before
            if rows == chunk_items or start < batch.num_rows:
                yield _join(waiting)
                waiting, rows, size = [], 0, 0
    if waiting:
        yield _join(waiting)


def row_bytes(batch: pa.RecordBatch) -> Lengths:
    """Bytes of each row's texts, binaries, and header names and values."""
    total = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        if pa.types.is_map(column.type):
            entries = np.asarray(column.offsets)
            total += np.diff(_ends(column.keys)[entries]) + np.diff(_ends(column.items)[entries])
        elif pa.types.is_binary(column.type) or pa.types.is_string(column.type):
            total += np.diff(_ends(column))
    return total


def _ends(column: pa.Array) -> Lengths:
    """Offsets of a text or binary column in its data buffer: the start of each value, and the end of the last."""
    if len(column) == 0:
        return np.zeros(1, np.int64)
    ends = np.frombuffer(column.buffers()[1], np.int32)
    return ends[column.offset : column.offset + len(column) + 1].astype(np.int64)


def _join(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(pieces) == 1:
        return pieces[0]
    return pa.concat_batches(pieces)
