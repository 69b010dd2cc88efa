"""A lane: one partition as a logical queue sees it, with at most one storage transaction in flight.

What arrives meanwhile waits and shares the next transaction, and a slow partition holds up nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from sluiceway.core.looking import open_slices, stats_of
from sluiceway.core.partition import Partition
from sluiceway.core.tickets import Grant, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId, LeaseId
from sluiceway.model.requests import Extended, IgnoredReason, LeaseInfo, PartitionStats, Produce, Produced, Selection, Settled


class LaneState(Enum):
    OPENING = "opening"
    READY = "ready"
    COMMITTING = "committing"
    FAILED = "failed"
    """To be opened again at `retry_at`."""
    STOPPED = "stopped"
    """Damaged, or owned by another: needs a person, or another owner."""


class SettlePart(NamedTuple):
    selections: list[Selection]
    stage: bool


class ExtendPart(NamedTuple):
    numbers: list[int]
    deadline: Millis


Work = Produce | SettlePart | ExtendPart
Answer = Produced | Settled | Extended | Grant | SluicewayError


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
    transferring: int | None = None
    transfer_at: Millis = 0
    last_produced: int = 0
    last_leased: int = 0
    accepted: int = 0
    """Items of produces that wait in the lane."""

    @property
    def takes_work(self) -> bool:
        """Open: a request may wait here for the next transaction."""
        return self.state in (LaneState.READY, LaneState.COMMITTING)

    def unavailable(self) -> SluicewayError:
        """Why the lane takes no work."""
        if self.state is LaneState.STOPPED:
            return SluicewayError("partition_damaged", f"partition {self.number} is stopped: {self.problem}")
        return SluicewayError("unavailable", f"partition {self.number} is not available: {self.problem or 'it is being opened'}")

    def grant(self, number: int, count: int, deadline: Millis) -> Grant:
        """The lease of that number as it is given to a waiter."""
        return Grant(LeaseInfo(self.number, number, count, deadline), open_slices(self.partition.leases[number]))

    def stats(self) -> PartitionStats:
        stats = stats_of(self.partition, self.number)
        stats.failures = self.failures
        stats.state = "available" if self.takes_work else self.state.value
        return stats

    def put(self, ticket: Ticket, work: Work) -> None:
        self.waiting.append((ticket, work))
        ticket.awaiting += 1
        if isinstance(work, Produce):
            self.accepted += work.batch.num_rows

    def take_back(self) -> list[tuple[Ticket, Work]]:
        """Give up all that waits and is not in flight."""
        given, self.waiting, self.accepted = self.waiting, [], 0
        for ticket, _ in given:
            ticket.awaiting -= 1
        return given

    def work(self, now: Millis) -> None:
        """Apply what time and the clients ask, in the order: timers, settled transfers, settles, produces."""
        partition = self.partition
        partition.tick(now)
        for number in self.transferred:
            partition.transferred(number)
        self.transferred = []
        waiting, self.waiting, self.accepted = self.waiting, [], 0
        # Settling first frees room and items before new ones come.
        for ticket, work in sorted(waiting, key=lambda pair: isinstance(pair[1], Produce)):
            if ticket.done:
                ticket.awaiting -= 1
                continue
            try:
                self.answers.append((ticket, self._apply(work, now)))
            except SluicewayError as error:
                self.answers.append((ticket, error))

    def _apply(self, work: Work, now: Millis) -> Answer:
        if isinstance(work, Produce):
            return Produced(self.number, *self.partition.produce(work.batch, now, work.key))
        if isinstance(work, SettlePart):
            return self._settle(work, now)
        result = Extended()
        for number in work.numbers:
            lease = self.partition.extend(number, work.deadline)
            if lease is None:
                result.ignored.append((str(LeaseId(self.incarnation, self.number, number)), self.why_no_lease(number)))
            else:
                result.leases.append(LeaseInfo(self.number, number, lease.open, work.deadline))
        return result

    def _settle(self, part: SettlePart, now: Millis) -> Settled:
        result = Settled()
        for selection in part.selections:
            if selection.lease is not None:
                if not self.partition.close_lease(selection.lease, now, result):
                    name = str(LeaseId(self.incarnation, self.number, selection.lease))
                    result.ignored.append((name, self.why_no_lease(selection.lease)))
            elif selection.offsets is not None:
                ignored = self.partition.settle_offsets(selection.offsets, selection.fate, now, part.stage, result)
                result.ignored.extend((str(ItemId(self.incarnation, self.number, at)), why) for at, why in ignored)
        return result

    def why_no_lease(self, number: int) -> IgnoredReason:
        return "settled" if 0 < number <= self.partition.header.lease_number else "unknown"
