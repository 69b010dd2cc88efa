"""Snapshot of a partition's items. Read-only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pyroaring import BitMap

from sluiceway.contract.item_answers import BrowseState
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.snapshots import Run, Snapshot
from sluiceway.model.inspection import Standing


def runs_of(partition: Partition, states: Iterable[BrowseState]) -> int:
    """Upper bound for the number of runs in a snapshot of these states, computed without visiting the items."""
    most = {"leased": partition.leases.parts, "ready": len(partition.log.ready), "scheduled": len(partition.log.dues)}
    return sum(most[state] for state in set(states))


def take(partition: Partition, states: Iterable[BrowseState]) -> Snapshot:
    """Return the partition's items in these states. Nothing is pinned: the snapshot is readable only until the next transition."""
    wanted = set(states)
    runs: list[Run] = []
    if "leased" in wanted:
        runs += _leased(partition)
    if "ready" in wanted:
        runs += _ready(partition)
    if "scheduled" in wanted:
        runs += _scheduled(partition)
    return Snapshot(runs)


def _leased(partition: Partition) -> Iterator[Run]:
    for lease, part in partition.leases.places_from(0):
        extent = part.extent
        standing = Standing(lease.deadline, extent.expires_at or None)
        if not lease.settled:
            yield Run(
                extent.blob, extent.first, extent.row, extent.rows, part.at, part.count, None, extent.attempts + 1, lease.number, standing
            )
            continue
        left = BitMap(range(part.base, part.base + part.count)) - lease.settled
        if left:
            chosen = left.shift(part.at - part.base)
            yield Run(
                extent.blob, extent.first, extent.row, extent.rows, 0, len(chosen), chosen, extent.attempts + 1, lease.number, standing
            )


def _ready(partition: Partition) -> Iterator[Run]:
    for extent in partition.log.ready:
        at, run = extent.run(partition.log.at(extent))
        # Items gone after the first run force an explicit choice; a copy, since the line changes on.
        chosen = None if at + run == extent.count else extent.waiting(at)
        count = run if chosen is None else len(chosen)
        if count:
            standing = Standing(expires_at=extent.expires_at or None)
            yield Run(extent.blob, extent.first, extent.row, extent.rows, at, count, chosen, extent.attempts, 0, standing)


def _scheduled(partition: Partition) -> Iterator[Run]:
    for due in partition.log.dues.values():
        standing = Standing(expires_at=due.expires_at or None, due_at=due.due_at)
        yield Run(due.blob, due.blob.number, 0, None, 0, len(due.rows), due.rows, due.attempts, 0, standing)
