"""Owned queue (share): the logical queue of the partitions that one instance owns of a queue. Partitions come and go while it works."""

from __future__ import annotations

from collections.abc import Iterable

from sluiceway.core.partition.partition import Partition
from sluiceway.core.queue.logical_queue import LogicalQueue
from sluiceway.core.queue.partition_executor import ExecutorState, PartitionExecutor, not_here
from sluiceway.core.queue.partition_load import Counts
from sluiceway.core.queue.queue_history import Tallies
from sluiceway.core.queue.scaling_policy import Average, Meter
from sluiceway.core.queue.tickets import Ticket, TransferEnd
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.peers import Load
from sluiceway.model.queue_minutes import Tally
from sluiceway.model.requests import Produce


class OwnedQueue(LogicalQueue):
    """A logical queue over the owned partitions. It refuses requests for others with `not_here`.

    For `takeover_grace` after a partition was gained, no lease in it runs out.
    """

    def __init__(self, incarnation: str, lease_timeout: Millis, takeover_grace: Millis = 0) -> None:
        super().__init__(incarnation, (), lease_timeout)
        self._takeover_grace = takeover_grace
        self._graces: dict[int, Millis] = {}
        self._incarnation = incarnation
        self._meter, self._queued, self.busy = Meter(), Average(), 0
        """`busy`: its last judged load, in thousandths of its instance's capacity."""
        self._tallies = Tallies()
        self._openings: dict[int, int] = {}
        """The last opening of each partition it had: under one grant a number is never reused."""

    # ---- gaining and losing partitions ------------------------------------------------------------------------

    def gain(self, number: int) -> None:
        """Add this partition; the next cycle opens it."""
        assert number not in self.executors, f"partition {number} is served already"
        executor = PartitionExecutor(number, self._incarnation, opening=self._openings.get(number, 0))
        self.index.add(executor)
        self._instruct(executor)

    def lose(self, number: int) -> bool:
        """Start nothing more in this partition. Returns whether it is gone; if not, it goes when its commit has ended, or with `drop`."""
        executor = self.executors.get(number)
        if executor is None:
            return True
        executor.leaving = True
        executor.touch()
        self._reroute_waiting(executor)
        self._refuse_leases(number)
        if executor.state is not ExecutorState.COMMITTING:
            self.drop(number)
        return number not in self.executors

    def drop(self, number: int) -> None:
        """Remove this partition. The outcome of a commit in flight will not be known."""
        executor = self.index.remove(number)
        if executor is None:
            return
        self._tallies.end(executor)
        if self.slots is not None:
            self.slots.drop(number)
        self._openings[number] = executor.opening
        self._graces.pop(number, None)
        executor.leaving = True
        self._reroute_waiting(executor)
        self._refuse_leases(number)
        answers, executor.answers = executor.answers, []
        for ticket, _ in answers:
            ticket.awaiting -= 1
            ticket.flying -= 1 if executor.flight_txn else 0
            if not ticket.done:
                if ticket.route is not None and ticket.route.only_intends:
                    ticket.error = not_here(number)
                else:
                    detail = f"partition {number} went to another instance while it was being written"
                    ticket.error = SluicewayError("outcome_unknown", detail)
                if not ticket.awaiting:
                    self._reply(ticket, ticket.ending(0))

    def _refuse_leases(self, number: int) -> None:
        """Refuse leases that wait only for that partition, so that their clients ask its new owner."""
        for ticket in [ticket for ticket in self.lease_scheduler.waiters.values() if ticket.lease_from == number]:
            self._reply(ticket, not_here(number))

    def withdraw(self, ticket: Ticket) -> bool:
        """Take back a lease that has been given nothing. False: it has, or it has ended, and its answer is on its way."""
        if ticket.number not in self.lease_scheduler.waiters:
            return False
        self._finish(ticket)
        return True

    def will_serve(self, ticket: Ticket) -> bool:
        """Whether a lease has been given items, or will be once executors here have committed, so that no other instance need be asked."""
        if ticket.number not in self.lease_scheduler.waiters:
            return True
        if self.circuit is not None and self.circuit.state != "closed":
            return False
        writing = (executor for executor in self.index.writing() if not (executor.degraded or executor.leaving))
        return sum(executor.servable for executor in writing) >= len(self.lease_scheduler.waiters)

    def _is_elsewhere(self, executor: PartitionExecutor | None, request: Produce) -> bool:
        if self._record is None or all(each.partition in self.executors for each in self._record.partitions):
            return False
        if executor is None:
            return True
        # The home of its key has moved away: the asking instance knows, or learns, where it is.
        moved = (
            request.key is not None
            and request.partition is None
            and executor.allows.produce
            and executor.partition.admission.refuses(request.key)
        )
        return executor.takes_work and moved

    def _has_healthy_other_than(self, home: PartitionExecutor | None) -> bool:
        # Partitions of other owners count as healthy.
        if super()._has_healthy_other_than(home):
            return True
        return self._record is not None and any(
            each.state == "available" and each.partition not in self.executors for each in self._record.partitions
        )

    # ---- events, which may come late --------------------------------------------------------------------------

    def opened(self, number: int, opening: int, loaded: Partition | Exception, now: Millis, final: bool = False) -> None:
        if number in self.executors:
            if isinstance(loaded, Partition) and self._takeover_grace:
                loaded.grace_until = self._graces.setdefault(number, now + self._takeover_grace)
            if isinstance(loaded, Partition) and opening == self.executors[number].opening:
                self._tallies.begin(number, loaded.log.header)
            super().opened(number, opening, loaded, now, final)

    def committed(self, number: int, opening: int, outcome: Outcome, now: Millis, *, at_once: bool = False) -> None:
        executor = self.executors.get(number)
        if executor is not None:
            super().committed(number, opening, outcome, now, at_once=at_once)
            if executor.leaving and executor.state is not ExecutorState.COMMITTING:
                self.drop(number)

    def transferred(self, number: int, lease: int, end: TransferEnd, now: Millis) -> None:
        if number in self.executors:
            super().transferred(number, lease, end, now)

    def give_back(self, number: int, lease: int) -> None:
        if number in self.executors:
            super().give_back(number, lease)

    def stop_executor(self, number: int, problem: str, now: Millis) -> None:
        if number in self.executors:
            super().stop_executor(number, problem, now)

    def retry_now(self, numbers: Iterable[int], now: Millis, *, anew: bool = False) -> None:
        super().retry_now([number for number in numbers if number in self.executors], now, anew=anew)

    # ---- queries ----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Items that a lease of another instance would get: none while leases wait here."""
        if "lease" in self.paused or any(ticket.lease_from is None for ticket in self.lease_scheduler.waiters.values()):
            return 0
        working = [executor for executor in self.executors.values() if executor.takes_work]
        ready = sum(executor.servable for executor in working)
        room = None if self.circuit is None else self.circuit.room
        ready = ready if room is None else min(ready, room)
        if self.slots is not None and self.slots.offers and not ready:
            # One that is fetched from here makes this instance ask for a quota.
            ready = min(1, sum(executor.leasable for executor in working))
        return ready if self.rate is None else min(ready, self.rate.offered)

    def load(self) -> Load:
        """The share's load, as reported to the other instances."""
        working = [] if "produce" in self.paused else [executor for executor in self.executors.values() if executor.takes_work]
        takes = (executor.has_or_will for executor in working if executor.takes_items and not executor.degraded)
        return Load(self.ready, min(takes, default=None), self.busy)

    def tally(self) -> Tally:
        """Its current levels, and its counts since it began."""
        return self._tallies.tally(self.executors.values())

    def measure(self, now: Millis) -> int:
        """Its work, as measured by `Meter`. Call about once a second."""
        headers = {executor.number: executor.partition.log.header for executor in self.executors.values() if executor.takes_work}
        done = {number: header.produced + header.leased + header.completed for number, header in headers.items()}
        return self._meter.note(now, self._tickets, done)

    def counts(self) -> dict[int, Counts]:
        """What each open partition has done since it was opened here, for its load."""
        working = ((executor, executor.partition.log.header) for executor in self.executors.values() if executor.takes_work)
        return {
            executor.number: Counts(executor.answered, header.produced + header.leased + header.completed, executor.written)
            for executor, header in working
        }

    @property
    def is_queued(self) -> bool:
        """Whether requests wait behind a commit in each partition that takes work."""
        working = self.index.working
        writing = [executor for executor in self.index.writing() if executor.takes_work]
        return 0 < working <= sum(bool(executor.waiting) for executor in writing)

    def note_queued(self, now: Millis, share: int) -> int:
        """Record that it was `is_queued` for `share` thousandths of the time since the last call. Returns the average."""
        return self._queued.note(now, share)
