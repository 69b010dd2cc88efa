"""Rows of blobs in memory: those just written, since they are mostly leased soon, and those just read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from sluiceway.model.small_batch import SmallBatch, StoredRows

Key = tuple[Hashable, int]
"""Under which ownership of which partition, and the blob's number there."""

ENTRY_BYTES = 2_048
"""What a blob takes beside its rows: a million blobs of one small item would otherwise count as nothing."""


class BlobCache:
    """Least recently used blobs, up to `capacity` bytes together. A batch put here must not be a view of something larger."""

    def __init__(self, capacity: int = 128 << 20) -> None:
        self.capacity = capacity
        self.size = 0
        self._batches: OrderedDict[Key, tuple[StoredRows, int]] = OrderedDict()

    def put(self, key: Key, batch: StoredRows) -> None:
        self.drop(key)
        nbytes = (batch.held_bytes if isinstance(batch, SmallBatch) else batch.nbytes) + ENTRY_BYTES
        self._batches[key] = (batch, nbytes)
        self.size += nbytes
        while self.size > self.capacity:
            self.size -= self._batches.popitem(last=False)[1][1]

    def get(self, key: Key) -> StoredRows | None:
        found = self._batches.get(key)
        if found is None:
            return None
        self._batches.move_to_end(key)
        return found[0]

    def drop(self, key: Key) -> None:
        found = self._batches.pop(key, None)
        if found is not None:
            self.size -= found[1]
