"""The columnar partition: a line of offsets made of extents over immutable blobs.

A pure machine. Each call is one transition, told `now`; it changes the state in place and notes which records it touched.
`take_changes` then gives everything since the last call as one change set for the store. If that commit does not succeed,
the state is thrown away and loaded anew: nothing here is ever undone.

An item is in one of four places: *ready* (from `head` on), in a *lease*, *due* (scheduled beside the line), or in a transfer
lease (dying).
Whatever puts items back appends an extent that points at the same blob, so no payload is ever copied.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

from sluiceway.core.forming import Forming, due_times, runs
from sluiceway.core.keys import KeyMemory, Seen
from sluiceway.core.keys import pack as pack_keys
from sluiceway.core.records import (
    Blob,
    Due,
    Extent,
    Header,
    LeaseState,
    Part,
    blob_bytes,
    by_part,
    due_bytes,
    extent_bytes,
    from_array,
    lease_bytes,
    pack,
    rows_of_part,
)
from sluiceway.core.spans import Spans
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_LEASE_BYTES, TIMER_BATCH
from sluiceway.model.changes import Changes, RecordKey, RecordKind
from sluiceway.model.items import digest as digest_of
from sluiceway.model.requests import DONE, Fate, IgnoredReason, Offsets, ProduceKey, Settled


class Partition:
    """The state of one partition, and its transitions. `max_attempts` 0 means no limit; without `keeps_dead` dead items are dropped."""

    def __init__(self, *, max_attempts: int = 0, keeps_dead: bool = False) -> None:
        self.max_attempts = max_attempts
        self.keeps_dead = keeps_dead
        self.txn = 0
        self.header = Header()
        self.blobs: dict[int, Blob] = {}
        self.extents: dict[int, Extent] = {}
        self.ready: deque[Extent] = deque()
        self.ready_count = 0
        self.leases: dict[int, LeaseState] = {}
        self.transfers: dict[int, LeaseState] = {}
        self.leased_count = 0
        self.dues: dict[int, Due] = {}
        self.scheduled_count = 0
        self.keys = KeyMemory()
        self.deadlines: list[tuple[Millis, int]] = []
        self.due_times: list[tuple[Millis, int]] = []
        self.spans = Spans()
        self.by_key: dict[tuple[str, str], dict[int, None]] = {}
        # A dict for its order: the same history must give the same bytes in every process.
        self._touched: dict[RecordKey, None] = {}
        self._dropped: set[int] = set()
        self._forming: list[Forming] = []
        self._changed = False

    # ---- produce ----------------------------------------------------------------------------------------------

    def produce(self, batch: pa.RecordBatch, now: Millis, key: ProduceKey | None = None) -> tuple[int, int, bool]:
        """Append the rows, due ones beside the line. Returns (first offset, count, repeated); raises what `KeyMemory.find` raises."""
        digest = b""
        if key is not None:
            digest = digest_of(batch)
            self.keys.forget_old(now)
            seen = self.keys.find(key, digest)
            if seen is not None:
                self.header.deduplicated += seen.count
                self._changed = True
                return seen.first_offset, seen.count, True
        now = self._at(now)
        first, count = self.header.next, batch.num_rows
        forming, row = self._forming_for(batch, now)
        self.header.next += count
        self.header.produced += count
        self._place(forming.blob, row, count, due_times(batch, now), now)
        if key is not None:
            self.keys.remember(key, Seen(digest, first, count), now)
        return first, count, False

    def _forming_for(self, batch: pa.RecordBatch, now: Millis) -> tuple[Forming, int]:
        """The blob that takes the batch, and the row at which it begins there. Row r of blob b must have offset b + r."""
        last = self._forming[-1] if self._forming else None
        # A blob may be settled whole in the turn that made it; it must not grow again.
        if last is None or not last.blob.open or last.blob.number + last.blob.rows != self.header.next or not last.has_room(batch):
            last = Forming(Blob(self.header.next, 0, 0, now, 0))
            self._forming.append(last)
            self.blobs[last.blob.number] = last.blob
            self._touch(RecordKind.BLOB, last.blob.number)
        return last, last.add(batch)

    def _place(self, blob: Blob, row: int, count: int, due: Offsets | None, now: Millis) -> None:
        first = blob.number + row
        if due is None:
            self._append(Extent(first, count, blob, row, None, 0, count))
            return
        waits = due > now
        for start, end in runs(~waits):
            self._append(Extent(first + start, end - start, blob, row + start, None, 0, end - start))
        rows = np.flatnonzero(waits)
        rows = rows[np.argsort(due[rows], kind="stable")]
        for together in np.split(rows, np.flatnonzero(np.diff(due[rows])) + 1):
            self._schedule(blob, from_array(together + row), 0, int(due[together[0]]))

    def _append(self, extent: Extent) -> None:
        """Put an extent at the tail. One that continues the last (same blob, of this turn, next row) makes it longer."""
        extent.blob.open += extent.count
        self.ready_count += extent.count
        last = self.ready[-1] if self.ready else None
        if last is not None and last.continued_by(extent) and self._forming and self._forming[-1].blob is last.blob:
            last.count += extent.count
            last.open += extent.count
            return
        self.ready.append(extent)
        self.extents[extent.first] = extent
        self._touch(RecordKind.EXTENT, extent.first)

    def _schedule(self, blob: Blob, rows: BitMap, attempts: int, due_at: Millis) -> None:
        self.header.due_number += 1
        due = Due(self.header.due_number, due_at, blob, rows, attempts)
        blob.open += len(rows)
        self.scheduled_count += len(rows)
        self.dues[due.number] = due
        heapq.heappush(self.due_times, (due_at, due.number))
        self._touch(RecordKind.DUE, due.number)

    # ---- lease ------------------------------------------------------------------------------------------------

    def lease(self, want: int, client_id: str, deadline: Millis, now: Millis, lease_key: str | None = None) -> LeaseState | None:
        """Lease up to `want` ready items, oldest first, as one lease; fewer if they are large. None if nothing is ready."""
        parts: list[Part] = []
        count, nbytes = 0, 0.0
        while self.ready and count < want:
            extent = self.ready[0]
            at = max(0, self.header.head - extent.first)
            each = extent.blob.nbytes / extent.blob.rows
            room = int((MAX_LEASE_BYTES - nbytes) / each) if each else want
            if room < 1 and count:
                break
            take = min(want - count, extent.count - at, max(1, room))
            parts.append(Part(extent, at, take, count))
            count += take
            nbytes += take * each
            self._advance(extent, at + take)
        if not parts:
            return None
        self._at(now)
        self.header.lease_number += 1
        self.header.leased += count
        self.ready_count -= count
        self.leased_count += count
        lease = LeaseState(self.header.lease_number, parts, count, client_id, deadline, lease_key)
        self._enter(lease)
        self._touch(RecordKind.LEASE, lease.number)
        return lease

    def _advance(self, extent: Extent, at: int) -> None:
        if at < extent.count:
            self.header.head = extent.first + at
            return
        self.ready.popleft()
        self.header.head = self.ready[0].first if self.ready else self.header.next

    def _enter(self, lease: LeaseState) -> None:
        """Put a lease into the indexes."""
        self.leases[lease.number] = lease
        self.spans.add(lease)
        if lease.deadline is not None:
            heapq.heappush(self.deadlines, (lease.deadline, lease.number))
        if lease.lease_key is not None:
            self.by_key.setdefault((lease.client_id, lease.lease_key), {})[lease.number] = None

    def restore_lease(self, lease: LeaseState) -> None:
        """Enter a lease that was loaded from storage."""
        self._enter(lease)
        self.leased_count += lease.open

    def _leave(self, lease: LeaseState) -> None:
        del self.leases[lease.number]
        self.spans.remove(lease)
        if lease.lease_key is not None:
            name = (lease.client_id, lease.lease_key)
            del self.by_key[name][lease.number]
            if not self.by_key[name]:
                del self.by_key[name]

    def keyed(self, client_id: str, lease_key: str) -> list[LeaseState]:
        """The live leases that were taken under this key."""
        return [self.leases[number] for number in self.by_key.get((client_id, lease_key), ())]

    def extend(self, number: int, deadline: Millis) -> LeaseState | None:
        """Set a live lease's deadline. None if it is gone."""
        lease = self.leases.get(number)
        if lease is not None:
            lease.deadline = deadline
            heapq.heappush(self.deadlines, (deadline, number))
            self._touch(RecordKind.LEASE, number)
        return lease

    # ---- settle -----------------------------------------------------------------------------------------------

    def settle_offsets(self, offsets: Offsets, fate: Fate, now: Millis, stage: bool, result: Settled) -> list[tuple[int, IgnoredReason]]:
        """Let the fate befall the leased ones among the (sorted, unique) offsets; with `stage`, note it only. Returns those ignored."""
        ignored: list[tuple[int, IgnoredReason]] = []
        for lease, positions in self._in_leases(offsets, ignored):
            if stage:
                self._stage(lease, positions, fate)
                _count(result, fate.verdict, len(positions))
            else:
                self._settle(lease, positions, fate, now, result)
                self._close_if_empty(lease)
        return ignored

    def close_lease(self, number: int, now: Millis, result: Settled) -> bool:
        """End a lease: staged fates take effect, the rest is completed. False if it is gone."""
        lease = self.leases.get(number)
        if lease is None:
            return False
        staged, lease.staged = lease.staged, {}
        for fate, positions in staged.items():
            self._settle(lease, positions - lease.settled, fate, now, result)
        self._settle(lease, lease.open_positions(), DONE, now, result)
        self._close_if_empty(lease)
        return True

    def _in_leases(self, offsets: Offsets, ignored: list[tuple[int, IgnoredReason]]) -> Iterator[tuple[LeaseState, BitMap]]:
        """The offsets by lease, as positions that are open there."""
        found: dict[int, tuple[LeaseState, BitMap]] = {}
        for run, place in self.spans.split(offsets):
            if place is None:
                ignored.extend((offset, self._why_ignored(offset)) for offset in run.tolist())
                continue
            lease, part = place
            positions = from_array(run - part.first + part.base)
            gone = positions & lease.settled
            ignored.extend((position - part.base + part.first, "settled") for position in gone)
            if len(gone) < len(positions):
                found.setdefault(lease.number, (lease, BitMap()))[1].update(positions - gone)
        yield from found.values()

    def _why_ignored(self, offset: int) -> IgnoredReason:
        """Why an offset is not in a live lease. Told by `head` alone: the line may be long, and a repeated call is normal traffic."""
        if not 0 <= offset < self.header.next:
            return "unknown"
        return "not_leased" if offset >= self.header.head else "settled"

    def _stage(self, lease: LeaseState, positions: BitMap, fate: Fate) -> None:
        for other in [staged for staged in lease.staged if staged != fate]:
            lease.staged[other] -= positions
            if not lease.staged[other]:
                del lease.staged[other]
        if fate.verdict != "done":
            lease.staged[fate] = lease.staged.get(fate, BitMap()) | positions
        self._touch(RecordKind.LEASE, lease.number)

    def _settle(self, lease: LeaseState, positions: BitMap, fate: Fate, now: Millis, result: Settled) -> None:
        """Close those open positions of a lease. The lease itself is closed by the caller."""
        if not positions:
            return
        now = self._at(now)
        dying: dict[str, BitMap] = {}
        if fate.verdict == "done":
            self.header.completed += len(positions)
            result.completed += len(positions)
        elif fate.verdict == "dead":
            dying[fate.reason or "rejected"] = positions
        else:
            due_at = fate.retry_at if fate.retry_at is not None else now + (fate.retry_after or 0)
            exhausted = self._put_back(lease, positions, due_at, now)
            if exhausted:
                dying[self._exhausted_reason(fate)] = exhausted
            back = len(positions) - len(exhausted)
            self.header.retried += back
            result.retried += back
        for reason, those in dying.items():
            self._die(lease, those, reason)
            result.dead += len(those)
        self._shut(lease, positions)

    def _exhausted_reason(self, fate: Fate) -> str:
        return f"max_attempts {self.max_attempts} reached" + (f": {fate.reason}" if fate.reason else "")

    def _shut(self, lease: LeaseState, positions: BitMap) -> None:
        """The positions are closed in this lease; whatever became of the rows has its own count of them already."""
        lease.settled |= positions
        self.leased_count -= len(positions)
        self._let_go(lease, positions)
        self._touch(RecordKind.LEASE, lease.number)

    def _let_go(self, lease: LeaseState, positions: BitMap) -> None:
        whole = len(positions) == lease.count
        for part in lease.parts:
            closed = part.count if whole else positions.range_cardinality(part.base, part.base + part.count)
            if closed:
                part.extent.open -= closed
                if part.extent.open == 0:
                    del self.extents[part.extent.first]
                    self._touch(RecordKind.EXTENT, part.extent.first)
                self._free(part.extent.blob, closed)

    def _free(self, blob: Blob, rows: int) -> None:
        blob.open -= rows
        if blob.open == 0:
            del self.blobs[blob.number]
            self._touch(RecordKind.BLOB, blob.number)
            if all(forming.blob is not blob for forming in self._forming):
                self._dropped.add(blob.number)

    def _close_if_empty(self, lease: LeaseState) -> None:
        if lease.open == 0:
            self._leave(lease)
            self._touch(RecordKind.LEASE, lease.number)

    def _put_back(self, lease: LeaseState, positions: BitMap, due_at: Millis, now: Millis) -> BitMap:
        """Append the rows of those positions anew, now or when due. Returns those that have no attempt left and stay."""
        exhausted = BitMap()
        rows_of: dict[tuple[int, int], BitMap] = {}
        blobs: dict[int, Blob] = {}
        for part, chosen in by_part(lease, positions):
            attempts = part.extent.attempts + 1
            if self.max_attempts and attempts >= self.max_attempts:
                exhausted |= chosen
                continue
            blob = part.extent.blob
            blobs[blob.number] = blob
            rows_of.setdefault((blob.number, attempts), BitMap()).update(rows_of_part(part, chosen))
        for (number, attempts), rows in rows_of.items():
            if due_at > now:
                self._schedule(blobs[number], rows, attempts, due_at)
            else:
                self._append_rows(blobs[number], rows, attempts)
        return exhausted

    def _append_rows(self, blob: Blob, rows: BitMap, attempts: int) -> None:
        count, first_row = len(rows), rows.min()
        dense = rows.max() - first_row + 1 == count
        first = self.header.next
        self.header.next += count
        self._append(Extent(first, count, blob, first_row, None if dense else rows, attempts, count))

    def _die(self, lease: LeaseState, positions: BitMap, reason: str) -> None:
        """Move the positions into a transfer lease of their own (they keep their offsets), or drop them."""
        if not self.keeps_dead:
            self.header.dead += len(positions)
            return
        self.header.lease_number += 1
        parts: list[Part] = []
        chosen, base = BitMap(), 0
        for part, those in by_part(lease, positions):
            parts.append(Part(part.extent, part.at, part.count, base))
            chosen.update(those.shift(base - part.base))
            part.extent.open += len(those)
            part.extent.blob.open += len(those)
            base += part.count
        transfer = LeaseState(self.header.lease_number, parts, base, "", None, None, reason)
        transfer.settled = BitMap(range(base)) - chosen
        self.transfers[transfer.number] = transfer
        self._touch(RecordKind.LEASE, transfer.number)

    def transferred(self, number: int) -> None:
        """The items of that transfer lease are durable in the dead queue: let go of them. Repeating it changes nothing."""
        transfer = self.transfers.pop(number, None)
        if transfer is not None:
            positions = transfer.open_positions()
            self.header.dead += len(positions)
            self._let_go(transfer, positions)
            self._touch(RecordKind.LEASE, number)

    # ---- time -------------------------------------------------------------------------------------------------

    def next_timer(self) -> Millis | None:
        """When `tick` has something to do next."""
        while self.deadlines:
            deadline, number = self.deadlines[0]
            lease = self.leases.get(number)
            if lease is not None and lease.deadline == deadline:
                break
            heapq.heappop(self.deadlines)
        times = [heap[0][0] for heap in (self.deadlines, self.due_times) if heap]
        return min(times) if times else None

    def tick(self, now: Millis) -> int:
        """Put back what expired and what is due, a bounded number a call. Returns how many items moved."""
        moved = 0
        for _ in range(TIMER_BATCH):
            at = self.next_timer()
            if at is None or at > now:
                break
            self._at(now)
            if self.due_times and self.due_times[0][0] == at:
                moved += self._fall_due(self.dues[heapq.heappop(self.due_times)[1]])
            else:
                moved += self._expire(self.leases[heapq.heappop(self.deadlines)[1]], now)
        return moved

    def _fall_due(self, due: Due) -> int:
        count = len(due.rows)
        del self.dues[due.number]
        self.scheduled_count -= count
        self._touch(RecordKind.DUE, due.number)
        self._append_rows(due.blob, due.rows, due.attempts)
        due.blob.open -= count
        return count

    def _expire(self, lease: LeaseState, now: Millis) -> int:
        positions = lease.open_positions()
        now = self._at(now)
        exhausted = self._put_back(lease, positions, now, now)
        if exhausted:
            self._die(lease, exhausted, f"max_attempts {self.max_attempts} reached: the lease expired")
        self.header.expired += len(positions) - len(exhausted)
        self._shut(lease, positions)
        self._leave(lease)
        return len(positions)

    # ---- changes ----------------------------------------------------------------------------------------------

    def _at(self, now: Millis) -> Millis:
        """Time never goes back for a partition, whatever its owner's clock says."""
        self._changed = True
        self.header.now = max(self.header.now, now)
        return self.header.now

    def _touch(self, kind: RecordKind, key: int) -> None:
        self._touched[kind, str(key)] = None

    def take_changes(self) -> tuple[Changes, dict[int, pa.RecordBatch]] | None:
        """Everything since the last call as one change set, and the new blobs' rows; None if nothing changed."""
        if not (self._changed or self._touched or self.keys.touched):
            return None
        self.keys.forget_old(self.header.now)
        self.txn += 1
        fresh: dict[int, pa.RecordBatch] = {}
        blobs: dict[int, bytes] = {}
        for forming in self._forming:
            number = forming.blob.number
            fresh[number], sealed = forming.seal()
            if number in self.blobs:
                blobs[number] = sealed
        changes = Changes(self.txn, pack(self.header), blobs=blobs, dropped_blobs=self._dropped)
        for record_key in self._touched:
            data = self._record(record_key)
            if data is None:
                changes.deletes.add(record_key)
            else:
                changes.puts[record_key] = data
        for name in self.keys.touched:
            seen = self.keys.records.get(name)
            if seen is None:
                changes.deletes.add((RecordKind.KEY, name))
            else:
                changes.puts[(RecordKind.KEY, name)] = pack_keys(seen)
        self._forming, self._touched, self._dropped, self._changed = [], {}, set(), False
        self.keys.touched = {}
        return changes, fresh

    def _record(self, key: RecordKey) -> bytes | None:
        """The present bytes of a record; None if it is gone."""
        kind, number = key[0], int(key[1])
        if kind is RecordKind.LEASE:
            lease = self.leases.get(number) or self.transfers.get(number)
            return lease_bytes(lease) if lease else None
        if kind is RecordKind.EXTENT:
            extent = self.extents.get(number)
            return extent_bytes(extent) if extent else None
        if kind is RecordKind.BLOB:
            blob = self.blobs.get(number)
            return blob_bytes(blob) if blob else None
        due = self.dues.get(number)
        return due_bytes(due) if due else None


def _count(result: Settled, verdict: str, items: int) -> None:
    if verdict == "done":
        result.completed += items
    elif verdict == "retry":
        result.retried += items
    else:
        result.dead += items
