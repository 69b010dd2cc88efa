"""Homes of keys: a key hashes to a slot, and each slot has one home partition. That remembers the slot's idempotency keys, and takes the
items whose keys are of the slot, in a queue that keeps these together.

A queue that was never rebalanced records no slots: partition i of n, in order of number, is the home of keys that hash to i. `slots_of`
expresses that in slots, so that no key loses its home when the first rebalance begins.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np

from sluiceway.kernel.limits import BURST_KEY
from sluiceway.model.item_keys import Hashes, hash_of
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Offsets, ProduceKey

SLOTS = 256
"""Minimum number of slots of a queue, so that they divide evenly among more partitions than it began with."""


def slot(key: ProduceKey, slots: int) -> int:
    """The slot of a key, of `slots`. Keys of a group share one, so a repetition need ask only one home. Deterministic across processes."""
    return slot_of_name(key.group if key.group is not None else key.key, slots)


def slot_of_name(name: str, slots: int) -> int:
    """The slot of a group's name, or of a lone key, of `slots`. Keys of a burst share one, so that calls made together share a commit."""
    if name.startswith(BURST_KEY):
        name = name.rpartition("/")[0]
    return zlib.crc32(name.encode()) % slots


def slot_of_hash(key: int, slots: int) -> int:
    """The slot of an item's key, of `slots`, by the key's hash: blobs note only that."""
    return key % slots


def slots_of_hashes(keys: Hashes, slots: int) -> Offsets:
    """The same of many keys."""
    return (keys % np.uint64(slots)).astype(np.int64)


def home_of(record: QueueRecord, key: ProduceKey) -> int:
    """The partition that remembers the key; MOVING: none at the moment."""
    return home_of_name(record, key.group if key.group is not None else key.key)


def home_of_name(record: QueueRecord, name: str) -> int:
    """The home of a group's name, or of a lone key; MOVING: none at the moment."""
    if record.slots:
        return record.slots[slot_of_name(name, len(record.slots))]
    numbers = sorted(each.partition for each in record.partitions)
    return numbers[slot_of_name(name, len(numbers))]


def home_of_key(record: QueueRecord, key: str) -> int:
    """The partition that takes the items of that key, in a queue that keeps them together; MOVING: none at the moment."""
    slots = slots_of(record)
    return slots[slot_of_hash(hash_of(key), len(slots))]


def slots_of(record: QueueRecord) -> tuple[int, ...]:
    """The home of each slot; for a queue without recorded slots, the homes in effect."""
    if record.slots:
        return record.slots
    return _first_slots(tuple(sorted(each.partition for each in record.partitions)))


@lru_cache(1_000)
def _first_slots(numbers: tuple[int, ...]) -> tuple[int, ...]:
    count = len(numbers) * -(-SLOTS // len(numbers))
    # A multiple: h mod (n·k) mod n is h mod n.
    return tuple(numbers[place % len(numbers)] for place in range(count))


def spread(slots: Sequence[int], partitions: Collection[int]) -> tuple[int, ...]:
    """Divide the slots evenly among these partitions (none gets any beyond one per slot), moving as few as possible.

    Deterministic across processes. Each has ⌊slots/partitions⌋ or one more; partitions that already have more keep that one.
    """
    numbers = sorted(partitions)
    has = Counter(home for home in slots if home in set(numbers))
    least, more = divmod(len(slots), len(numbers))
    fuller = set(sorted(numbers, key=lambda number: (-has[number], number))[:more])
    room = {number: least + (number in fuller) for number in numbers}
    homes: list[int | None] = []
    for home in slots:
        stays = room.get(home, 0) > 0
        homes.append(home if stays else None)
        if stays:
            room[home] -= 1
    free = (number for number in numbers for _ in range(room[number]))
    return tuple(next(free) if home is None else home for home in homes)
