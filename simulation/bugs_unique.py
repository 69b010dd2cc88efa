"""Planted bugs of unique items: each removes one rule of ADR 55."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import msgspec
import numpy as np

from simulation.planting import Bug, shelf
from sluiceway.cluster import produce_by_key
from sluiceway.core.partition.idempotency_keys import KeyMemory
from sluiceway.core.partition.segment_log import SegmentLog
from sluiceway.core.partition.unique_items import UniqueItems

BUGS: list[Bug] = []
bug = shelf(BUGS)


@bug(SegmentLog, "leave_lease")
def keeps_keys_of_settled_items(original: Any) -> Any:
    """An item that is settled holds its unique key for good."""

    def leave_lease(self: Any, lease: Any, positions: Any) -> None:
        uniques, self.uniques = self.uniques, None
        original(self, lease, positions)
        self.uniques = uniques

    return leave_lease


@bug(SegmentLog, "follow_unique")
def forgets_leased_items_at_a_takeover(original: Any) -> Any:
    """After a takeover, items that are leased do not hold their unique keys."""

    def follow(self: Any, unique: Any, leases: Any) -> None:
        forgotten, leave_lease = {lease.number for lease in leases}, self.leave_lease
        original(self, unique, ())

        def leave(lease: Any, positions: Any) -> None:
            uniques = self.uniques
            if lease.number in forgotten:
                self.uniques = None
            leave_lease(lease, positions)
            self.uniques = uniques

        self.leave_lease = leave

    return follow


@bug(KeyMemory, "remember")
def forgets_duplicates_of_calls(original: Any) -> Any:
    """A repeated call is told that all of its items were stored."""

    def remember(self: Any, key: Any, seen: Any, *rest: Any) -> None:
        parts = tuple(each._replace(duplicates=b"") for each in seen.parts)
        original(self, key, msgspec.structs.replace(seen, parts=parts), *rest)

    return remember


@bug(UniqueItems, "duplicates")
def looks_at_other_calls_alone(original: Any) -> Any:
    """Two items of one call may have the same unique key."""

    def duplicates(self: Any, given: Any, first: int) -> Any:
        return tuple((row, place) for row, place in original(self, given, first) if place < first)

    return duplicates


@bug(produce_by_key, "slots_of_hashes")
def each_instance_has_its_own_homes_of_unique_keys(original: Any) -> Any:
    """Two instances send the items of a unique key to different partitions."""

    def slots(hashes: Any, of: int) -> Any:
        instance: Any = asyncio.get_running_loop()
        return original(hashes + np.uint64(zlib.crc32(instance.process.name.encode())), of)

    return slots
