"""Compaction: selects mostly settled blobs and their open rows (docs/adr/0040-compaction.md).

A blob goes when its last row is settled, so one forgotten item would keep all of it. Compaction rewrites such a blob with its open rows
only, under the same number and with the same row numbers: no extent, lease or id changes. Rows only ever go from open to settled, so the
rows open in one state suffice for every later state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.records import Extent, Part, by_part, from_array, rows_of_part, to_array
from sluiceway.model.requests import Offsets

MAX_COMPACTIONS = 64
"""Blobs of a partition named by one call, which scans the line once for all of them."""


class Compaction(NamedTuple):
    """The rows of a blob to keep. `columns` are those stored with it."""

    blob: int
    columns: int
    rows: Offsets


def compactions(partition: Partition) -> list[Compaction]:
    """The blobs worth compacting: sparse at the last call, and still sparse.

    Valid for the partition as it is now, not after reloading: settlements that did not land are open again there.
    """
    numbers = partition.log.long_sparse(MAX_COMPACTIONS)
    if not numbers:
        return []
    found = open_rows(partition, numbers)
    # Equal counts of distinct rows prove that none is missing. On any mismatch the blob is left alone.
    sure = [number for number in numbers if len(found[number]) == partition.log.blobs[number].open]
    return [Compaction(number, partition.log.blobs[number].columns, to_array(found[number])) for number in sure]


def open_rows(partition: Partition, numbers: Collection[int]) -> dict[int, BitMap]:
    """The open rows of these blobs: waiting in the line or beside it, leased, or in transfer.

    Visits each extent, scheduled entry and transfer of the partition once.
    """
    found = {number: BitMap() for number in numbers}
    for extent in partition.log.extents.values():
        if extent.blob.number in found:
            found[extent.blob.number].update(*_open_rows_of(partition, extent))
    for due in partition.log.dues.values():
        if due.blob.number in found:
            found[due.blob.number].update(due.rows)
    for transfer in partition.transfers.by_number.values():
        if any(part.extent.blob.number in found for part in transfer.parts):
            for part, chosen in by_part(transfer, transfer.open_positions()):
                if part.extent.blob.number in found:
                    found[part.extent.blob.number].update(rows_of_part(part, chosen))
    return found


def _open_rows_of(partition: Partition, extent: Extent) -> Iterator[BitMap]:
    """The rows of an extent that wait in the line, and those in live leases."""
    at = partition.log.at(extent)
    yield rows_of_part(Part(extent, 0, extent.count, 0), extent.waiting(at))
    end = extent.first + min(at, extent.count)
    packed = partition.leases.packed_offsets(extent.first, end)
    yield rows_of_part(Part(extent, 0, extent.count, 0), from_array(packed - extent.first))
    for run, place in partition.leases.spans.split(np.arange(extent.first, end, dtype=np.int64)):
        if place is not None:
            lease, part = place
            begin = int(run[0]) - part.first + part.base
            yield rows_of_part(part, BitMap(range(begin, begin + len(run))) - lease.settled)
