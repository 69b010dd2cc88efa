"""Compacted blobs: the rows that were still open, with their row numbers in the whole blob.

A compacted blob keeps its number, and its rows keep theirs, so references to them stay valid. Its bytes are `MAGIC`, the number of rows
(8 bytes, little-endian), their row numbers (4 bytes each, ascending), padding up to a multiple of 64 bytes, and the rows as in any blob
(`model.items`). A whole blob begins with Arrow's continuation marker instead of `MAGIC`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluiceway.model.items import decode_blob, encode_blob, stored_schema
from sluiceway.model.requests import Offsets

MAGIC = b"SLUISOME"
_ALIGNMENT = 64


class SparseBatch(NamedTuple):
    """Some rows of a blob: `batch` has the rows with the sorted row numbers `rows`."""

    rows: Offsets
    batch: pa.RecordBatch

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return int(self.batch.nbytes) + self.rows.nbytes

    def has(self, rows: Offsets) -> npt.NDArray[np.bool_]:
        """Mask of the given rows that are present."""
        return np.isin(rows, self.rows, assume_unique=True)

    def places(self, rows: Offsets) -> Offsets:
        """Positions in `batch` of these rows, all of which must be present."""
        return np.searchsorted(self.rows, rows).astype(np.int64)


def encode_sparse(sparse: SparseBatch) -> bytes:
    """Encode a compacted blob."""
    head = MAGIC + len(sparse.rows).to_bytes(8, "little") + sparse.rows.astype("<u4").tobytes()
    return head + bytes(-len(head) % _ALIGNMENT) + encode_blob(sparse.batch)


def decode_stored(data: bytes, columns: int) -> pa.RecordBatch | SparseBatch:
    """Decode a stored blob, whole or compacted, without copying its rows."""
    if not data.startswith(MAGIC):
        return decode_blob(data, columns)
    begin = len(MAGIC) + 8
    count = int.from_bytes(data[len(MAGIC) : begin], "little")
    end = begin + 4 * count
    rows = np.frombuffer(data, "<u4", count, begin).astype(np.int64)
    batch = pa.ipc.read_record_batch(pa.py_buffer(memoryview(data)[end + -end % _ALIGNMENT :]), stored_schema(columns))
    return SparseBatch(rows, batch)


def compacted(blob: pa.RecordBatch | SparseBatch, rows: Offsets) -> SparseBatch:
    """Reduce a blob to these rows. Raises ValueError if one is missing, since it would be lost."""
    if isinstance(blob, SparseBatch):
        if not blob.has(rows).all():
            raise ValueError("a compacted blob lacks an open row")
        return SparseBatch(rows, blob.batch.take(pa.array(blob.places(rows))))
    return SparseBatch(rows, blob.take(pa.array(rows)))
