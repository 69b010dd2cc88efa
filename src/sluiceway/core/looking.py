"""Reading a partition's state without changing it: a lease's rows, what comes next, the counts; and loading it from a snapshot."""

from __future__ import annotations

import heapq
from bisect import bisect_right

import numpy as np
from pyroaring import BitMap

from sluiceway.core.partition import Partition
from sluiceway.core.records import (
    Blob,
    Due,
    Extent,
    LeaseRecord,
    LeaseState,
    Part,
    by_part,
    to_array,
    unpack_blob,
    unpack_due,
    unpack_extent,
    unpack_header,
    unpack_lease,
)
from sluiceway.model.changes import RecordKind, Snapshot
from sluiceway.model.leased import Slice
from sluiceway.model.requests import PartitionStats


def open_slices(lease: LeaseState, start: int = 0, limit: int | None = None) -> list[Slice]:
    """The open items among `limit` positions of a lease from `start` on, in order, by blob."""
    end = lease.count if limit is None else min(lease.count, start + limit)
    chosen = BitMap(range(start, end)) - lease.settled if end > start else BitMap()
    pieces = []
    for part, those in by_part(lease, chosen):
        index = to_array(those) - part.base
        extent = part.extent
        rows = extent.rows_at(part.at, part.count)[index]
        pieces.append(Slice(extent.blob.number, rows, index + part.first, extent.attempts + 1, extent.blob.written_at))
    return pieces


def ready_slices(partition: Partition, limit: int) -> list[Slice]:
    """The next `limit` items to be served."""
    pieces: list[Slice] = []
    for extent in partition.ready:
        if limit <= 0:
            break
        at = max(0, partition.header.head - extent.first)
        count = min(limit, extent.count - at)
        offsets = np.arange(extent.first + at, extent.first + at + count, dtype=np.int64)
        pieces.append(Slice(extent.blob.number, extent.rows_at(at, count), offsets, extent.attempts, extent.blob.written_at))
        limit -= count
    return pieces


def stats_of(partition: Partition, number: int) -> PartitionStats:
    header = partition.header
    return PartitionStats(
        number,
        ready=partition.ready_count,
        leased_now=partition.leased_count,
        scheduled=partition.scheduled_count,
        transferring=sum(lease.open for lease in partition.transfers.values()),
        leases=len(partition.leases),
        produced=header.produced,
        deduplicated=header.deduplicated,
        leased=header.leased,
        completed=header.completed,
        retried=header.retried,
        expired=header.expired,
        dead=header.dead,
    )


def load(snapshot: Snapshot, *, max_attempts: int, keeps_dead: bool) -> Partition:
    """The machine in the state that the store holds. Reads records only: no blob is touched, whatever the backlog."""
    partition = Partition(max_attempts=max_attempts, keeps_dead=keeps_dead)
    if snapshot.header is None:
        return partition
    partition.txn = snapshot.txn
    partition.header = unpack_header(snapshot.header)
    records: dict[RecordKind, list[tuple[int, bytes]]] = {kind: [] for kind in RecordKind}
    for (kind, key), data in snapshot.records.items():
        if kind is RecordKind.KEY:
            partition.keys.load(key, data)
        else:
            records[kind].append((int(key), data))
    for number, data in records[RecordKind.BLOB]:
        blob = unpack_blob(data)
        partition.blobs[number] = Blob(number, blob.rows, blob.columns, blob.written_at, blob.nbytes)
    _load_line(partition, sorted(records[RecordKind.EXTENT]))
    firsts = list(partition.extents)
    for number, data in sorted(records[RecordKind.LEASE]):
        _load_lease(partition, number, unpack_lease(data), firsts)
    for number, data in records[RecordKind.DUE]:
        due = unpack_due(data)
        rows = BitMap.deserialize(due.rows)
        partition.dues[number] = Due(number, due.due_at, partition.blobs[due.blob], rows, due.attempts)
        partition.blobs[due.blob].open += len(rows)
        partition.scheduled_count += len(rows)
        heapq.heappush(partition.due_times, (due.due_at, number))
    return partition


def _load_line(partition: Partition, records: list[tuple[int, bytes]]) -> None:
    head = partition.header.head
    for first, data in records:
        record = unpack_extent(data)
        rows = None if record.rows is None else BitMap.deserialize(record.rows)
        blob = partition.blobs[record.blob]
        extent = Extent(first, record.count, blob, record.row, rows, record.attempts, 0)
        partition.extents[first] = extent
        waiting = first + record.count - max(first, head)
        if waiting > 0:
            extent.open = waiting
            blob.open += waiting
            partition.ready.append(extent)
            partition.ready_count += waiting


def _load_lease(partition: Partition, number: int, record: LeaseRecord, firsts: list[int]) -> None:
    settled = BitMap.deserialize(record.settled) if record.settled else BitMap()
    parts, base = [], 0
    for first, count in record.ranges:
        extent = partition.extents.get(firsts[max(0, bisect_right(firsts, first) - 1)])
        if extent is None or not extent.first <= first < extent.first + extent.count:
            extent = _closed_extent(first, count)
        part = Part(extent, first - extent.first, count, base)
        closed = settled.range_cardinality(base, base + count)
        extent.open += count - closed
        extent.blob.open += count - closed
        parts.append(part)
        base += count
    lease = LeaseState(number, parts, base, record.client_id, record.deadline, record.lease_key, record.transfer, settled)
    lease.staged = {fate: BitMap.deserialize(bits) for fate, bits in record.staged}
    if lease.transfer is not None:
        partition.transfers[number] = lease
    else:
        partition.restore_lease(lease)


def _closed_extent(first: int, count: int) -> Extent:
    """Stands for an extent that is gone because all of it is settled, while the lease that had it lives on."""
    return Extent(first, count, Blob(first, count, 0, 0, 0), 0, None, 0, 0)
