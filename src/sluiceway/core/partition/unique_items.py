"""Unique items: which unique keys of a partition's queue are taken, and by which items.

An item is known by its *place*, the offset that its row got when it was stored here, which no retry changes. More than one item may hold a
key, as those that were stored in any case do (`Partition.produce`), so the holders of a key are counted. Derived from the partition's
records, and not stored: docs/adr/0055-unique-items.md has the reasons.
"""

from __future__ import annotations

from sluiceway.contract.queue_settings import Unique
from sluiceway.core.partition.records import Blob
from sluiceway.model.requests import Duplicates, Offsets
from sluiceway.model.unique_keys import UniqueRows


class UniqueItems:
    """The unique keys that are taken, by their hashes."""

    def __init__(self, unique: Unique) -> None:
        self.while_waiting = unique == "while_waiting"
        """Whether a key is free while its item is leased."""
        self._first: dict[bytes, int] = {}
        """The place of the item that holds each key, the lowest if there are several."""
        self._others: dict[bytes, list[int]] = {}

    def enter(self, blob: Blob, rows: Offsets) -> None:
        """Those (sorted) rows of the blob hold their keys from now on, or (rows that return) once more, until they have left as often."""
        for row, hashed in () if blob.uniques is None else blob.uniques.among(rows):
            place = blob.number + row
            if hashed in self._first:
                first = self._first[hashed]
                self._first[hashed] = min(first, place)
                self._others.setdefault(hashed, []).append(max(first, place))
            else:
                self._first[hashed] = place

    def leave(self, blob: Blob, rows: Offsets) -> None:
        """Those (sorted) rows of the blob no longer do."""
        for row, hashed in () if blob.uniques is None else blob.uniques.among(rows):
            others, place = self._others.get(hashed), blob.number + row
            if others is None:
                del self._first[hashed]
                continue
            if place == self._first[hashed]:
                place = self._first[hashed] = min(others)
            others.remove(place)
            if not others:
                del self._others[hashed]

    def duplicates(self, given: UniqueRows, first: int) -> Duplicates:
        """The rows of a batch whose key is taken, by an item here or by an earlier row, each with the place of that item. `first`: the
        place that the first of the others will get."""
        found: list[tuple[int, int]] = []
        fresh: dict[bytes, int] = {}
        for row, hashed in zip(*given, strict=True):
            place = self._first.get(hashed)
            if place is None:
                place = fresh.get(hashed)
            if place is None:
                fresh[hashed] = first + row - len(found)
            else:
                found.append((row, place))
        return tuple(found)

    def picture(self) -> dict[bytes, list[int]]:
        """The holders of each key, sorted."""
        return {hashed: sorted([place, *self._others.get(hashed, ())]) for hashed, place in self._first.items()}
