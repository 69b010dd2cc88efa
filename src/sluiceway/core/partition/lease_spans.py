"""Lease spans: finds the live lease of an offset without visiting others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice

import numpy as np

from sluiceway.core.partition.records import LeaseState, Part
from sluiceway.model.requests import Offsets

Place = tuple[LeaseState, Part]
"""A lease, and the part of it that has an offset."""


class Spans:
    """The parts of leases, by first offset. Parts never overlap, nor with any earlier part: an offset is leased once."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        """Starts of removed parts stay until they are half: removing one from a long list costs its length."""
        self._at: dict[int, Place] = {}

    def __len__(self) -> int:
        return len(self._at)

    def add(self, lease: LeaseState) -> None:
        for part in lease.parts:
            first = part.first
            if not self._starts or first > self._starts[-1]:
                self._starts.append(first)
            elif self._starts[at := bisect_left(self._starts, first)] != first:
                # The start of a removed part may be there still, which is added again.
                self._starts.insert(at, first)
            self._at[first] = (lease, part)

    def remove(self, lease: LeaseState) -> None:
        for part in lease.parts:
            del self._at[part.first]
        if len(self._starts) > 2 * len(self._at) + 1_000:
            self._starts = [start for start in self._starts if start in self._at]

    def at(self, offset: int) -> Place | None:
        """The lease and the part that contain the offset; None: no live lease does."""
        index = bisect_right(self._starts, offset) - 1
        place = self._at.get(self._starts[index]) if index >= 0 else None
        return place if place is not None and offset < place[1].end else None

    def places_from(self, offset: int) -> Iterator[Place]:
        """The parts by offset, from the one that has the offset on, or the last before it. Valid until the next change."""
        starts = islice(self._starts, max(0, bisect_right(self._starts, offset) - 1), None)
        return (self._at[start] for start in starts if start in self._at)

    def split(self, offsets: Offsets) -> Iterator[tuple[Offsets, Place | None]]:
        """Split the sorted offsets into runs, each with its lease and part (None: no lease). Costs per run, not per offset."""
        at, starts = 0, self._starts
        while at < len(offsets):
            index = bisect_right(starts, int(offsets[at])) - 1
            place = self._at.get(starts[index]) if index >= 0 else None
            if place is not None and int(offsets[at]) < place[1].end:
                limit: int | None = place[1].end
            else:
                place = None
                limit = starts[index + 1] if index + 1 < len(starts) else None
            end = len(offsets) if limit is None else at + int(np.searchsorted(offsets[at:], limit))
            yield offsets[at:end], place
            at = end
