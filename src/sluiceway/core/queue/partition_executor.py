"""Partition executor: one partition of a logical queue, with at most one storage transaction in flight.

Requests that arrive meanwhile wait and share the next transaction. A slow partition delays no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec
import numpy as np

from sluiceway.contract.item_answers import IgnoredReason, LeftReason
from sluiceway.contract.queue_stats import PartitionStats
from sluiceway.contract.rebalances import PartitionState
from sluiceway.core.partition.compaction import Compaction, compactions
from sluiceway.core.partition.item_listing import why_left
from sluiceway.core.partition.partition import Intended, Partition, Placed
from sluiceway.core.partition.partition_states import Allows, ShownState
from sluiceway.core.partition.queries import lives_of, open_slices, stats_of
from sluiceway.core.partition.records import LeaseState, to_array
from sluiceway.core.partition.slot_contents import slot_contents
from sluiceway.core.queue.distribution import Candidate, transaction_limit
from sluiceway.core.queue.request_split import DeletePart, ExtendPart, RunNowPart, SettlePart, Work
from sluiceway.core.queue.tickets import (
    Answer,
    Compact,
    Compacted,
    ForgetAnswers,
    Grant,
    KeysTaken,
    Rebalancing,
    Route,
    TakeOut,
    Ticket,
    Transfer,
    TransferBegun,
    TransferEnd,
)
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId, LeaseId
from sluiceway.kernel.limits import BLOB_BYTES, MAX_ITEMS_ARROW, MAX_LEASE_BYTES
from sluiceway.model.inspection import Deleted, MadeReady
from sluiceway.model.peers import GiveKeys, KeysGiven, NoteKeys, ServeSlots, Shut, Shutted, TakeKeys
from sluiceway.model.requests import (
    Clear,
    Cleared,
    CountBundles,
    Disposition,
    Extended,
    LeaseInfo,
    Offsets,
    Produce,
    Produced,
    Settled,
)

LONGEST_SAMPLE = 2_000
"""Milliseconds. Cap on a commit's time in the average, so that a partition that hung for a minute recovers in seconds."""

SOON = 25
"""Milliseconds. Where commits take longer, no request waits for one to share the next while another partition is idle."""

SHARED = 64
"""Requests that may share a transaction committed inline: if it hangs, it holds up all executors anyway."""

SLOWER = 4
"""Times. No produce joins an executor whose commits take this much longer than another's, in order to share one."""


TRANSFERS_AT_ONCE = 16
"""Concurrent transfers of one partition. Their rows are in memory while they are sent, and each has another target."""

REDIRECTED_AT_ONCE = 1_000
"""Transfers redirected in one scheduling cycle."""


def gone_elsewhere(partition: int | None) -> SluicewayError:
    """The error for a part of a call whose keys go from that partition to others."""
    return SluicewayError("not_here", f"keys of the items move from partition {partition} to others")


def not_here(partition: int | None) -> SluicewayError:
    """The error for a partition that another instance owns; None: for any partition that could take the request."""
    which = "the partition that takes it" if partition is None else f"partition {partition}"
    return SluicewayError("not_here", f"{which} is owned by another instance")


class ExecutorState(Enum):
    OPENING = "opening"
    READY = "ready"
    COMMITTING = "committing"
    FAILED = "failed"
    """To be reopened at `retry_at`."""
    STOPPED = "stopped"
    """Damaged, or owned by another instance: needs an operator, or another owner."""


@dataclass(slots=True, eq=False)
class PartitionExecutor:
    """One partition's queue of requests, state, and commit in flight."""

    number: int
    incarnation: str
    state: ExecutorState = ExecutorState.FAILED
    partition: Partition = field(default_factory=Partition)
    opening: int = 0
    retry_at: Millis = 0
    failures: int = 0
    failed_in_a_row: int = 0
    problem: str = ""
    knows_keys: bool = False
    """The lease keys in `partition` describe the store even while the executor is closed: no other instance writes there."""
    waiting: list[tuple[Ticket, Work]] = field(default_factory=list)
    answers: list[tuple[Ticket, Answer]] = field(default_factory=list)
    """Answers of the scheduling cycle under way, then of the commit in flight."""
    flight_txn: int = 0
    transferred: list[int] = field(default_factory=list)
    called_back: list[int] = field(default_factory=list)
    """Transfers whose target no longer exists."""
    redirected: dict[int, str] = field(default_factory=dict)
    """Transfers that their target never takes, each with the queue that is to take them."""
    bound: dict[int, str] = field(default_factory=dict)
    """Redrives, each with its target's incarnation, which was not recorded yet."""
    transferring: dict[str, int] = field(default_factory=dict)
    """The transfer in progress, by target."""
    transfer_at: dict[str, Millis] = field(default_factory=dict)
    """Retry time of targets that did not take a transfer."""
    given_back: list[int] = field(default_factory=list)
    """Leases whose clients disconnected before they received them, or that could not be handed out."""
    returning: list[int] = field(default_factory=list)
    """Those of them whose return is in the transaction under way."""
    committing_since: Millis = 0
    commit_time: float = 0.0
    """Moving average, ms."""
    at_once: bool = False
    """The next commit, if small, runs inline: while it hangs, all executors wait."""
    degraded: bool = False
    """Far slower than the others. Set by the logical queue, which compares them."""
    probe_at: Millis = 0
    last_produced: int = 0
    last_leased: int = 0
    last_timed: int = 0
    """When its timers last ran, on the counter used by `last_produced`."""
    accepted: int = 0
    """Items of the produces waiting in the executor."""
    accepted_bytes: int = 0
    """Bytes of the produces waiting in the executor."""
    room: int | None = None
    """Bytes that produces may still add on a disk that is low; None: unlimited."""
    quota: int | None = None
    """Items that may be leased at once, of the queue's concurrency; None: any number."""
    durable_leased: int = 0
    """Items leased as of the last commit that has landed: a commit in flight that returns some may fail."""
    answered: int = 0
    """Requests that commits have carried, for its load."""
    written: int = 0
    """Bytes of the blobs in these commits."""
    coming: int = 0
    """Items reserved by key homes whose intents, still being written, name this partition."""
    leaving: bool = False
    """It moves to another owner as soon as its commit has ended."""
    recorded: PartitionState = "available"
    allows: Allows = field(default_factory=Allows)
    """Operations that the queue's record permits."""
    refused: list[Ticket] = field(default_factory=list)
    """Produces that the partition refused in this cycle: they try elsewhere, or wait."""
    touched: set[int] = field(default_factory=set)
    """Changed executors of the logical queue."""

    def touch(self) -> None:
        """Mark the executor as changed. Every change here or in the partition must call this."""
        self.touched.add(self.number)

    @property
    def takes_work(self) -> bool:
        """Open: requests may wait here for the next transaction."""
        return self.state in (ExecutorState.READY, ExecutorState.COMMITTING) and not self.leaving

    def takes(self, work: Work) -> bool:
        """Whether this work may wait here for the next transaction."""
        return self.takes_work and not (isinstance(work, TakeOut | Compact) and work.opening not in (None, self.opening))

    def may_hold(self, name: tuple[str, str]) -> bool:
        """Whether live leases under this (client, lease key) may turn up when the partition opens (again).

        False for an open one, whose leases are known. A preparing partition never gave any, and those of a stopped one are lost.
        """
        return self.is_away and (self.leaving or not self.knows_keys or self.partition.may_hold(name))

    @property
    def is_away(self) -> bool:
        """Closed, and will reopen with its contents."""
        return not self.takes_work and self.state is not ExecutorState.STOPPED and self.recorded != "preparing"

    def takes_produce(self, request: Produce) -> bool:
        """Whether that produce may wait here. Moved items may, whatever the record says: see `Admission.refuses`."""
        allowed = self.allows.produce or bool(request.lives)
        return (
            self.takes_work
            and allowed
            and (self.has_room or not request.batch.num_rows)
            and not self.partition.admission.refuses(request.key, request.part)
        )

    def gave_away(self, request: Produce) -> bool:
        """Whether keys of that part of a call are at home elsewhere, or will be: the call is to be divided again."""
        return self.takes_work and (self.recorded == "draining" or self.partition.admission.refuses(request.key, request.part))

    @property
    def has_room(self) -> bool:
        """Whether produces may add bytes."""
        return self.room is None or self.room > 0

    @property
    def takes_items(self) -> bool:
        """Whether a produce that any partition may take may wait here."""
        return self.takes_work and self.allows.produce and self.has_room and not self.partition.log.header.shut

    @property
    def has_or_will(self) -> int:
        """Ready items, plus those of accepted produces not committed yet, plus those reserved by intents."""
        return self.partition.log.ready_count + self.accepted + self.coming

    def reserve(self, items: int) -> None:
        """Add `items` (negative: subtract) to those expected by intents."""
        self.coming += items
        self.touch()

    def transaction_limit(self, requests: int) -> int:
        """Maximum number of the `requests` under way that may share a transaction here, since all would wait if it hangs."""
        if self.degraded:
            return 1
        most = transaction_limit(requests)
        # A request that is under way during this call is not made at once.
        return max(most, min(requests, SHARED)) if self.at_once and self.state is ExecutorState.READY else most

    def shares(self, nbytes: int, requests: int, now: Millis) -> bool:
        """Whether a produce of `nbytes` would share a transaction that comes here soon anyway. `requests`: total under way."""
        most = self.transaction_limit(requests)
        # With two calls, one would only wait for the other.
        comes = bool(self.waiting) if self.state is ExecutorState.READY else most > 1 and self.slowness(now) <= SOON
        fits = len(self.waiting) < most and self.accepted_bytes + nbytes <= BLOB_BYTES
        return comes and fits and self.takes_items

    @property
    def servable(self) -> int:
        """Ready items that may be leased."""
        return self.leasable if self.quota is None else min(self.leasable, self.slots_left)

    @property
    def leasable(self) -> int:
        """Ready items that could be leased if it were not for the queue's concurrency."""
        return self.partition.servable if self.allows.lease else 0

    @property
    def slots_left(self) -> int:
        """Items that may still be leased here, in a queue with a concurrency."""
        return 0 if self.quota is None else max(0, self.quota - self.partition.leased_count)

    def candidate(self) -> Candidate:
        """Its sort key among executors that could take a produce."""
        partition = self.partition
        claimed = partition.leased_count + partition.log.scheduled_count
        return Candidate(self.has_or_will, claimed, self.last_produced, self.number)

    def wakes_at(self) -> Millis | None:
        """Time at which a cycle next has work here without further events; 0 or a past time if it has work now."""
        if self.state is ExecutorState.FAILED:
            return self.retry_at
        if self.state is not ExecutorState.READY:
            return None
        partition = self.partition
        if self.has_work or partition.is_changed:
            return 0
        timer = partition.next_timer()
        free = self._free_targets() if partition.transfers.by_number else ()
        if not free:
            return timer
        at = min(self.transfer_at.get(target, 0) for target in free)
        return at if timer is None else min(timer, at)

    @property
    def has_work(self) -> bool:
        """Whether anything waits for the next cycle."""
        return bool(self.waiting or self.transferred or self.called_back or self.redirected or self.bound or self.given_back)

    def _free_targets(self) -> list[str]:
        """Targets with pending transfers and none in progress; empty while there are TRANSFERS_AT_ONCE."""
        transfers = self.partition.transfers.by_number
        busy = {target for target, number in self.transferring.items() if number in transfers}
        return [target for target in self.partition.transfers.by_target if target not in busy] if len(busy) < TRANSFERS_AT_ONCE else []

    def slowness(self, now: Millis) -> float:
        """Milliseconds that a commit takes: on average, or so far."""
        return max(self.commit_time, now - self.committing_since) if self.state is ExecutorState.COMMITTING else self.commit_time

    def is_slower(self, other: PartitionExecutor, now: Millis) -> bool:
        """Whether a commit under way here is too slow, compared with `other`, to be worth waiting for."""
        return self.state is ExecutorState.COMMITTING and self.slowness(now) > SLOWER * max(1, other.commit_time)

    def sample(self, now: Millis) -> None:
        """Record the end of a commit, whatever its outcome."""
        self.touch()
        took = min(LONGEST_SAMPLE, now - self.committing_since)
        self.commit_time += 0.3 * (took - self.commit_time)

    def unavailable(self) -> SluicewayError:
        """The error that explains why the executor takes no work."""
        if self.leaving:
            # Not `not_here`: the request's other partitions may have done their parts.
            return SluicewayError("unavailable", f"partition {self.number} is moving to another instance")
        if self.state is ExecutorState.STOPPED:
            return SluicewayError("partition_damaged", f"partition {self.number} is stopped: {self.problem}")
        return SluicewayError("unavailable", f"partition {self.number} is not available: {self.problem or 'it is being opened'}")

    def lease_info(self, lease: LeaseState) -> LeaseInfo:
        """A live lease as answers show it."""
        assert lease.deadline is not None, "a transfer is not a lease of a client"
        return LeaseInfo(self.number, lease.number, lease.open, lease.deadline)

    def grant(self, lease: LeaseState) -> Grant:
        """The grant of that lease for a waiter."""
        return Grant(self.lease_info(lease), open_slices(lease))

    def stats(self) -> PartitionStats:
        return msgspec.structs.replace(
            stats_of(self.partition, self.number),
            failures=self.failures,
            state=self.shown,
            commit_time_ms=round(self.commit_time, 3),
            degraded=self.degraded,
            next_offset=self.partition.log.header.next if self.takes_work else None,
        )

    @property
    def shown(self) -> ShownState:
        """The partition's state as shown to users."""
        if self.state is ExecutorState.STOPPED:
            return "error"
        return self.recorded if self.takes_work else "unavailable"

    def compactions(self) -> list[Compaction]:
        """The blobs worth compacting. Valid until the partition is reopened, since settlements may not land."""
        return compactions(self.partition) if self.takes_work else []

    def put(self, ticket: Ticket, work: Work) -> None:
        self.touch()
        self.waiting.append((ticket, work))
        ticket.awaiting += 1
        if isinstance(work, Produce) and not _only_intends(ticket):
            self.accepted += work.batch.num_rows
            self.accepted_bytes += work.batch.nbytes
            if self.room is not None:
                self.room -= work.batch.nbytes

    def take_back(self) -> list[tuple[Ticket, Work]]:
        """Give up all waiting work that is not in flight."""
        self.touch()
        given, self.waiting, self.accepted, self.accepted_bytes = self.waiting, [], 0, 0
        for ticket, _ in given:
            ticket.awaiting -= 1
        return given

    def take_back_produces(self, *, keyed: bool = False) -> list[tuple[Ticket, Produce]]:
        """Give up waiting produces that may go elsewhere; `keyed`: also those that only this partition can take."""
        self.touch()
        given, stay = [], []
        for ticket, work in self.waiting:
            if isinstance(work, Produce) and (keyed or work.key is None or ticket.route is not None):
                given.append((ticket, work))
            else:
                stay.append((ticket, work))
        self.waiting = stay
        for ticket, work in given:
            ticket.awaiting -= 1
            if not _only_intends(ticket):
                self.accepted -= work.batch.num_rows
                self.accepted_bytes -= work.batch.nbytes
        return given

    def start_transfers(self, now: Millis) -> list[Transfer]:
        """Start one transfer per target, in order of number: a target remembers only the last. A stuck target delays no other."""
        partition = self.partition
        if self.state is not ExecutorState.READY or not partition.transfers.by_number:
            return []
        present, incarnation = partition.dead_queue, partition.dead_incarnation
        if present is not None and partition.transfers.redirect_waiting(present, REDIRECTED_AT_ONCE, incarnation):
            self.touch()
            return []
        self.transferring = {target: number for target, number in self.transferring.items() if number in partition.transfers.by_number}
        self.transfer_at = {target: at for target, at in self.transfer_at.items() if target in partition.transfers.by_target}
        free = [target for target in self._free_targets() if self.transfer_at.get(target, 0) <= now]
        # Least recently tried first: unresponsive targets cannot occupy every slot.
        free.sort(key=lambda target: self.transfer_at.get(target, 0))
        started = free[: TRANSFERS_AT_ONCE - len(self.transferring)]
        if started:
            self.touch()
        return [self._start_transfer(target) for target in started]

    def _start_transfer(self, target: str) -> Transfer:
        partition = self.partition
        self.transferring[target] = number = next(iter(partition.transfers.by_target[target]))
        lease = partition.transfers.by_number[number]
        moves_to = lease.moves_to
        lives = () if moves_to is None else lives_of(lease, partition.log.bundles)
        dies = lease.transfer and moves_to is None and lease.target is not None
        instead = partition.dead_queue if dies and self._has_another_dead_queue(lease) else None
        # The texts name positions, the rows are the open ones of these.
        opens = to_array(lease.open_positions()) if lease.failures else None
        failures = [] if opens is None else [(opens.searchsorted(to_array(those)), text) for those, text in lease.failures]
        return Transfer(
            self.number,
            number,
            lease.transfer or "",
            open_slices(lease),
            lease.target,
            moves_to,
            lives,
            lease.target_incarnation,
            instead,
            failures,
        )

    def _has_another_dead_queue(self, transfer: LeaseState) -> bool:
        """Whether the queue's dead queue is another one than when the items died, perhaps one of the same name."""
        partition = self.partition
        former, present = transfer.target_incarnation, partition.dead_incarnation
        return transfer.target != partition.dead_queue or (former is not None and present is not None and former != present)

    def transfer_ended(self, number: int, end: TransferEnd, again_at: Millis) -> None:
        """Record the end of an attempt at that transfer; after a failure the target is retried at `again_at`."""
        self.touch()
        if end.nowhere:
            self.called_back.append(number)
        elif end.done:
            self.transferred.append(number)
        elif end.elsewhere is not None:
            self.redirected[number] = end.elsewhere
        elif end.bound is not None:
            self.bound[number] = end.bound
        else:
            for target in [target for target, each in self.transferring.items() if each == number]:
                del self.transferring[target]
                self.transfer_at[target] = again_at

    def _settle_transfers(self) -> None:
        """Apply the recorded ends of transfers."""
        partition = self.partition
        for number in self.transferred:
            partition.transfers.end(number)
        for number in self.called_back:
            partition.transfers.call_back(number)
        for number, target in self.redirected.items():
            known = partition.dead_incarnation if target == partition.dead_queue else None
            partition.transfers.redirect(number, target, known)
        for number, incarnation in self.bound.items():
            partition.transfers.bind(number, incarnation)
        # A bound transfer is sent as soon as the binding is durable.
        self.transferring = {target: number for target, number in self.transferring.items() if number not in self.bound}
        self.transferred, self.called_back, self.redirected, self.bound = [], [], {}, {}

    def is_due(self, now: Millis) -> bool:
        """Whether a timer of the partition is due."""
        timer = self.partition.next_timer()
        return timer is not None and timer <= now

    def run_timers(self, now: Millis, most: int) -> None:
        """Put back expired leases and due entries, up to `most`."""
        self.partition.tick(now, most)

    def work(self, now: Millis) -> None:
        """Apply the waiting work in order: ended transfers, settles, produces, seals. Its timers have run before."""
        partition = self.partition
        self._settle_transfers()
        self.returning, self.given_back = self.given_back, []
        for number in self.returning:
            lease = partition.leases.get(number)
            if lease is not None:
                partition.release(lease, now, Settled())
        waiting, self.waiting, self.accepted, self.accepted_bytes = self.waiting, [], 0, 0
        for ticket, work in sorted(waiting, key=lambda pair: _rank(pair[1])):
            if ticket.done:
                ticket.awaiting -= 1
                continue
            route = ticket.route
            at_target = route is not None and route.at_target
            if isinstance(work, Produce) and not at_target and partition.admission.refuses(work.key, work.part):
                ticket.awaiting -= 1
                self.refused.append(ticket)
                continue
            try:
                self.answers.append((ticket, self._apply(work, now) if route is None else self._apply_routed(work, route, now)))
            except SluicewayError as error:
                self.answers.append((ticket, error))

    def _apply(self, work: Work, now: Millis) -> Answer:
        if isinstance(work, Produce):
            if work.part is None:
                return self._produced(self.partition.produce(work.batch, now, work.key, work.lives, work.bundle))
            return self._produced(self.partition.produce_part(work.batch, now, work.key, work.part, work.bundle))
        if isinstance(work, SettlePart):
            return self._settle(work, now)
        if isinstance(work, Clear):
            return Cleared(*self.partition.clear(work.ready, work.scheduled, now))
        if isinstance(work, CountBundles):
            return self.partition.count_bundles(work)
        if isinstance(work, TakeOut):
            return self._take_out(work, now)
        if isinstance(work, Compact):
            return Compacted(self.number, self.partition.log.compact(work.blob, work.kept, work.nbytes, work.data))
        if isinstance(work, DeletePart):
            return self._delete(work, now)
        if isinstance(work, RunNowPart):
            found = self.partition.log.make_ready(work.offsets, now)
            return MadeReady(len(found), self._left(work.offsets, found))
        if isinstance(work, ExtendPart):
            return self._extend(work)
        return self._rebalance(work, now)

    def _apply_routed(self, work: Work, route: Route, now: Millis) -> Answer:
        """Apply a produce with a key, as the key's home or as the target of an intent."""
        assert isinstance(work, Produce)
        assert work.key is not None
        placed: Placed | Intended | None
        if route.at_target:
            placed = self.partition.produce_by_intent(work.batch, now, work.key, self.allows.produce, work.bundle)
        else:
            placed = self.partition.produce_by_home(work.batch, now, work.key, route.target, work.bundle)
        if placed is None:
            return Produced(self.number, 0, 0, False)
        if isinstance(placed, Intended):
            return placed
        return self._produced(placed)

    def _produced(self, placed: Placed) -> Produced:
        first, items, repeated, partition, runs, duplicates = placed
        told = tuple([(self.number if at is None else at, start, rows) for at, start, rows in runs]) if runs else ()
        return Produced(self.number if partition is None else partition, first, items, repeated, told, duplicates)

    def _rebalance(self, work: Rebalancing, now: Millis) -> Answer:
        partition = self.partition
        if isinstance(work, Shut):
            partition.admission.shut(work.shutting, work.cursor)
            return self._shutted()
        if isinstance(work, GiveKeys):
            return KeysGiven(self.number, partition.admission.give_keys(work.slots, work.of, work.cursor, self.number, work.piece))
        if isinstance(work, TakeKeys) and work.piece is not None:
            partition.admission.take_piece(work.slots, work.of, work.cursor, work.keys or {}, work.piece)
            return KeysTaken(self.number, len(work.keys or ()))
        if isinstance(work, TakeKeys):
            partition.admission.take_keys(work.slots, work.of, work.cursor, work.keys, now, waits=work.waits)
            return KeysTaken(self.number, len(work.keys or ()))
        if isinstance(work, NoteKeys):
            partition.admission.note_answers(work.keys)
            return KeysTaken(self.number, len(work.keys))
        if isinstance(work, ServeSlots):
            partition.admission.serve_slots(work.slots, work.cursor, now)
            return KeysTaken(self.number, len(work.slots))
        if isinstance(work, ForgetAnswers):
            partition.admission.forget_answers(work.names, work.cursor)
            return KeysTaken(self.number, len(work.names))
        partition.admission.follow_cursor(work.cursor)
        limit = min(work.limit, MAX_ITEMS_ARROW)
        slots = None if work.slots is None else frozenset(work.slots)
        return TransferBegun(self.number, *partition.transfers.move_out(limit, MAX_LEASE_BYTES, work.target, work.scheduled, now, slots))

    def _shutted(self) -> Shutted:
        stats = stats_of(self.partition, self.number)
        moving = sum(lease.open for lease in self.partition.transfers.by_number.values() if lease.moves_to is not None)
        keys = len(self.partition.keys.placed)
        busy, due, movable = slot_contents(self.partition.log, self.partition.transfers.by_number.values())
        shutting = self.partition.admission.shutting
        return Shutted(shutting, stats.ready, stats.total_leased, stats.scheduled, stats.transferring, moving, keys, movable, busy, due)

    def _extend(self, part: ExtendPart) -> Extended:
        result = Extended()
        leases: dict[int, LeaseState] = {}
        for number in part.numbers:
            found = self.partition.lease_of(number, part.client_id)
            if isinstance(found, str):
                result.ignored.append((self._lease_name(number), found))
            else:
                leases[number] = found
        if part.offsets is not None:
            ignored: list[tuple[int, IgnoredReason]] = []
            leases.update((lease.number, lease) for lease, _ in self.partition.in_leases(part.offsets, ignored, part.client_id))
            result.ignored += self._named(ignored)
        for lease in leases.values():
            self.partition.extend(lease, part.deadline)
            result.leases.append(self.lease_info(lease))
        return result

    def _delete(self, part: DeletePart, now: Millis) -> Deleted:
        self.partition.repeated.dropped()
        dropped = self.partition.log.drop(part.offsets, now)
        return Deleted(len(dropped), self._left(part.offsets, dropped))

    def _take_out(self, part: TakeOut, now: Millis) -> TransferBegun:
        number, taken = self.partition.transfers.redrive(part.offsets, part.target, now, part.incarnation, part.scheduled)
        if part.scheduled and len(taken):
            self.partition.repeated.dropped()
        # A redrive chose them itself, and asks for the rest again.
        return TransferBegun(self.number, number, len(taken), self._left(part.offsets, taken) if part.scheduled else ())

    def _left(self, offsets: Offsets, taken: Offsets) -> list[tuple[str, LeftReason]]:
        """The items among the offsets on which a call did not act, with the reasons."""
        left = np.setdiff1d(offsets, taken, assume_unique=True).tolist()
        return [(str(ItemId(self.incarnation, self.number, offset)), why_left(self.partition, offset)) for offset in left]

    def _settle(self, part: SettlePart, now: Millis) -> Settled:
        result = Settled()
        for selection in part.selections:
            if selection.lease is not None:
                self._settle_lease(selection.lease, selection.disposition, part.client_id, now, result)
            elif selection.offsets is not None:
                ignored = self.partition.settle_offsets(selection.offsets, selection.disposition, now, part.stage, result, part.client_id)
                result.ignored += self._named(ignored)
        return result

    def _settle_lease(self, number: int, disposition: Disposition, client_id: str | None, now: Millis, result: Settled) -> None:
        found = self.partition.lease_of(number, client_id)
        if isinstance(found, str):
            result.ignored.append((self._lease_name(number), found))
        elif disposition.verdict == "release":
            self.partition.release(found, now, result)
        else:
            self.partition.close_lease(found, now, result)

    def _named(self, ignored: list[tuple[int, IgnoredReason]]) -> list[tuple[str, IgnoredReason]]:
        return [(str(ItemId(self.incarnation, self.number, offset)), why) for offset, why in ignored]

    def _lease_name(self, number: int) -> str:
        return str(LeaseId(self.incarnation, self.number, number))


def _only_intends(ticket: Ticket) -> bool:
    return ticket.route is not None and ticket.route.only_intends


def _rank(work: Work) -> int:
    """Sort order of work: settling frees room and items for the others; a seal needs everything else done first."""
    if isinstance(work, Shut) and work.shutting == "sealed":
        return 2
    return int(isinstance(work, Produce))
