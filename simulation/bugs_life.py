"""Planted bugs of an item's life between leases, and of partitions that are paused or avoided meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyroaring import BitMap

from simulation.planting import Bug, shelf
from sluiceway.core.partition import queries
from sluiceway.core.partition.closed_leases import ClosedLeases
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.records import REDRIVEN, Extent, LeaseState
from sluiceway.core.partition.segment_log import SegmentLog
from sluiceway.core.partition.transfers import TransferTable
from sluiceway.core.queue import logical_queue
from sluiceway.core.queue.logical_queue import LogicalQueue
from sluiceway.core.queue.partition_executor import PartitionExecutor
from sluiceway.model.requests import Disposition

BUGS: list[Bug] = []
bug = shelf(BUGS)

# ---- redelivery -----------------------------------------------------------------------------------------------


@bug(Partition, "_put_back")
def counts_a_release(original: Any) -> Any:
    """A released item has used an attempt."""

    def put_back(self: Any, lease: Any, positions: Any, disposition: Any, now: int) -> Any:
        released = disposition is not None and disposition.verdict == "release"
        return original(self, lease, positions, Disposition("retry", retry_at=now) if released else disposition, now)

    return put_back


@bug(Partition, "_due_at")
def ignores_the_back_off(original: Any) -> Any:
    """A retry without a time of its own is due at once, ignoring the queue's back-off."""

    def due_at(self: Any, disposition: Any, attempts: int, now: int) -> Any:
        plain = disposition is not None and disposition.retry_at is None and disposition.retry_after is None
        return now if plain else original(self, disposition, attempts, now)

    return due_at


@bug(Partition, "_due_at")
def backs_off_by_one_attempt_more(original: Any) -> Any:
    """The back-off is that of the next attempt."""
    return lambda self, disposition, attempts, now: original(self, disposition, attempts + 1, now)


@bug(Partition, "_due_at")
def serves_at_once_what_ran_out(original: Any) -> Any:
    """An item whose lease expired is offered again at once, ignoring the queue's back-off."""
    return lambda self, disposition, attempts, now: now if disposition is None else original(self, disposition, attempts, now)


@bug(SegmentLog, "schedule")
def forgets_halving_while_it_waits(original: Any) -> Any:
    """After the back-off, items of an expired lease may come back in a lease as large."""

    def schedule(
        self: Any, blob: Any, rows: Any, attempts: Any, due_at: Any, expires_at: Any, _max: int = 0, is_back: bool = False
    ) -> None:
        original(self, blob, rows, attempts, due_at, expires_at, is_back=is_back)

    return schedule


@bug(SegmentLog, "append_rows")
def does_not_halve(original: Any) -> Any:
    """Items of an expired lease may come back in a lease as large."""
    return lambda self, blob, rows, attempts, expires_at, max_lease_size=0: original(self, blob, rows, attempts, expires_at)


@bug(Extent, "continued_by")
def joins_what_is_not_alike(original: Any) -> Any:
    """Neighbouring rows of a blob that come back become one extent, whatever their attempts."""
    return lambda self, other: original(self, replace(other, attempts=self.attempts))


@bug(queries, "unpack_extent")
def forgets_halving_at_loading(original: Any) -> Any:
    """The limit on the next lease's size is lost when a partition is opened."""

    def unpack(data: bytes) -> Any:
        record = original(data)
        record.max_lease_size = 0
        return record

    return unpack


@bug(Partition, "release")
def forgets_halving_at_a_release(original: Any) -> Any:
    """A small lease that is released may come back in a large one."""

    def release(self: Any, lease: Any, *rest: Any) -> None:
        for part in lease.parts:
            part.extent.max_lease_size = 0
        original(self, lease, *rest)

    return release


# ---- expiry and clearing --------------------------------------------------------------------------------------


@bug(SegmentLog, "take_out")
def expires_what_is_leased(original: Any) -> Any:
    """Items taken out of the line may have been leased already."""

    def take_out(self: Any, extent: Any, positions: Any) -> Any:
        taken = BitMap(range(extent.count)) - extent.gone
        head, self.header.head = self.header.head, extent.first
        try:
            return original(self, extent, taken)
        finally:
            self.header.head = head

    return take_out


@bug(Partition, "_expire")
def serves_the_expired(original: Any) -> Any:
    """An expired item stays in the line."""
    return lambda self, extent: 0


@bug(queries, "load")
def forgets_expiry_at_loading(original: Any) -> Any:
    """Items in the line before the partition was opened never expire."""

    def load(*args: Any, **options: Any) -> Any:
        partition = original(*args, **options)
        partition.log.expiries.clear()
        return partition

    return load


@bug(SegmentLog, "schedule")
def expires_from_production_on(original: Any) -> Any:
    """A scheduled item expires as if it had been due at once."""

    def schedule(self: Any, blob: Any, rows: Any, attempts: int, due_at: int, expires_at: int, *rest: int, **named: Any) -> None:
        early = expires_at - due_at + self.header.now if expires_at and not attempts else expires_at
        original(self, blob, rows, attempts, due_at, early, *rest, **named)

    return schedule


@bug(Partition, "clear")
def clears_the_leased(original: Any) -> Any:
    """Clearing drops leased items."""

    def clear(self: Any, ready: bool, scheduled: bool, now: int) -> Any:
        for lease in list(self.leases.values()):
            self.log.header.cleared += lease.open
            self._close(lease, lease.open_positions())
            self._close_if_empty(lease)
        return original(self, ready, scheduled, now)

    return clear


@bug(Partition, "clear")
def clears_the_scheduled_unasked(original: Any) -> Any:
    """Clearing drops scheduled items even if not requested."""
    return lambda self, ready, scheduled, now: original(self, ready, True, now)


@bug(queries, "unpack_extent")
def forgets_who_left_at_loading(original: Any) -> Any:
    """Items that left the line without a lease are in it again when the partition is opened."""

    def unpack(data: bytes) -> Any:
        record = original(data)
        record.gone = b""
        return record

    return unpack


# ---- redrive --------------------------------------------------------------------------------------------------


@bug(TransferTable, "end")
def redrives_a_copy(original: Any) -> Any:
    """A redriven item also stays in the dead queue."""

    def end(self: Any, number: int) -> None:
        transfer = self.by_number.get(number)
        if transfer is not None and transfer.transfer == REDRIVEN:
            self.call_back(number)
        else:
            original(self, number)

    return end


@bug(TransferTable, "redrive")
def redrives_into_nothing(original: Any) -> Any:
    """An item leaves the dead queue before it is in its target."""

    def redrive(self: Any, *args: Any) -> Any:
        number, items = original(self, *args)
        self.end(number)
        return number, items

    return redrive


@bug(queries, "_load_lease")
def forgets_where_it_goes_at_loading(original: Any) -> Any:
    """After a restart a redriven item goes to the dead queue."""

    def load_lease(partition: Any, number: int, *rest: Any) -> None:
        original(partition, number, *rest)
        if number in partition.transfers.by_number:
            partition.transfers.by_number[number].target = None

    return load_lease


@bug(queries, "_load_lease")
def forgets_which_queue_of_that_name_at_loading(original: Any) -> Any:
    """After a restart a redriven item goes to any queue of its target's name."""

    def load_lease(partition: Any, number: int, *rest: Any) -> None:
        original(partition, number, *rest)
        if number in partition.transfers.by_number:
            partition.transfers.by_number[number].target_incarnation = None

    return load_lease


@bug(TransferTable, "redirect_waiting")
def sends_to_another_dead_queue_what_may_have_arrived(_original: Any) -> Any:
    """A new dead queue gets every item in transit, even those that the former one may have taken."""

    def redirect_waiting(self: Any, target: str, most: int, incarnation: str | None = None) -> bool:
        found = [number for number, each in self.by_number.items() if each.transfer and each.moves_to is None and each.target != target]
        for number in found[:most]:
            self.redirect(number, target, incarnation)
        return bool(found)

    return redirect_waiting


@bug(TransferTable, "redirect")
def stays_bound_to_the_former_dead_queue(original: Any) -> Any:
    """Dead items that get a new target are still bound to the incarnation of the old one: there is no such queue, so they are dropped."""

    def redirect(self: Any, number: int, target: str, incarnation: str | None = None) -> None:
        former = self.by_number.get(number)
        original(self, number, target, incarnation if former is None else former.target_incarnation)

    return redirect


@bug(TransferTable, "call_back")
def calls_back_without_attempts(original: Any) -> Any:
    """An item called back from a missing target starts over with no attempts."""

    def call_back(self: Any, number: int) -> None:
        log = self._log
        log.append_rows = lambda blob, rows, attempts, expires_at, *rest: SegmentLog.append_rows(log, blob, rows, 0, expires_at, *rest)
        try:
            original(self, number)
        finally:
            del log.append_rows

    return call_back


# ---- outcomes and ownership -----------------------------------------------------------------------------------


@bug(LeaseState, "disposition_of")
def calls_everything_completed(original: Any) -> Any:
    """A settle of an item that was put back is told that it was completed."""
    return lambda self, position: "completed"


@bug(ClosedLeases, "record")
def does_not_write_closed_leases(original: Any) -> Any:
    """After a restart the outcome of an id is unknown."""
    return lambda self, number: None


@bug(queries, "unpack_lease")
def revives_closed_leases_at_loading(original: Any) -> Any:
    """A closed lease that is remembered becomes a live one when it is loaded."""

    def unpack(data: bytes) -> Any:
        record = original(data)
        record.closed = False
        return record

    return unpack


@bug(Partition, "in_leases")
def lets_anybody_settle(original: Any) -> Any:
    """A client may settle items that another one has leased."""
    return lambda self, offsets, ignored, client_id: original(self, offsets, ignored, None)


@bug(Partition, "lease_of")
def lets_anybody_close(original: Any) -> Any:
    """A client may close another client's lease."""
    return lambda self, number, client_id: original(self, number, None)


@bug(LogicalQueue, "give_back")
def keeps_what_nobody_was_told_of(original: Any) -> Any:
    """Leases of clients that went away stay until they expire."""
    return lambda *_: None


@bug(LogicalQueue, "_reply")
def gives_back_what_was_answered(original: Any) -> Any:
    """A lease is given back although its client was told of it."""

    def reply(self: Any, ticket: Any, result: Any) -> None:
        for grant in result if isinstance(result, list) and not ticket.keyed else ():
            self.give_back(grant.info.partition, grant.info.number)
        original(self, ticket, result)

    return reply


# ---- settings, pauses and slow partitions ---------------------------------------------------------------------


@bug(LogicalQueue, "cycle")
def serves_while_paused(original: Any) -> Any:
    """A paused queue leases."""

    def cycle(self: Any, *args: Any) -> Any:
        paused, self.paused = self.paused, frozenset()
        try:
            return original(self, *args)
        finally:
            self.paused = paused

    return cycle


@bug(LogicalQueue, "submit")
def takes_produces_while_paused(original: Any) -> Any:
    """A paused queue accepts items."""

    def submit(self: Any, ticket: Any) -> None:
        paused, self.paused = self.paused, frozenset()
        try:
            original(self, ticket)
        finally:
            self.paused = paused

    return submit


@bug(LogicalQueue, "configure")
def follows_new_settings_after_a_restart_only(original: Any) -> Any:
    """Open partitions keep the old settings."""

    def configure(self: Any, record: Any, dead_incarnation: Any = None) -> None:
        executors, self.executors = self.executors, {}
        try:
            original(self, record, dead_incarnation)
        finally:
            self.executors = executors

    return configure


@bug(LogicalQueue, "opened")
def forgets_its_settings_at_opening(original: Any) -> Any:
    """A partition that was opened follows no settings at all."""

    def opened(self: Any, *args: Any) -> None:
        rules, self._rules = self._rules, None
        try:
            original(self, *args)
        finally:
            self._rules = rules

    return opened


@bug(LogicalQueue, "_unload_hung")
def leaves_produces_behind_a_hung_commit(original: Any) -> Any:
    """Pending produces wait for a hung partition although others are fast."""

    def unload(self: Any, now: int) -> None:
        self._compare_speeds(now)

    return unload


@bug(PartitionExecutor, "take_back_produces")
def produces_here_and_there(original: Any) -> Any:
    """A produce moved away from a hung partition is done there as well."""

    def take_back(self: Any, **named: Any) -> Any:
        waiting, accepted, nbytes = list(self.waiting), self.accepted, self.accepted_bytes
        given = original(self, **named)
        self.waiting, self.accepted, self.accepted_bytes = waiting, accepted, nbytes
        return given

    return take_back


@bug(logical_queue, "PROBE_EVERY")
def never_tries_a_slow_partition_again(original: Any) -> Any:
    """A partition that was slow once is avoided forever."""
    return 10**12
