"""Item listing: leased, ready or scheduled items in order of offset. Read-only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from sluiceway.contract.item_answers import BrowseState, LeftReason
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.records import to_array
from sluiceway.core.partition.segment_log import first_offset
from sluiceway.core.partition.snapshots import Listed
from sluiceway.model.inspection import Place, Standing
from sluiceway.model.leased_items import Slice
from sluiceway.model.requests import Offsets


def in_line(partition: Partition, start: int, limit: int) -> list[Listed]:
    """Up to `limit` leased or ready items from the offset `start` on."""
    found: list[Listed] = []
    for listed in _by_offset(_leased(partition, start), _ready(partition, start)):
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


class Found(NamedTuple):
    """Listed items, and the places of the first of them and after the last."""

    listed: Listed
    place: Place


def from_place(partition: Partition, states: Container[BrowseState], start: Place, entries: Sequence[int]) -> Iterator[Found]:
    """The items in these states from that place on, in reading order. Read-only, and valid until the next transition.

    `entries`: the sorted numbers of the scheduled entries to look at. A caller that reads on in small steps sorts a million of them once.
    """
    if not start.scheduled:
        leased = _leased(partition, start.at) if "leased" in states else iter(())
        ready = _ready(partition, start.at) if "ready" in states else iter(())
        for listed in _by_offset(leased, ready):
            yield Found(listed, Place(at=int(listed.piece.offsets[0])))
        start = Place(scheduled=True)
    if "scheduled" in states:
        for number in islice(entries, bisect_left(entries, start.at), None):
            due = partition.log.dues.get(number)
            if due is None:
                continue
            rows = to_array(due.rows)
            rows = rows[rows >= start.row] if number == start.at else rows
            if len(rows):
                piece = Slice(due.blob.number, rows, rows + due.blob.number, due.attempts, due.blob.written_at, due.blob.columns)
                standing = Standing(expires_at=due.expires_at or None, due_at=due.due_at)
                yield Found(Listed(piece, 0, standing), Place(True, number, int(rows[0])))


def after(found: Found, rows: int) -> Place:
    """The place after the first `rows` items of these."""
    piece = found.listed.piece
    if found.place.scheduled:
        return found.place._replace(row=int(piece.rows[rows - 1]) + 1)
    return Place(at=int(piece.offsets[rows - 1]) + 1)


def waiting_among(partition: Partition, offsets: Offsets) -> list[Slice]:
    """The waiting items, ready or scheduled, among the (sorted, unique) offsets."""
    found = []
    for offset in offsets.tolist():
        extent = partition.log.ready_extent(offset)
        if extent is not None:
            row, at = extent.rows_at(offset - extent.first, 1), np.array([offset], np.int64)
            found.append(Slice(extent.blob.number, row, at, extent.attempts, extent.blob.written_at, extent.blob.columns))
    for due, chosen in partition.log.scheduled_among(offsets):
        rows = to_array(chosen)
        found.append(Slice(due.blob.number, rows, rows + due.blob.number, due.attempts, due.blob.written_at, due.blob.columns))
    return found


def why_left(partition: Partition, offset: int) -> LeftReason:
    """Why a call on waiting items did not act on this one."""
    place = partition.leases.at(offset)
    if place is not None and offset - place[1].first + place[1].base not in place[0].settled:
        return "leased"
    if partition.log.ready_extent(offset) is not None:
        return "ready"
    return "gone" if 0 <= offset < partition.log.header.next else "unknown"


def _leased(partition: Partition, start: int) -> Iterator[Listed]:
    for lease, part in partition.leases.places_from(start):
        begin = part.base + max(0, start - part.first)
        index = to_array(BitMap(range(begin, max(begin, part.base + part.count))) - lease.settled) - part.base
        if len(index):
            extent = part.extent
            rows = extent.rows_at(part.at, part.count)[index]
            piece = Slice(extent.blob.number, rows, index + part.first, extent.attempts + 1, extent.blob.written_at, extent.blob.columns)
            yield Listed(piece, lease.number, Standing(lease.deadline, extent.expires_at or None))


def _ready(partition: Partition, start: int) -> Iterator[Listed]:
    before = max(0, bisect_right(partition.log.ready, start, key=first_offset) - 1)
    for extent in islice(partition.log.ready, before, None):
        if extent.first + extent.count > start:
            index = to_array(extent.waiting(max(partition.log.at(extent), start - extent.first)))
            if len(index):
                rows = extent.rows_at(0, extent.count)[index]
                piece = Slice(extent.blob.number, rows, index + extent.first, extent.attempts, extent.blob.written_at, extent.blob.columns)
                yield Listed(piece, 0, Standing(expires_at=extent.expires_at or None))


def _by_offset(one: Iterator[Listed], other: Iterator[Listed]) -> Iterator[Listed]:
    """Both in order of offset, as each is. Leased items precede ready ones, unless keys decide what is leased."""
    first, second = next(one, None), next(other, None)
    while first is not None and second is not None:
        if second.piece.offsets[0] < first.piece.offsets[0]:
            one, other, first, second = other, one, second, first
        before = int(first.piece.offsets.searchsorted(second.piece.offsets[0]))
        yield first._replace(piece=_first(first.piece, before))
        left = first.piece._replace(rows=first.piece.rows[before:], offsets=first.piece.offsets[before:])
        first = first._replace(piece=left) if len(left.rows) else next(one, None)
    if first is not None:
        yield first
    if second is not None:
        yield second
    yield from one
    yield from other


def _first(piece: Slice, count: int) -> Slice:
    return piece._replace(rows=piece.rows[:count], offsets=piece.offsets[:count])
