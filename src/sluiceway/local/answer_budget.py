"""Answer budget: cuts a partition's slices down to the size of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from sluiceway.core.partition.partition import Partition
from sluiceway.model.leased_items import Slice


@dataclass(slots=True)
class Asked:
    """Audit-trail detail of a call that names items: their number, and the queue that they go to."""

    items: int
    target: str | None = None


def fitting(partition: Partition, pieces: list[Slice], room: float) -> tuple[list[Slice], float]:
    """The first rows that fit into `room` bytes (by each blob's average), and their bytes: a backlog may exceed memory."""
    chosen, used = [], 0.0
    for piece in pieces:
        blob = partition.log.blobs[piece.blob]
        each = max(1.0, blob.nbytes / blob.stored_rows)
        count = min(len(piece.rows), int((room - used) / each))
        if count:
            chosen.append(_first(piece, count))
            used += count * each
        if count < len(piece.rows):
            break
    return chosen, used


def first_rows(pieces: list[Slice], count: int) -> list[Slice]:
    """The first `count` rows."""
    chosen: list[Slice] = []
    for piece in pieces:
        if count > 0:
            chosen.append(_first(piece, count))
            count -= len(piece.rows)
    return chosen


def _first(piece: Slice, count: int) -> Slice:
    return piece._replace(rows=piece.rows[:count], offsets=piece.offsets[:count])
