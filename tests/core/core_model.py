"""A partition machine on a bench: over a store that is a few dicts, and loaded anew from it to see that nothing else is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.contract.queue_settings import RetryBackoff
from sluiceway.core.partition.compaction import compactions, open_rows
from sluiceway.core.partition.key_flows import KeyFlows
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import load, open_slices, ready_slices
from sluiceway.core.partition.records import LeaseState, unpack_blob, unpack_due, unpack_extent
from sluiceway.kernel.clock import Millis
from sluiceway.model.changes import Changes, RecordKey, RecordKind, Snapshot
from sluiceway.model.item_keys import NO_KEY
from sluiceway.model.items import batch_from_rows
from sluiceway.model.leased_items import Slice, take_rows
from sluiceway.model.requests import DONE, Disposition, Offsets, ProduceKey, Settled
from sluiceway.model.small_batch import Rows, SmallBatch, in_columns
from sluiceway.model.sparse import SparseBatch, compacted, decode_stored, encode_sparse

START: Millis = 1_000_000_000_000
EVERYTHING = 10**9


class Row(NamedTuple):
    """One row of a produce."""

    payload: bytes
    enqueue_at: Millis | None = None
    kind: str | None = None
    key: str | None = None
    priority: int | None = None
    unique_key: str | None = None


def rows_of(*payloads: str) -> list[Row]:
    return [Row(payload.encode()) for payload in payloads]


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    return batch_from_rows([{name: value for name, value in row._asdict().items() if value is not None} for row in rows])


def either_form(rows: Sequence[Row]) -> Rows:
    """The rows in columns, or (an odd number of those that come by their values at all) by their values."""
    if len(rows) % 2 == 0 or any(row.enqueue_at is not None for row in rows):
        return batch_of(rows)
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in ("kind", "key", "priority", "unique_key")}
    others = {name: values for name, values in columns.items() if values.count(None) < len(values)}
    return SmallBatch([row.payload for row in rows], others, sum(len(row.payload) + 4 for row in rows))


def array_of(offsets: Iterable[int]) -> Offsets:
    return np.array(sorted(set(offsets)), dtype=np.int64)


class Disk:
    """A store in dicts that refuses what no store survives: a reference to a blob that is not there, an orphan, a blob put twice."""

    def __init__(self) -> None:
        self.txn = 0
        self.header: bytes | None = None
        self.records: dict[RecordKey, bytes] = {}
        self.blobs: dict[int, bytes] = {}
        self.ever: set[int] = set()

    def apply(self, changes: Changes) -> None:
        assert changes.txn == self.txn + 1
        assert not changes.puts.keys() & changes.deletes
        assert not changes.blobs.keys() & self.ever, "a blob number is used twice"
        assert not changes.blobs.keys() & changes.dropped_blobs, "written and dropped in one turn: stores differ in which comes first"
        assert changes.dropped_blobs <= self.blobs.keys()
        self.txn, self.header = changes.txn, changes.header
        self.records.update(changes.puts)
        for key in changes.deletes:
            self.records.pop(key, None)
        assert changes.compacted_blobs.keys() <= self.blobs.keys() - changes.dropped_blobs, "a blob is compacted that is not there"
        self.blobs.update(changes.blobs)
        self.blobs.update(changes.compacted_blobs)
        self.ever.update(changes.blobs)
        for number in changes.dropped_blobs:
            del self.blobs[number]
        listed = {int(key) for kind, key in self.records if kind is RecordKind.BLOB}
        assert self._referred() == listed == self.blobs.keys()

    def _referred(self) -> set[int]:
        extents = {unpack_extent(data).blob for (kind, _), data in self.records.items() if kind is RecordKind.EXTENT}
        return extents | {unpack_due(data).blob for (kind, _), data in self.records.items() if kind is RecordKind.DUE}

    def rows(self, number: int) -> pa.RecordBatch | SparseBatch:
        record = unpack_blob(self.records[RecordKind.BLOB, str(number)])
        rows = decode_stored(self.blobs[number], record.columns)
        assert (rows.batch if isinstance(rows, SparseBatch) else rows).num_rows == (record.kept or record.rows)
        return rows

    def snapshot(self) -> Snapshot:
        return Snapshot(self.txn, self.header, dict(self.records))


class Served(NamedTuple):
    """An item as a consumer gets it."""

    offset: int
    origin: int
    attempts: int
    payload: bytes
    kind: str | None = None


class Rig:
    """A partition over a disk. Every commit is checked: what is loaded from the disk must be the same machine."""

    def __init__(
        self, *, max_attempts: int = 0, keeps_dead: bool = False, expire_timeout: Millis = 0, backoff: RetryBackoff | None = None
    ) -> None:
        self.machine, self.disk = Partition(), Disk()
        self.follow(Rules(max_attempts, keeps_dead, expire_timeout, backoff))

    def follow(self, rules: Rules) -> None:
        self.rules = rules
        self.machine.follow(rules)

    def loaded(self) -> Partition:
        machine = load(self.disk.snapshot(), max_attempts=0, keeps_dead=False)
        machine.follow(self.rules)
        return machine

    def commit(self) -> Changes | None:
        taken = self.machine.take_changes()
        if taken is not None:
            self.disk.apply(taken[0])
            for number in taken[0].blobs:
                assert in_columns(taken[1][number]).equals(self.disk.rows(number))
        assert picture(self.loaded()) == picture(self.machine)
        return taken[0] if taken else None

    def compact(self) -> int:
        """Compact every sparse blob, whatever its size. Returns how many there were."""
        self.commit()
        machine = self.machine
        counted = {number: blob.open for number, blob in machine.log.blobs.items()}
        assert {number: len(rows) for number, rows in open_rows(machine, machine.log.blobs).items()} == counted
        machine.log.min_sparse_bytes = 1
        machine.log.find_sparse()
        assert not compactions(machine), "a blob that was settled just now"
        wanted = compactions(machine)
        for each in wanted:
            kept = compacted(self.disk.rows(each.blob), each.rows)
            assert machine.log.compact(each.blob, len(kept.rows), kept.batch.nbytes, encode_sparse(kept))
        self.commit()
        return len(wanted)

    def reload(self) -> None:
        self.commit()
        self.machine = self.loaded()

    def produce(self, rows: Sequence[Row], now: Millis = START, key: ProduceKey | None = None) -> tuple[int, int, bool]:
        return self.machine.produce(either_form(rows), now, key)[:3]

    def lease(self, want: int, now: Millis = START, timeout: Millis = 100, client: str = "c", key: str | None = None) -> LeaseState:
        lease = self.machine.lease(want, client, now + timeout, now, key)
        assert lease is not None
        return lease

    def settle(
        self, offsets: Iterable[int], disposition: Disposition = DONE, now: Millis = START, *, stage: bool = False
    ) -> tuple[Settled, list[tuple[int, IgnoredReason]]]:
        result = Settled()
        return result, self.machine.settle_offsets(array_of(offsets), disposition, now, stage, result)

    def close(self, lease: LeaseState, now: Millis = START) -> Settled:
        result = Settled()
        self.machine.close_lease(lease, now, result)
        return result

    def release(self, lease: LeaseState, now: Millis = START) -> Settled:
        result = Settled()
        self.machine.release(lease, now, result)
        return result

    def served(self, pieces: Iterable[Slice]) -> list[Served]:
        """What a consumer would be sent; the rows must be on the disk."""
        found = []
        for piece in pieces:
            rows = take_rows(self.disk.rows(piece.blob), piece.rows)
            kinds = rows.column("kind").to_pylist() if "kind" in rows.schema.names else [None] * rows.num_rows
            payloads = rows.column("payload").to_pylist()
            for row, offset, payload, kind in zip(piece.rows.tolist(), piece.offsets.tolist(), payloads, kinds, strict=True):
                found.append(Served(offset, piece.blob + row, piece.attempts, payload, kind))
        return found

    def ready(self) -> list[Served]:
        return self.served(ready_slices(self.machine, EVERYTHING))


def picture(machine: Partition) -> dict[str, Any]:
    """All that makes up a machine's state, comparable; a loaded machine has the same picture as the one that wrote the records."""
    leases = {lease.number: lease for lease in (*machine.leases.values(), *machine.transfers.by_number.values())}
    return {
        "txn": machine.txn,
        "header": machine.log.header,
        "ready": [extent.first for extent in machine.log.ready if extent.waiting(machine.log.at(extent))],
        "counts": (machine.log.ready_count, machine.leased_count, machine.log.scheduled_count, len(machine.transfers.by_number)),
        "served next": [_plain(piece) for piece in ready_slices(machine, EVERYTHING)],
        "leases": {n: (lease.count, lease.client_id, lease.deadline, lease.lease_key) for n, lease in leases.items()},
        "transfers": {n: (lease.transfer, lease.target, lease.dues) for n, lease in leases.items()},
        "told": {n: sorted(lease.dispositions.items()) for n, lease in leases.items()},
        "closed": {n: machine.closed.record(n) for n in range(machine.log.header.lease_number + 1)},
        "open": {number: [_plain(piece) for piece in open_slices(lease)] for number, lease in leases.items()},
        "staged": {number: list(lease.staged.items()) for number, lease in leases.items()},
        "dues": {
            number: (due.due_at, due.blob.number, due.rows, due.attempts, due.expires_at, due.max_lease_size, due.is_back)
            for number, due in machine.log.dues.items()
        },
        "blobs": {
            n: (blob.rows, blob.columns, blob.written_at, blob.nbytes, blob.open, blob.reasons) for n, blob in machine.log.blobs.items()
        },
        "extents": {n: (e.count, e.blob.number, e.row, e.rows, e.attempts, e.open) for n, e in machine.log.extents.items()},
        "limits of extents": {n: (e.expires_at, e.max_lease_size, e.gone) for n, e in machine.log.extents.items()},
        "keys": machine.keys.records,
        "keyed": {name: list(numbers) for name, numbers in machine.by_key.items()},
        "failures": {number: machine.log.failures.record(number) for number in machine.log.failures.numbers()},
        "failures of transfers": {number: lease.failures for number, lease in leases.items()},
        "bundles": {bundle: machine.log.bundles.record(bundle) for bundle in machine.log.bundles},
        "timer": machine.next_timer(),
        "starts": [part.first for _, part in machine.leases.places_from(0)],
        "flows": None if machine.log.flows is None else _flows(machine.log.flows),
        "uniques": None if machine.log.uniques is None else machine.log.uniques.picture(),
    }


def _flows(flows: KeyFlows) -> dict[int, tuple[int, int, int, list[int]]]:
    """Of each key: how many wait, are in flight, and can be served; and the offsets of those that wait, in order."""
    found = {}
    for key, number in flows._numbers.items():
        offsets: list[int] = []
        segment = flows._first[number]
        while segment >= 0:
            extent, at, count = flows._extents[segment], flows._at[segment], flows._count[segment]
            assert extent is not None
            offsets += [extent.first + position for position in range(at, at + count) if position not in extent.gone]
            segment = flows._next[segment]
        waiting, flight, can = flows._waiting[number], flows._flight[number], flows._can[number]
        assert len(offsets) == waiting
        if waiting or flight:
            found[key] = waiting, flight, can, offsets if flows.rules.order and key != NO_KEY else sorted(offsets)
    assert flows.servable == sum(can for _, _, can, _ in found.values())
    assert flows._torn <= set(flows._numbers.values()), "a flow that is gone still counts as torn"
    return found


def _plain(piece: Slice) -> tuple[int, list[int], list[int], int, Millis]:
    return piece.blob, piece.rows.tolist(), piece.offsets.tolist(), piece.attempts, piece.enqueued_at
