"""Simulated store of one partition, with power loss and bit rot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from simulation.item_history import Cycle
from simulation.promises import check
from simulation.scene import Scene, scene_of
from sluiceway.core.partition import queries
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.queries import load as load_for_checking
from sluiceway.core.partition.records import unpack_header, unpack_lease
from sluiceway.kernel.clock import Millis
from sluiceway.model.leased_items import Slice, served
from sluiceway.model.sparse import SparseBatch, decode_stored
from sluiceway.ports.partition_store import Changes, RecordKey, RecordKind, Snapshot

Fence = tuple[int, ...]
"""(grant, opening), or (era, grant, opening)."""


class Row(NamedTuple):
    payload: str
    reference: str | None
    origin: str | None


class Written(NamedTuple):
    changes: Changes
    cycle: Cycle | None


class Follower(Protocol):
    def follow(self, old: Scene, new: Scene, cycle: Cycle) -> None:
        """A cycle's changes became durable: the scene before and after."""
        ...


class Store:
    """Dicts of records and blobs, the current fence, and the one write that a power loss would undo."""

    def __init__(self) -> None:
        self.trail: Follower | None = None
        self.fence: Fence = (0, 0)
        self.txn = 0
        self.header: bytes | None = None
        self.now: Millis = 0
        """The latest time of any durable change."""
        self.records: dict[RecordKey, bytes] = {}
        self._current: dict[RecordKey, bytes] = {}
        """Records that determine where items are: all but idempotency keys and closed leases."""
        self.blobs: dict[int, bytes] = {}
        self.written: Written | None = None
        self.cuts = 0
        """Number of power losses."""
        self.out_until: Millis = 0
        """Until then every commit is refused, though the partition can be opened."""
        self.slow: Millis = 0
        """Maximum extra commit latency until `slow_until`, in milliseconds."""
        self.slow_until: Millis = 0
        self.damaged = False
        """Whether everything is unreadable, records and blobs."""
        self.damaged_blobs: set[int] = set()
        self._rows: dict[int, dict[int, Row]] = {}
        self._seen: Partition | None = None
        self._scene: Scene | None = None

    # ---- owner operations -------------------------------------------------------------------------------------

    def open(self, fence: Fence) -> None:
        """Raise the fence durably, which makes earlier writes durable too."""
        self._sync()
        self.fence = fence

    def load(self) -> Partition:
        """Load a partition from the durable state, with the code under test."""
        return queries.load(self.snapshot())

    def write(self, changes: Changes, fence: Fence, cycle: Cycle | None = None) -> bool:
        """Write without syncing. False if the fence has moved on."""
        if fence != self.fence:
            return False
        self._sync()
        self.written = Written(changes, cycle)
        return True

    def sync(self, changes: Changes) -> bool:
        """Make the write durable, if the last write is still these changes. Returns whether it was."""
        return self.written is not None and self.written.changes is changes and self._sync()

    def _sync(self) -> bool:
        if self.written is None:
            return False
        (changes, cycle), self.written = self.written, None
        before = self.scene() if self.trail is not None else None
        self._land(changes)
        if self.trail is not None and cycle is not None and before is not None:
            self.trail.follow(before, self.scene(), cycle)
        return True

    def apply(self, changes: Changes, fence: Fence, cycle: Cycle | None = None) -> bool:
        """Write and sync. False if the fence has moved on."""
        return self.write(changes, fence, cycle) and self.sync(changes)

    def _land(self, changes: Changes) -> None:
        check(changes.txn == self.txn + 1, "a change set does not follow the last")
        check(not changes.blobs.keys() & changes.dropped_blobs, "a blob is new and dropped at once")
        self.now = max(self.now, unpack_header(changes.header).now)
        self.txn, self.header, self._seen, self._scene = changes.txn, changes.header, None, None
        self.records.update(changes.puts)
        for key in changes.deletes:
            self.records.pop(key, None)
            self._current.pop(key, None)
        self._sort(changes.puts)
        for number, data in changes.blobs.items():
            self.blobs[number] = data
            self._rows.pop(number, None)
        for number, data in changes.compacted_blobs.items():
            check(number in self.blobs, "a blob is compacted that is not there")
            self.blobs[number] = data
            self._rows.pop(number, None)
        for number in changes.dropped_blobs:
            check(number in self.blobs, "a blob is dropped that is not there")
            del self.blobs[number]
            self._rows.pop(number, None)
        self.damaged_blobs -= changes.dropped_blobs

    def _sort(self, puts: Mapping[RecordKey, bytes]) -> None:
        """Keep current records for `look`. History records, which are most, are decoded once here instead of at every look."""
        history = {key: data for key, data in puts.items() if _is_history(key, data)}
        if history:
            load_for_checking(Snapshot(self.txn, self.header, history))
        for key, data in puts.items():
            if key in history:
                self._current.pop(key, None)
            else:
                self._current[key] = data

    # ---- faults -----------------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        self.written = None
        self.cuts += 1

    def repair(self) -> None:
        self.damaged = False
        self.damaged_blobs.clear()

    @property
    def is_sound(self) -> bool:
        return not self.damaged and not self.damaged_blobs

    def is_damaged_blob(self, number: int) -> bool:
        return self.damaged or number in self.damaged_blobs

    def is_damaged(self, pieces: Sequence[Slice]) -> bool:
        """Whether reading those rows would hit a damaged blob."""
        return self.damaged or any(piece.blob in self.damaged_blobs for piece in pieces)

    # ---- inspection -------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(self.txn, self.header, dict(self.records))

    def look(self) -> Partition:
        """Load the durable state, read-only. Lacks idempotency keys and closed leases (`Partition.keys`, `Partition.closed`)."""
        if self._seen is None:
            self._seen = load_for_checking(Snapshot(self.txn, self.header, self._current))
        return self._seen

    def scene(self) -> Scene:
        """Return the durable place of every item."""
        if self._scene is None:
            self._scene = scene_of(self.look(), lambda blob, row: self.row(blob, row).payload)
        return self._scene

    def rows_of(self, pieces: Iterable[Slice]) -> list[Row]:
        """Return the rows that a consumer would receive. Every blob must be durable."""
        return [self.row(piece.blob, row) for piece in pieces for row in piece.rows.tolist()]

    def row(self, blob: int, row: int) -> Row:
        if blob not in self._rows:
            stored = self.blob(blob)
            batch = stored.batch if isinstance(stored, SparseBatch) else stored
            columns = [
                batch.column(name).to_pylist() if name in batch.schema.names else [None] * batch.num_rows
                for name in ("payload", "reference", "origin")
            ]
            numbers = stored.rows.tolist() if isinstance(stored, SparseBatch) else range(batch.num_rows)
            rows = [Row(payload.decode(), *others) for payload, *others in zip(*columns, strict=True)]
            self._rows[blob] = dict(zip(numbers, rows, strict=True))
        check(row in self._rows[blob], f"row {row} of blob {blob} is gone although it is alive")
        return self._rows[blob][row]

    def blob(self, number: int) -> pa.RecordBatch | SparseBatch:
        check(number in self.blobs, f"blob {number} is gone although rows of it are alive")
        return decode_stored(self.blobs[number], self.look().log.blobs[number].columns)

    def transfer_rows(self, partition: int, number: int, pieces: Sequence[Slice]) -> list[pa.RecordBatch] | None:
        """Return the rows of a transfer as the driver reads them, None if a blob is gone."""
        if any(piece.blob not in self.blobs for piece in pieces):
            return None
        return [served(partition, number, piece, self.blob(piece.blob)) for piece in pieces]


def _is_history(key: RecordKey, data: bytes) -> bool:
    """Whether the record is mere history, from which no state of a live item is derived."""
    kind = key[0]
    return kind is RecordKind.KEY or (kind is RecordKind.LEASE and unpack_lease(data).closed)
