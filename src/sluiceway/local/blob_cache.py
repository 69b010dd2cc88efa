"""Blob cache: rows of blobs just written, most of which are leased soon, or just read."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable

from sluiceway.model.small_batch import SmallBatch, StoredRows

Key = tuple[Hashable, int]
"""Partition and token under which the blob is served, and the blob's number there."""

ENTRY_BYTES = 2_048
"""Overhead of a blob beside its rows: otherwise a million blobs of one small item would count as nothing."""


class BlobCache:
    """LRU cache of blobs, up to `capacity` bytes in total. A batch put here must not be a view of something larger."""

    def __init__(self, capacity: int = 128 << 20) -> None:
        self.capacity = capacity
        self.size = 0
        self._batches: OrderedDict[Key, tuple[StoredRows, int]] = OrderedDict()
        self._numbers: defaultdict[Hashable, set[int]] = defaultdict(set)
        """The blobs of each partition and token, so that all of them can be dropped without a search."""

    def __len__(self) -> int:
        return len(self._batches)

    def put(self, key: Key, batch: StoredRows) -> None:
        self.drop(key)
        nbytes = (batch.held_bytes if isinstance(batch, SmallBatch) else batch.nbytes) + ENTRY_BYTES
        self._batches[key] = (batch, nbytes)
        self._numbers[key[0]].add(key[1])
        self.size += nbytes
        while self.size > self.capacity:
            self.drop(next(iter(self._batches)))

    def get(self, key: Key) -> StoredRows | None:
        found = self._batches.get(key)
        if found is None:
            return None
        self._batches.move_to_end(key)
        return found[0]

    def drop(self, key: Key) -> None:
        found = self._batches.pop(key, None)
        if found is None:
            return
        self.size -= found[1]
        held, number = key
        self._numbers[held].discard(number)
        if not self._numbers[held]:
            del self._numbers[held]

    def drop_all(self, held: Hashable) -> None:
        """Drop all blobs of a partition that were served under that token."""
        for number in self._numbers.pop(held, ()):
            self.size -= self._batches.pop((held, number))[1]
