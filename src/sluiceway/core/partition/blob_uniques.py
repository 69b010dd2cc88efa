"""Which rows of a blob have a unique key, and its hash, without their payload: a part of the blob's record."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from sluiceway.model.requests import Offsets
from sluiceway.model.unique_keys import UniqueRows

HASH_BYTES = 16


class BlobUniques:
    """Rows with unique keys, in order, and the hash of each."""

    __slots__ = ("_hashes", "_rows")

    def __init__(self, packed: bytes = b"") -> None:
        count = len(packed) // (4 + HASH_BYTES)
        self._rows = array("I", packed[: 4 * count])
        # Not in one piece: each is a key of the index, too, which shares it.
        self._hashes = [packed[at : at + HASH_BYTES] for at in range(4 * count, len(packed), HASH_BYTES)]

    def packed(self) -> bytes:
        """The bytes that make an equal one: the rows, then the hash of each."""
        return self._rows.tobytes() + b"".join(self._hashes)

    def add(self, found: UniqueRows, row: int) -> None:
        """Append further rows; the first of their batch is the blob's row `row`."""
        self._rows.extend([row + each for each in found.rows])
        self._hashes += found.hashes

    def among(self, rows: Offsets) -> Iterator[tuple[int, bytes]]:
        """Those of the (sorted, unique) rows that have a unique key, with its hash."""
        if len(rows) == 1:
            # NumPy costs more than the rest of a single item's way through the index.
            index = bisect_left(self._rows, row := int(rows[0]))
            if index < len(self._rows) and self._rows[index] == row:
                yield row, self._hashes[index]
            return
        known = np.frombuffer(self._rows, np.uint32)
        at = np.searchsorted(known, rows)
        at = at[at < len(known)]
        found = at[known[at] == rows[: len(at)]].tolist()
        del known  # an array that is looked at cannot grow
        for index in found:
            yield self._rows[index], self._hashes[index]
