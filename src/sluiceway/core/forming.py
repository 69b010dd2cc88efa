"""A blob while its turn lasts: small produces of many clients are put together and sealed once."""

from __future__ import annotations

import pyarrow as pa

from sluiceway.core.records import Blob
from sluiceway.kernel.limits import BLOB_BYTES
from sluiceway.model.items import encode_blob, narrow, widen


class Forming:
    """Collects batches for one blob. The blob's rows, columns and size are kept up to date while it grows."""

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self._batches: list[pa.RecordBatch] = []

    def has_room(self, batch: pa.RecordBatch) -> bool:
        return self.blob.nbytes + int(batch.nbytes) <= BLOB_BYTES

    def add(self, batch: pa.RecordBatch) -> int:
        """Add the rows; returns the row number of the first."""
        stored, columns = narrow(batch)
        row = self.blob.rows
        self._batches.append(stored)
        self.blob.rows += stored.num_rows
        self.blob.columns |= columns
        self.blob.nbytes += stored.nbytes
        return row

    def seal(self) -> tuple[pa.RecordBatch, bytes]:
        """The blob's rows as one batch, and its bytes."""
        batches = [widen(batch, self.blob.columns) for batch in self._batches]
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return batch, encode_blob(batch)
