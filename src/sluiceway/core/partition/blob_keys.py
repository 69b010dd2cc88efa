"""Which rows of a blob have which key, or belong to which bundle, without their payload: a part of the blob's record."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from pyroaring import BitMap

from sluiceway.model.item_keys import NO_KEY, KeyRuns
from sluiceway.model.requests import Offsets

KeyCounts = tuple[list[int], list[int]]
"""The keys of rows, in order, by their hashes, and how many rows have each. A key may be there several times."""


class BlobKeys:
    """Runs of rows with equal keys, which follow each other from row 0 on."""

    __slots__ = ("_hashes", "_starts")

    def __init__(self, packed: bytes = b"") -> None:
        runs = len(packed) // 12
        self._starts = array("I", packed[: 4 * runs])
        self._hashes = array("Q", packed[4 * runs :])

    def packed(self) -> bytes:
        """The bytes that make an equal one: the first row of each run, then the hash of each."""
        return self._starts.tobytes() + self._hashes.tobytes()

    def add(self, runs: KeyRuns, row: int) -> None:
        """Append the runs of further rows, the first of which is the blob's row `row`. Rows before it that no run had have no key."""
        firsts, keys = runs
        if not self._starts and row:
            self._append(0, NO_KEY)
        self._append(row, keys[0])
        self._starts.extend([row + first for first in firsts[1:]])
        self._hashes.extend(keys[1:])

    def _append(self, row: int, key: int) -> None:
        if not self._hashes or self._hashes[-1] != key:
            self._starts.append(row)
            self._hashes.append(key)

    def at(self, row: int) -> int:
        """The key of the row."""
        index = bisect_right(self._starts, row) - 1
        return self._hashes[index] if index >= 0 else NO_KEY

    def split(self, first: int, rows: int) -> KeyCounts:
        """The keys of `rows` consecutive rows from `first` on."""
        begin = max(0, bisect_right(self._starts, first) - 1)
        end = bisect_left(self._starts, first + rows)
        edges = [first, *self._starts[begin + 1 : end], first + rows]
        return self._hashes[begin:end].tolist(), [until - start for start, until in pairwise(edges)]

    def count(self, rows: BitMap) -> Iterator[tuple[int, int]]:
        """The keys of those rows, at least one: each run of them with the number of its rows that are among them. NO_KEY is left out."""
        first = rows.min()
        for key, items in zip(*self.split(first, rows.max() - first + 1), strict=True):
            among = rows.range_cardinality(first, first + items) if key != NO_KEY else 0
            if among:
                yield key, among
            first += items

    def split_sorted(self, rows: Offsets) -> KeyCounts:
        """The same of any rows, sorted."""
        indices = np.searchsorted(np.frombuffer(self._starts, np.uint32), rows, "right") - 1
        edges = [0, *(np.flatnonzero(np.diff(indices)) + 1).tolist(), len(rows)] if len(rows) else [0]
        return [self._hashes[indices[begin]] for begin in edges[:-1]], [until - start for start, until in pairwise(edges)]
