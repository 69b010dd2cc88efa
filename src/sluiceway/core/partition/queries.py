"""Queries on a partition's state: lease rows, next items, counts, explanations; and loading it from a store's snapshot."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from pyroaring import BitMap

from sluiceway.contract.queue_stats import COUNTERS, PartitionStats
from sluiceway.core.partition import lease_loading
from sluiceway.core.partition.blob_uniques import BlobUniques
from sluiceway.core.partition.blob_values import BlobValues
from sluiceway.core.partition.bundle_ledger import BundleLedger
from sluiceway.core.partition.closed_leases import unknown_extent
from sluiceway.core.partition.compaction import open_rows
from sluiceway.core.partition.key_flows import KeyFlows, KeyTotals
from sluiceway.core.partition.lease_loading import load_plain, packed_records
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.records import (
    EXPIRED_READY,
    HELD,
    REDRIVEN,
    Blob,
    Due,
    Extent,
    LeaseRecord,
    LeaseState,
    Part,
    by_part,
    rows_of_part,
    to_array,
    unpack_bits,
    unpack_blob,
    unpack_due,
    unpack_extent,
    unpack_header,
    unpack_lease,
)
from sluiceway.model.changes import RecordKind, Snapshot
from sluiceway.model.item_keys import DEFAULT_PRIORITY, NO_KEY
from sluiceway.model.leased_items import Slice
from sluiceway.model.peers import KeyCount
from sluiceway.model.requests import Explanation, Failure, MovedItem, Offsets


def open_slices(lease: LeaseState, start: int = 0, limit: int | None = None) -> list[Slice]:
    """The open items among up to `limit` positions of a lease from `start` on, in order, by blob."""
    handled = lease.transfer not in (REDRIVEN, EXPIRED_READY) and lease.moves_to is None
    if start == 0 and limit is None and not lease.settled:
        whole = [_slice(part, part.extent.rows_at(part.at, part.count), np.arange(part.first, part.end), handled) for part in lease.parts]
        return whole if lease.transfer is not None or len(whole) < 2 else _joined(whole)
    end = lease.count if limit is None else min(lease.count, start + limit)
    chosen = BitMap(range(start, end)) - lease.settled if end > start else BitMap()
    pieces = []
    for part, those in by_part(lease, chosen):
        index = to_array(those) - part.base
        pieces.append(_slice(part, part.extent.rows_at(part.at, part.count)[index], index + part.first, handled))
    return pieces if lease.transfer is not None or len(pieces) < 2 else _joined(pieces)


def _joined(pieces: list[Slice]) -> list[Slice]:
    """Neighbours whose rows follow each other in a blob, as one: leases by key are made of many small parts."""
    joined = []
    for same in _neighbours(pieces):
        first = same[0]
        if len(same) > 1:
            first = first._replace(
                rows=np.concatenate([each.rows for each in same]), offsets=np.concatenate([each.offsets for each in same])
            )
        joined.append(first)
    return joined


def _neighbours(pieces: list[Slice]) -> Iterator[list[Slice]]:
    same = pieces[:1]
    for piece in pieces[1:]:
        last = same[-1]
        if piece.blob == last.blob and piece.attempts == last.attempts and piece.rows[0] > last.rows[-1]:
            same.append(piece)
        else:
            yield same
            same = [piece]
    yield same


def _slice(part: Part, rows: Offsets, offsets: Offsets, handled: bool) -> Slice:
    blob = part.extent.blob
    return Slice(blob.number, rows, offsets, part.extent.attempts + handled, blob.written_at, blob.columns)


def lives_of(transfer: LeaseState, counted: BundleLedger) -> tuple[MovedItem, ...]:
    """Moved-item metadata of a transfer inside the queue, for the rows of its `open_slices`: one entry for each slice, or, where a slice
    has items of several bundles, for each run of one.

    Of the bundles, those that are `counted` in the partition. Others are over, and the target's count would stay there for good.
    """
    due_at = transfer.due_at()
    return tuple(
        MovedItem(
            items,
            part.extent.blob.written_at,
            part.extent.attempts,
            part.extent.expires_at,
            due_at.get(part.base, 0),
            part.extent.max_lease_size,
            bundle if bundle in counted else NO_KEY,
        )
        for part, those in by_part(transfer, transfer.open_positions())
        for bundle, items in _by_bundle(part, those)
    )


def _by_bundle(part: Part, positions: BitMap) -> Iterable[tuple[int, int]]:
    """The runs of items of a bundle at those positions, in order: the bundle, or NO_KEY, and the number of items."""
    bundles = part.extent.blob.bundles
    if bundles is None:
        return [(NO_KEY, len(positions))]
    return zip(*bundles.split_sorted(to_array(rows_of_part(part, positions))), strict=True)


def ready_slices(partition: Partition, limit: int) -> list[Slice]:
    """The next `limit` items to be leased."""
    pieces: list[Slice] = []
    for extent in partition.log.ready:
        if limit <= 0:
            break
        found = waiting_slices(partition, extent, limit)
        pieces += found
        limit -= sum(len(piece.rows) for piece in found)
    return pieces


def waiting_slices(partition: Partition, extent: Extent, limit: int | None = None) -> list[Slice]:
    """The waiting items of an extent, at most `limit`: one slice, or none."""
    at, run = extent.run(partition.log.at(extent))
    if run == extent.count - at:
        index = np.arange(at, at + (run if limit is None else min(limit, run)), dtype=np.int64)
        rows = extent.rows_at(at, len(index))
    else:
        index = to_array(extent.waiting(at))[:limit]
        rows = extent.rows_at(0, extent.count)[index]
    if not len(index):
        return []
    return [Slice(extent.blob.number, rows, index + extent.first, extent.attempts, extent.blob.written_at, extent.blob.columns)]


def stats_of(partition: Partition, number: int) -> PartitionStats:
    """The counts of the partition, which has that number."""
    ready, leased, scheduled = partition.log.ready_count, partition.leased_count, partition.log.scheduled_count
    keys = key_totals(partition)
    return PartitionStats(
        partition=number,
        total=ready + leased + scheduled,
        ready=ready,
        servable=partition.servable,
        total_leased=leased,
        scheduled=scheduled,
        transferring=sum(lease.open for lease in partition.transfers.by_number.values()),
        leases=len(partition.leases),
        keys_waiting=keys.waiting,
        keys_blocked=keys.blocked,
        keys_limited=keys.limited,
        **{name: getattr(partition.log.header, name) for name in COUNTERS},
    )


def reasons(partition: Partition) -> Counter[tuple[str, str]]:
    """Items by why they died and in which queue, those on their way elsewhere included. Scans the line for blobs of which rows with
    several reasons are left: for people, not for the hot path."""
    found = Counter[tuple[str, str]]()
    mixed: list[Blob] = []
    for blob in partition.log.blobs.values():
        if blob.open < blob.rows and any(group.rows for group in blob.reasons):
            mixed.append(blob)
        else:
            for group in blob.reasons:
                found[group.reason, group.source] += blob.open if not group.rows else group.items
    if mixed:
        left = open_rows(partition, [blob.number for blob in mixed])
        for blob in mixed:
            for group in blob.reasons:
                found[group.reason, group.source] += unpack_bits(group.rows).intersection_cardinality(left[blob.number])
    return +found


def explain(partition: Partition, offset: int) -> Explanation:
    """Explain the item's current place. Scans the whole line: for people, not for the hot path."""
    disposition: str | None = partition.closed.why_offset(offset)
    place = partition.leases.at(offset)
    if place is not None:
        lease, part = place
        position = offset - part.first + part.base
        if position not in lease.settled:
            return replace(_leased(lease, part.extent), failures=_failures(partition, part.extent, offset))
        disposition = lease.disposition_of(position)
    for extent in partition.log.extents.values():
        if extent.first <= offset < extent.first + extent.count and offset - extent.first in extent.waiting(partition.log.at(extent)):
            return replace(_waiting(partition, extent, offset), failures=_failures(partition, extent, offset))
    for due in partition.log.dues.values():
        if due.blob.number <= offset < due.blob.number + due.blob.rows and offset - due.blob.number in due.rows:
            reason = "it is not due yet" + _failed(partition, due.attempts)
            if due.due_at == HELD:
                reason = f"it would be dead (attempts: {due.attempts}), and holds up its key until it is run now, moved or deleted"
            elif due.is_back and partition.log.flows is not None and partition.log.flows.rules.order:
                reason += "; later items of its key wait for it"
            failures = partition.log.failures.of(due.blob.number, offset - due.blob.number)
            return Explanation(
                "scheduled", reason, attempts=due.attempts, due_at=due.due_at, expires_at=due.expires_at or None, failures=failures
            )
    for transfer in partition.transfers.by_number.values():
        if any(offset in piece.offsets for piece in open_slices(transfer)):
            if transfer.moves_to is not None:
                return Explanation("dying", f"it is on its way to partition {transfer.moves_to}, because a rebalance is draining this one")
            to = "the dead queue" if transfer.target is None else f"queue {transfer.target}"
            return Explanation("dying", f"it is on its way to {to}: {transfer.transfer or 'redriven'}")
    if not 0 <= offset < partition.log.header.next:
        return Explanation("unknown", "this id was never assigned")
    return Explanation("gone", _GONE[disposition or "settled"])


_GONE: dict[str, str] = {
    "completed": "it was completed",
    "expired": "its lease ran out; it is served again under a new id with the same origin, or it became dead",
    "retried": "it was retried; it is, or will be, served again under a new id with the same origin",
    "released": "it was released; it is served again under a new id with the same origin",
    "dead": "it is dead",
    "settled": "it was completed, put back under a new id, cleared, redriven or moved, or it died, too long ago to say which",
}


def _failures(partition: Partition, extent: Extent, offset: int) -> list[Failure]:
    return partition.log.failures.of(extent.blob.number, int(extent.rows_at(offset - extent.first, 1)[0]))


def _failed(partition: Partition, attempts: int) -> str:
    """What to say of an item that was leased before and not completed."""
    if not attempts:
        return ""
    limit = f" of {partition.max_attempts}" if partition.max_attempts else ""
    return f"; attempt {attempts}{limit} failed"


def _leased(lease: LeaseState, extent: Extent) -> Explanation:
    return Explanation(
        "leased",
        "a client has leased it",
        attempts=extent.attempts + 1,
        expires_at=extent.expires_at or None,
        lease=lease.number,
        client_id=lease.client_id,
        lease_deadline=lease.deadline,
    )


def _waiting(partition: Partition, extent: Extent, offset: int) -> Explanation:
    ahead, reason = _turn(partition, extent, offset) if partition.log.flows is None else _turn_by_key(partition.log.flows, extent, offset)
    reason += _failed(partition, extent.attempts)
    if extent.max_lease_size:
        reason += f"; its lease ran out before, so at most {extent.max_lease_size} such items fit into one lease"
    return Explanation("ready", reason, ahead=ahead, attempts=extent.attempts, expires_at=extent.expires_at or None)


def _turn(partition: Partition, extent: Extent, offset: int) -> tuple[int, str]:
    """The number of items that are served before it, and why it waits."""
    ahead = 0
    for other in partition.log.ready:
        if other is extent:
            before = BitMap(range(min(offset - extent.first, extent.count)))
            ahead += len(before & extent.waiting(partition.log.at(extent)))
            break
        ahead += len(other.waiting(partition.log.at(other)))
    return ahead, "it is next" if not ahead else f"{ahead} items of its partition are served before it"


def _turn_by_key(flows: KeyFlows, extent: Extent, offset: int) -> tuple[int, str]:
    """The same where its key or its priority decides: the number of items of the key."""
    key, ahead = flows.of_item(extent, offset - extent.first)
    reasons = []
    if key.blocked_by == "lease":
        reasons.append("an earlier item of its key is leased")
    elif key.blocked_by == "retry":
        reasons.append("an earlier item of its key waits for its retry")
    elif key.blocked_by == "limit":
        reasons.append(f"its key is at its limit of {flows.rules.concurrency}")
    elif key.blocked_by == "rate":
        reasons.append("its key has used up its rate")
    elif key.blocked_by == "rebalance":
        reasons.append("items of its key, or of others that a rebalance moved with it, are left in their former partition")
    of_key = "of its partition" if not flows.rules.by_key else "without a key" if key.key == NO_KEY else "of its key"
    if ahead:
        why = ", of higher priority or older" if flows.rules.priority else ""
        reasons.append(f"1 item {of_key} is served before it{why}" if ahead == 1 else f"{ahead} items {of_key} are served before it{why}")
    return ahead, "; ".join(reasons) or f"it is the next {of_key}"


def key_totals(partition: Partition) -> KeyTotals:
    """The counts of the partition's keys."""
    return KeyTotals() if partition.log.flows is None else partition.log.flows.totals()


def key_counts(partition: Partition, limit: int) -> Iterator[tuple[KeyCount, Slice]]:
    """What is to be said of each of `KeyFlows.most_waiting`, apart from its text, and an item that has it."""
    flows = partition.log.flows
    for each in () if flows is None or not flows.rules.by_key else flows.most_waiting(limit):
        extent, offset = each.extent, np.array([each.extent.first + each.at])
        item = Slice(extent.blob.number, extent.rows_at(each.at, 1), offset, extent.attempts, extent.blob.written_at, extent.blob.columns)
        yield KeyCount(each.key, each.waiting, each.leased, each.returned, extent.blob.written_at, each.blocked_by), item


def load(snapshot: Snapshot, *, max_attempts: int = 0, keeps_dead: bool = False) -> Partition:
    """Load the machine in the state that the store holds. Reads records only, never blobs, whatever the backlog."""
    partition = Partition(max_attempts=max_attempts, keeps_dead=keeps_dead)
    if snapshot.header is None:
        return partition
    partition.txn = snapshot.txn
    partition.log.header = unpack_header(snapshot.header)
    records: dict[RecordKind, list[tuple[int, bytes]]] = {kind: [] for kind in RecordKind}
    for (kind, key), data in snapshot.records.items():
        if kind is RecordKind.KEY:
            partition.keys.load(key, data)
        else:
            records[kind].append((int(key), data))
    for number, data in records[RecordKind.BLOB]:
        blob = unpack_blob(data)
        partition.log.blobs[number] = Blob(
            number,
            blob.rows,
            blob.columns,
            blob.written_at,
            blob.nbytes,
            kept=blob.kept,
            reasons=blob.reasons,
            keys=BlobValues(NO_KEY, blob.keys) if blob.keys else None,
            bundles=BlobValues(NO_KEY, blob.bundles) if blob.bundles else None,
            priorities=BlobValues(DEFAULT_PRIORITY, blob.priorities) if blob.priorities else None,
            uniques=BlobUniques(blob.uniques) if blob.uniques else None,
        )
    _load_line(partition, sorted(records[RecordKind.EXTENT]))
    firsts = list(partition.log.extents)
    leases = records[RecordKind.LEASE]
    batches = [packed_records(leases)] if len(leases) >= lease_loading.MIN_PACKED else []
    others = load_plain(partition, [*snapshot.leases, *batches])
    for number, data in sorted(others if batches else others + leases):
        _load_lease(partition, number, unpack_lease(data), firsts)
    if others:
        # Those in batches came first. Under a key, leases are answered in the order in which they were taken.
        partition.by_key.update({name: dict.fromkeys(sorted(numbers)) for name, numbers in partition.by_key.items() if len(numbers) > 1})
    for number, data in sorted(records[RecordKind.FAILURE]):
        partition.log.failures.load(number, data)
    for number, data in records[RecordKind.BUNDLE]:
        partition.log.bundles.load(number, data)
    for number, data in records[RecordKind.DUE]:
        due = unpack_due(data)
        rows = unpack_bits(due.rows)
        blob_of = partition.log.blobs[due.blob]
        partition.log.dues[number] = Due(number, due.due_at, blob_of, rows, due.attempts, due.expires_at, due.max_lease_size, due.is_back)
        blob_of.open += len(rows)
        partition.log.scheduled_count += len(rows)
        heapq.heappush(partition.log.due_times, (due.due_at, number))
    partition.log.sweep()
    return partition


def _load_line(partition: Partition, records: list[tuple[int, bytes]]) -> None:
    head = partition.log.header.head
    for first, data in records:
        record = unpack_extent(data)
        rows = None if record.rows is None else unpack_bits(record.rows)
        blob = partition.log.blobs[record.blob]
        gone = unpack_bits(record.gone)
        extent = Extent(first, record.count, blob, record.row, rows, record.attempts, 0, record.expires_at, record.max_lease_size, gone)
        partition.log.extents[first] = extent
        at = max(first, head) - first
        waiting = record.count - at - gone.range_cardinality(at, record.count) if at < record.count else 0
        if waiting > 0:
            extent.open = waiting
            blob.open += waiting
            partition.log.ready.append(extent)
            partition.log.ready_count += waiting
            if extent.expires_at:
                heapq.heappush(partition.log.expiries, (extent.expires_at, first))


def _load_lease(partition: Partition, number: int, record: LeaseRecord, firsts: list[int]) -> None:
    settled = unpack_bits(record.settled)
    if record.closed:
        settled = BitMap(range(sum(count for _, count in record.ranges)))
    parts, base = [], 0
    for first, count in record.ranges:
        extent = partition.log.extents.get(firsts[bisect_right(firsts, first) - 1]) if firsts else None
        if extent is None or not extent.first <= first < extent.first + extent.count:
            extent = unknown_extent(first, count)
        part = Part(extent, first - extent.first, count, base)
        closed = settled.range_cardinality(base, base + count) if settled else 0
        extent.open += count - closed
        extent.blob.open += count - closed
        parts.append(part)
        base += count
    lease = LeaseState(number, parts, base, record.client_id, record.deadline, record.lease_key, record.transfer, settled)
    if record.staged:
        lease.staged = {disposition: unpack_bits(bits) for disposition, bits in record.staged}
    if record.dispositions:
        lease.dispositions = {disposition: unpack_bits(bits) for disposition, bits in record.dispositions}
    lease.target, lease.dues, lease.target_incarnation = record.target, record.dues, record.target_incarnation
    lease.failures = [(unpack_bits(bits), text) for bits, text in record.failures]
    if record.closed:
        lease.is_completed = record.is_completed
        partition.closed.add(lease)
    elif lease.transfer is not None:
        partition.transfers.add(lease)
    else:
        partition.restore_lease(lease)
