"""Where a partition machine has its items, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.queries import open_slices, ready_slices
from sluiceway.core.partition.records import EXPIRED_READY, REDRIVEN, to_array
from sluiceway.kernel.clock import Millis
from sluiceway.model.requests import Disposition
from tests.core.core_model import EVERYTHING

Place = Literal["ready", "leased", "due", "dying", "completed", "dead", "cleared", "redriven", "moved"]


class Spot(NamedTuple):
    """Where the machine has an item."""

    origin: int
    place: Place
    attempts: int
    offset: int | None
    number: int | None
    due_at: Millis | None
    staged: Disposition | None = None
    expires_at: Millis = 0
    reason: str = ""
    target: str | None = None
    enqueued_at: Millis = 0


def spots_of(machine: Partition) -> Iterator[Spot]:
    expiry = {extent.first + n: extent.expires_at for extent in machine.log.extents.values() for n in range(extent.count)}
    for piece in ready_slices(machine, EVERYTHING):
        for row, offset in zip(piece.rows.tolist(), piece.offsets.tolist(), strict=True):
            yield Spot(
                piece.blob + row, "ready", piece.attempts, offset, None, None, expires_at=expiry[offset], enqueued_at=piece.enqueued_at
            )
    for number, lease in {**machine.leases, **machine.transfers.by_number}.items():
        place: Place = "dying" if lease.transfer is not None else "leased"
        position = {part.first + n: part.base + n for part in lease.parts for n in range(part.count)}
        due_at = {part.first + n: at for part in lease.parts if (at := lease.due_at().get(part.base)) for n in range(part.count)}
        for piece in open_slices(lease):
            for row, offset in zip(piece.rows.tolist(), piece.offsets.tolist(), strict=True):
                staged = [disposition for disposition, bits in lease.staged.items() if position[offset] in bits]
                assert len(staged) < 2, "two dispositions are staged for one item"
                disposition, reason = staged[0] if staged else None, lease.transfer or ""
                before = piece.attempts - (lease.transfer not in (REDRIVEN, EXPIRED_READY) and lease.moves_to is None)
                later, at = due_at.get(offset), piece.enqueued_at
                yield Spot(piece.blob + row, place, before, offset, number, later, disposition, expiry[offset], reason, lease.target, at)
    for due in machine.log.dues.values():
        for row in to_array(due.rows).tolist():
            yield Spot(
                due.blob.number + row,
                "due",
                due.attempts,
                None,
                None,
                due.due_at,
                expires_at=due.expires_at,
                enqueued_at=due.blob.written_at,
            )
