"""Compaction: which blobs are mostly settled, and which of their rows are still open (docs/adr/0040-compaction.md).

A blob goes when its last row is settled, so one forgotten item would keep all of it. Compaction rewrites such a blob with its open rows
only, under the same number and with the same row numbers: no extent, lease or id changes. An open row can only become settled, never the
other way round, so the rows that are open in one state are enough for any state that follows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.records import Extent, Part, by_part, rows_of_part, to_array
from sluiceway.model.requests import Offsets

MAX_COMPACTIONS = 64
"""Blobs of a partition that one call names: the line is looked through once for all of them."""


class Compaction(NamedTuple):
    """What is to be kept of a blob: these rows. `columns` are those that it is stored with."""

    blob: int
    columns: int
    rows: Offsets


def compactions(partition: Partition) -> list[Compaction]:
    """The blobs that are worth compacting: those that were sparse at the last call, and still are.

    Only for the partition as it is now, and not once it is loaded anew: what was settled and did not land is open again there.
    """
    numbers = partition.long_sparse(MAX_COMPACTIONS)
    if not numbers:
        return []
    found = open_rows(partition, numbers)
    # Equal counts of distinct rows: none is missing. Whatever else they were, nothing is rewritten.
    sure = [number for number in numbers if len(found[number]) == partition.blobs[number].open]
    return [Compaction(number, partition.blobs[number].columns, to_array(found[number])) for number in sure]


def open_rows(partition: Partition, numbers: Collection[int]) -> dict[int, BitMap]:
    """The open rows of these blobs: those that wait in the line or beside it, are leased, or are on their way elsewhere.

    Looks at each extent, scheduled entry and transfer of the partition once.
    """
    found = {number: BitMap() for number in numbers}
    for extent in partition.extents.values():
        if extent.blob.number in found:
            found[extent.blob.number].update(*_open_rows_of(partition, extent))
    for due in partition.dues.values():
        if due.blob.number in found:
            found[due.blob.number].update(due.rows)
    for transfer in partition.transfers.values():
        if any(part.extent.blob.number in found for part in transfer.parts):
            for part, chosen in by_part(transfer, transfer.open_positions()):
                if part.extent.blob.number in found:
                    found[part.extent.blob.number].update(rows_of_part(part, chosen))
    return found


def _open_rows_of(partition: Partition, extent: Extent) -> Iterator[BitMap]:
    """The rows of an extent that wait in the line, and those in live leases."""
    at = partition.at(extent)
    yield rows_of_part(Part(extent, 0, extent.count, 0), extent.waiting(at))
    passed = np.arange(extent.first, extent.first + min(at, extent.count), dtype=np.int64)
    for run, place in partition.spans.split(passed):
        if place is not None:
            lease, part = place
            begin = int(run[0]) - part.first + part.base
            yield rows_of_part(part, BitMap(range(begin, begin + len(run))) - lease.settled)
