"""The logical queue: the single-threaded point at which requests meet partitions.

A pure machine. Events come in by `submit`, `cancel`, `opened`, `committed`, `transferred`; `turn(now)` decides and returns effects for the
driver to carry out. A turn gathers what waits, distributes it over the lanes, makes one change set per lane and settles what was committed.
No reply leaves before the commit that it depends on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice

from sluiceway.core.distribution import Candidate, deal, emptiest, home
from sluiceway.core.lane import Answer, ExtendPart, Lane, LaneState, SettlePart
from sluiceway.core.looking import open_slices, stats_of
from sluiceway.core.partition import Partition
from sluiceway.core.tickets import Commit, Effect, Fault, Grant, Open, Reply, Result, Ticket, Transfer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_WAITING
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Extend, Lease, LeaseInfo, Produce, Produced, QueueStats, Settle, Settled

FLIGHT_PATIENCE = 30_000
"""Milliseconds past its deadline that a lease waits for a commit in flight: its answer would be lost otherwise."""

REOPEN_AFTER = (50, 5_000)
"""Milliseconds before a failed partition is opened again: first, and at most (doubling)."""

TRANSFER_RETRY = 1_000
"""Milliseconds before a transfer that failed is tried again."""


class LogicalQueue:
    """Serves the given partitions of one queue. `lease_timeout` is the queue's."""

    def __init__(self, incarnation: str, partitions: Iterable[int], lease_timeout: Millis) -> None:
        self.lanes = {number: Lane(number, incarnation) for number in partitions}
        self.lease_timeout = lease_timeout
        self.produces: dict[int, Ticket] = {}
        self.waiters: dict[int, Ticket] = {}
        self._deadlines: list[tuple[Millis, int, Ticket]] = []
        self._tickets = 0
        self._choices = 0
        self._effects: list[Effect] = []

    # ---- events -----------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Take a request. Raises too_many_requests; otherwise exactly one Reply follows, unless it is cancelled."""
        if len(self.produces) + len(self.waiters) >= MAX_WAITING:
            raise SluicewayError("too_many_requests", f"{MAX_WAITING} requests wait on this queue already; try later")
        self._tickets += 1
        ticket.number = self._tickets
        heapq.heappush(self._deadlines, (ticket.deadline, ticket.number, ticket))
        request = ticket.request
        if isinstance(request, Produce):
            self.produces[ticket.number] = ticket
        elif isinstance(request, Lease):
            self.waiters[ticket.number] = ticket
        elif isinstance(request, Settle):
            ticket.settled.ignored.extend((name, "unknown") for name in request.foreign)
            for number, selections in request.selections.items():
                self._put_now(ticket, number, SettlePart(selections, request.stage))
        else:
            self._submit_extend(ticket, request)
        if isinstance(request, Settle | Extend) and not ticket.awaiting:
            self._reply(ticket, ticket.error or _result(ticket))

    def _submit_extend(self, ticket: Ticket, request: Extend) -> None:
        ticket.extended.ignored.extend((name, "unknown") for name in request.foreign)
        numbers: dict[int, list[int]] = {}
        for partition, number in request.leases:
            numbers.setdefault(partition, []).append(number)
        timeout = self.lease_timeout if request.lease_timeout is None else request.lease_timeout
        deadline = ticket.deadline - request.request_timeout + timeout
        for partition, those in numbers.items():
            self._put_now(ticket, partition, ExtendPart(those, deadline))

    def _put_now(self, ticket: Ticket, number: int, work: SettlePart | ExtendPart) -> None:
        """Settling does not wait for a partition that is down: the client may be about to lose its lease."""
        lane = self.lanes[number]
        if lane.takes_work:
            lane.put(ticket, work)
        else:
            ticket.error = _unavailable(lane)

    def cancel(self, ticket: Ticket) -> None:
        """The client is gone: do not begin what has not begun. What is in flight goes on, and nobody is told."""
        self._finish(ticket)

    def opened(self, number: int, opening: int, loaded: Partition | Exception, now: Millis, final: bool = False) -> None:
        """The answer to `Open`: the partition's state, or why not (`final`: trying again is of no use)."""
        lane = self.lanes[number]
        if opening != lane.opening:
            return
        if isinstance(loaded, Exception):
            lane.problem = str(loaded)
            self._fail(lane, now, final)
            return
        landed = lane.flight_txn and loaded.txn >= lane.flight_txn
        lane.partition, lane.state, lane.failed_in_a_row, lane.problem = loaded, LaneState.READY, 0, ""
        lane.transferring = None
        self._land(lane, bool(landed))

    def committed(self, number: int, opening: int, outcome: Outcome, now: Millis) -> None:
        """The answer to `Commit`."""
        lane = self.lanes[number]
        if opening != lane.opening:
            return
        if outcome is Outcome.DONE:
            lane.state = LaneState.READY
            self._land(lane, True)
            return
        lane.failures += 1
        lane.problem = f"a commit was {outcome.value}"
        if outcome is Outcome.REFUSED:
            self._land(lane, False)
        # The state in memory is ahead of the store: only opening anew, with a higher fence, tells what holds.
        self._fail(lane, now, False)

    def transferred(self, number: int, lease: int, done: bool, now: Millis) -> None:
        """The answer to `Transfer`."""
        lane = self.lanes[number]
        if done:
            lane.transferred.append(lease)
        elif lane.transferring == lease:
            lane.transferring = None
            lane.transfer_at = now + TRANSFER_RETRY

    def stop_lane(self, number: int, problem: str, now: Millis) -> None:
        """The partition's data is damaged: serve nothing from it until a person has looked."""
        lane = self.lanes[number]
        lane.problem = problem
        lane.opening += 1  # whatever is still in flight is not ours to hear any more
        self._fail(lane, now, True)

    # ---- a turn -----------------------------------------------------------------------------------------------

    def turn(self, now: Millis) -> list[Effect]:
        """Decide all that can be decided now. The driver carries out the effects, in order."""
        self._time_out(now)
        self._reopen(now)
        self._find_keyed()
        self._distribute()
        idle = [lane for lane in self.lanes.values() if lane.state is LaneState.READY]
        for lane in idle:
            if lane.waiting or lane.transferred or (lane.partition.next_timer() or now + 1) <= now:
                self._work(lane, now)
        self._deal([lane for lane in idle if lane.state is LaneState.READY and lane.partition.ready_count], now)
        for lane in idle:
            if lane.state is LaneState.READY:
                self._commit(lane)
                self._start_transfer(lane, now)
        self._answer_empty(now)
        effects, self._effects = self._effects, []
        return effects

    def wake_at(self) -> Millis | None:
        """When a turn is due though nothing happened."""
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        for lane in self.lanes.values():
            if lane.state is LaneState.FAILED:
                times.append(lane.retry_at)
            elif lane.state is LaneState.READY:
                timer = lane.partition.next_timer()
                if timer is not None:
                    times.append(timer)
                if lane.partition.transfers and lane.transferring is None:
                    times.append(lane.transfer_at)
        return min(times) if times else None

    def _time_out(self, now: Millis) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heapq.heappop(self._deadlines)[2]
            if ticket.done:
                continue
            if isinstance(ticket.request, Lease):
                self._time_out_lease(ticket, now)
            elif ticket.flying:
                self._reply(ticket, SluicewayError("outcome_unknown", "request_timeout passed while the write was under way"))
            else:
                self._reply(ticket, ticket.error or SluicewayError("unavailable", "no partition took the request within request_timeout"))

    def _time_out_lease(self, ticket: Ticket, now: Millis) -> None:
        if not ticket.awaiting:
            return  # still waiting: `_answer_empty` ends it, once nothing that is on its way could serve it
        if ticket.patience:
            self._reply(ticket, SluicewayError("outcome_unknown", "the lease was being written when the time was up"))
            return
        ticket.patience = True
        heapq.heappush(self._deadlines, (now + FLIGHT_PATIENCE, ticket.number, ticket))

    def _reopen(self, now: Millis) -> None:
        for lane in self.lanes.values():
            if lane.state is LaneState.FAILED and lane.retry_at <= now:
                lane.state = LaneState.OPENING
                lane.opening += 1
                self._effects.append(Open(lane.number, lane.opening))

    def _find_keyed(self) -> None:
        """Answer repeated keyed leases with the leases that they took before; hold back those that cannot be answered yet."""
        for ticket in [ticket for ticket in self.waiters.values() if ticket.request.lease_key is not None]:  # type: ignore[union-attr]
            found = self._keyed(ticket)
            if found and all(lane.state is LaneState.READY for lane, _ in found):
                ticket.grants = [grant for _, grant in found]
                self._reply(ticket, ticket.grants)

    def _keyed(self, ticket: Ticket) -> list[tuple[Lane, Grant]]:
        request = ticket.request
        assert isinstance(request, Lease)
        assert request.lease_key is not None
        return [
            (lane, _grant(lane, lease.number, lease.open, lease.deadline or 0))
            for lane in self.lanes.values()
            for lease in lane.partition.keyed(request.client_id, request.lease_key)
        ]

    def _distribute(self) -> None:
        for ticket in list(self.produces.values()):
            request = ticket.request
            assert isinstance(request, Produce)
            if request.key is not None:
                lane: Lane | None = self.lanes[home(request.key, len(self.lanes))]
            else:
                lane = self._emptiest()
            if lane is not None and lane.takes_work:
                del self.produces[ticket.number]
                self._choices += 1
                lane.last_produced = self._choices
                lane.put(ticket, request)

    def _emptiest(self) -> Lane | None:
        candidates = [
            Candidate(
                lane.partition.ready_count + lane.accepted,
                lane.partition.leased_count + lane.partition.scheduled_count,
                lane.last_produced,
                lane.number,
            )
            for lane in self.lanes.values()
            if lane.takes_work
        ]
        return self.lanes[emptiest(candidates)] if candidates else None

    def _work(self, lane: Lane, now: Millis) -> None:
        waiting = list(lane.waiting)
        try:
            lane.work(now)
        except Exception as error:
            # A mistake of ours. Nothing of this turn was written, and the state cannot be trusted: tell the clients and load it anew.
            self._effects.append(Fault(lane.number, error))
            lane.answers, lane.waiting, lane.problem = [], [], repr(error)
            for ticket, _ in waiting:
                self._reply(ticket, SluicewayError("internal", "the server made a mistake; nothing was written"))
            self._fail(lane, now, False)

    # ---- leases -----------------------------------------------------------------------------------------------

    def _deal(self, sources: list[Lane], now: Millis) -> None:
        """Serve waiters from lanes with ready items: the lane that has waited longest first, one lane a waiter where that will do."""
        if not sources or not self.waiters:
            return
        sources.sort(key=lambda lane: lane.last_leased)
        waiters = self._servable(sum(lane.partition.ready_count for lane in sources))
        for index, lane in enumerate(sources):
            group = waiters[index :: len(sources)]
            shares = deal(lane.partition.ready_count, [ticket.request.batch_size for ticket in group])  # type: ignore[union-attr]
            for ticket, share in zip(group, shares, strict=True):
                self._lease(lane, ticket, share, now)
        for ticket in waiters:
            self._lease_more(sources, ticket, now)

    def _servable(self, ready: int) -> list[Ticket]:
        """The waiters that come next; of those with one lease key only the first, and none whose earlier lease may still turn up."""
        chosen: list[Ticket] = []
        keys: set[tuple[str, str]] = set()
        every_lane_open = all(lane.takes_work for lane in self.lanes.values())
        for ticket in islice(self.waiters.values(), ready):
            request = ticket.request
            assert isinstance(request, Lease)
            if request.lease_key is not None:
                name = (request.client_id, request.lease_key)
                if not every_lane_open or name in keys or self._keyed(ticket):
                    continue
                keys.add(name)
            chosen.append(ticket)
        return chosen

    def _lease_more(self, sources: list[Lane], ticket: Ticket, now: Millis) -> None:
        """From further lanes: for a waiter whose lane had none left, and for one that asked for several partitions."""
        request = ticket.request
        assert isinstance(request, Lease)
        had = {grant.info.partition for grant in ticket.grants}
        wanted = request.batch_size - sum(grant.info.items for grant in ticket.grants)
        for lane in sources:
            if wanted <= 0 or len(had) >= request.max_partitions:
                return
            if lane.number not in had and lane.partition.ready_count:
                wanted -= self._lease(lane, ticket, wanted, now)
                had.add(lane.number)

    def _lease(self, lane: Lane, ticket: Ticket, share: int, now: Millis) -> int:
        request = ticket.request
        assert isinstance(request, Lease)
        timeout = self.lease_timeout if request.lease_timeout is None else request.lease_timeout
        lease = lane.partition.lease(share, request.client_id, now + timeout, now, request.lease_key) if share else None
        if lease is None:
            return 0
        self._choices += 1
        lane.last_leased = self._choices
        self.waiters.pop(ticket.number, None)
        grant = _grant(lane, lease.number, lease.count, now + timeout)
        ticket.grants.append(grant)
        ticket.awaiting += 1
        lane.answers.append((ticket, grant))
        return lease.count

    def _answer_empty(self, now: Millis) -> None:
        """End the waits whose time is up. A lane that is committing may be about to have items for them."""
        coming = any(lane.state is LaneState.COMMITTING and (lane.partition.ready_count or lane.waiting) for lane in self.lanes.values())
        for ticket in list(self.waiters.values()):
            if ticket.deadline > now:
                continue
            request = ticket.request
            assert isinstance(request, Lease)
            if request.lease_key is not None and not all(lane.takes_work for lane in self.lanes.values()):
                self._reply(ticket, SluicewayError("unavailable", "a partition that may hold this key's leases is not available"))
            elif not coming and not (request.lease_key is not None and self._keyed(ticket)):
                self._reply(ticket, ticket.grants)

    # ---- commit and settle ------------------------------------------------------------------------------------

    def _commit(self, lane: Lane) -> None:
        taken = lane.partition.take_changes()
        if taken is None:
            lane.flight_txn = 0
            self._land(lane, True)
            return
        changes, fresh = taken
        lane.state, lane.flight_txn = LaneState.COMMITTING, changes.txn
        for ticket, _ in lane.answers:
            ticket.flying += 1
        self._effects.append(Commit(lane.number, lane.opening, changes, fresh))

    def _land(self, lane: Lane, done: bool) -> None:
        """The lane's answers are true (or, if not `done`, surely never happened)."""
        answers, lane.answers = lane.answers, []
        flew, lane.flight_txn = lane.flight_txn, 0
        for ticket, answer in answers:
            ticket.awaiting -= 1
            ticket.flying -= 1 if flew else 0
            if ticket.done:
                continue
            if done:
                self._add(ticket, answer)
            else:
                self._take_out(lane, ticket, answer)
            again = ticket.number in self.produces or ticket.number in self.waiters
            if not ticket.awaiting and not again:
                self._reply(ticket, ticket.error or _result(ticket))

    def _add(self, ticket: Ticket, answer: Answer) -> None:
        if isinstance(answer, SluicewayError):
            ticket.error = answer
        elif isinstance(answer, Produced):
            self._reply(ticket, answer)
        elif isinstance(answer, Settled):
            ticket.settled.completed += answer.completed
            ticket.settled.retried += answer.retried
            ticket.settled.dead += answer.dead
            ticket.settled.ignored += answer.ignored
        elif not isinstance(answer, Grant):
            ticket.extended.leases += answer.leases
            ticket.extended.ignored += answer.ignored

    def _take_out(self, lane: Lane, ticket: Ticket, answer: Answer) -> None:
        """Nothing was written for the ticket in this lane: a produce and a lease try again, a settle is told."""
        if isinstance(ticket.request, Produce):
            self.produces[ticket.number] = ticket
        elif isinstance(ticket.request, Lease):
            ticket.grants = [grant for grant in ticket.grants if grant is not answer]
            if not ticket.awaiting and not ticket.grants:
                self.waiters[ticket.number] = ticket
        else:
            ticket.error = _unavailable(lane)

    def _fail(self, lane: Lane, now: Millis, final: bool) -> None:
        """The partition has to be opened anew. What waits and is not in flight looks elsewhere."""
        first, most = REOPEN_AFTER
        lane.state = LaneState.STOPPED if final else LaneState.FAILED
        lane.retry_at = now + min(most, first << min(lane.failed_in_a_row, 10)) if lane.failed_in_a_row else now
        lane.failed_in_a_row += 1
        for ticket, work in lane.take_back():
            if ticket.done:
                continue
            if isinstance(work, Produce):
                self.produces[ticket.number] = ticket
            else:
                ticket.error = _unavailable(lane)
                if not ticket.awaiting:
                    self._reply(ticket, ticket.error)

    def _start_transfer(self, lane: Lane, now: Millis) -> None:
        """One transfer at a time per partition, in the order of their numbers: the dead queue remembers only the last."""
        if lane.transferring is not None and lane.transferring not in lane.partition.transfers:
            lane.transferring = None
        transfers = lane.partition.transfers
        if lane.state is LaneState.READY and transfers and lane.transferring is None and lane.transfer_at <= now:
            number = min(transfers)
            lane.transferring = number
            lease = transfers[number]
            self._effects.append(Transfer(lane.number, number, lease.transfer or "", open_slices(lease)))

    def _reply(self, ticket: Ticket, result: Result | SluicewayError) -> None:
        if not ticket.done:
            self._finish(ticket)
            self._effects.append(Reply(ticket, result))

    def _finish(self, ticket: Ticket) -> None:
        ticket.done = True
        self.produces.pop(ticket.number, None)
        self.waiters.pop(ticket.number, None)

    # ---- looking ----------------------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        partitions = []
        for lane in self.lanes.values():
            stats = stats_of(lane.partition, lane.number)
            stats.failures = lane.failures
            stats.state = "available" if lane.takes_work else lane.state.value
            partitions.append(stats)
        work = [work for lane in self.lanes.values() for _, work in lane.waiting]
        produces = sum(isinstance(each, Produce) for each in work)
        return QueueStats(
            produce_waiting=len(self.produces) + produces,
            lease_waiting=len(self.waiters),
            complete_waiting=len(work) - produces,
            in_flight=sum(len(lane.answers) for lane in self.lanes.values()),
            partitions=partitions,
        )


def _grant(lane: Lane, number: int, count: int, deadline: Millis) -> Grant:
    lease = lane.partition.leases[number]
    return Grant(LeaseInfo(lane.number, number, count, deadline), open_slices(lease))


def _result(ticket: Ticket) -> Result:
    request = ticket.request
    if isinstance(request, Settle):
        return ticket.settled
    return ticket.grants if isinstance(request, Lease) else ticket.extended


def _unavailable(lane: Lane) -> SluicewayError:
    if lane.state is LaneState.STOPPED:
        return SluicewayError("partition_damaged", f"partition {lane.number} is stopped: {lane.problem}")
    return SluicewayError("unavailable", f"partition {lane.number} is not available: {lane.problem or 'it is being opened'}")
