"""Snapshot reader: pages through a partition as it was at one moment."""

from __future__ import annotations

from weakref import WeakSet

import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.core.partition import partition_snapshot
from sluiceway.core.partition.snapshots import Snapshot
from sluiceway.core.queue.partition_executor import PartitionExecutor
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import (
    MAX_LEASE_BYTES,
    MAX_SNAPSHOT_AGE,
    MAX_SNAPSHOT_RUNS,
    MAX_SNAPSHOTS,
    SNAPSHOT_IDLE,
    SNAPSHOT_READ,
)
from sluiceway.local.answer_budget import first_rows, fitting
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.inspection import Browse, BrowsedPage
from sluiceway.model.items import PAYLOAD
from sluiceway.model.leased_items import present, served


async def browse(driver: QueueDriver, request: Browse) -> BrowsedPage:
    """Return a page of a new or an earlier snapshot.

    Raises `snapshot_gone`, `too_many_items`, `too_many_requests`, `not_here`, `unavailable`, `partition_damaged`.
    """
    executor = driver.executor(request.partition)
    snapshot = _take(executor, request, driver.snapshots) if request.snapshot is None else _find(executor, request.snapshot)
    found = snapshot.listed(request.position, request.limit)
    pieces, _ = fitting(executor.partition, first_rows([listed.piece for listed in found], request.limit), MAX_LEASE_BYTES)
    position = request.position + sum(len(piece.rows) for piece in pieces)
    more = position < snapshot.count
    name = request.snapshot or _keep(executor, snapshot, driver.snapshots)
    snapshot.until = min(system.now() + (SNAPSHOT_IDLE if more else SNAPSHOT_READ), snapshot.latest)
    executor.touch()
    driver.cycle_soon()
    blobs = await driver.blobs(executor.number, pieces)
    if any(piece.blob not in blobs or present(piece, blobs[piece.blob]) is not piece for piece in pieces):
        raise _gone(executor.number)
    if not more and request.snapshot is None:
        # Everything fits on one page, so no client learns of the snapshot.
        snapshot.until = system.now()
        executor.touch()
        driver.cycle_soon()
    rows = []
    for piece, listed in zip(pieces, found, strict=False):
        batch = served(executor.number, listed.lease, piece, blobs[piece.blob])
        rows.append((batch if request.payload else without_payloads(batch), listed.standing))
    return BrowsedPage(rows, name if more else None, position if more else 0)


def _take(executor: PartitionExecutor, request: Browse, others: WeakSet[Snapshot]) -> Snapshot:
    runs = partition_snapshot.runs_of(executor.partition, request.states)
    if runs > MAX_SNAPSHOT_RUNS:
        said = f"partition {executor.number} has {runs:,} runs of items in the same state; a snapshot takes at most {MAX_SNAPSHOT_RUNS:,}"
        raise SluicewayError("too_many_items", f"{said}; browse one state, or wait until there are fewer")
    if len(others) >= MAX_SNAPSHOTS or runs + sum(len(each.runs) for each in list(others)) > MAX_SNAPSHOT_RUNS:
        raise SluicewayError("too_many_requests", "the limit of concurrent browses is reached; try again later")
    return partition_snapshot.take(executor.partition, request.states)


def _find(executor: PartitionExecutor, name: str) -> Snapshot:
    snapshot = executor.partition.log.snapshots.get(name)
    if snapshot is None or snapshot.until <= system.now():
        raise _gone(executor.number)
    return snapshot


def _keep(executor: PartitionExecutor, snapshot: Snapshot, others: WeakSet[Snapshot]) -> str:
    """Pin the snapshot under an unguessable name: knowing it is enough to keep the snapshot alive."""
    name = system.new_secret()
    snapshot.latest = system.now() + MAX_SNAPSHOT_AGE
    snapshot.until = snapshot.latest
    executor.partition.log.pin(name, snapshot)
    others.add(snapshot)
    return name


def _gone(partition: int) -> SluicewayError:
    why = "it was not read for too long, or the partition was reopened or moved to another instance"
    return SluicewayError("snapshot_gone", f"the snapshot of partition {partition} is gone: {why}; start again without a cursor", "cursor")


def without_payloads(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with empty payloads."""
    empty = pa.repeat(pa.scalar(b"", PAYLOAD.type), batch.num_rows)
    return batch.set_column(batch.schema.get_field_index(PAYLOAD.name), PAYLOAD, empty)
