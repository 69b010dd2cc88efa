"""Unique keys of items: of the items with the same one, and the same key, a queue with `unique` has at most one.

docs/adr/0055-unique-items.md has what holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import pyarrow as pa

from sluiceway.model.item_keys import KEY, has_values
from sluiceway.model.small_batch import Rows, SmallBatch

UNIQUE_KEY = "unique_key"


class UniqueRows(NamedTuple):
    """Those rows of a batch that have a unique key, in order, and the hash of each."""

    rows: Sequence[int]
    hashes: Sequence[bytes]

    def without(self, left_out: Sequence[int]) -> UniqueRows:
        """The same of the batch without those rows, which are sorted and among these."""
        gone, kept, hashes = 0, [], []
        for row, hashed in zip(self.rows, self.hashes, strict=True):
            if gone < len(left_out) and left_out[gone] == row:
                gone += 1
            else:
                kept.append(row - gone)
                hashes.append(hashed)
        return UniqueRows(kept, hashes)


def has_unique_keys(rows: Rows) -> bool:
    """Whether any of the rows has a unique key."""
    return has_values(rows, UNIQUE_KEY)


def unique_rows(rows: Rows) -> UniqueRows:
    """The rows with unique keys. There are some."""
    pairs = list(zip(_texts(rows, UNIQUE_KEY), _texts(rows, KEY), strict=True))
    numbers = [row for row, (unique_key, _) in enumerate(pairs) if unique_key is not None]
    return UniqueRows(numbers, [hash_of(unique_key, key) for unique_key, key in pairs if unique_key is not None])


def _texts(rows: Rows, name: str) -> Sequence[str | None]:
    nothing = [None] * rows.num_rows
    if isinstance(rows, SmallBatch):
        return rows.others.get(name, nothing)
    return rows.column(name).to_pylist() if name in rows.schema.names else nothing


def hash_of(unique_key: str, key: str | None) -> bytes:
    """A hash of 128 bits of both: items with equal hashes are taken for one. It is on disk."""
    scope = b"" if key is None else key.encode()
    return blake2b(b"%d:%b%b" % (len(scope), scope, unique_key.encode()), digest_size=16).digest()


def without_rows(rows: Rows, left_out: Sequence[int]) -> Rows:
    """The rows without those, which are sorted."""
    gone = set(left_out)
    kept = [row for row in range(rows.num_rows) if row not in gone]
    return rows.take(kept if isinstance(rows, SmallBatch) else pa.array(kept, pa.int64()))
