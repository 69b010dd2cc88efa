"""Item listing: leased, ready or scheduled items in order of offset. Read-only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain

import numpy as np
from pyroaring import BitMap

from sluiceway.contract.item_answers import LeftReason
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.records import to_array
from sluiceway.core.partition.snapshots import Listed
from sluiceway.model.inspection import Standing
from sluiceway.model.leased_items import Slice


def in_line(partition: Partition, start: int, limit: int) -> list[Listed]:
    """Up to `limit` leased or ready items from the offset `start` on."""
    found: list[Listed] = []
    # Leased items precede ready ones.
    for listed in chain(_leased(partition, start), _ready(partition, start)):
        if limit <= 0:
            break
        found.append(listed._replace(piece=_first(listed.piece, limit)))
        limit -= len(found[-1].piece.rows)
    return found


def scheduled(partition: Partition, start: int, limit: int) -> list[Listed]:
    """Up to `limit` items not yet due, by the offset of their row when produced, from `start` on."""
    dues = [due for due in partition.log.dues.values() if due.blob.number + due.blob.rows > start]
    if not dues:
        return []
    offsets = np.concatenate([to_array(due.rows) + due.blob.number for due in dues])
    owners = np.repeat(np.arange(len(dues)), [len(due.rows) for due in dues])
    order = np.argsort(offsets)
    order = order[offsets[order] >= start][:limit]
    found = []
    for run in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
        if len(run):
            due = dues[int(owners[run[0]])]
            blob = due.blob
            piece = Slice(blob.number, offsets[run] - blob.number, offsets[run], due.attempts, blob.written_at, blob.columns)
            found.append(Listed(piece, 0, Standing(expires_at=due.expires_at or None, due_at=due.due_at)))
    return found


def why_left(partition: Partition, offset: int) -> LeftReason:
    """Why an item that is not waiting was not deleted."""
    place = partition.spans.at(offset)
    if place is not None and offset - place[1].first + place[1].base not in place[0].settled:
        return "leased"
    return "gone" if 0 <= offset < partition.log.header.next else "unknown"


def _leased(partition: Partition, start: int) -> Iterator[Listed]:
    starts = partition.spans.starts
    for at in range(max(0, bisect_right(starts, start) - 1), len(starts)):
        place = partition.spans.at(starts[at])
        assert place is not None, "a span begins where no lease is"
        lease, part = place
        begin = part.base + max(0, start - part.first)
        index = to_array(BitMap(range(begin, max(begin, part.base + part.count))) - lease.settled) - part.base
        if len(index):
            extent = part.extent
            rows = extent.rows_at(part.at, part.count)[index]
            piece = Slice(extent.blob.number, rows, index + part.first, extent.attempts + 1, extent.blob.written_at, extent.blob.columns)
            yield Listed(piece, lease.number, Standing(lease.deadline, extent.expires_at or None))


def _ready(partition: Partition, start: int) -> Iterator[Listed]:
    for extent in partition.log.ready:
        if extent.first + extent.count > start:
            index = to_array(extent.waiting(max(partition.log.at(extent), start - extent.first)))
            if len(index):
                rows = extent.rows_at(0, extent.count)[index]
                piece = Slice(extent.blob.number, rows, index + extent.first, extent.attempts, extent.blob.written_at, extent.blob.columns)
                yield Listed(piece, 0, Standing(expires_at=extent.expires_at or None))


def _first(piece: Slice, count: int) -> Slice:
    return piece._replace(rows=piece.rows[:count], offsets=piece.offsets[:count])
