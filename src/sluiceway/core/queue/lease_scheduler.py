"""Lease scheduling: distributes ready items to waiting leases, and finds the leases that a lease key has taken before."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping

from sluiceway.contract.queue_settings import Verb
from sluiceway.core.queue.distribution import deal
from sluiceway.core.queue.executor_index import ExecutorIndex
from sluiceway.core.queue.partition_executor import ExecutorState, PartitionExecutor
from sluiceway.core.queue.tickets import Grant, Result, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_LEASE_BYTES
from sluiceway.model.requests import Lease, LeaseInfo

LEASE_PATIENCE = 1_000
"""Lease grace: milliseconds past its deadline that a lease waits for partitions that are writing, for their items or its own commit.

Without it a lease that does not wait would hardly ever get anything. What lands later is given back.
"""


class LeaseScheduler:
    """The leases of a logical queue: `waiters` have been given nothing yet."""

    def __init__(self, incarnation: str, partitions: Iterable[int], lease_timeout: Millis) -> None:
        self.index = ExecutorIndex(PartitionExecutor(number, incarnation) for number in partitions)
        self.executors = self.index.executors
        self.lease_timeout = lease_timeout
        self.paused: frozenset[Verb] = frozenset()
        self.waiters: dict[int, Ticket] = {}
        # Unanswered leases with a key, and those past their deadline, indexed to avoid scanning all waiters.
        self._keyed_leases: dict[int, Ticket] = {}
        self._late_leases: dict[int, Ticket] = {}
        # Numbers, not tickets: an answered ticket must not be kept, with its payload, until its deadline.
        self._deadlines: list[tuple[Millis, int]] = []
        self._choices = 0

    def _reply(self, ticket: Ticket, result: Result | SluicewayError) -> None:
        raise NotImplementedError

    # ---- keyed leases -----------------------------------------------------------------------------------------

    def _find_keyed(self, now: Millis) -> None:
        """Answer repeated keyed leases with the leases that they took before.

        An executor's leases are noted at a moment when all are durable. Busy executors never are at the same moment, so each is noted at
        its own.
        """
        keyed = [ticket for ticket in self._keyed_leases.values() if ticket.number in self.waiters]
        if not keyed:
            return
        held = {name for executor in self.executors.values() for name in executor.partition.by_key}
        for ticket in [ticket for ticket in keyed if ticket.key_name in held]:
            if self._hides_leases(ticket):
                continue
            found = self._keyed(ticket, now)
            ticket.found.update((grant.info[:2], grant) for executor, grant in found if executor.state is ExecutorState.READY)
            noted = [ticket.found.get(grant.info[:2]) for _, grant in found]
            grants = [grant for grant in noted if grant is not None]
            if grants and len(grants) == len(found):
                self._reply(ticket, grants)

    def _keyed(self, ticket: Ticket, now: Millis) -> list[tuple[PartitionExecutor, Grant]]:
        """The live leases under the ticket's key. Excludes those of stopped partitions, which cannot be read."""
        request = ticket.request
        assert isinstance(request, Lease)
        assert request.lease_key is not None
        return [
            (executor, executor.grant(lease.number, lease.open, lease.deadline))
            for executor in self._executors_for(ticket)
            if executor.state is not ExecutorState.STOPPED
            for lease in executor.partition.keyed(request.client_id, request.lease_key)
            if lease.deadline is not None and lease.deadline > now
        ]

    def _executors_for(self, ticket: Ticket) -> Collection[PartitionExecutor]:
        """The executors that may serve the lease."""
        only = ticket.lease_from
        return self.executors.values() if only is None else [self.executors[only]] if only in self.executors else []

    def _hides_leases(self, ticket: Ticket) -> bool:
        """Whether a closed partition that will reopen may hold live leases under the ticket's key, or is the only one that may serve it: an
        empty answer would wrongly say that there is nothing."""
        name = ticket.key_name
        if name is None:
            return False
        if ticket.lease_from is None:
            return any(executor.may_hold(name) for executor in self.index.closed())
        return any(executor.is_away for executor in self._executors_for(ticket))

    # ---- distribution -----------------------------------------------------------------------------------------

    def _deal(self, now: Millis) -> None:
        """Serve waiters from executors with ready items: each executor once per round, one executor per waiter where that suffices."""
        if not self.waiters or "lease" in self.paused:
            return
        sources: list[PartitionExecutor] = []
        groups, anywhere = self._grouped(sources, now)
        first: dict[int, LeaseInfo] = {}
        for number, group in groups.items():
            executor = self.executors[number]
            shares = deal(executor.partition.ready_count, [ticket.request.batch_size for ticket in group])  # type: ignore[union-attr]
            for ticket, share in zip(group, shares, strict=True):
                info = self._lease(executor, ticket, share, now)
                if info is not None:
                    first[ticket.number] = info
        for ticket in anywhere:
            self._lease_more(sources, ticket, first.get(ticket.number), now)
        for executor in (*sources, *(self.executors[number] for number in groups)):
            executor.touch()

    def _grouped(self, sources: list[PartitionExecutor], now: Millis) -> tuple[dict[int, list[Ticket]], list[Ticket]]:
        """Group the next waiters by the executor that serves them first. Also returns those that any executor may serve, and fills
        `sources` with the executors considered for these.

        An executor gets as many waiters as it has items for before the next one is considered, so that they share its transaction; but
        never most of them, since it may hang, and a slow one as few as possible.
        """
        groups: dict[int, list[Ticket]] = {}
        anywhere: list[Ticket] = []
        late: list[Ticket] = []
        left, over, has = 0, 0, 0
        executor: PartitionExecutor | None = None
        for ticket in self._servable(late, now):
            request = ticket.request
            assert isinstance(request, Lease)
            if request.partition is not None:
                groups.setdefault(request.partition, []).append(ticket)
                continue
            full = executor is not None and has >= executor.together(len(self.waiters))
            if not over and (full or request.batch_size > left):
                executor, has = self.index.take_stocked(request.client_id), 0
                if executor is not None:
                    sources.append(executor)
                    left = executor.servable
                else:
                    # Not enough for all: they share what there is.
                    over = sum(each.servable for each in sources) - len(anywhere)
            if executor is None:
                if over <= 0:
                    break
                over -= 1
            chosen = sources[len(anywhere) % len(sources)] if executor is None else executor
            groups.setdefault(chosen.number, []).append(ticket)
            anywhere.append(ticket)
            has += 1
            left -= min(left, request.batch_size)
        for ticket in late:
            if self._is_late(ticket):
                self._reply(ticket, SluicewayError("stale_ids", "this client has already completed a later lease", "after_lease"))
            else:
                self._end_wait(ticket, now)
        return groups, anywhere

    def _servable(self, late: list[Ticket], now: Millis) -> Iterator[Ticket]:
        """The next waiters; per lease key only the first, and none whose earlier lease may still turn up.

        Adds to `late` the waiters whose lease would come too late, and those for which nothing can come any more.
        """
        room: dict[int, int] = {}
        keys: set[tuple[tuple[str, str], int | None]] = set()
        held = None
        for ticket in self.waiters.values():
            only = ticket.lease_from
            if only is not None and not room.setdefault(only, self._servable_of(only)):
                continue
            if ticket.key_name is not None:
                if held is None:
                    held = {name for executor in self.executors.values() for name in executor.partition.by_key}
                taken = ticket.key_name in held and self._keyed(ticket, now)
                if taken or (ticket.key_name, only) in keys or self._hides_leases(ticket):
                    continue
                keys.add((ticket.key_name, only))
            request = ticket.request
            assert isinstance(request, Lease)
            if (only is not None and self._is_late(ticket)) or (request.before is not None and self._is_past(ticket, request.before)):
                late.append(ticket)
                continue
            if only is not None:
                room[only] -= 1
            yield ticket

    def _servable_of(self, number: int) -> int:
        executor = self.executors.get(number)
        return executor.servable if executor is not None and executor.state is ExecutorState.READY else 0

    def _is_late(self, ticket: Ticket) -> bool:
        """Whether its client completed a lease taken after the one that the request names."""
        request = ticket.request
        assert isinstance(request, Lease)
        if request.after is None or request.partition is None:
            return False
        return self.executors[request.partition].partition.closed.was_completed_after(request.after, request.client_id)

    def _is_past(self, ticket: Ticket, before: Mapping[int, int]) -> bool:
        """Whether all partitions are past the request's offset limits: new and returning items go to the tail."""
        return all(
            executor.takes_work and executor.partition.header.head >= before.get(executor.number, 0)
            for executor in self._executors_for(ticket)
        )

    def _lease_more(self, sources: list[PartitionExecutor], ticket: Ticket, first: LeaseInfo | None, now: Millis) -> None:
        """Lease from further executors, for a waiter whose executor had none left or that asked for several partitions."""
        request = ticket.request
        assert isinstance(request, Lease)
        had = set() if first is None else {first.partition}
        wanted = request.batch_size - (0 if first is None else first.items)
        at = 0
        while wanted > 0 and len(had) < request.max_partitions:
            if at == len(sources):
                further = self.index.take_stocked(request.client_id)
                if further is None:
                    return
                sources.append(further)
            executor = sources[at]
            at += 1
            info = None if executor.number in had else self._lease(executor, ticket, wanted, now)
            if info is not None:
                wanted -= info.items
                had.add(executor.number)

    def _lease(self, executor: PartitionExecutor, ticket: Ticket, share: int, now: Millis) -> LeaseInfo | None:
        request = ticket.request
        assert isinstance(request, Lease)
        timeout = self.lease_timeout if request.lease_timeout is None else request.lease_timeout
        if not share:
            return None
        nothing_yet = ticket.room == MAX_LEASE_BYTES
        before = None if request.before is None else request.before.get(executor.number, 0)
        lease = executor.partition.lease(share, request.client_id, now + timeout, now, request.lease_key, ticket.room, nothing_yet, before)
        if lease is None:
            return None
        ticket.room -= max(lease.nbytes, 1)
        self._choices += 1
        executor.last_leased = self._choices
        if request.partition is None:
            self.index.serves(request.client_id, executor.number)
        self.waiters.pop(ticket.number, None)
        grant = executor.grant(lease.number, lease.count, now + timeout)
        ticket.awaiting += 1
        executor.answers.append((ticket, grant))
        return grant.info

    # ---- end of the wait --------------------------------------------------------------------------------------

    def _time_out_lease(self, ticket: Ticket, now: Millis) -> None:
        """Past its deadline a lease waits up to LEASE_PATIENCE for items in flight to it. See also `_answer_empty`."""
        if now - ticket.deadline < LEASE_PATIENCE:
            self._late_leases[ticket.number] = ticket
            heapq.heappush(self._deadlines, (ticket.deadline + LEASE_PATIENCE, ticket.number))
        elif ticket.awaiting and ticket.grants and not ticket.keyed:
            self._reply(ticket, ticket.result(now))
        elif ticket.awaiting:
            self._reply(ticket, SluicewayError("outcome_unknown", "request_timeout passed while the lease was being written"))
        else:
            self._end_wait(ticket, now)

    def _answer_empty(self, now: Millis) -> None:
        """End waits past their deadline, and waits for a stopped partition.

        A committing executor may have items for them in a moment.
        """
        if any(executor.state is ExecutorState.STOPPED for executor in self.index.closed()):
            # Even before the deadline: nothing in there will come.
            for ticket in [ticket for ticket in self.waiters.values() if ticket.lease_from is not None]:
                executor = self.executors.get(ticket.lease_from)  # type: ignore[arg-type]
                if executor is not None and executor.state is ExecutorState.STOPPED:
                    self._reply(ticket, executor.unavailable())
        late = [ticket for ticket in self._late_leases.values() if ticket.number in self.waiters]
        if not late:
            return
        coming = {executor.number for executor in self.index.writing() if executor.servable and not executor.degraded}
        # An expired item at the head hides those behind it until its timer runs.
        coming |= {
            executor.number
            for executor in self.index.visited()
            if executor.state is ExecutorState.READY and executor.servable and executor.is_due(now)
        }
        for ticket in late:
            only = ticket.lease_from
            waits = (coming if only is None else only in coming) or (ticket.keyed and self._keyed(ticket, now))
            if not waits or now - ticket.deadline >= LEASE_PATIENCE or self._hides_leases(ticket):
                self._end_wait(ticket, now)

    def _end_wait(self, ticket: Ticket, now: Millis) -> None:
        if ticket.keyed and (self._hides_leases(ticket) or self._keyed(ticket, now)):
            self._reply(ticket, SluicewayError("unavailable", "a partition that may hold this key's leases is busy or not open"))
        else:
            self._reply(ticket, [])
