"""Blob building: collects a cycle's batches into one blob, and finds the rows' due times."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluiceway.core.partition.blob_uniques import BlobUniques
from sluiceway.core.partition.blob_values import BlobValues
from sluiceway.core.partition.dead_reasons import may_have_died, reason_groups
from sluiceway.core.partition.records import Blob
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import BLOB_BYTES
from sluiceway.model.item_keys import DEFAULT_PRIORITY, NO_KEY, Runs, has_keys, has_priorities, key_runs, priority_runs
from sluiceway.model.items import encode_blob, narrow, widen
from sluiceway.model.requests import Offsets
from sluiceway.model.small_batch import Rows, SmallBatch, in_columns, join
from sluiceway.model.unique_keys import UniqueRows

NO_BUNDLE = Runs((0,), (NO_KEY,))
"""Of rows that belong to no bundle."""


class Forming:
    """Collects batches for one blob; keeps the blob's rows, columns and size current as it grows."""

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self._pieces: list[Rows] = []

    def has_room(self, batch: Rows) -> bool:
        return self.blob.nbytes + int(batch.nbytes) <= BLOB_BYTES

    def add(self, batch: Rows, notes: bool = False, bundles: Runs = NO_BUNDLE, uniques: UniqueRows | None = None) -> int:
        """Add the rows; returns the row number of the first. `notes`: the blob notes which rows have which key and priority. `bundles`:
        which of them belong to which bundle. `uniques`: those with unique keys."""
        stored, columns = (batch, batch.columns) if isinstance(batch, SmallBatch) else narrow(batch)
        row = self.blob.rows
        if self.blob.keys is not None or (notes and has_keys(stored)):
            self.blob.keys = self.blob.keys or BlobValues(NO_KEY)
            self.blob.keys.add(key_runs(stored), row)
        if self.blob.priorities is not None or (notes and has_priorities(stored)):
            self.blob.priorities = self.blob.priorities or BlobValues(DEFAULT_PRIORITY)
            self.blob.priorities.add(priority_runs(stored), row)
        if self.blob.bundles is not None or bundles is not NO_BUNDLE:
            self.blob.bundles = self.blob.bundles or BlobValues(NO_KEY)
            self.blob.bundles.add(bundles, row)
        if uniques is not None:
            self.blob.uniques = self.blob.uniques or BlobUniques()
            self.blob.uniques.add(uniques, row)
        self._pieces.append(stored)
        self.blob.rows += stored.num_rows
        self.blob.columns |= columns
        self.blob.nbytes += stored.nbytes
        return row

    def seal(self) -> tuple[Rows, bytes]:
        """Return the blob's rows, joined, and its encoded bytes; note why they died, if they did. The rows are a small batch if each piece
        was one."""
        rows: Rows
        if all(isinstance(piece, SmallBatch) for piece in self._pieces):
            rows = join(self._pieces)
        else:
            batches = [widen(in_columns(piece), self.blob.columns) for piece in self._pieces]
            rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        batch = in_columns(rows)
        if may_have_died(rows):
            self.blob.reasons = reason_groups(batch)
        return rows, encode_blob(batch)


def due_times(batch: Rows, now: Millis) -> Offsets | None:
    """Each row's due time, 0 where it has none; None if no row is due after `now`."""
    if isinstance(batch, SmallBatch) or "enqueue_at" not in batch.schema.names:
        return None
    column = batch.column("enqueue_at")
    times: Offsets = column.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return times if bool((times > now).any()) else None


def runs(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The runs of True as (start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.view(np.int8), [0]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
