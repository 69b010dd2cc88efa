"""A lane: one partition as a logical queue sees it, with at most one storage transaction in flight.

What arrives meanwhile waits and shares the next transaction, and a slow partition holds up nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sluiceway.core.distribution import Candidate, most_together
from sluiceway.core.inspecting import why_left
from sluiceway.core.looking import lives_of, open_slices, stats_of
from sluiceway.core.partition import Partition
from sluiceway.core.parts import DeletePart, ExtendPart, SettlePart, Work
from sluiceway.core.records import LeaseState
from sluiceway.core.states import Allows, ShownState
from sluiceway.core.tickets import Answer, Grant, KeysTaken, Rebalancing, TakeOut, Ticket, Transfer, TransferBegun
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId, LeaseId
from sluiceway.kernel.limits import BLOB_BYTES, MAX_ITEMS_ARROW, MAX_LEASE_BYTES
from sluiceway.model.inspection import Deleted
from sluiceway.model.peers import GiveKeys, KeysGiven, Shut, Shutted, TakeKeys
from sluiceway.model.queue import PartitionState
from sluiceway.model.requests import (
    Clear,
    Cleared,
    Extended,
    Fate,
    IgnoredReason,
    LeaseInfo,
    PartitionStats,
    Produce,
    Produced,
    Settled,
)

LONGEST_SAMPLE = 2_000
"""Milliseconds. A commit that took longer counts as this in the average, so that a partition that hung for a minute recovers in seconds."""

SOON = 25
"""Milliseconds. Where commits take longer, nobody waits for one to end to share the next, while another partition is idle."""

SHARED = 64
"""Requests that may share a transaction where none that hangs would do so by itself."""

SLOWER = 4
"""Times. Nobody goes where commits take so much longer than in another partition, to share one of them."""


def not_here(partition: int | None) -> SluicewayError:
    """What is told of a partition that another instance owns; None: of any that could take the request."""
    which = "the partition that takes it" if partition is None else f"partition {partition}"
    return SluicewayError("not_here", f"{which} is owned by another instance")


class LaneState(Enum):
    OPENING = "opening"
    READY = "ready"
    COMMITTING = "committing"
    FAILED = "failed"
    """To be opened again at `retry_at`."""
    STOPPED = "stopped"
    """Damaged, or owned by another: needs a person, or another owner."""


@dataclass(slots=True, eq=False)
class Lane:
    number: int
    incarnation: str
    state: LaneState = LaneState.FAILED
    partition: Partition = field(default_factory=Partition)
    opening: int = 0
    retry_at: Millis = 0
    failures: int = 0
    failed_in_a_row: int = 0
    problem: str = ""
    waiting: list[tuple[Ticket, Work]] = field(default_factory=list)
    answers: list[tuple[Ticket, Answer]] = field(default_factory=list)
    """Of the turn that is being put together, and then of the commit in flight."""
    flight_txn: int = 0
    transferred: list[int] = field(default_factory=list)
    called_back: list[int] = field(default_factory=list)
    """Transfers that have nowhere to go."""
    transferring: int | None = None
    transfer_at: Millis = 0
    given_back: list[int] = field(default_factory=list)
    """Leases whose clients went away before they were told."""
    committing_since: Millis = 0
    commit_time: float = 0.0
    """Moving average, ms."""
    at_once: bool = False
    """The next commit, if it is small, is made while nothing else happens: one that hangs holds up all lanes."""
    degraded: bool = False
    """Far slower than the others. Judged by the logical queue, which knows them."""
    probe_at: Millis = 0
    last_produced: int = 0
    last_leased: int = 0
    accepted: int = 0
    """Items of produces that wait in the lane, and ..."""
    accepted_bytes: int = 0
    """... their bytes."""
    leaving: bool = False
    """It goes to another owner as soon as its commit has ended."""
    recorded: PartitionState = "available"
    allows: Allows = field(default_factory=Allows)
    """What the queue's record says that it may be asked for."""
    turned_away: list[Ticket] = field(default_factory=list)
    """Produces that the partition refused in the turn that is being put together: they look elsewhere, or wait."""
    touched: set[int] = field(default_factory=set)
    """The lanes of the logical queue in which something has changed."""

    def touch(self) -> None:
        """Something has changed here, or in the partition: whoever changes it says so."""
        self.touched.add(self.number)

    @property
    def takes_work(self) -> bool:
        """Open: a request may wait here for the next transaction."""
        return self.state in (LaneState.READY, LaneState.COMMITTING) and not self.leaving

    def takes(self, work: Work) -> bool:
        """This may wait here for the next transaction."""
        return self.takes_work and not (isinstance(work, TakeOut) and work.opening not in (None, self.opening))

    def takes_produce(self, request: Produce) -> bool:
        """That produce may wait here. Items that are moved may whatever the record says: see `Gate.refuses`."""
        return self.takes_work and (self.allows.produce or bool(request.lives)) and not self.partition.refuses(request.key)

    @property
    def takes_items(self) -> bool:
        """A produce that any partition may take may wait here."""
        return self.takes_work and self.allows.produce and not self.partition.header.shut

    @property
    def has_or_will(self) -> int:
        """Ready items, and those of produces that it has accepted and not committed yet."""
        return self.partition.ready_count + self.accepted

    def together(self, requests: int) -> int:
        """How many requests may share a transaction here, of so many that are under way: who is in one that hangs waits for it."""
        if self.degraded:
            return 1
        most = most_together(requests)
        # One that is under way while this is asked is not made at once.
        return max(most, min(requests, SHARED)) if self.at_once and self.state is LaneState.READY else most

    def shares(self, nbytes: int, requests: int, now: Millis) -> bool:
        """Whether a produce of so many bytes would share a transaction that comes here anyway and soon. `requests`: under way in all."""
        most = self.together(requests)
        # Of two calls one would only wait for the other.
        comes = bool(self.waiting) if self.state is LaneState.READY else most > 1 and self.slowness(now) <= SOON
        fits = len(self.waiting) < most and self.accepted_bytes + nbytes <= BLOB_BYTES
        return comes and fits and self.takes_items

    @property
    def servable(self) -> int:
        """Ready items that may be leased."""
        return self.partition.ready_count if self.allows.lease else 0

    def candidate(self) -> Candidate:
        """How it compares with others as one that takes a produce."""
        partition = self.partition
        claimed = partition.leased_count + partition.scheduled_count
        return Candidate(self.has_or_will, claimed, self.last_produced, self.number)

    def wakes_at(self) -> Millis | None:
        """When a turn has something to do here, if nothing happens: a moment that is over where it has that now."""
        if self.state is LaneState.FAILED:
            return self.retry_at
        if self.state is not LaneState.READY:
            return None
        partition = self.partition
        if self.waiting or self.transferred or self.called_back or self.given_back or partition.is_changed:
            return 0
        timer = partition.next_timer()
        if not partition.transfers or self.transferring in partition.transfers:
            return timer
        return self.transfer_at if timer is None else min(timer, self.transfer_at)

    def slowness(self, now: Millis) -> float:
        """Milliseconds that a commit takes: on average, or so far."""
        return max(self.commit_time, now - self.committing_since) if self.state is LaneState.COMMITTING else self.commit_time

    def is_slower(self, other: Lane, now: Millis) -> bool:
        """Whether a commit that is under way here takes so much longer than one there that it is not worth to wait for it."""
        return self.state is LaneState.COMMITTING and self.slowness(now) > SLOWER * max(1, other.commit_time)

    def sample(self, now: Millis) -> None:
        """A commit has ended, one way or the other."""
        self.touch()
        took = min(LONGEST_SAMPLE, now - self.committing_since)
        self.commit_time += 0.3 * (took - self.commit_time)

    def unavailable(self) -> SluicewayError:
        """Why the lane takes no work."""
        if self.leaving:
            # Not `not_here`: what the request asks of other partitions may have been done.
            return SluicewayError("unavailable", f"partition {self.number} goes to another instance")
        if self.state is LaneState.STOPPED:
            return SluicewayError("partition_damaged", f"partition {self.number} is stopped: {self.problem}")
        return SluicewayError("unavailable", f"partition {self.number} is not available: {self.problem or 'it is being opened'}")

    def grant(self, number: int, count: int, deadline: Millis) -> Grant:
        """The lease of that number as it is given to a waiter."""
        return Grant(LeaseInfo(self.number, number, count, deadline), open_slices(self.partition.leases[number]))

    def stats(self) -> PartitionStats:
        stats = stats_of(self.partition, self.number)
        stats.failures = self.failures
        stats.state = self.shown
        stats.commit_time = self.commit_time
        stats.degraded = self.degraded
        return stats

    @property
    def shown(self) -> ShownState:
        """The state of the partition as users see it."""
        if self.state is LaneState.STOPPED:
            return "error"
        return self.recorded if self.takes_work else "unavailable"

    def put(self, ticket: Ticket, work: Work) -> None:
        self.touch()
        self.waiting.append((ticket, work))
        ticket.awaiting += 1
        if isinstance(work, Produce):
            self.accepted += work.batch.num_rows
            self.accepted_bytes += work.batch.nbytes

    def take_back(self) -> list[tuple[Ticket, Work]]:
        """Give up all that waits and is not in flight."""
        self.touch()
        given, self.waiting, self.accepted, self.accepted_bytes = self.waiting, [], 0, 0
        for ticket, _ in given:
            ticket.awaiting -= 1
        return given

    def take_back_produces(self, *, keyed: bool = False) -> list[tuple[Ticket, Produce]]:
        """Give up the produces that wait and may go elsewhere; `keyed`: those with a key, too."""
        self.touch()
        given = [(ticket, work) for ticket, work in self.waiting if isinstance(work, Produce) and (keyed or work.key is None)]
        self.waiting = [pair for pair in self.waiting if not isinstance(pair[1], Produce) or not (keyed or pair[1].key is None)]
        for ticket, work in given:
            ticket.awaiting -= 1
            self.accepted -= work.batch.num_rows
            self.accepted_bytes -= work.batch.nbytes
        return given

    def start_transfer(self, now: Millis) -> Transfer | None:
        """One transfer at a time, in the order of their numbers: the dead queue remembers only the last."""
        transfers = self.partition.transfers
        if self.transferring is not None and self.transferring not in transfers:
            self.transferring = None
        if self.state is not LaneState.READY or not transfers or self.transferring is not None or self.transfer_at > now:
            return None
        self.touch()
        number, lease = next(iter(transfers.items()))
        self.transferring = number
        moves_to = lease.moves_to
        lives = () if moves_to is None else lives_of(lease)
        return Transfer(self.number, number, lease.transfer or "", open_slices(lease), lease.target, moves_to, lives)

    def is_due(self, now: Millis) -> bool:
        """A timer of the partition has something to do."""
        timer = self.partition.next_timer()
        return timer is not None and timer <= now

    def work(self, now: Millis, timers: int) -> None:
        """Apply what time and the clients ask, in the order: timers, settled transfers, settles, produces, seals."""
        partition = self.partition
        partition.tick(now, timers)
        for number in self.transferred:
            partition.transferred(number)
        for number in self.called_back:
            partition.call_back(number)
        for number in self.given_back:
            lease = partition.leases.get(number)
            if lease is not None:
                partition.release(lease, now, Settled())
        self.transferred, self.called_back, self.given_back = [], [], []
        waiting, self.waiting, self.accepted, self.accepted_bytes = self.waiting, [], 0, 0
        for ticket, work in sorted(waiting, key=lambda pair: _rank(pair[1])):
            if ticket.done:
                ticket.awaiting -= 1
                continue
            if isinstance(work, Produce) and partition.refuses(work.key):
                ticket.awaiting -= 1
                self.turned_away.append(ticket)
                continue
            try:
                self.answers.append((ticket, self._apply(work, now)))
            except SluicewayError as error:
                self.answers.append((ticket, error))

    def _apply(self, work: Work, now: Millis) -> Answer:
        if isinstance(work, Produce):
            first, count, repeated, partition = self.partition.produce(work.batch, now, work.key, work.lives)
            return Produced(self.number if partition is None else partition, first, count, repeated)
        if isinstance(work, SettlePart):
            return self._settle(work, now)
        if isinstance(work, Clear):
            return Cleared(*self.partition.clear(work.ready, work.scheduled, now))
        if isinstance(work, TakeOut):
            return TransferBegun(self.number, *self.partition.redrive(work.offsets, work.target, now))
        if isinstance(work, DeletePart):
            return self._delete(work, now)
        if isinstance(work, ExtendPart):
            return self._extend(work)
        return self._rebalance(work, now)

    def _rebalance(self, work: Rebalancing, now: Millis) -> Answer:
        partition = self.partition
        if isinstance(work, Shut):
            partition.shut(work.shutting, work.cursor)
            return self._shutted()
        if isinstance(work, GiveKeys):
            return KeysGiven(self.number, partition.give_keys(work.slots, work.of, work.cursor, self.number))
        if isinstance(work, TakeKeys):
            partition.take_keys(work.slots, work.of, work.cursor, work.keys)
            return KeysTaken(self.number, len(work.keys or ()))
        partition.follow_cursor(work.cursor)
        limit = min(work.limit, MAX_ITEMS_ARROW)
        return TransferBegun(self.number, *partition.move_out(limit, MAX_LEASE_BYTES, work.target, work.scheduled, now))

    def _shutted(self) -> Shutted:
        stats = stats_of(self.partition, self.number)
        moving = sum(lease.open for lease in self.partition.transfers.values() if lease.moves_to is not None)
        return Shutted(self.partition.shutting, stats.ready, stats.leased_now, stats.scheduled, stats.transferring, moving)

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
        for number, lease in leases.items():
            self.partition.extend(lease, part.deadline)
            result.leases.append(LeaseInfo(self.number, number, lease.open, part.deadline))
        return result

    def _delete(self, part: DeletePart, now: Millis) -> Deleted:
        dropped = set(self.partition.drop(part.offsets, now).tolist())
        left = (offset for offset in part.offsets.tolist() if offset not in dropped)
        return Deleted(
            len(dropped), [(str(ItemId(self.incarnation, self.number, offset)), why_left(self.partition, offset)) for offset in left]
        )

    def _settle(self, part: SettlePart, now: Millis) -> Settled:
        result = Settled()
        for selection in part.selections:
            if selection.lease is not None:
                self._settle_lease(selection.lease, selection.fate, part.client_id, now, result)
            elif selection.offsets is not None:
                ignored = self.partition.settle_offsets(selection.offsets, selection.fate, now, part.stage, result, part.client_id)
                result.ignored += self._named(ignored)
        return result

    def _settle_lease(self, number: int, fate: Fate, client_id: str | None, now: Millis, result: Settled) -> None:
        found = self.partition.lease_of(number, client_id)
        if isinstance(found, str):
            result.ignored.append((self._lease_name(number), found))
        elif fate.verdict == "release":
            self.partition.release(found, now, result)
        else:
            self.partition.close_lease(found, now, result)

    def _named(self, ignored: list[tuple[int, IgnoredReason]]) -> list[tuple[str, IgnoredReason]]:
        return [(str(ItemId(self.incarnation, self.number, offset)), why) for offset, why in ignored]

    def _lease_name(self, number: int) -> str:
        return str(LeaseId(self.incarnation, self.number, number))


def _rank(work: Work) -> int:
    """Settling first frees room and items before new ones come; and what is sealed must be empty when all else is done."""
    if isinstance(work, Shut) and work.shutting == "sealed":
        return 2
    return int(isinstance(work, Produce))
