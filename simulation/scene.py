"""Durable location of every item of one partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from simulation.promises import check
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.records import Header, LeaseState, by_part, to_array
from sluiceway.kernel.clock import Millis

READY, LEASED, DUE = "ready", "leased", "due"

PayloadOf = Callable[[int, int], str]
"""Maps (blob, row) to the row's payload."""


class Place(NamedTuple):
    """Location and state of an item in a partition.

    `attempts` excludes the current lease. `first` is the offset that the row was first given. `due_at` is set for a scheduled item, and for
    an item in a transfer that will be scheduled at the target.
    """

    kind: str
    offset: int
    first: int
    attempts: int
    expires_at: Millis
    lease: int = 0
    due_at: Millis = 0
    enqueued_at: Millis = 0


@dataclass(slots=True)
class Scene:
    """Durable items: `alive` by payload, `leaving` by (transfer, payload); the latter may have arrived at their target already."""

    header: Header
    alive: dict[str, Place]
    leaving: dict[tuple[int, str], Place]
    leases: Mapping[int, LeaseState]
    transfers: dict[int, LeaseState]


def scene_of(partition: Partition, payload_of: PayloadOf) -> Scene:
    """Build the scene of a partition. Raises BrokenPromiseError if a payload occurs twice."""
    alive: dict[str, Place] = {}
    count = 0
    for payload, place in _alive(partition, payload_of):
        alive[payload] = place
        count += 1
    check(len(alive) == count, "an item is twice in one partition")
    leaving = {
        (lease.number, payload): place
        for lease in partition.transfers.by_number.values()
        for payload, place in _in_lease(lease, payload_of)
    }
    return Scene(partition.log.header, alive, leaving, partition.leases, partition.transfers.by_number)


def _alive(partition: Partition, payload_of: PayloadOf) -> Iterator[tuple[str, Place]]:
    for extent in partition.log.ready:
        at = partition.log.at(extent)
        rows = extent.rows_at(0, extent.count).tolist()
        blob = extent.blob.number
        for position in extent.waiting(at):
            row = rows[position]
            place = Place(READY, extent.first + position, blob + row, extent.attempts, extent.expires_at)
            yield payload_of(blob, row), place._replace(enqueued_at=extent.blob.written_at)
    for lease in partition.leases.values():
        yield from _in_lease(lease, payload_of)
    for due in partition.log.dues.values():
        blob = due.blob.number
        for row in to_array(due.rows).tolist():
            yield payload_of(blob, row), Place(DUE, -1, blob + row, due.attempts, due.expires_at, 0, due.due_at, due.blob.written_at)


def _in_lease(lease: LeaseState, payload_of: PayloadOf) -> Iterator[tuple[str, Place]]:
    due_at = lease.due_at()
    for part, positions in by_part(lease, lease.open_positions()):
        due = due_at.get(part.base, 0)
        extent, blob = part.extent, part.extent.blob.number
        rows = extent.rows_at(part.at, part.count).tolist()
        for position in positions:
            index = position - part.base
            place = Place(LEASED, part.first + index, blob + rows[index], extent.attempts, extent.expires_at, lease.number, due)
            yield payload_of(blob, rows[index]), place._replace(enqueued_at=extent.blob.written_at)
