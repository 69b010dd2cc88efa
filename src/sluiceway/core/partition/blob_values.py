"""Which rows of a blob have which key or priority, or belong to which bundle, without their payload: a part of the blob's record."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from pyroaring import BitMap

from sluiceway.model.item_keys import Runs
from sluiceway.model.requests import Offsets

ValueCounts = tuple[list[int], list[int]]
"""The values of rows, in order, and how many rows have each. A value may be there several times."""


class BlobValues:
    """Runs of rows with equal values, which follow each other from row 0 on: hashes of keys, or priorities."""

    __slots__ = ("_none", "_starts", "_values")

    def __init__(self, none: int, packed: bytes = b"") -> None:
        """`none`: the value of rows of which none was noted."""
        self._none = none
        runs = len(packed) // 12
        self._starts = array("I", packed[: 4 * runs])
        self._values = array("Q", packed[4 * runs :])

    def packed(self) -> bytes:
        """The bytes that make an equal one: the first row of each run, then the value of each."""
        return self._starts.tobytes() + self._values.tobytes()

    def add(self, runs: Runs, row: int) -> None:
        """Append the runs of further rows, the first of which is the blob's row `row`."""
        firsts, values = runs
        if not self._starts and row:
            self._append(0, self._none)
        self._append(row, values[0])
        self._starts.extend([row + first for first in firsts[1:]])
        self._values.extend(values[1:])

    def _append(self, row: int, value: int) -> None:
        if not self._values or self._values[-1] != value:
            self._starts.append(row)
            self._values.append(value)

    def at(self, row: int) -> int:
        """The value of the row."""
        index = bisect_right(self._starts, row) - 1
        return self._values[index] if index >= 0 else self._none

    def split(self, first: int, rows: int) -> ValueCounts:
        """The values of `rows` consecutive rows from `first` on."""
        begin = max(0, bisect_right(self._starts, first) - 1)
        end = bisect_left(self._starts, first + rows)
        edges = [first, *self._starts[begin + 1 : end], first + rows]
        return self._values[begin:end].tolist(), [until - start for start, until in pairwise(edges)]

    def count(self, rows: BitMap) -> Iterator[tuple[int, int]]:
        """The values of those rows, at least one: each run of them with the number of its rows that are among them. Without those of which
        none was noted."""
        first = rows.min()
        for value, items in zip(*self.split(first, rows.max() - first + 1), strict=True):
            among = rows.range_cardinality(first, first + items) if value != self._none else 0
            if among:
                yield value, among
            first += items

    def split_sorted(self, rows: Offsets) -> ValueCounts:
        """The same of any rows, sorted."""
        if not len(rows):
            return [], []
        runs = np.searchsorted(np.frombuffer(self._starts, np.uint32), rows, "right") - 1
        edges = [0, *(np.flatnonzero(runs[1:] != runs[:-1]) + 1).tolist(), len(rows)]
        values = np.frombuffer(self._values, np.uint64)[runs[edges[:-1]]]
        return values.tolist(), [until - start for start, until in pairwise(edges)]
