"""Blobs that were compacted: the rows that were still open, and which rows of the whole blob they are.

A compacted blob keeps its number, and its rows keep theirs, so nothing that refers to them changes. Its bytes are `MAGIC`, the number of
rows (8 bytes, little-endian), their row numbers (4 bytes each, ascending), padding up to a multiple of 64 bytes, and the rows as any blob
has them (`model.items`). A whole blob begins with Arrow's continuation marker instead of `MAGIC`.
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
    """Some rows of a blob: `batch` has those of the (sorted) row numbers `rows`."""

    rows: Offsets
    batch: pa.RecordBatch

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return int(self.batch.nbytes) + self.rows.nbytes

    def has(self, rows: Offsets) -> npt.NDArray[np.bool_]:
        """A mask: which of these rows are here."""
        return np.isin(rows, self.rows, assume_unique=True)

    def places(self, rows: Offsets) -> Offsets:
        """Where these rows, all of which are here, lie in `batch`."""
        return np.searchsorted(self.rows, rows).astype(np.int64)


def encode_sparse(sparse: SparseBatch) -> bytes:
    """The bytes of a compacted blob."""
    head = MAGIC + len(sparse.rows).to_bytes(8, "little") + sparse.rows.astype("<u4").tobytes()
    return head + bytes(-len(head) % _ALIGNMENT) + encode_blob(sparse.batch)


def decode_stored(data: bytes, columns: int) -> pa.RecordBatch | SparseBatch:
    """The rows of a blob as it is stored, whole or compacted, without a copy of them."""
    if not data.startswith(MAGIC):
        return decode_blob(data, columns)
    begin = len(MAGIC) + 8
    count = int.from_bytes(data[len(MAGIC) : begin], "little")
    end = begin + 4 * count
    rows = np.frombuffer(data, "<u4", count, begin).astype(np.int64)
    batch = pa.ipc.read_record_batch(pa.py_buffer(memoryview(data)[end + -end % _ALIGNMENT :]), stored_schema(columns))
    return SparseBatch(rows, batch)


def compacted(blob: pa.RecordBatch | SparseBatch, rows: Offsets) -> SparseBatch:
    """The same blob with these rows of it alone. Raises ValueError if one is not there: it would be lost."""
    if isinstance(blob, SparseBatch):
        if not blob.has(rows).all():
            raise ValueError("a compacted blob lacks an open row")
        return SparseBatch(rows, blob.batch.take(pa.array(blob.places(rows))))
    return SparseBatch(rows, blob.take(pa.array(rows)))
