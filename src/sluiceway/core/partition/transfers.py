"""Transfers: items leaving a partition, and items arriving from another partition of the queue.

In transit, items are in a *transfer*: a lease without deadline that ends when they are durable at the destination.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, islice

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

from sluiceway.core.partition.blob_builder import NO_BUNDLE
from sluiceway.core.partition.records import (
    MOVED,
    REDRIVEN,
    Blob,
    Due,
    Extent,
    LeaseState,
    Part,
    by_part,
    from_array,
    partition_target,
    rows_of_part,
    target_partition,
    to_array,
)
from sluiceway.core.partition.segment_log import SegmentLog
from sluiceway.core.partition.slot_contents import movable_rows
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import invalid
from sluiceway.model.changes import RecordKind
from sluiceway.model.item_keys import MAX_HASH, Runs
from sluiceway.model.requests import MovedItem, Offsets

MAX_PIECES = 128
"""Maximum pieces of a move: where each item has a blob of its own, a piece costs as much as thousands of neighbours, and clients wait for
it."""

Piece = tuple[Part, BitMap]
"""Positions of a part, counted from its base."""


class TransferTable:
    """The outgoing transfers of a segment log's items."""

    def __init__(self, log: SegmentLog) -> None:
        self._log = log
        self.by_number: dict[int, LeaseState] = {}
        self.by_target: dict[str, dict[int, None]] = {}
        """The numbers of the transfers to each target, in order. "" stands for records written before the target was noted."""

    def add(self, transfer: LeaseState) -> None:
        """Add a transfer to the indexes."""
        self.by_number[transfer.number] = transfer
        self.by_target.setdefault(transfer.target or "", {})[transfer.number] = None

    def _remove(self, number: int) -> LeaseState | None:
        transfer = self.by_number.pop(number, None)
        if transfer is not None:
            name = transfer.target or ""
            del self.by_target[name][number]
            if not self.by_target[name]:
                del self.by_target[name]
            self._log.touch(RecordKind.LEASE, number)
        return transfer

    def begin(self, pieces: Iterable[Piece], reason: str, target: str | None, incarnation: str | None = None) -> LeaseState:
        """Put those positions of parts into a transfer lease of their own, in addition to where they are now. It is bound to that
        incarnation of its target; None: to none yet."""
        self._log.header.lease_number += 1
        parts: list[Part] = []
        chosen, base = BitMap(), 0
        for part, those in pieces:
            parts.append(Part(part.extent, part.at, part.count, base))
            chosen.update(those.shift(base - part.base))
            part.extent.open += len(those)
            part.extent.blob.open += len(those)
            base += part.count
        transfer = LeaseState(self._log.header.lease_number, parts, base, "", None, None, reason, target=target)
        transfer.settled = BitMap(range(base)) - chosen
        transfer.target_incarnation = incarnation
        self.add(transfer)
        self._log.touch(RecordKind.LEASE, transfer.number)
        return transfer

    def end(self, number: int) -> None:
        """End a transfer whose items are durable at the destination. Idempotent."""
        transfer = self._remove(number)
        if transfer is not None:
            positions = transfer.open_positions()
            if transfer.moves_to is not None:
                self._log.header.moved += len(positions)
            elif transfer.transfer == REDRIVEN:
                self._log.header.redriven += len(positions)
                self._log.bundles.end_of("dropped", by_part(transfer, positions))
            else:
                self._log.header.dead += len(positions)
            self._log.close_leased(transfer, positions)

    def call_back(self, number: int) -> None:
        """Cancel a transfer that has no destination: its items are ready, or scheduled, again, as before."""
        transfer = self._remove(number)
        if transfer is not None:
            positions, due_at = transfer.open_positions(), transfer.due_at()
            for part, chosen in by_part(transfer, positions):
                extent, rows = part.extent, rows_of_part(part, chosen)
                if part.base in due_at:
                    self._log.schedule(extent.blob, rows, extent.attempts, due_at[part.base], extent.expires_at, extent.max_lease_size)
                else:
                    self._log.append_rows(extent.blob, rows, extent.attempts, extent.expires_at, extent.max_lease_size)
            self._log.close_leased(transfer, positions)

    def bind(self, number: int, incarnation: str) -> None:
        """Bind the redrive to this incarnation of its target, and to no later one."""
        transfer = self.by_number.get(number)
        if transfer is not None and transfer.target_incarnation is None:
            transfer.target_incarnation = incarnation
            self._log.touch(RecordKind.LEASE, number)

    def redirect(self, number: int, target: str, incarnation: str | None = None) -> None:
        """Send the transfer to that incarnation of another queue. Nothing of it may be, or ever come to be, at its old target.

        It gets a new number, since the new target may have taken later transfers of this partition already.
        """
        transfer = self._remove(number)
        if transfer is not None:
            self._log.header.lease_number += 1
            transfer.number, transfer.target, transfer.target_incarnation = self._log.header.lease_number, target, incarnation
            self.add(transfer)
            self._log.touch(RecordKind.LEASE, transfer.number)

    def redirect_waiting(self, target: str, most: int, incarnation: str | None = None) -> bool:
        """Redirect dead items on their way to a former dead queue, up to `most` transfers. Returns whether there were any.

        Excludes the first transfer to each target: only that one may have been sent already.
        """
        waiting = [
            number
            for name, numbers in self.by_target.items()
            if name and name != target and target_partition(name) is None
            for number in islice(numbers, 1, None)
            if self.by_number[number].transfer != REDRIVEN
        ]
        for number in waiting[:most]:
            self.redirect(number, target, incarnation)
        return bool(waiting)

    def redrive(
        self, offsets: Offsets, target: str, now: Millis, incarnation: str | None = None, scheduled: bool = False
    ) -> tuple[int, Offsets]:
        """Send the ready items among the (sorted, unique) offsets to that incarnation of another queue; with `scheduled`, also those not
        due yet, by the offset of their row when produced. Returns the transfer's number, 0 if there are none, and the offsets taken."""
        pieces: list[Piece] = []
        times: list[Millis] = []
        found = [offsets[:0]]
        for extent in list(self._log.ready):
            first, end = offsets.searchsorted([extent.first, extent.first + extent.count])
            taken = self._log.take_out(extent, from_array(offsets[first:end] - extent.first)) if first < end else None
            if taken:
                pieces.append((Part(extent, 0, extent.count, 0), taken))
                times.append(0)
                found.append(to_array(taken) + extent.first)
        for due, rows in self._log.scheduled_among(offsets) if scheduled else ():
            found.append(to_array(rows) + due.blob.number)
            times.append(due.due_at)
            part = self._enter_and_leave(due, rows)
            pieces.append((part, BitMap(range(part.count))))
        number, _ = self._send(pieces, REDRIVEN, target, now, incarnation)
        if number and any(times):
            # If there is no such queue any more, they come back as they were.
            self.by_number[number].dues = [(due_at, part.count) for due_at, (part, _) in zip(times, pieces, strict=True)]
        return number, np.sort(np.concatenate(found))

    def _send(self, pieces: Sequence[Piece], reason: str, target: str, now: Millis, incarnation: str | None = None) -> tuple[int, int]:
        """Begin the transfer of items taken out of the line. Returns (transfer number, items); 0, 0 without pieces."""
        if not pieces:
            return 0, 0
        self._log.record_time(now)
        number = self.begin(pieces, reason, target, incarnation).number
        for part, those in pieces:
            self._log.close_positions(part.extent, len(those))
        return number, sum(len(those) for _, those in pieces)

    # ---- moves between partitions of the queue ----------------------------------------------------------------

    def move_out(
        self, limit: int, room: float, target: int, scheduled: bool, now: Millis, slots: frozenset[int] | None = None
    ) -> tuple[int, int]:
        """Send up to `limit` items to another partition: ready ones, oldest first, or the next scheduled ones, entered in the line for it.
        `slots`: of those, only what `movable_rows` says. Returns (transfer number, items); 0, 0 if there are none.

        Their blobs hold at most `room` bytes, or are a single one, since some rows may be nearly all of it. At most MAX_PIECES pieces.
        """
        if scheduled:
            pieces, times = self._take_due(limit, room, slots)
        else:
            pieces, times = self._take_oldest(limit, room, now), []
        number, items = self._send(pieces, MOVED, partition_target(target), now)
        if number:
            self.by_number[number].dues = [(due_at, part.count) for due_at, (part, _) in zip(times, pieces, strict=False)]
        return number, items

    def _take_oldest(self, limit: int, room: float, now: Millis) -> list[Piece]:
        """Advance `head` over up to `limit` items. `max_lease_size` does not apply: no consumer handles them here."""
        pieces: list[Piece] = []
        blobs: set[int] = set()
        while self._log.ready and limit and len(pieces) < MAX_PIECES:
            extent = self._log.ready[0]
            at, run = extent.run(self._log.at(extent))
            if 0 < extent.expires_at <= now:
                break  # its timer comes in the next cycle
            if extent.blob.number not in blobs:
                if pieces and extent.blob.nbytes > room:
                    break
                blobs.add(extent.blob.number)
                room -= extent.blob.nbytes
            take = min(limit, run)
            pieces.append((Part(extent, at, take, 0), BitMap(range(take))))
            limit -= take
            self._log.pass_over(extent, at, take)
        return pieces

    def _take_due(self, limit: int, room: float, slots: frozenset[int] | None) -> tuple[list[Piece], list[Millis]]:
        """Pass up to `limit` scheduled items through the line. Returns the pieces, and the due time of each."""
        pieces: list[Piece] = []
        times: list[Millis] = []
        blobs: set[int] = set()
        for due, movable in self._next_dues(slots):
            if not limit or len(pieces) == MAX_PIECES:
                break
            if due.blob.number not in blobs:
                if pieces and due.blob.nbytes > room:
                    break
                blobs.add(due.blob.number)
                room -= due.blob.nbytes
            rows = movable if len(movable) <= limit else from_array(to_array(movable)[:limit])
            part = self._enter_and_leave(due, rows)
            pieces.append((part, BitMap(range(part.count))))
            times.append(due.due_at)
            limit -= part.count
        return pieces, times

    def _next_dues(self, slots: frozenset[int] | None) -> Iterator[tuple[Due, BitMap]]:
        """The scheduled entries in order of their time, with the rows that may be moved: the caller takes these out before it goes on."""
        if slots is None:
            while self._log.due_times:
                due = self._log.dues.get(self._log.due_times[0][1])
                if due is None:
                    heapq.heappop(self._log.due_times)
                else:
                    yield due, due.rows
            return
        for _, number in sorted(self._log.due_times):
            if number in self._log.dues and (rows := movable_rows(self._log, self._log.dues[number], slots)):
                yield self._log.dues[number], rows

    def _enter_and_leave(self, due: Due, rows: BitMap) -> Part:
        """Pass those rows of a scheduled entry through the line, which gives them offsets and an extent there."""
        extent = self._log.enter_rows(due, rows)
        # They may have lengthened an existing extent.
        at = self._log.header.next - len(rows) - extent.first
        self._log.take_out(extent, BitMap(range(at, at + len(rows))))
        if self._log.ready and self._log.ready[-1] is extent and not extent.waiting(self._log.at(extent)):
            # Otherwise gone positions pile up behind items that are never leased.
            self._log.ready.pop()
        return Part(extent, at, len(rows), 0)

    def arrive(self, batch: pa.RecordBatch, lives: Sequence[MovedItem], now: Millis) -> None:
        """Append rows from another partition with their metadata: attempts, expiry and due times continue."""
        if sum(life.rows for life in lives) != batch.num_rows or any(life.rows < 1 for life in lives):
            raise invalid("lives", f"expected the lives of {batch.num_rows} rows")
        if any(not 0 <= life.bundle <= MAX_HASH for life in lives):
            raise invalid("lives", "a bundle is a number of 64 bits")
        at = 0
        for enqueued_at, those in groupby(lives, lambda life: life.enqueued_at):
            each = list(those)
            count = sum(life.rows for life in each)
            rows = batch.slice(at, count)
            forming, row = self._log.forming_for(rows, enqueued_at, _bundles_of(each), self._log.uniques_of(rows))
            at += count
            self._log.header.next += count
            for life in each:
                self._log.bundles.arrive(life.bundle)
                self._append_moved(forming.blob, row, life, now)
                row += life.rows
        self._log.header.moved_in += batch.num_rows

    def _append_moved(self, blob: Blob, row: int, life: MovedItem, now: Millis) -> None:
        if life.due_at > now:
            self._log.schedule(blob, BitMap(range(row, row + life.rows)), life.attempts, life.due_at, life.expires_at, life.max_lease_size)
        else:
            first = blob.number + row
            self._log.append(Extent(first, life.rows, blob, row, None, life.attempts, life.rows, life.expires_at, life.max_lease_size))


def _bundles_of(lives: Sequence[MovedItem]) -> Runs:
    """Which of the rows belong to which bundle."""
    if not any(life.bundle for life in lives):
        return NO_BUNDLE
    return Runs([0, *accumulate(life.rows for life in lives[:-1])], [life.bundle for life in lives])
