"""Lease scheduling: distributes ready items to waiting leases, and finds the leases that a lease key has taken before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from sluiceway.core.partition.circuit_breaker import Circuit
from sluiceway.core.queue.distribution import deal
from sluiceway.core.queue.executor_index import ExecutorIndex
from sluiceway.core.queue.partition_executor import ExecutorState, PartitionExecutor
from sluiceway.core.queue.queue_rate import QueueRate
from sluiceway.core.queue.queue_slots import QueueSlots
from sluiceway.core.queue.tickets import Grant, Result, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_CYCLE_LEASES, MAX_LEASE_BYTES
from sluiceway.model.requests import Lease, LeaseInfo

LEASE_PATIENCE = 1_000
"""Lease grace: milliseconds past its deadline that a lease waits for partitions that are writing, for their items or its own commit.

Without it a lease that does not wait would hardly ever get anything. What lands later is given back.
"""


class Demand(NamedTuple):
    """Waiting leases could be given that many `items` of those that are `servable`, by `until` at the latest."""

    items: int
    servable: int
    until: Millis


class LeaseScheduler:
    """The waiting leases of a logical queue, and the choice of the executors that serve them.

    It takes the queue's executors, and `reply`, which ends a ticket: that must also `remove` the ticket here. It appends each lease that it
    takes to its executor's `answers`; the queue commits them and replies.
    """

    def __init__(self, index: ExecutorIndex, lease_timeout: Millis, reply: Callable[[Ticket, Result | SluicewayError], None]) -> None:
        self.lease_timeout = lease_timeout
        """For leases that ask for no timeout of their own."""
        self.waiters: dict[int, Ticket] = {}
        """Leases that have been given nothing yet, by ticket number."""
        self._index = index
        self._reply = reply
        # Unanswered leases with a key, and those past their deadline, indexed to avoid scanning all waiters.
        self._keyed_leases: dict[int, Ticket] = {}
        self._overdue: dict[int, Ticket] = {}
        self.circuit: Circuit | None = None
        """The queue's circuit breaker: what is leased while it is not closed is a probe."""
        self.rate: QueueRate | None = None
        """The tokens for the queue's rate; None: it has none."""
        self.refused: dict[int, int] = {}
        """Items that waiters were not given in this cycle, though ready, because of the partition's quota."""
        self.slots: QueueSlots | None = None
        """The quotas for the queue's concurrency; None: it has none."""
        self._tokens = 0
        """Tokens left in this cycle."""
        self._leases_taken = 0
        """Orders the executors by when each last served."""

    def add(self, ticket: Ticket) -> None:
        """Add a new lease."""
        self.waiters[ticket.number] = ticket
        if ticket.keyed:
            self._keyed_leases[ticket.number] = ticket

    def remove(self, ticket: Ticket) -> None:
        """Remove a lease that has ended, whether it waits or not."""
        self.waiters.pop(ticket.number, None)
        self._keyed_leases.pop(ticket.number, None)
        self._overdue.pop(ticket.number, None)

    def retry(self, ticket: Ticket) -> None:
        """Let a lease wait again whose grants were surely not written."""
        self.waiters[ticket.number] = ticket
        ticket.room = MAX_LEASE_BYTES

    # ---- keyed leases -----------------------------------------------------------------------------------------

    def answer_repeated(self, now: Millis) -> None:
        """Answer repeated keyed leases with the leases that they took before.

        An executor's leases are noted at a moment when all are durable. Busy executors never are at the same moment, so each is noted at
        its own.
        """
        keyed = [ticket for ticket in self._keyed_leases.values() if ticket.number in self.waiters]
        if not keyed:
            return
        held = self._held_keys()
        for ticket in [ticket for ticket in keyed if ticket.key_name in held]:
            if self._hides_leases(ticket):
                continue
            found = self._keyed(ticket, now)
            ticket.found.update((grant.info[:2], grant) for executor, grant in found if executor.state is ExecutorState.READY)
            noted = [ticket.found.get(grant.info[:2]) for _, grant in found]
            grants = [grant for grant in noted if grant is not None]
            if grants and len(grants) == len(found):
                self._reply(ticket, grants)

    def _held_keys(self) -> set[tuple[str, str]]:
        """The (client, lease key) names of all live leases."""
        return {name for executor in self._index.executors.values() for name in executor.partition.by_key}

    def _keyed(self, ticket: Ticket, now: Millis) -> list[tuple[PartitionExecutor, Grant]]:
        """The live leases under the ticket's key. Excludes those of stopped partitions, which cannot be read."""
        request = ticket.request
        assert isinstance(request, Lease)
        assert request.lease_key is not None
        return [
            (executor, executor.grant(lease))
            for executor in self._executors_for(ticket)
            if executor.state is not ExecutorState.STOPPED
            for lease in executor.partition.keyed(request.client_id, request.lease_key)
            if lease.deadline is not None and lease.deadline > now
        ]

    def _executors_for(self, ticket: Ticket) -> Collection[PartitionExecutor]:
        """The executors that may serve the lease."""
        only, executors = ticket.lease_from, self._index.executors
        return executors.values() if only is None else [executors[only]] if only in executors else []

    def _hides_leases(self, ticket: Ticket) -> bool:
        """Whether a closed partition that will reopen may hold live leases under the ticket's key, or is the only one that may serve it: an
        empty answer would wrongly say that there is nothing."""
        name = ticket.key_name
        if name is None:
            return False
        if ticket.lease_from is None:
            return any(executor.may_hold(name) for executor in self._index.closed())
        return any(executor.is_away for executor in self._executors_for(ticket))

    # ---- distribution -----------------------------------------------------------------------------------------

    def serve(self, now: Millis, is_pressed: bool = False) -> bool:
        """Serve waiters from executors with ready items: each executor once per round, one executor per waiter where that suffices.

        `is_pressed`: for lack of processor time, fill the waiters one after the other, instead of having all of them share the items.

        Returns whether waiters are left for the next cycle, since MAX_CYCLE_LEASES were served. These have shared with them: they get what
        they would have got now.
        """
        if self.rate is not None and self.waiters:
            self._tokens = self.rate.available(now)
        if not self.waiters or self._room == 0:
            return False
        assignment, pointless = self._assign(now, is_pressed)
        for ticket in pointless:
            self._end_pointless(ticket, now)
        first: dict[int, LeaseInfo] = {}
        enough = self._leases_taken + MAX_CYCLE_LEASES
        for number, tickets in assignment.by_executor.items():
            executor = self._index.executors[number]
            shares = deal(executor.partition.servable, [ticket.request.batch_size for ticket in tickets])  # type: ignore[union-attr]
            for ticket, share in zip(tickets, shares, strict=True):
                info = self._lease(executor, ticket, share, now) if self._leases_taken < enough else None
                if info is not None:
                    first[ticket.number] = info
        for ticket in assignment.unbound:
            if ticket.number in first or self._leases_taken < enough:
                self._lease_more(assignment.sources, ticket, first.get(ticket.number), now)
        for executor in (*assignment.sources, *(self._index.executors[number] for number in assignment.by_executor)):
            executor.touch()
        return self._leases_taken >= enough and bool(self.waiters)

    def _assign(self, now: Millis, is_pressed: bool) -> tuple[_Assignment, list[Ticket]]:
        """Assign the next waiters to executors. Also returns the waiters among them for which nothing can come any more."""
        assignment = _Assignment(self._index, len(self.waiters), not is_pressed)
        pointless: list[Ticket] = []
        unassigned: dict[int, int] = {}
        """Items left for waiters that name their partition, by partition."""
        served_keys: set[tuple[tuple[str, str], int | None]] = set()
        held = None
        for ticket in self.waiters.values():
            only, key = ticket.lease_from, ticket.key_name
            if only is not None and not unassigned.setdefault(only, self._servable_of(only)):
                continue
            if key is not None:
                if held is None:
                    held = self._held_keys()
                # One at a time per key, and none while an earlier lease under the key may still be found.
                if (key, only) in served_keys or (key in held and self._keyed(ticket, now)) or self._hides_leases(ticket):
                    continue
                served_keys.add((key, only))
            if self._is_pointless(ticket):
                pointless.append(ticket)
            elif only is not None:
                unassigned[only] -= 1
                assignment.bind(ticket, only)
            elif not assignment.add(ticket):
                break
        return assignment, pointless

    def _servable_of(self, number: int) -> int:
        executor = self._index.executors.get(number)
        return executor.servable if executor is not None and executor.state is ExecutorState.READY else 0

    def _is_pointless(self, ticket: Ticket) -> bool:
        """Whether nothing can come for the waiter any more, or only too late."""
        request = ticket.request
        assert isinstance(request, Lease)
        return self._is_late(ticket) or (request.before is not None and self._is_past(ticket, request.before))

    def _end_pointless(self, ticket: Ticket, now: Millis) -> None:
        if self._is_late(ticket):
            self._reply(ticket, SluicewayError("stale_ids", "this client has already completed a later lease", "after_lease"))
        else:
            self._end_wait(ticket, now)

    def _is_late(self, ticket: Ticket) -> bool:
        """Whether its client completed a lease taken after the one that the request names."""
        request = ticket.request
        assert isinstance(request, Lease)
        if request.after is None or request.partition is None:
            return False
        return self._index.executors[request.partition].partition.closed.was_completed_after(request.after, request.client_id)

    def _is_past(self, ticket: Ticket, before: Mapping[int, int]) -> bool:
        """Whether all partitions are past the request's offset limits: new and returning items go to the tail."""
        return all(
            executor.takes_work and executor.partition.log.header.head >= before.get(executor.number, 0)
            for executor in self._executors_for(ticket)
        )

    def _lease_more(self, sources: list[PartitionExecutor], ticket: Ticket, first: LeaseInfo | None, now: Millis) -> None:
        """Lease from further executors, for a waiter whose executor had none left or that asked for several partitions."""
        request = ticket.request
        assert isinstance(request, Lease)
        had = set() if first is None else {first.partition}
        wanted = request.batch_size - (0 if first is None else first.items)
        at = 0
        while wanted > 0 and len(had) < request.max_partitions and self._room != 0:
            if at == len(sources):
                further = self._index.take_stocked(request.client_id)
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
        if (room := self._room) is not None:
            share = min(share, room)
        if executor.quota is not None and share > (left := executor.slots_left):
            self.refused[executor.number] = (
                self.refused.get(executor.number, 0) + min(share, executor.leasable) - min(left, executor.leasable)
            )
            share = left
        if not share:
            return None
        nothing_yet = ticket.room == MAX_LEASE_BYTES
        before = None if request.before is None else request.before.get(executor.number, 0)
        lease = executor.partition.lease(
            share, request.client_id, now + timeout, now, request.lease_key, ticket.room, nothing_yet, before, request.runs
        )
        if lease is None:
            return None
        ticket.room -= max(lease.nbytes, 1)
        if self.circuit is not None:
            lease.probe = self.circuit.leased(lease.count, timeout, now)
        if self.rate is not None:
            self.rate.use(lease.count, now)
            self._tokens -= lease.count
        self._leases_taken += 1
        executor.last_leased = self._leases_taken
        if request.partition is None:
            self._index.serves(request.client_id, executor.number)
        self.waiters.pop(ticket.number, None)
        grant = executor.grant(lease)
        ticket.awaiting += 1
        executor.answers.append((ticket, grant))
        return grant.info

    @property
    def _room(self) -> int | None:
        """Items that the circuit breaker and the queue's rate still let through; None: any number."""
        room = None if self.circuit is None else self.circuit.room
        if self.rate is None:
            return room
        return self._tokens if room is None else min(self._tokens, room)

    def unmet(self) -> dict[int, int]:
        """Items that waiters could still be given if it were not for the partitions' quotas, by partition."""
        found, self.refused = self.refused, {}
        executors = [each for each in self._index.executors.values() if each.takes_work and not each.slots_left and each.leasable]
        if not executors or not self.waiters:
            return found
        unbound, bound = 0, dict.fromkeys((each.number for each in executors), 0)
        for ticket in self.waiters.values():
            assert isinstance(ticket.request, Lease)
            if ticket.lease_from is None:
                unbound += ticket.request.batch_size
            elif ticket.lease_from in bound:
                bound[ticket.lease_from] += ticket.request.batch_size
        wanted = ((each, unbound + bound[each.number]) for each in executors)
        return found | {each.number: min(each.leasable, count) for each, count in wanted if count}

    def demand(self, now: Millis) -> Demand:
        """What the waiters could still be given if it were not for the queue's rate."""
        executors = self._index.executors
        servable = {number: executor.servable for number, executor in executors.items() if executor.takes_work and executor.servable}
        if not servable or not self.waiters or (self.circuit is not None and self.circuit.room == 0):
            return Demand(0, 0, now)
        bound = dict.fromkeys(servable, 0)
        wanted, until = 0, now
        for ticket in self.waiters.values():
            request, only = ticket.request, ticket.lease_from
            assert isinstance(request, Lease)
            if (only is not None and only not in servable) or (request.before is not None and self._is_past(ticket, request.before)):
                continue
            if only is None:
                wanted += request.batch_size
            else:
                bound[only] += request.batch_size
            until = max(until, ticket.deadline)
        total = sum(servable.values())
        items = min(total, wanted + sum(min(bound[number], count) for number, count in servable.items()))
        return Demand(items, total, until)

    # ---- end of the wait --------------------------------------------------------------------------------------

    def time_out(self, ticket: Ticket, now: Millis) -> Millis | None:
        """Handle a lease that is past its deadline. Returns when to call again; None: it is answered.

        It waits up to LEASE_PATIENCE for items in flight to it. See also `end_waits`.
        """
        if now - ticket.deadline < LEASE_PATIENCE:
            self._overdue[ticket.number] = ticket
            return ticket.deadline + LEASE_PATIENCE
        if ticket.awaiting and ticket.grants and not ticket.keyed:
            self._reply(ticket, ticket.result(now))
        elif ticket.awaiting:
            self._reply(ticket, SluicewayError("outcome_unknown", "request_timeout passed while the lease was being written"))
        else:
            self._end_wait(ticket, now)
        return None

    def end_waits(self, now: Millis, is_cut: bool = False) -> None:
        """End waits past their deadline, and waits for a stopped partition.

        A committing executor may have items for them in a moment. `is_cut`: so has the next cycle, as `serve` says.
        """
        if any(executor.state is ExecutorState.STOPPED for executor in self._index.closed()):
            # Even before the deadline: nothing in there will come.
            for ticket in [ticket for ticket in self.waiters.values() if ticket.lease_from is not None]:
                executor = self._index.executors.get(ticket.lease_from)  # type: ignore[arg-type]
                if executor is not None and executor.state is ExecutorState.STOPPED:
                    self._reply(ticket, executor.unavailable())
        overdue = [ticket for ticket in self._overdue.values() if ticket.number in self.waiters]
        if not overdue:
            return
        is_coming = (self.rate is not None and self.rate.taking and self.demand(now).items) or (
            self.slots is not None and self.slots.is_coming
        )
        if is_cut or is_coming:
            # Their turn, tokens, or quotas may be about to come. `time_out` ends the wait.
            return
        coming = {executor.number for executor in self._index.writing() if executor.servable and not executor.degraded}
        # An expired item at the head hides those behind it until its timer runs.
        coming |= {
            executor.number
            for executor in self._index.visited()
            if executor.state is ExecutorState.READY and executor.servable and executor.is_due(now)
        }
        for ticket in overdue:
            only = ticket.lease_from
            waits = (coming if only is None else only in coming) or (ticket.keyed and self._keyed(ticket, now))
            if not waits or now - ticket.deadline >= LEASE_PATIENCE or self._hides_leases(ticket):
                self._end_wait(ticket, now)

    def _end_wait(self, ticket: Ticket, now: Millis) -> None:
        if ticket.keyed and (self._hides_leases(ticket) or self._keyed(ticket, now)):
            self._reply(ticket, SluicewayError("unavailable", "a partition that may hold this key's leases is busy or not open"))
        else:
            self._reply(ticket, [])


class _Assignment:
    """The executor that serves each waiter first, in one cycle.

    An executor gets as many waiters as it has items for before the next one is considered, so that they share its transaction. It never
    gets most of the waiters, since it may hang, and a slow one gets as few as possible. Once no further executor has items, the executors
    share the waiters that are left, up to one for each item, if `spreads`.
    """

    def __init__(self, index: ExecutorIndex, waiters: int, spreads: bool) -> None:
        self.by_executor: dict[int, list[Ticket]] = {}
        self.unbound: list[Ticket] = []
        """Those that any executor may serve."""
        self.sources: list[PartitionExecutor] = []
        """The executors considered for them, in order."""
        self._index = index
        self._waiters = waiters
        self._spreads = spreads
        self._filling: PartitionExecutor | None = None
        """The last source, while it gets waiters."""
        self._filled = 0
        """The waiters that it has got."""
        self._unclaimed = 0
        """Its items that these have not asked for."""
        self._spare: int | None = None
        """Once no further executor has items: how many more waiters there is an item for."""

    def bind(self, ticket: Ticket, number: int) -> None:
        """Assign the waiter to the executor that it names."""
        self.by_executor.setdefault(number, []).append(ticket)

    def add(self, ticket: Ticket) -> bool:
        """Assign a waiter that any executor may serve. False: no item is left for it."""
        request = ticket.request
        assert isinstance(request, Lease)
        if self._spare is None and (request.batch_size > self._unclaimed or self._is_full()):
            self._take_source(request.client_id)
        executor = self._filling
        if executor is None:
            if not self._spare:
                return False
            self._spare -= 1
            executor = self.sources[len(self.unbound) % len(self.sources)]
        self.bind(ticket, executor.number)
        self.unbound.append(ticket)
        self._filled += 1
        self._unclaimed -= min(self._unclaimed, request.batch_size)
        return True

    def _is_full(self) -> bool:
        return self._filling is not None and self._filled >= self._filling.transaction_limit(self._waiters)

    def _take_source(self, client_id: str) -> None:
        executor = self._filling = self._index.take_stocked(client_id)
        if executor is not None:
            self.sources.append(executor)
            self._filled, self._unclaimed = 0, executor.servable
        else:
            self._spare = max(0, sum(each.servable for each in self.sources) - len(self.unbound)) if self._spreads else 0
