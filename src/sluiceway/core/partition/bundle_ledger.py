"""Counts of bundles: how many items of each a partition has stored, and how those that ended here have ended.

The counts only rise, and every item is counted as stored in one partition and as ended in one. So the sums over a queue's partitions may be
taken at different moments, and as often as one likes: a bundle is over when they are equal. A move between partitions is neither.
docs/adr/0056-bundles.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
from pyroaring import BitMap

from sluiceway.core.partition.records import Blob, Part, pack, rows_of_part
from sluiceway.model.item_keys import NO_KEY
from sluiceway.model.requests import BundleCount

Ending = Literal["completed", "dead", "dropped"]


class LedgerRecord(msgspec.Struct, array_like=True):
    """What is counted of a bundle. `closed`: items that are stored from now on do not belong to it."""

    stored: int = 0
    completed: int = 0
    dead: int = 0
    dropped: int = 0
    closed: bool = False


_unpack = msgspec.msgpack.Decoder(LedgerRecord).decode


class BundleLedger:
    """A partition's records of bundles, by the hash of their ids. `touched` names the changed ones.

    There is one for each bundle of which an item is or was here. An item of a bundle that has none, since it is over, is not counted.
    """

    def __init__(self) -> None:
        self._of: dict[int, LedgerRecord] = {}
        self.touched: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def __contains__(self, bundle: int) -> bool:
        return bundle in self._of

    def record(self, bundle: int) -> bytes | None:
        """The bytes to store; None if it is forgotten."""
        record = self._of.get(bundle)
        return None if record is None else pack(record)

    def load(self, bundle: int, data: bytes) -> None:
        self._of[bundle] = _unpack(data)

    def count(self, bundle: int) -> BundleCount:
        """What is counted here."""
        record = self._of.get(bundle) or LedgerRecord()
        return BundleCount(record.stored, record.completed, record.dead, record.dropped)

    # ---- transitions ------------------------------------------------------------------------------------------

    def store(self, bundle: int, items: int) -> int:
        """Count new items. Returns the bundle to which they belong: NO_KEY if this one is closed here."""
        record = self._record(bundle)
        if record.closed:
            return NO_KEY
        record.stored += items
        return bundle

    def arrive(self, bundle: int) -> None:
        """Count from now on how items of the bundle end that were stored in another partition."""
        if bundle != NO_KEY:
            self._record(bundle)

    def end(self, ending: Ending, blob: Blob, rows: BitMap) -> None:
        """Count the end of the items in those rows of a blob. Costs per run of rows of a bundle."""
        if not self._of or blob.bundles is None or not rows:
            return
        for bundle, items in blob.bundles.count(rows):
            record = self._of.get(bundle)
            if record is not None:
                setattr(record, ending, getattr(record, ending) + items)
                self.touched[bundle] = None

    def end_of(self, ending: Ending, pieces: Iterable[tuple[Part, BitMap]]) -> None:
        """Count the end of the items at those positions of parts."""
        for part, positions in pieces if self._of else ():
            if part.extent.blob.bundles is not None:
                self.end(ending, part.extent.blob, rows_of_part(part, positions))

    def close(self, bundle: int, *, takes_items: bool) -> None:
        """From now on no item that is stored here belongs to the bundle. `takes_items`: whether any could be."""
        known = self._of.get(bundle)
        if known is None and not takes_items:
            return
        if known is None or not known.closed:
            self._record(bundle).closed = True

    def forget(self, bundle: int) -> None:
        """Forget the bundle, which is over. Idempotent."""
        if self._of.pop(bundle, None) is not None:
            self.touched[bundle] = None

    def _record(self, bundle: int) -> LedgerRecord:
        self.touched[bundle] = None
        return self._of.setdefault(bundle, LedgerRecord())
