"""What a partition still has of the slots whose keys another partition takes: until nothing is left, that one serves none of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pyroaring import BitMap

from sluiceway.core.partition.key_flows import keys_of
from sluiceway.core.partition.records import REDRIVEN, Blob, Due, LeaseState, from_array, rows_of_part, slots_in, to_array
from sluiceway.core.partition.segment_log import SegmentLog
from sluiceway.model.item_keys import NO_KEY


class SlotContents(NamedTuple):
    """`busy`: slots with items that may be delivered here. `due`: those with scheduled items that may be moved. `movable`: the number of
    those items; where none may come in, also of those that no slot keeps together."""

    busy: tuple[int, ...] = ()
    due: tuple[int, ...] = ()
    movable: int = 0


def slot_contents(log: SegmentLog, transfers: Iterable[LeaseState]) -> SlotContents:
    """What is left of the slots that the partition has given away. Costs per key, scheduled entry and transfer."""
    closed = set(slots_in(log.header.closed_slots))
    if log.flows is None or not closed or not log.flows.rules.keep_together:
        return SlotContents(movable=log.scheduled_count)
    of = log.header.slots_of
    busy = log.flows.slots_left(of)
    due: set[int] = set()
    movable = 0
    for blob, rows in _by_blob((each.blob, each.rows) for each in log.dues.values() if stays(log, each)):
        busy |= {key % of for key in keys_of(blob, rows)[0] if key != NO_KEY}
    for blob, rows in _by_blob((each.blob, each.rows) for each in log.dues.values() if not stays(log, each)):
        for key, count in zip(*keys_of(blob, rows), strict=True):
            goes = key != NO_KEY and key % of in closed
            due |= {key % of} if goes else set()
            movable += count if goes or log.header.shut else 0
    for transfer in transfers:
        # Dead items do not come back.
        if transfer.moves_to is not None or transfer.transfer == REDRIVEN:
            for part in transfer.parts:
                chosen = transfer.open_positions() & BitMap(range(part.base, part.base + part.count))
                busy |= {key % of for key in keys_of(part.extent.blob, rows_of_part(part, chosen))[0] if key != NO_KEY}
    return SlotContents(tuple(sorted((busy | due) & closed)), tuple(sorted(due)), movable)


def stays(log: SegmentLog, due: Due) -> bool:
    """Whether the entry waits for its time here, as later items of its keys wait for it."""
    return due.is_back and log.flows is not None and log.flows.rules.order


def movable_rows(log: SegmentLog, due: Due, slots: frozenset[int] | None) -> BitMap:
    """The rows of the entry that may be moved with these slots; None: all. All, too, if slots keep nothing together any more."""
    if slots is None or log.flows is None or not log.flows.rules.keep_together:
        return due.rows
    if stays(log, due):
        return BitMap()
    rows, of, found, at = to_array(due.rows), log.header.slots_of, BitMap(), 0
    closed = set(slots_in(log.header.closed_slots))
    for key, count in zip(*keys_of(due.blob, due.rows), strict=True):
        if key % of in slots if key != NO_KEY and key % of in closed else log.header.shut:
            found |= from_array(rows[at : at + count])
        at += count
    return found


def _by_blob(entries: Iterable[tuple[Blob, BitMap]]) -> Iterable[tuple[Blob, BitMap]]:
    found: dict[int, tuple[Blob, BitMap]] = {}
    for blob, rows in entries:
        if blob.number in found:
            found[blob.number][1].update(rows)
        else:
            found[blob.number] = blob, BitMap(rows)
    return found.values()
