"""Where live leases lie on the line: finds the lease of an offset without looking at any other."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator

import numpy as np

from sluiceway.core.records import LeaseState, Part
from sluiceway.model.requests import Offsets


class Spans:
    """The parts of all live leases, by their first offset. No two overlap."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._at: dict[int, tuple[LeaseState, Part]] = {}

    def add(self, lease: LeaseState) -> None:
        for part in lease.parts:
            insort(self.starts, part.first)
            self._at[part.first] = (lease, part)

    def remove(self, lease: LeaseState) -> None:
        for part in lease.parts:
            del self.starts[bisect_right(self.starts, part.first) - 1]
            del self._at[part.first]

    def at(self, offset: int) -> tuple[LeaseState, Part] | None:
        """The lease and the part in which the offset lies."""
        index = bisect_right(self.starts, offset) - 1
        place = self._at[self.starts[index]] if index >= 0 else None
        return place if place is not None and offset < place[1].end else None

    def split(self, offsets: Offsets) -> Iterator[tuple[Offsets, tuple[LeaseState, Part] | None]]:
        """The sorted offsets in runs, each with the part in which it lies; None where no lease is. Work is per run, not per offset."""
        at = 0
        while at < len(offsets):
            index = bisect_right(self.starts, int(offsets[at])) - 1
            place = self._at[self.starts[index]] if index >= 0 else None
            if place is not None and int(offsets[at]) < place[1].end:
                limit: int | None = place[1].end
            else:
                place = None
                limit = self.starts[index + 1] if index + 1 < len(self.starts) else None
            end = len(offsets) if limit is None else at + int(np.searchsorted(offsets[at:], limit))
            yield offsets[at:end], place
            at = end
