"""Items of a partition that fail again and again, for whoever looks for poison items. In memory only: a restart forgets them until they
fail again."""

from __future__ import annotations

from typing import Final, NamedTuple

from pyroaring import BitMap

from sluiceway.core.partition.records import LeaseState, by_part, rows_of_part
from sluiceway.kernel.clock import Millis

MIN_ATTEMPTS: Final = 4
"""Failed attempts from which on an item is remembered."""
MAX_REPEATED: Final = 16
"""Items remembered: if there are more, it is not the items that are at fault."""


class Repeated(NamedTuple):
    """An item, by its first offset. `attempts`: failed ones; `at`: the last failure; `blob`: the number of its blob."""

    offset: int
    attempts: int
    at: Millis
    blob: int


class RepeatedItems:
    """The last items that failed at least MIN_ATTEMPTS times and are neither completed nor dead."""

    def __init__(self) -> None:
        self._items: dict[int, Repeated] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def failed(self, blob: int, rows: BitMap, attempts: int, now: Millis) -> None:
        """Note rows of a blob that come back after that many failed attempts. Costs by what is remembered, not by the number of rows."""
        if attempts < MIN_ATTEMPTS:
            return
        for row in rows[:MAX_REPEATED]:
            # Row r of blob b was first given offset b + r.
            self._items.pop(blob + row, None)
            self._items[blob + row] = Repeated(blob + row, attempts, now, blob)
        while len(self._items) > MAX_REPEATED:
            del self._items[next(iter(self._items))]

    def settled(self, lease: LeaseState, positions: BitMap) -> None:
        """Forget those that are settled for good."""
        for part, chosen in by_part(lease, positions):
            if part.extent.attempts >= MIN_ATTEMPTS and self._items:
                rows = rows_of_part(part, chosen)
                first = part.extent.blob.number
                self._items = {offset: each for offset, each in self._items.items() if not (offset >= first and offset - first in rows)}

    def dropped(self) -> None:
        """Forget all, after waiting items were dropped: which ones is not looked up."""
        self._items = {}

    def items(self) -> list[Repeated]:
        return list(self._items.values())
