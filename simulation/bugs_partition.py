"""Planted bugs of a partition, its keys, its loading and its store."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

from simulation.owner import Flight
from simulation.planting import Bug, shelf
from simulation.store import Store
from sluiceway.core.partition import queries
from sluiceway.core.partition.idempotency_keys import KeyMemory
from sluiceway.core.partition.lease_columns import LeaseColumns
from sluiceway.core.partition.lease_table import LeaseTable
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.segment_log import SegmentLog
from sluiceway.core.queue import partition_executor
from sluiceway.core.queue.partition_executor import PartitionExecutor
from sluiceway.core.queue.tickets import Compact
from sluiceway.kernel.clock import Clock
from sluiceway.local import dead_letters
from sluiceway.model.changes import RecordKind
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Settled

BUGS: list[Bug] = []
bug = shelf(BUGS)

# ---- blobs ----------------------------------------------------------------------------------------------------


@bug(SegmentLog, "free")
def drops_a_blob_too_soon(original: Any) -> Any:
    """A blob is dropped while one of its rows is alive."""

    def free(self: Any, blob: Any, rows: int) -> None:
        original(self, blob, rows)
        if blob.open == 1:
            self._dropped.add(blob.number)

    return free


@bug(SegmentLog, "free")
def keeps_blobs_for_ever(original: Any) -> Any:
    """A blob stays in the store when its last row is settled."""

    def free(self: Any, blob: Any, rows: int) -> None:
        original(self, blob, rows)
        self._dropped.discard(blob.number)

    return free


@bug(partition_executor, "compactions")
def compacts_one_row_too_few(original: Any) -> Any:
    """A compacted blob lacks an open row."""

    def compactions(partition: Any) -> Any:
        return [each._replace(rows=each.rows[:-1]) if len(each.rows) > 1 else each for each in original(partition)]

    return compactions


@bug(PartitionExecutor, "takes")
def compacts_by_what_did_not_land(original: Any) -> Any:
    """A compaction is accepted after its partition was reopened, when rows settled by a lost commit are open again."""

    def takes(self: Any, work: Any) -> bool:
        return bool(self.takes_work if isinstance(work, Compact) else original(self, work))

    return takes


# ---- time -----------------------------------------------------------------------------------------------------


@bug(SegmentLog, "record_time")
def lets_time_go_back(original: Any) -> Any:
    """The stored time follows the owner's clock, even backwards."""

    def record_time(self: Any, now: int) -> int:
        self.changed, self.header.now = True, now
        return now

    return record_time


@bug(SegmentLog, "record_time")
def believes_any_stored_time(original: Any) -> Any:
    """A time written by a clock an hour ahead stands until that hour is over."""

    def record_time(self: Any, now: int) -> int:
        self.changed, self.header.now = True, max(self.header.now, now)
        return int(self.header.now)

    return record_time


@bug(Partition, "produce")
def decides_by_the_stored_time(original: Any) -> Any:
    """Items are due by the stored time, which may be ahead of the owner's."""

    def produce(self: Any, batch: Any, now: int, *rest: Any, **options: Any) -> Any:
        return original(self, batch, self.log.record_time(now), *rest, **options)

    return produce


@bug(Clock, "read")
def follows_every_jump(original: Any) -> Any:
    """A process follows the wall clock as soon as it is set ahead."""

    def read(self: Any, wall: int, steady: int) -> int:
        self._now = max(wall, self._now + steady - self._steady)
        self._steady = steady
        return int(self._now // 1_000_000)

    return read


@bug(Partition, "tick")
def forgets_when_a_timer_ran(original: Any) -> Any:
    """A timer's effect is stored without its time."""

    def tick(self: Any, now: int, *rest: Any) -> Any:
        self.log.record_time = lambda moment: max(self.log.header.now, moment)
        try:
            return original(self, now, *rest)
        finally:
            del self.log.record_time

    return tick


@bug(queries, "load")
def forgets_deadlines_at_loading(original: Any) -> Any:
    """A lease older than the partition's opening never expires."""

    def load(*args: Any, **options: Any) -> Any:
        partition = original(*args, **options)
        last, next_deadline = partition.log.header.lease_number, partition.leases.next_deadline

        def newer() -> Any:
            deadline = next_deadline()
            return deadline if deadline is None or deadline[1] > last else None

        partition.leases.next_deadline = newer
        return partition

    return load


@bug(queries, "load")
def forgets_what_is_scheduled_at_loading(original: Any) -> Any:
    """An item scheduled before the partition's opening never becomes due."""

    def load(*args: Any, **options: Any) -> Any:
        partition = original(*args, **options)
        partition.log.due_times.clear()
        return partition

    return load


@bug(queries, "_load_line")
def loads_the_line_in_another_order(original: Any) -> Any:
    """Extents are loaded in the order of their keys as text: 10 before 9."""
    return lambda partition, records: original(partition, sorted(records, key=lambda record: str(record[0])))


# ---- leases and dispositions -----------------------------------------------------------------------------------------


@bug(LeaseColumns, "end")
def finds_packed_leases_that_are_over(original: Any) -> Any:
    """A packed lease that has ended is there still."""

    def end(self: Any, row: int) -> None:
        self.live -= 1

    return end


@bug(LeaseColumns, "extend")
def extends_no_packed_lease(original: Any) -> Any:
    """A packed lease that is extended expires at its former deadline."""
    return lambda self, row, deadline: None


@bug(LeaseTable, "unpack")
def forgets_what_is_settled_of_packed_leases(original: Any) -> Any:
    """What is settled or staged of a packed lease is forgotten."""
    return lambda self, number: self.find(number)


@bug(SegmentLog, "append_rows")
def does_not_count_an_attempt(original: Any) -> Any:
    """An item that is put back keeps its former attempts."""
    return lambda self, blob, rows, attempts, *rest: original(self, blob, rows, max(0, attempts - 1), *rest)


@bug(Partition, "_put_back")
def allows_one_attempt_more(original: Any) -> Any:
    """`max_attempts` is off by one."""

    def put_back(self: Any, *args: Any) -> Any:
        self.max_attempts += bool(self.max_attempts)
        try:
            return original(self, *args)
        finally:
            self.max_attempts -= bool(self.max_attempts)

    return put_back


@bug(Partition, "_due_at")
def retries_at_once(original: Any) -> Any:
    """The delay of a retry is ignored."""
    return lambda self, disposition, attempts, now: now


@bug(Partition, "extend")
def does_not_write_an_extension(original: Any) -> Any:
    """A new deadline is in memory only."""

    def extend(self: Any, lease: Any, deadline: int) -> None:
        original(self, lease, deadline)
        self.log.touched.pop((RecordKind.LEASE, lease.number), None)

    return extend


@bug(Partition, "_close")
def does_not_write_what_is_settled(original: Any) -> Any:
    """The bitmap of a partly settled lease is in memory only."""

    def shut(self: Any, lease: Any, positions: Any) -> None:
        original(self, lease, positions)
        self.log.touched.pop((RecordKind.LEASE, lease.number), None)

    return shut


@bug(Partition, "_run_out")
def completes_what_has_expired(original: Any) -> Any:
    """An expiring lease applies its staged dispositions and completes the rest."""

    def run_out(self: Any, lease: Any, now: int, _back: Any) -> int:
        items: int = lease.open
        self.close_lease(lease, now, Settled())
        return items

    return run_out


@bug(Partition, "close_lease")
def forgets_staged_dispositions(original: Any) -> Any:
    """Closing a lease completes all of it, staged items included."""

    def close_lease(self: Any, lease: Any, *rest: Any) -> Any:
        lease.staged = {}
        return original(self, lease, *rest)

    return close_lease


@bug(Partition, "_dead_letter")
def drops_the_dead(original: Any) -> Any:
    """A dead item does not reach the dead queue."""

    def die(self: Any, lease: Any, positions: Any, reason: str) -> None:
        self.log.header.dead += len(positions)

    return die


@bug(Partition, "_dead_letter")
def does_not_count_the_dead(original: Any) -> Any:
    """Without a dead queue, dead items are missing from the counters."""

    def die(self: Any, lease: Any, positions: Any, reason: str) -> None:
        if self.keeps_dead:
            original(self, lease, positions, reason)

    return die


@bug(dead_letters, "dead_rows")
def stamps_each_transfer(original: Any) -> Any:
    """A repeated transfer has other headers, so the dead queue takes it for another body."""
    times = count()
    return lambda source, reason, *rest: original(source, f"{reason} at {next(times)}", *rest)


# ---- keys -----------------------------------------------------------------------------------------------------


@bug(KeyMemory, "remember")
def does_not_write_keys(original: Any) -> Any:
    """An idempotency key is in memory only."""

    def remember(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.touched.clear()

    return remember


@bug(KeyMemory, "remember")
def remembers_one_key_of_a_group(original: Any) -> Any:
    """A new key of a group evicts the others."""

    def remember(self: Any, key: Any, *rest: Any, **options: Any) -> None:
        record = self.records.get(f"g{key.group}")
        if record is not None:
            record.seen.clear()
        original(self, key, *rest, **options)

    return remember


@bug(Partition, "_repeat")
def takes_any_body_for_the_first(original: Any) -> Any:
    """A different body under a known key is answered as its repetition."""
    return lambda self, key, seen, digest: original(self, key, seen, seen.digest)


@bug(KeyMemory, "find")
def lets_a_sequence_go_back(original: Any) -> Any:
    """A group's lower sequence is accepted, and its keys count."""

    def find(self: Any, key: Any, *role: Any) -> Any:
        record = self.records.get(f"g{key.group}")
        if key.group is not None and record is not None and key.sequence < record.sequence:
            return None
        return original(self, key, *role)

    return find


# ---- store ----------------------------------------------------------------------------------------------------


@bug(Flight, "outcome")
def says_done_before_it_is_durable(original: Any) -> Any:
    """A commit counts as done once written, even if a power loss takes it."""
    return lambda self: Outcome.DONE if self._written else original(self)


@bug(Store, "_land")
def tears_a_change_set(original: Any) -> Any:
    """Now and then only half of a change set lands."""

    def land(self: Any, changes: Any) -> None:
        if changes.txn % 16 == 0:
            puts = dict(list(changes.puts.items())[::2])
            changes = replace(changes, puts=puts)
        original(self, changes)

    return land


@bug(Store, "write")
def lets_an_old_owner_write(original: Any) -> Any:
    """The fence is not checked inside the transaction."""

    def write(self: Any, changes: Any, fence: Any, *cycle: Any) -> Any:
        return original(self, changes, self.fence, *cycle) if changes.txn == self.txn + 1 else False

    return write


@bug(Store, "open")
def looks_before_it_shuts_out(original: Any) -> Any:
    """Opening a partition misses a write that is not yet durable and lands later."""

    def open_(self: Any, fence: Any) -> None:
        self.fence = fence

    return open_
