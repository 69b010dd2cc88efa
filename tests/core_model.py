"""What the partition machine is judged by: a naive model with one object an item, and a store that is a few dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from sluiceway.core.looking import load, open_slices, ready_slices
from sluiceway.core.partition import Partition
from sluiceway.core.records import Header, LeaseState, to_array, unpack_blob, unpack_due, unpack_extent
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import KEY_WINDOW
from sluiceway.model.changes import Changes, RecordKey, RecordKind, Snapshot
from sluiceway.model.items import batch_from_rows, decode_blob
from sluiceway.model.leased import Slice
from sluiceway.model.requests import DONE, Fate, IgnoredReason, Offsets, ProduceKey, Settled

START: Millis = 1_000_000_000_000
EVERYTHING = 10**9


class Row(NamedTuple):
    """One row of a produce."""

    payload: bytes
    enqueue_at: Millis | None = None
    kind: str | None = None


def rows_of(*payloads: str) -> list[Row]:
    return [Row(payload.encode()) for payload in payloads]


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    return batch_from_rows([{name: value for name, value in row._asdict().items() if value is not None} for row in rows])


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
        self.blobs.update(changes.blobs)
        self.ever.update(changes.blobs)
        for number in changes.dropped_blobs:
            del self.blobs[number]
        listed = {int(key) for kind, key in self.records if kind is RecordKind.BLOB}
        assert self._referred() == listed == self.blobs.keys()

    def _referred(self) -> set[int]:
        extents = {unpack_extent(data).blob for (kind, _), data in self.records.items() if kind is RecordKind.EXTENT}
        return extents | {unpack_due(data).blob for (kind, _), data in self.records.items() if kind is RecordKind.DUE}

    def rows(self, number: int) -> pa.RecordBatch:
        record = unpack_blob(self.records[RecordKind.BLOB, str(number)])
        rows = decode_blob(self.blobs[number], record.columns)
        assert rows.num_rows == record.rows
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

    def __init__(self, *, max_attempts: int = 0, keeps_dead: bool = False) -> None:
        self.options = {"max_attempts": max_attempts, "keeps_dead": keeps_dead}
        self.machine = Partition(max_attempts=max_attempts, keeps_dead=keeps_dead)
        self.disk = Disk()

    def loaded(self) -> Partition:
        return load(self.disk.snapshot(), max_attempts=self.options["max_attempts"], keeps_dead=bool(self.options["keeps_dead"]))

    def commit(self) -> Changes | None:
        taken = self.machine.take_changes()
        if taken is not None:
            self.disk.apply(taken[0])
            for number in taken[0].blobs:
                assert taken[1][number].equals(self.disk.rows(number))
        assert picture(self.loaded()) == picture(self.machine)
        return taken[0] if taken else None

    def reload(self) -> None:
        self.commit()
        self.machine = self.loaded()

    def produce(self, rows: Sequence[Row], now: Millis = START, key: ProduceKey | None = None) -> tuple[int, int, bool]:
        return self.machine.produce(batch_of(rows), now, key)

    def lease(self, want: int, now: Millis = START, timeout: Millis = 100, client: str = "c", key: str | None = None) -> LeaseState:
        lease = self.machine.lease(want, client, now + timeout, now, key)
        assert lease is not None
        return lease

    def settle(
        self, offsets: Iterable[int], fate: Fate = DONE, now: Millis = START, *, stage: bool = False
    ) -> tuple[Settled, list[tuple[int, IgnoredReason]]]:
        result = Settled()
        return result, self.machine.settle_offsets(array_of(offsets), fate, now, stage, result)

    def close(self, lease: LeaseState, now: Millis = START) -> Settled:
        result = Settled()
        assert self.machine.close_lease(lease.number, now, result)
        return result

    def served(self, pieces: Iterable[Slice]) -> list[Served]:
        """What a consumer would be sent; the rows must be on the disk."""
        found = []
        for piece in pieces:
            rows = self.disk.rows(piece.blob)
            kinds = rows.column("kind").to_pylist() if "kind" in rows.schema.names else [None] * rows.num_rows
            for row, offset in zip(piece.rows.tolist(), piece.offsets.tolist(), strict=True):
                found.append(Served(offset, piece.blob + row, piece.attempts, rows.column("payload")[row].as_py(), kinds[row]))
        return found

    def ready(self) -> list[Served]:
        return self.served(ready_slices(self.machine, EVERYTHING))


def picture(machine: Partition) -> dict[str, Any]:
    """All that makes up a machine's state, comparable; a loaded machine has the same picture as the one that wrote the records."""
    leases = {**machine.leases, **machine.transfers}
    return {
        "txn": machine.txn,
        "header": machine.header,
        "ready": [extent.first for extent in machine.ready],
        "counts": (machine.ready_count, machine.leased_count, machine.scheduled_count, len(machine.transfers)),
        "served next": [_plain(piece) for piece in ready_slices(machine, EVERYTHING)],
        "leases": {n: (lease.count, lease.client_id, lease.deadline, lease.lease_key, lease.transfer) for n, lease in leases.items()},
        "open": {number: [_plain(piece) for piece in open_slices(lease)] for number, lease in leases.items()},
        "staged": {number: list(lease.staged.items()) for number, lease in leases.items()},
        "dues": {number: (due.due_at, due.blob.number, due.rows, due.attempts) for number, due in machine.dues.items()},
        "blobs": {n: (blob.rows, blob.columns, blob.written_at, blob.nbytes, blob.open) for n, blob in machine.blobs.items()},
        "extents": {n: (e.count, e.blob.number, e.row, e.rows, e.attempts, e.open) for n, e in machine.extents.items()},
        "keys": machine.keys.records,
        "keyed": {name: list(numbers) for name, numbers in machine.by_key.items()},
        "timer": machine.next_timer(),
        "starts": machine.spans.starts,
    }


def _plain(piece: Slice) -> tuple[int, list[int], list[int], int, Millis]:
    return piece.blob, piece.rows.tolist(), piece.offsets.tolist(), piece.attempts, piece.enqueued_at


Place = Literal["ready", "leased", "due", "dying", "completed", "dead"]
LIVE: tuple[Place, ...] = ("ready", "leased", "due", "dying")


@dataclass
class Item:
    """One item. `offset` None: it has one of its own choosing or none, see `Model.adopt`; `attempts` are those before its present lease."""

    origin: int
    row: Row
    place: Place
    offset: int | None
    attempts: int = 0
    number: int | None = None
    due_at: Millis | None = None
    reason: str = ""
    staged: Fate | None = None


@dataclass
class ModelLease:
    client_id: str
    deadline: Millis
    lease_key: str | None


@dataclass
class Model:
    """The same contract as `Partition`, item by item. It does not foresee the new offsets of items that are put back: it adopts them."""

    max_attempts: int
    keeps_dead: bool
    items: dict[int, Item] = field(default_factory=dict)
    leases: dict[int, ModelLease] = field(default_factory=dict)
    header: Header = field(default_factory=Header)
    offered: set[int] = field(default_factory=set)
    """Offsets that were ever leased."""
    floor: int = 0
    """Offsets that are adopted must be at least this: the machine's `next` before the step."""
    lone: dict[str, tuple[list[Row], int, Millis]] = field(default_factory=dict)
    groups: dict[str, tuple[int, dict[str, tuple[list[Row], int]]]] = field(default_factory=dict)

    def at(self, *places: Place) -> list[Item]:
        return [item for item in self.items.values() if item.place in places]

    def ready(self) -> list[Item]:
        return sorted(self.at("ready"), key=lambda item: item.offset or 0)

    def leased(self, number: int | None = None) -> list[Item]:
        found = [item for item in self.at("leased") if number is None or item.number == number]
        return sorted(found, key=lambda item: item.offset or 0)

    def moment(self, now: Millis) -> Millis:
        self.header.now = max(self.header.now, now)
        return self.header.now

    # Produce

    def produce(self, rows: list[Row], now: Millis, key: ProduceKey | None) -> tuple[int, int, bool] | str:
        """What the machine must answer, or the code of the error that it must raise."""
        seen = self._seen(key, now) if key else None
        if key and seen:
            if seen[0] != rows:
                return "key_conflict"
            self.header.deduplicated += len(rows)
            return seen[1], len(rows), True
        if key and key.group is not None and key.group in self.groups and self.groups[key.group][0] > key.sequence:
            return "stale_sequence"
        now, first = self.moment(now), self.header.next
        for origin, row in enumerate(rows, first):
            waits = row.enqueue_at is not None and row.enqueue_at > now
            self.items[origin] = Item(origin, row, "due" if waits else "ready", origin, due_at=row.enqueue_at if waits else None)
        self.header.next += len(rows)
        self.header.produced += len(rows)
        if key and key.group is None:
            self.lone[key.key] = (rows, first, now)
        elif key and key.group is not None:
            sequence, keys = self.groups.get(key.group, (key.sequence, {}))
            kept = keys if sequence == key.sequence else {}
            self.groups[key.group] = (key.sequence, {**kept, key.key: (rows, first)})
        return first, len(rows), False

    def _seen(self, key: ProduceKey, now: Millis) -> tuple[list[Row], int] | None:
        self.forget(now)
        if key.group is None:
            known = self.lone.get(key.key)
            return known and known[:2]
        sequence, keys = self.groups.get(key.group, (key.sequence, {}))
        return keys.get(key.key) if sequence == key.sequence else None

    def forget(self, now: Millis) -> None:
        self.lone = {name: known for name, known in self.lone.items() if known[2] + KEY_WINDOW > now}

    def remembered(self) -> set[tuple[str, int, str, int, int]]:
        """(record's name, sequence, key, first offset, count)"""
        lone = {(f"k{key}", 0, key, first, len(rows)) for key, (rows, first, _) in self.lone.items()}
        return lone | {
            (f"g{group}", sequence, key, first, len(rows))
            for group, (sequence, keys) in self.groups.items()
            for key, (rows, first) in keys.items()
        }

    # Lease and settle

    def lease(self, number: int, want: int, lease: ModelLease, now: Millis) -> list[Item]:
        self.moment(now)
        taken = self.ready()[:want]
        for item in taken:
            item.place, item.number = "leased", number
            self.offered.add(item.offset or 0)
        self.leases[number] = lease
        self.header.leased += len(taken)
        return taken

    def settle(self, offsets: Iterable[int], fate: Fate, now: Millis, stage: bool) -> tuple[Settled, list[int]]:
        """What must be counted, and which offsets must be ignored."""
        by_offset = {item.offset: item for item in self.leased()}
        found = [by_offset[offset] for offset in offsets if offset in by_offset]
        ignored = [offset for offset in offsets if offset not in by_offset]
        result = Settled()
        if stage:
            for item in found:
                item.staged = None if fate.verdict == "done" else fate
            setattr(result, {"done": "completed", "retry": "retried", "dead": "dead"}[fate.verdict], len(found))
        else:
            self._befall(found, fate, now, result)
        return result, ignored

    def close(self, number: int, now: Millis) -> Settled:
        result = Settled()
        for item in self.leased(number):
            self._befall([item], item.staged or DONE, now, result)
        return result

    def may_be_ignored(self, offset: int, reason: IgnoredReason) -> bool:
        """An offset that was only ever scheduled may be called either, since its item is not leased, and may have another id by now."""
        if not 0 <= offset < self.header.next:
            return reason == "unknown"
        if offset in self.offered:
            return reason == "settled"
        return reason == "not_leased" or (reason == "settled" and all(item.offset != offset for item in self.at("ready")))

    def _befall(self, items: list[Item], fate: Fate, now: Millis, result: Settled) -> None:
        for item in items:
            now = self.moment(now)
            number, item.number, item.staged = item.number, None, None
            if fate.verdict == "done":
                item.place = "completed"
                self.header.completed += 1
                result.completed += 1
            elif fate.verdict == "dead":
                self._die(item, fate.reason or "rejected")
                result.dead += 1
            elif self._spent(item):
                self._die(item, f"max_attempts {self.max_attempts} reached" + (f": {fate.reason}" if fate.reason else ""))
                result.dead += 1
            else:
                self._put_back(item, fate.retry_at if fate.retry_at is not None else now + (fate.retry_after or 0), now)
                self.header.retried += 1
                result.retried += 1
            self._end_if_empty(number)

    def _end_if_empty(self, number: int | None) -> None:
        if number is not None and not self.leased(number):
            del self.leases[number]

    def _spent(self, item: Item) -> bool:
        return self.max_attempts > 0 and item.attempts + 1 >= self.max_attempts

    def _put_back(self, item: Item, due_at: Millis, now: Millis) -> None:
        item.attempts += 1
        item.offset = None
        item.place, item.due_at = ("due", due_at) if due_at > now else ("ready", None)

    def _die(self, item: Item, reason: str) -> None:
        item.place, item.reason = ("dying" if self.keeps_dead else "dead"), reason
        self.header.dead += not self.keeps_dead

    def transferred(self, number: int) -> None:
        for item in self.at("dying"):
            if item.number == number:
                item.place = "dead"
                self.header.dead += 1

    # Time

    def tick(self, now: Millis) -> int:
        moved = 0
        for item in self.at("due"):
            if item.due_at is not None and item.due_at <= now:
                self.moment(now)
                item.place, item.due_at, item.offset = "ready", None, None
                moved += 1
        for number in [number for number, lease in self.leases.items() if lease.deadline <= now]:
            for item in self.leased(number):
                moved += 1
                item.number, item.staged = None, None
                if self._spent(item):
                    self._die(item, f"max_attempts {self.max_attempts} reached: the lease expired")
                else:
                    self._put_back(item, now, self.moment(now))
                    item.place = "ready"
                    self.header.expired += 1
            self.moment(now)
            del self.leases[number]
        return moved

    # Comparison

    def adopt(self, machine: Partition) -> None:
        """Compare every item with where the machine has it; take over the new offsets and the transfer numbers that it chose."""
        spots = list(_spots(machine))
        where = {spot.origin: spot for spot in spots}
        assert len(where) == len(spots), "an item is in two places"
        live = {item.origin: item for item in self.at(*LIVE)}
        assert where.keys() == live.keys(), "an item is lost, or is a phantom"
        for origin, item in live.items():
            spot = where[origin]
            if item.offset is None and item.place == "ready":
                assert spot.offset is not None
                assert spot.offset >= self.floor
                item.offset = spot.offset
            if item.place == "dying" and item.number is None:
                item.number = spot.number
            known = item.place != "due"
            expected = Spot(origin, item.place, item.attempts, item.offset if known else None, item.number, item.due_at, item.staged)
            assert spot._replace(reason="") == expected
            assert item.place != "dying" or spot.reason == item.reason
        taken = [spot.offset for spot in spots if spot.offset is not None]
        assert len(set(taken)) == len(taken), "two items have one offset"
        assert max(taken, default=-1) < machine.header.next
        self.header.next = self.floor = machine.header.next

    def compare_counts(self, machine: Partition) -> None:
        header = machine.header
        for name in ("now", "produced", "deduplicated", "leased", "completed", "retried", "expired", "dead"):
            assert getattr(header, name) == getattr(self.header, name), name
        counts = [len(self.at(place)) for place in LIVE]
        transferring = sum(lease.open for lease in machine.transfers.values())
        assert [machine.ready_count, machine.leased_count, machine.scheduled_count, transferring] == counts
        assert header.produced == header.completed + header.dead + sum(counts)
        shown = {number: ModelLease(lease.client_id, lease.deadline or 0, lease.lease_key) for number, lease in machine.leases.items()}
        assert shown == self.leases
        live = [item.origin for item in self.at(*LIVE)]
        for number, blob in machine.blobs.items():
            assert blob.open == sum(number <= origin < number + blob.rows for origin in live) > 0
        held = {
            (name, record.sequence, key, seen.first_offset, seen.count)
            for name, record in machine.keys.records.items()
            for key, seen in record.seen.items()
        }
        assert held == self.remembered()


class Spot(NamedTuple):
    """Where the machine has an item."""

    origin: int
    place: Place
    attempts: int
    offset: int | None
    number: int | None
    due_at: Millis | None
    staged: Fate | None = None
    reason: str = ""


def _spots(machine: Partition) -> Iterator[Spot]:
    for piece in ready_slices(machine, EVERYTHING):
        for row, offset in zip(piece.rows.tolist(), piece.offsets.tolist(), strict=True):
            yield Spot(piece.blob + row, "ready", piece.attempts, offset, None, None)
    for number, lease in {**machine.leases, **machine.transfers}.items():
        place: Place = "dying" if lease.transfer is not None else "leased"
        position = {part.first + n: part.base + n for part in lease.parts for n in range(part.count)}
        for piece in open_slices(lease):
            for row, offset in zip(piece.rows.tolist(), piece.offsets.tolist(), strict=True):
                staged = [fate for fate, bits in lease.staged.items() if position[offset] in bits]
                assert len(staged) < 2, "two fates are staged for one item"
                fate = staged[0] if staged else None
                yield Spot(piece.blob + row, place, piece.attempts - 1, offset, number, None, fate, lease.transfer or "")
    for due in machine.dues.values():
        for row in to_array(due.rows).tolist():
            yield Spot(due.blob.number + row, "due", due.attempts, None, None, due.due_at)
