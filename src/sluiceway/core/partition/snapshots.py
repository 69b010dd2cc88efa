"""Snapshots: a partition's content at one moment, read page by page while it works on.

A snapshot holds positions, not items: a few numbers for each run of items with equal attributes. Their blobs are pinned meanwhile, which
keeps them from being dropped when their rows are settled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from sluiceway.core.partition.records import Blob, to_array
from sluiceway.kernel.clock import Millis
from sluiceway.model.inspection import Standing
from sluiceway.model.leased_items import Slice
from sluiceway.model.requests import Offsets


class Listed(NamedTuple):
    """Items with equal attributes; `lease` is 0 for waiting ones."""

    piece: Slice
    lease: int
    standing: Standing


class Run(NamedTuple):
    """A run of `items` items with equal attributes: the places from `at` on, or the `chosen` ones.

    Place p had the offset `first` + p, and stands for the blob's row `row` + p, or for the p-th of `rows`.
    """

    blob: Blob
    first: int
    row: int
    rows: BitMap | None
    at: int
    items: int
    chosen: BitMap | None
    attempts: int
    lease: int
    standing: Standing

    def listed(self, skip: int, most: int) -> Listed:
        """At most `most` of the items, after skipping `skip`."""
        count = min(most, self.items - skip)
        if self.chosen is None:
            places: Offsets = np.arange(self.at + skip, self.at + skip + count, dtype=np.int64)
        else:
            places = to_array(self.chosen)[skip : skip + count]
        rows = places + self.row if self.rows is None else to_array(self.rows)[places]
        blob = self.blob
        piece = Slice(blob.number, rows, places + self.first, self.attempts, blob.written_at, blob.columns)
        return Listed(piece, self.lease, self.standing)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """The runs in reading order. Released at `until`, and never later than `latest`."""

    runs: list[Run]
    until: Millis = 0
    latest: Millis = 0
    ends: list[int] = field(init=False)
    """Cumulative item count at the end of each run."""

    def __post_init__(self) -> None:
        self.ends = list(accumulate(run.items for run in self.runs))

    @property
    def count(self) -> int:
        return self.ends[-1] if self.ends else 0

    def listed(self, position: int, limit: int) -> list[Listed]:
        """Up to `limit` items from that position on."""
        found: list[Listed] = []
        position = max(0, position)
        at = bisect_right(self.ends, position)
        while limit > 0 and at < len(self.runs):
            run = self.runs[at]
            found.append(run.listed(position - (self.ends[at] - run.items), limit))
            position = self.ends[at]
            limit -= len(found[-1].piece.rows)
            at += 1
        return found


def of_blobs(blobs: Iterable[Blob]) -> Snapshot:
    """A snapshot without items, which keeps these blobs, pinned until its time is over."""
    return Snapshot([Run(blob, blob.number, 0, None, 0, 0, None, 0, 0, Standing()) for blob in blobs])
