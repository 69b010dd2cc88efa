"""What holds up the keys of a partition in order: for people and the judge of problems, not for the hot path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, takewhile
from typing import Final, NamedTuple

from pyroaring import BitMap

from sluiceway.core.partition.key_flows import keys_of
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.records import Blob, Due, LeaseState, by_part, rows_of_part
from sluiceway.kernel.clock import Millis
from sluiceway.model.item_keys import NO_KEY

_LOOKED_AT: Final = 1_000
"""Runs of items that are looked at for the one that most wait behind: under 3 ms."""


class Holder(NamedTuple):
    """An item for which later ones of its key wait. `origin`: the offset that it had first, as row `origin - blob` of that blob. It is
    leased, since `leased_at` by `client_id`; or it waits for its retry until `due_at`; or it fails again and again. `behind`: how many
    wait. `attempts`: failed ones."""

    origin: int
    blob: int
    key: int
    behind: int
    attempts: int
    client_id: str = ""
    leased_at: Millis = 0
    due_at: Millis = 0

    @property
    def is_failing(self) -> bool:
        """Whether it is told of because it fails again and again, wherever it is."""
        return not (self.leased_at or self.due_at)


def holder_of(partition: Partition, key: int) -> Holder | None:
    """What holds up that key; None: nothing does."""
    holders = chain(_leased(partition, partition.leases.values()), _returned(partition, partition.log.dues.values()))
    return next((each for each in holders if each.key == key), None)


def holder_before(partition: Partition, offset: int) -> Holder | None:
    """What the ready item at that offset waits for because of its key; None: nothing."""
    if partition.log.flows is None or not partition.log.flows.rules.order:
        return None
    extents = partition.log.extents.values()
    extent = next((each for each in extents if each.first <= offset < each.first + each.count), None)
    if extent is None or extent.blob.keys is None:
        return None
    key = extent.blob.keys.at(extent.row_at(offset - extent.first))
    return None if key == NO_KEY else holder_of(partition, key)


def longest_held(partition: Partition, leased_before: Millis, due_after: Millis) -> list[Holder]:
    """Of the oldest leases, if they are from before that time, the item that most wait behind; and so of the retries after that time."""
    leases = takewhile(lambda lease: lease.leased_at <= leased_before, partition.leases.values())
    retries = (due for due in islice(partition.log.dues.values(), _LOOKED_AT) if due.due_at > due_after)
    found = (islice(each, _LOOKED_AT) for each in (_leased(partition, leases), _returned(partition, retries)))
    worst = (max(each, key=lambda holder: holder.behind, default=None) for each in found)
    return [each for each in worst if each is not None and each.behind]


def failing(partition: Partition) -> Iterator[Holder]:
    """The items that fail again and again, and hold up others."""
    for each in partition.repeated.items():
        blob, row = partition.log.blobs.get(each.blob), each.offset - each.blob
        key = NO_KEY if blob is None or blob.keys is None else blob.keys.at(row)
        waiting = None if key == NO_KEY or partition.log.flows is None else partition.log.flows.of_key(key)
        if waiting is not None:
            # It may be the next one itself.
            is_next = waiting.extent.blob is blob and waiting.extent.row_at(waiting.at) == row
            if waiting.waiting > is_next:
                yield Holder(each.offset, each.blob, key, waiting.waiting - is_next, each.attempts)


def keys_in(lease: LeaseState, most: int) -> int:
    """How many consumers could have the lease's open items: its keys, and its items without one. Counts up to `most`."""
    keys: set[int] = set()
    without = 0
    for part, chosen in by_part(lease, lease.open_positions()):
        for key, _, rows in _keys_of(part.extent.blob, rows_of_part(part, chosen)):
            if key == NO_KEY:
                without += rows
            else:
                keys.add(key)
            if len(keys) + without >= most:
                return most
    return len(keys) + without


def _leased(partition: Partition, leases: Iterable[LeaseState]) -> Iterator[Holder]:
    for lease in leases:
        for part, chosen in by_part(lease, lease.open_positions()):
            blob, attempts = part.extent.blob, part.extent.attempts
            for key, row, _ in _keys_of(blob, rows_of_part(part, chosen)):
                behind = _behind(partition, key)
                yield Holder(blob.number + row, blob.number, key, behind, attempts, lease.client_id, leased_at=lease.leased_at)


def _returned(partition: Partition, dues: Iterable[Due]) -> Iterator[Holder]:
    for due in dues:
        for key, row, _ in _keys_of(due.blob, due.rows) if due.is_back else ():
            yield Holder(due.blob.number + row, due.blob.number, key, _behind(partition, key), due.attempts, due_at=due.due_at)


def _behind(partition: Partition, key: int) -> int:
    return 0 if key == NO_KEY or partition.log.flows is None else partition.log.flows.waiting_of(key)


def _keys_of(blob: Blob, rows: BitMap) -> Iterator[tuple[int, int, int]]:
    """The keys of those rows, each with its first row and their number, perhaps in several pieces."""
    at = 0
    for key, count in zip(*keys_of(blob, rows), strict=True):
        yield key, rows[at], count
        at += count
