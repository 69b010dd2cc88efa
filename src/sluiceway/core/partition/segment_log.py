"""Segment log of a partition: dense offsets made of extents over immutable blobs, ready to be leased from `head` on.

Putting items back appends an extent that points at the same blob, so payloads are never copied.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap

from sluiceway.contract.queue_settings import Unique
from sluiceway.core.partition.blob_builder import NO_BUNDLE, Forming, runs
from sluiceway.core.partition.bundle_ledger import BundleLedger, Ending
from sluiceway.core.partition.failures import FailureNotes
from sluiceway.core.partition.key_flows import KeyFlows, KeyRules, Taking
from sluiceway.core.partition.records import (
    Blob,
    Due,
    Extent,
    Header,
    LeaseState,
    Part,
    by_part,
    from_array,
    rows_of_extent,
    rows_of_part,
    slots_in,
    to_array,
)
from sluiceway.core.partition.snapshots import Snapshot
from sluiceway.core.partition.unique_items import UniqueItems
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_CLOCK_STEP, MIN_SPARSE_BYTES, SPARSE_FACTOR
from sluiceway.model.changes import RecordKind
from sluiceway.model.item_keys import Runs
from sluiceway.model.requests import Offsets
from sluiceway.model.small_batch import Rows
from sluiceway.model.unique_keys import UniqueRows, has_unique_keys, unique_rows

RecordName = tuple[RecordKind, int]

STALE_TIMERS = 1_000
"""Timers of what is gone, beyond as many as there are others, from which on they are removed."""


class SegmentLog:
    """Blobs, the extents over them, scheduled entries beside them, and the records changed since they were last written."""

    def __init__(self) -> None:
        self.header = Header()
        self.blobs: dict[int, Blob] = {}
        self.extents: dict[int, Extent] = {}
        self.ready: deque[Extent] = deque()
        self.ready_count = 0
        self.dues: dict[int, Due] = {}
        self.scheduled_count = 0
        self.due_times: list[tuple[Millis, int]] = []
        """Heap of due times: (time, number). May name entries that are gone."""
        self.expiries: list[tuple[Millis, int]] = []
        """Expiry heap: (time, first offset) of extents with waiting items. May name extents that are gone."""
        self.touched: dict[RecordName, None] = {}
        """Records to write. A dict for its order: the same history must give the same bytes in every process."""
        self.changed = False
        """Whether the header is to be written, whatever else is."""
        self._dropped: set[int] = set()
        self._forming: list[Forming] = []
        self.snapshots: dict[str, Snapshot] = {}
        """Snapshots being read page by page. In memory only: a newly loaded partition has none."""
        self.min_sparse_bytes = MIN_SPARSE_BYTES
        self.failures = FailureNotes()
        self.bundles = BundleLedger()
        self._sparse: dict[int, bool] = {}
        """Blobs kept by few open rows, and whether the last `long_sparse` saw them."""
        self._compacted: dict[int, bytes] = {}
        self.flows: KeyFlows | None = None
        """Who may be leased next, where keys matter; None: the oldest."""
        self.uniques: UniqueItems | None = None
        """Which unique keys are taken, where items are unique."""
        self._spent = 0
        """Extents in the line, at most, of which nothing waits."""

    @property
    def servable(self) -> int:
        """Items that may be leased now."""
        return self.ready_count if self.flows is None else self.flows.servable

    @property
    def has_precedence(self) -> bool:
        """Whether what is served next should not wait for other partitions: keys that were at rest, or items above the default priority."""
        return self.flows is not None and self.flows.has_precedence

    def follow_keys(self, rules: KeyRules, leases: Iterable[LeaseState]) -> None:
        """Serve by these rules from now on. `leases`: the live ones."""
        self.flows = KeyFlows(rules) if rules else None
        if self.flows is not None:
            # Not from the stored time on, which may lie ahead: keys with a rate would wait until then. Nothing ceases to be held back here.
            self.hold_back(0)
            # In order of their places, so that each is the last of its flow.
            for extent in sorted(self.ready, key=lambda extent: extent.blob.number + extent.row_at(0)):
                self.flows.enter_waiting(extent, extent.waiting(self.at(extent)))
            for lease in leases:
                self.flows.leased(lease)
            for due in self.dues.values():
                if due.is_back:
                    self.flows.hold(due.blob, due.rows)

    def hold_back(self, now: Millis) -> None:
        """Serve keys of the slots that the header says, and from `now` on those that were held back before."""
        if self.flows is not None and self.header.slots_of:
            self.flows.hold_back(frozenset(slots_in(self.header.held_slots)), self.header.slots_of, now)

    def follow_unique(self, unique: Unique | None, leases: Iterable[LeaseState]) -> None:
        """Keep items unique by this setting from now on. `leases`: the live ones."""
        self.uniques = UniqueItems(unique) if unique is not None else None
        if self.uniques is None:
            return
        for extent in self.ready:
            self.uniques.enter(extent.blob, to_array(rows_of_extent(extent, extent.waiting(self.at(extent)))))
        for due in self.dues.values():
            self.uniques.enter(due.blob, to_array(due.rows))
        for lease in () if self.uniques.while_waiting else leases:
            for part, chosen in by_part(lease, lease.open_positions()):
                self.uniques.enter(part.extent.blob, to_array(rows_of_part(part, chosen)))

    def touch(self, kind: RecordKind, number: int) -> None:
        """Mark a record as changed: it is written, or deleted if it is gone."""
        self.touched[kind, number] = None

    def record_time(self, now: Millis) -> Millis:
        """The time to record for a change now. It does not go back when this owner's clock is slightly behind the previous owner's.

        A stored time further ahead than MAX_CLOCK_STEP came from a wrong clock and is discarded. Due times, lease deadlines and expiries
        are not judged by this time but by the owner's `now`, which drives the timers.
        """
        self.changed = True
        if not now <= self.header.now <= now + MAX_CLOCK_STEP:
            self.header.now = now
        return self.header.now

    # ---- append -----------------------------------------------------------------------------------------------

    def uniques_of(self, batch: Rows) -> UniqueRows | None:
        """The rows with unique keys, if they matter here; None: none has one."""
        return unique_rows(batch) if self.uniques is not None and has_unique_keys(batch) else None

    def forming_for(
        self, batch: Rows, written_at: Millis, bundles: Runs = NO_BUNDLE, uniques: UniqueRows | None = None
    ) -> tuple[Forming, int]:
        """The blob that takes the batch, and the row at which it begins there. Row r of blob b must have offset b + r. `uniques`: as
        `uniques_of` gives them."""
        last = self._forming[-1] if self._forming else None
        if last is None or not self._goes_on(last.blob, written_at) or not last.has_room(batch):
            last = Forming(Blob(self.header.next, 0, 0, written_at, 0))
            self._forming.append(last)
            self.blobs[last.blob.number] = last.blob
            self.touch(RecordKind.BLOB, last.blob.number)
        return last, last.add(batch, self.flows is not None, bundles, uniques)

    def _goes_on(self, blob: Blob, written_at: Millis) -> bool:
        # A blob may be fully settled in the cycle that made it; it must not grow again.
        return bool(blob.open) and blob.number + blob.rows == self.header.next and blob.written_at == written_at

    def append_new(self, blob: Blob, row: int, count: int, due: Offsets | None, now: Millis, expire_timeout: Millis) -> None:
        """Enter new rows into the line; rows due after `now` go beside it. They expire `expire_timeout` ms after they become ready."""
        first = blob.number + row
        expires_at = now + expire_timeout if expire_timeout else 0
        if due is None:
            self.append(Extent(first, count, blob, row, None, 0, count, expires_at))
            return
        waits = due > now
        for start, end in runs(~waits):
            self.append(Extent(first + start, end - start, blob, row + start, None, 0, end - start, expires_at))
        rows = np.flatnonzero(waits)
        rows = rows[np.argsort(due[rows], kind="stable")]
        for due_rows in np.split(rows, np.flatnonzero(np.diff(due[rows])) + 1):
            due_at = int(due[due_rows[0]])
            self.schedule(blob, from_array(due_rows + row), 0, due_at, due_at + expire_timeout if expire_timeout else 0)

    def append(self, extent: Extent) -> None:
        """Append an extent at the tail. One that continues the last (same blob, next row) lengthens it."""
        extent.blob.open += extent.count
        self.ready_count += extent.count
        if self.uniques is not None and extent.blob.uniques is not None:
            self.uniques.enter(extent.blob, extent.rows_at(0, extent.count))
        last = self.ready[-1] if self.ready else None
        if last is not None and last.continued_by(extent):
            last.count += extent.count
            last.open += extent.count
            self.touch(RecordKind.EXTENT, last.first)
            if self.flows is not None:
                self.flows.enter(last, last.count - extent.count, extent.count)
            return
        self.ready.append(extent)
        if self.flows is not None:
            self.flows.enter(extent, 0, extent.count)
        self.extents[extent.first] = extent
        if extent.expires_at:
            heapq.heappush(self.expiries, (extent.expires_at, extent.first))
            if len(self.expiries) > 2 * len(self.extents) + STALE_TIMERS:
                # Entries of what was leased meanwhile pile up behind an item that waits, such as one whose key is held up.
                self.expiries = [(each.expires_at, each.first) for each in self.extents.values() if each.expires_at]
                heapq.heapify(self.expiries)
        self.touch(RecordKind.EXTENT, extent.first)

    def append_rows(self, blob: Blob, rows: BitMap, attempts: int, expires_at: Millis, max_lease_size: int = 0) -> None:
        """Append an extent over those rows of a blob, under new offsets."""
        count, first_row = len(rows), rows.min()
        dense = rows.max() - first_row + 1 == count
        first = self.header.next
        self.header.next += count
        self.append(Extent(first, count, blob, first_row, None if dense else rows, attempts, count, expires_at, max_lease_size))

    def schedule(
        self,
        blob: Blob,
        rows: BitMap,
        attempts: int,
        due_at: Millis,
        expires_at: Millis,
        max_lease_size: int = 0,
        is_back: bool = False,
    ) -> None:
        """Keep those rows of a blob beside the line until `due_at`. `is_back`: they were returned."""
        self.header.due_number += 1
        due = Due(self.header.due_number, due_at, blob, rows, attempts, expires_at, max_lease_size, is_back)
        if is_back and self.flows is not None:
            self.flows.hold(blob, rows)
        if self.uniques is not None and blob.uniques is not None:
            self.uniques.enter(blob, to_array(rows))
        blob.open += len(rows)
        self.scheduled_count += len(rows)
        self.dues[due.number] = due
        heapq.heappush(self.due_times, (due_at, due.number))
        if len(self.due_times) > 2 * len(self.dues) + STALE_TIMERS:
            # Items that are deleted, or made ready, before their time leave an entry until then.
            self.due_times = [(each.due_at, each.number) for each in self.dues.values()]
            heapq.heapify(self.due_times)
        self.touch(RecordKind.DUE, due.number)

    def unschedule(self, due: Due) -> None:
        """Remove the entry; its rows still count as open."""
        del self.dues[due.number]
        self._leave_due(due, due.rows)

    def _leave_due(self, due: Due, rows: BitMap) -> None:
        """Those rows are no longer scheduled."""
        self.scheduled_count -= len(rows)
        self.touch(RecordKind.DUE, due.number)
        if due.is_back and self.flows is not None:
            self.flows.let_go(due.blob, rows)
        if self.uniques is not None and due.blob.uniques is not None:
            self.uniques.leave(due.blob, to_array(rows))

    def enter_line(self, due: Due) -> Extent:
        """Enter due rows into the line. Returns the extent that holds them."""
        self.unschedule(due)
        self.append_rows(due.blob, due.rows, due.attempts, due.expires_at, due.max_lease_size)
        due.blob.open -= len(due.rows)
        return self.ready[-1]

    def enter_rows(self, due: Due, rows: BitMap) -> Extent:
        """Enter some rows of a scheduled entry into the line; the entry keeps the others. Returns the extent that holds them."""
        if len(rows) == len(due.rows):
            return self.enter_line(due)
        due.rows = due.rows - rows
        self._leave_due(due, rows)
        self.append_rows(due.blob, rows, due.attempts, due.expires_at, due.max_lease_size)
        due.blob.open -= len(rows)
        return self.ready[-1]

    def scheduled_among(self, offsets: Offsets) -> list[tuple[Due, BitMap]]:
        """The scheduled items among the (sorted, unique) offsets of their rows when produced, by entry."""
        blobs = np.sort(np.fromiter(self.blobs, np.int64, len(self.blobs)))
        near = blobs[np.unique(np.maximum(np.searchsorted(blobs, offsets, "right") - 1, 0))] if len(blobs) else blobs
        # There may be many times more entries than offsets: most of them cost no more than a lookup.
        wanted = {number: _within(offsets, number, self.blobs[number].rows) for number in near.tolist()}
        found = []
        for due in self.dues.values():
            rows = wanted.get(due.blob.number)
            if rows and due.rows.intersect(rows):
                found.append((due, due.rows & rows))
        return found

    def make_ready(self, offsets: Offsets, now: Millis) -> Offsets:
        """Enter the scheduled items among the (sorted, unique) offsets into the line, although they are not due. Returns their offsets."""
        found = self.scheduled_among(offsets)
        for due, rows in found:
            self.enter_rows(due, rows)
        if not found:
            return offsets[:0]
        self.record_time(now)
        return np.sort(np.concatenate([to_array(rows) + due.blob.number for due, rows in found]))

    # ---- take -------------------------------------------------------------------------------------------------

    def take(self, taking: Taking) -> list[Part]:
        """Take items out of the line, to be leased."""
        parts = self._take_oldest(taking) if self.flows is None else self._take_by_key(taking, self.flows)
        if self.uniques is not None and self.uniques.while_waiting:
            for part in parts:
                if part.extent.blob.uniques is not None:
                    self.uniques.leave(part.extent.blob, part.extent.rows_at(part.at, part.count))
        return parts

    def _take_oldest(self, taking: Taking) -> list[Part]:
        parts: list[Part] = []
        while self.ready and taking.goes_on:
            extent, base = self.ready[0], taking.count
            at, run = extent.run(self.at(extent))
            take = taking.take(extent, at, run)
            if not take:
                break
            parts.append(Part(extent, at, take, base))
            self.advance(at + take)
        self.ready_count -= taking.count
        return parts

    def _take_by_key(self, taking: Taking, flows: KeyFlows) -> list[Part]:
        parts: list[Part] = []
        base = 0
        for extent, at, items in flows.take(taking):
            parts.append(Part(extent, at, items, base))
            base += items
            extent.gone.add_range(at, at + items)
            self.touch(RecordKind.EXTENT, extent.first)
            self._spent += len(extent.gone) == extent.count
        self.ready_count -= taking.count
        if parts:
            self.advance(self.at(self.ready[0]))
        if self._spent > max(64, len(self.ready) // 2):
            # One that waits at the head keeps them in the line.
            self.ready = deque(extent for extent in self.ready if len(extent.gone) < extent.count)
            self._spent = 0
        return parts

    def pass_over(self, extent: Extent, at: int, items: int) -> None:
        """Take the first waiting items out of the line: those from position `at` of its first extent on."""
        if self.flows is None:
            self.ready_count -= items
            if self.uniques is not None:
                self.uniques.leave(extent.blob, extent.rows_at(at, items))
            self.advance(at + items)
        else:
            self.take_out(extent, BitMap(range(at, at + items)))

    def at(self, extent: Extent) -> int:
        """The first position of the extent that `head` has not passed."""
        return max(0, self.header.head - extent.first)

    def advance(self, at: int) -> None:
        """Advance `head` to the first item in the line, from position `at` of the first extent on."""
        while self.ready:
            extent = self.ready[0]
            at, run = extent.run(at)
            if run > 0:
                self.header.head = extent.first + at
                return
            self.ready.popleft()
            at = 0
        self.header.head = self.header.next

    def take_out(self, extent: Extent, positions: BitMap) -> BitMap:
        """Take those positions out of the line, as far as they are in it; they still count as open. Returns the positions taken."""
        taken = positions & extent.waiting(self.at(extent))
        if taken:
            extent.gone |= taken
            self.ready_count -= len(taken)
            if self.flows is not None:
                self.flows.leave(extent, taken)
            if self.uniques is not None and extent.blob.uniques is not None:
                self.uniques.leave(extent.blob, to_array(rows_of_extent(extent, taken)))
            self.touch(RecordKind.EXTENT, extent.first)
            self.advance(self.at(self.ready[0]))
        return taken

    def ready_extent(self, offset: int) -> Extent | None:
        """The extent of the ready item at that offset; None: there is none."""
        at = bisect_right(self.ready, offset, key=first_offset) - 1
        if at < 0:
            return None
        extent = self.ready[at]
        is_there = extent.count > offset - extent.first >= self.at(extent) and offset - extent.first not in extent.gone
        return extent if is_there else None

    def leave_lease(self, lease: LeaseState, positions: BitMap) -> None:
        """Those positions of the lease are no longer leased, whatever has become of them."""
        if self.flows is not None:
            self.flows.settled(lease, positions)
        if self.uniques is not None and not self.uniques.while_waiting:
            for part, chosen in by_part(lease, positions):
                if part.extent.blob.uniques is not None:
                    self.uniques.leave(part.extent.blob, to_array(rows_of_part(part, chosen)))

    # ---- removal ----------------------------------------------------------------------------------------------

    def drop(self, offsets: Offsets, now: Millis) -> Offsets:
        """Drop the waiting items among the (sorted, unique) offsets: ready ones, and scheduled ones by the offset of their row when
        produced.

        Returns the offsets of the dropped items.
        """
        dropped: list[Offsets] = []
        for extent in list(self.ready):
            wanted = _within(offsets, extent.first, extent.count)
            taken = self.take_out(extent, wanted) if wanted else wanted
            if taken:
                self.end_waiting("dropped", extent, taken)
                dropped.append(to_array(taken) + extent.first)
        for due, taken in self.scheduled_among(offsets):
            # Named before the drop: the blob goes with its last open row.
            dropped.append(to_array(taken) + due.blob.number)
            self._drop_due(due, taken)
        if not dropped:
            return offsets[:0]
        self.record_time(now)
        gone = np.concatenate(dropped)
        self.header.cleared += len(gone)
        return gone

    def _drop_due(self, due: Due, rows: BitMap) -> None:
        if len(rows) == len(due.rows):
            self.unschedule(due)
        else:
            due.rows = due.rows - rows
            self._leave_due(due, rows)
        self.bundles.end("dropped", due.blob, rows)
        self.free(due.blob, len(rows))

    def end_waiting(self, ending: Ending, extent: Extent, positions: BitMap) -> None:
        """Close those positions of the extent, which were taken out of the line: their items have ended."""
        self.bundles.end_of(ending, [(Part(extent, 0, extent.count, 0), positions)])
        self.close_positions(extent, len(positions))

    def close_positions(self, extent: Extent, count: int) -> None:
        """Close `count` positions of the extent, and drop the extent with its last."""
        extent.open -= count
        if extent.open == 0:
            del self.extents[extent.first]
            self.touch(RecordKind.EXTENT, extent.first)
        self.free(extent.blob, count)

    def close_leased(self, lease: LeaseState, positions: BitMap) -> None:
        """Close those positions of a lease or transfer in their extents."""
        whole = len(positions) == lease.count
        for part in lease.parts:
            closed = part.count if whole else positions.range_cardinality(part.base, part.base + part.count)
            if closed:
                self.close_positions(part.extent, closed)

    def free(self, blob: Blob, rows: int) -> None:
        """Settle rows of a blob, which goes with its last."""
        blob.open -= rows
        self._drop_if_idle(blob)
        if blob.open and self._is_sparse(blob):
            self._sparse.setdefault(blob.number, False)

    def _drop_if_idle(self, blob: Blob) -> None:
        """Drop a blob without open rows, unless it is pinned."""
        if blob.open == 0 and blob.pins == 0:
            del self.blobs[blob.number]
            self.touch(RecordKind.BLOB, blob.number)
            self.failures.forget_blob(blob.number)
            if all(forming.blob is not blob for forming in self._forming):
                self._dropped.add(blob.number)

    # ---- compaction -------------------------------------------------------------------------------------------

    def _is_sparse(self, blob: Blob) -> bool:
        """Whether few open rows keep many bytes."""
        return blob.nbytes >= self.min_sparse_bytes and SPARSE_FACTOR * blob.open <= blob.stored_rows

    def find_sparse(self) -> None:
        """Check every blob, as after loading; afterwards each is checked when rows of it are settled."""
        self._sparse = {number: False for number, blob in self.blobs.items() if self._is_sparse(blob)}

    def long_sparse(self, most: int) -> list[int]:
        """Up to `most` blobs that were sparse at the last call, too: blobs in the middle of being settled will soon be gone anyway."""
        there = {number: seen for number, seen in self._sparse.items() if number in self.blobs and self._is_sparse(self.blobs[number])}
        found = [number for number, seen in there.items() if seen and not self.blobs[number].pins]
        self._sparse = dict.fromkeys(there, True)
        return found[:most]

    def compact(self, number: int, kept: int, nbytes: int, data: bytes) -> bool:
        """Replace the stored blob by `data`: `kept` rows of `nbytes`. False if the blob is gone or pinned by a snapshot."""
        blob = self.blobs.get(number)
        if blob is None or blob.pins:
            return False
        blob.kept, blob.nbytes = kept, nbytes
        self._compacted[number] = data
        self.touch(RecordKind.BLOB, number)
        return True

    # ---- changes ----------------------------------------------------------------------------------------------

    def take_blobs(self) -> tuple[dict[int, Rows], dict[int, bytes], set[int], dict[int, bytes]]:
        """Return the blobs made since the last call (as rows, and encoded), the dropped ones, and the new bytes of the compacted ones."""
        fresh: dict[int, Rows] = {}
        blobs: dict[int, bytes] = {}
        for forming in self._forming:
            number = forming.blob.number
            fresh[number], sealed = forming.seal()
            if number in self.blobs:
                blobs[number] = sealed
        dropped = self._dropped
        compacted = {number: data for number, data in self._compacted.items() if number in self.blobs}
        self._forming, self._dropped, self._compacted = [], set(), {}
        return fresh, blobs, dropped, compacted

    # ---- snapshots --------------------------------------------------------------------------------------------

    def pin(self, name: str, snapshot: Snapshot) -> None:
        """Pin the snapshot's blobs until it is released. They stay in the store, too, so memory holds only positions."""
        self.snapshots[name] = snapshot
        for run in snapshot.runs:
            run.blob.pins += 1

    def sweep(self) -> None:
        """Drop blobs pinned by a previous owner that crashed or lost the partition."""
        for blob in list(self.blobs.values()):
            self._drop_if_idle(blob)
        self.find_sparse()

    def release_snapshots(self, now: Millis) -> None:
        """Release the snapshots whose time is over."""
        for name in [name for name, snapshot in self.snapshots.items() if snapshot.until <= now]:
            for run in self.snapshots.pop(name).runs:
                run.blob.pins -= 1
                if run.blob.number in self.blobs:
                    self._drop_if_idle(run.blob)


def first_offset(extent: Extent) -> int:
    """By which extents in the line are sorted."""
    return extent.first


def _within(offsets: Offsets, first: int, count: int) -> BitMap:
    """Those of the sorted offsets within `count` from `first` on, as positions from there."""
    begin, end = offsets.searchsorted([first, first + count])
    return from_array(offsets[begin:end] - first)
