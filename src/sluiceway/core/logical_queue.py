"""The logical queue: the single-threaded point at which requests meet partitions.

A pure machine. Events come in by `submit`, `cancel`, `opened`, `committed`, `transferred`; `turn(now)` decides and returns effects for the
driver to carry out. A turn gathers what waits, distributes it over the lanes, makes one change set per lane and settles what was committed.
No reply leaves before the commit that it depends on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from sluiceway.core.distribution import deal, home
from sluiceway.core.health import PROBE_EVERY, choose, judge
from sluiceway.core.lane import Lane, LaneState, not_here
from sluiceway.core.partition import Partition
from sluiceway.core.parts import Work, parts_of
from sluiceway.core.rules import Rules
from sluiceway.core.tickets import Commit, Effect, Fault, Grant, Open, Reply, Result, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_LEASE_BYTES, MAX_WAITING, TIMER_BATCH
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import QueueRecord, Verb
from sluiceway.model.requests import Lease, LeaseInfo, Produce, QueueStats

LEASE_PATIENCE = 1_000
"""Milliseconds past its deadline that a lease waits for partitions that are writing: for items of theirs, or for its own commit.

A lease that does not wait would hardly ever get anything otherwise. What lands later is given back.
"""

REOPEN_AFTER = (50, 1_000)
"""Milliseconds before a failed partition is opened again: first, and at most (doubling)."""

TRANSFER_RETRY = 1_000
"""Milliseconds before a transfer that failed is tried again."""


class LogicalQueue:
    """Serves the given partitions of one queue. `homes` are all that the queue has, if these are not. `lease_timeout` is the queue's."""

    def __init__(self, incarnation: str, partitions: Iterable[int], lease_timeout: Millis, homes: Iterable[int] = ()) -> None:
        self.lanes = {number: Lane(number, incarnation) for number in partitions}
        self._homes = sorted(homes or self.lanes)
        self.lease_timeout = lease_timeout
        self.paused: frozenset[Verb] = frozenset()
        self._rules: Rules | None = None
        self._patience = 0.0
        self.produces: dict[int, Ticket] = {}
        self.waiters: dict[int, Ticket] = {}
        self._unanswered: dict[int, Ticket] = {}
        # Numbers, not tickets: one that is answered must not be kept, with its payload, until its deadline.
        self._deadlines: list[tuple[Millis, int]] = []
        self._tickets = 0
        self._choices = 0
        self._effects: list[Effect] = []

    def configure(self, record: QueueRecord) -> None:
        """Follow the queue's settings from now on."""
        self.lease_timeout = record.lease_timeout
        self.paused = frozenset(record.paused)
        dead_queue = record.dead_queue
        self._rules = Rules(record.max_attempts, dead_queue is not None, record.expire_timeout, record.retry_backoff, dead_queue)
        for lane in self.lanes.values():
            lane.partition.follow(self._rules)

    # ---- events -----------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Take a request. Raises too_many_requests, queue_paused; otherwise exactly one Reply follows, unless it is cancelled."""
        if isinstance(ticket.request, Produce) and "produce" in self.paused:
            raise SluicewayError("queue_paused", "the queue is paused: it takes no items until it is resumed")
        if len(self._unanswered) >= MAX_WAITING:
            raise SluicewayError("too_many_requests", f"{MAX_WAITING} requests wait on this queue already; try later")
        self._tickets += 1
        ticket.number = self._tickets
        self._unanswered[ticket.number] = ticket
        heapq.heappush(self._deadlines, (ticket.deadline, ticket.number))
        request = ticket.request
        if isinstance(request, Produce):
            self.produces[ticket.number] = ticket
        elif isinstance(request, Lease):
            self.waiters[ticket.number] = ticket
        else:
            for number, work in parts_of(ticket, self.lanes, self.lease_timeout):
                self._put_now(ticket, number, work)
            if not ticket.awaiting:
                self._reply(ticket, ticket.error or ticket.result(ticket.deadline))

    def _put_now(self, ticket: Ticket, number: int, work: Work) -> None:
        """Settling does not wait for a partition that is down: the client may be about to lose its lease."""
        lane = self.lanes.get(number)
        if lane is not None and lane.takes(work):
            lane.put(ticket, work)
        else:
            ticket.error = not_here(number) if lane is None else lane.unavailable()

    def cancel(self, ticket: Ticket) -> None:
        """The client is gone: do not begin what has not begun, and give back its leases without a key. What is in flight goes on."""
        for grant in () if ticket.done or ticket.keyed else ticket.grants:
            self.give_back(grant.info.partition, grant.info.number)
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
        if self._rules is not None:
            loaded.follow(self._rules)
        lane.partition, lane.state, lane.problem = loaded, LaneState.READY, ""
        lane.transferring = None
        self._land(lane, bool(landed), now)

    def committed(self, number: int, opening: int, outcome: Outcome, now: Millis) -> None:
        """The answer to `Commit`."""
        lane = self.lanes[number]
        if opening != lane.opening:
            return
        lane.sample(now)
        if outcome is Outcome.DONE:
            # Not before: a partition that opens but takes no commit would be opened again and again without a pause.
            lane.state, lane.failed_in_a_row = LaneState.READY, 0
            self._land(lane, True, now)
            return
        lane.failures += 1
        lane.problem = f"a commit was {outcome.value}"
        if outcome is Outcome.REFUSED:
            self._land(lane, False, now)
        # The state in memory is ahead of the store: only opening anew, with a higher fence, tells what holds.
        self._fail(lane, now, False)

    def transferred(self, number: int, lease: int, done: bool, now: Millis, *, nowhere: bool = False) -> None:
        """The answer to `Transfer`; `nowhere`: its target is no more, so its items stay here."""
        lane = self.lanes[number]
        if nowhere:
            lane.called_back.append(lease)
        elif done:
            lane.transferred.append(lease)
        elif lane.transferring == lease:
            lane.transferring = None
            lane.transfer_at = now + TRANSFER_RETRY

    def give_back(self, number: int, lease: int) -> None:
        """The client went away before it was told of this lease."""
        lane = self.lanes[number]
        if lane.takes_work:
            lane.given_back.append(lease)

    def retry_now(self, numbers: Iterable[int], now: Millis, *, anew: bool = False) -> None:
        """Do not wait any longer with opening these partitions again; `anew`: neither those that serve, nor those that were stopped."""
        for lane in [self.lanes[number] for number in numbers]:
            if anew and lane.state is not LaneState.OPENING:
                self._fail(lane, now, False)
            if lane.state is LaneState.FAILED:
                lane.retry_at = now

    def stop_lane(self, number: int, problem: str, now: Millis) -> None:
        """The partition's data is damaged: serve nothing from it until a person has looked."""
        lane = self.lanes[number]
        lane.problem = problem
        lane.opening += 1  # whatever is still in flight is not ours to hear any more
        self._fail(lane, now, True)

    def close(self, final: bool) -> None:
        """The owner stops: answer what has not begun; if `final`, also what is in flight, since nothing more will be heard of it."""
        for ticket in list(self._unanswered.values()):
            if ticket.awaiting and not final:
                continue
            if ticket.flying:
                self._reply(ticket, SluicewayError("outcome_unknown", "the server stopped while the write was under way"))
            elif isinstance(ticket.request, Lease) and ticket.request.lease_key is None:
                self._reply(ticket, [])
            else:
                self._reply(ticket, ticket.error or SluicewayError("unavailable", "the server is stopping"))

    # ---- a turn -----------------------------------------------------------------------------------------------

    def turn(self, now: Millis) -> list[Effect]:
        """Decide all that can be decided now. The driver carries out the effects, in order."""
        self._time_out(now)
        self._reopen(now)
        self._find_keyed(now)
        self._spread(now)
        self._distribute(now)
        idle = [lane for lane in self.lanes.values() if lane.state is LaneState.READY]
        due = [lane for lane in idle if lane.is_due(now)]
        timers = max(1, TIMER_BATCH // len(due)) if due else 0
        for lane in idle:
            if lane in due or lane.waiting or lane.transferred or lane.called_back or lane.given_back:
                self._attempt(lambda lane, now: lane.work(now, timers), lane, now)
        self._deal([lane for lane in idle if lane.state is LaneState.READY and lane.partition.ready_count], now)
        for lane in idle:
            if lane.state is LaneState.READY and (lane.answers or lane.partition.is_changed):
                self._attempt(self._commit, lane, now)
            transfer = lane.start_transfer(now)
            if transfer is not None:
                self._effects.append(transfer)
        self._answer_empty(now)
        effects, self._effects = self._effects, []
        return effects

    def wake_at(self) -> Millis | None:
        """When a turn is due though nothing happened."""
        while self._deadlines and self._deadlines[0][1] not in self._unanswered:
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
            elif lane.state is LaneState.COMMITTING and lane.accepted and not lane.degraded and self._patience:
                times.append(int(lane.committing_since + self._patience) + 1)
        return min(times) if times else None

    def _time_out(self, now: Millis) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = self._unanswered.get(heapq.heappop(self._deadlines)[1])
            if ticket is None:
                continue
            if isinstance(ticket.request, Lease):
                self._time_out_lease(ticket, now)
            elif ticket.flying:
                self._reply(ticket, SluicewayError("outcome_unknown", "request_timeout passed while the write was under way"))
            else:
                self._reply(ticket, ticket.error or SluicewayError("unavailable", "no partition took the request within request_timeout"))

    def _time_out_lease(self, ticket: Ticket, now: Millis) -> None:
        """Past its deadline a lease stays for what is on its way to it, but not for ever. See also `_answer_empty`."""
        if now - ticket.deadline < LEASE_PATIENCE:
            heapq.heappush(self._deadlines, (ticket.deadline + LEASE_PATIENCE, ticket.number))
        elif ticket.awaiting and ticket.grants and not ticket.keyed:
            self._reply(ticket, ticket.result(now))
        elif ticket.awaiting:
            self._reply(ticket, SluicewayError("outcome_unknown", "the lease was being written when the time was up"))
        else:
            self._end_wait(ticket, now)

    def _reopen(self, now: Millis) -> None:
        for lane in self.lanes.values():
            if lane.state is LaneState.FAILED and lane.retry_at <= now:
                lane.state = LaneState.OPENING
                lane.opening += 1
                self._effects.append(Open(lane.number, lane.opening))

    def _find_keyed(self, now: Millis) -> None:
        """Answer repeated keyed leases with the leases that they took before.

        What a lane holds is noted while all of it is durable. Busy lanes are never so at one moment, so each is noted at its own.
        """
        if self._hides_leases():
            return
        held = {name for lane in self.lanes.values() for name in lane.partition.by_key}
        for ticket in [ticket for ticket in self.waiters.values() if ticket.key_name in held]:
            found = self._keyed(ticket, now)
            ticket.found.update((grant.info[:2], grant) for lane, grant in found if lane.state is LaneState.READY)
            noted = [ticket.found.get(grant.info[:2]) for _, grant in found]
            grants = [grant for grant in noted if grant is not None]
            if grants and len(grants) == len(found):
                self._reply(ticket, grants)

    def _keyed(self, ticket: Ticket, now: Millis) -> list[tuple[Lane, Grant]]:
        """The live leases under the ticket's key. Those of a stopped partition are of no use to anybody: it cannot be read."""
        request = ticket.request
        assert isinstance(request, Lease)
        assert request.lease_key is not None
        return [
            (lane, lane.grant(lease.number, lease.open, lease.deadline))
            for lane in self.lanes.values()
            if lane.state is not LaneState.STOPPED
            for lease in lane.partition.keyed(request.client_id, request.lease_key)
            if lease.deadline is not None and lease.deadline > now
        ]

    def _hides_leases(self) -> bool:
        """Whether a partition that will open (again) may hold leases that are not known now."""
        return any(not lane.takes_work and lane.state is not LaneState.STOPPED for lane in self.lanes.values())

    def _spread(self, now: Millis) -> None:
        """Take from lanes that hang what has not begun, and may go elsewhere."""
        self._patience = judge(self.lanes.values(), now)
        for lane in self.lanes.values():
            if lane.degraded and lane.state is LaneState.COMMITTING and lane.accepted:
                self.produces.update((ticket.number, ticket) for ticket, _ in lane.take_back_produces() if not ticket.done)

    def _distribute(self, now: Millis) -> None:
        for ticket in list(self.produces.values()):
            request = ticket.request
            assert isinstance(request, Produce)
            number = request.partition if request.key is None else self._homes[home(request.key, len(self._homes))]
            lane = choose(self.lanes.values(), now) if number is None else self.lanes.get(number)
            if lane is None and len(self.lanes) < len(self._homes):
                # Another owner has a partition that may take it.
                self._reply(ticket, not_here(number))
            elif lane is not None and lane.takes_work:
                del self.produces[ticket.number]
                self._choices += 1
                lane.last_produced = self._choices
                lane.probe_at = now + PROBE_EVERY
                lane.put(ticket, request)

    def _attempt(self, step: Callable[[Lane, Millis], None], lane: Lane, now: Millis) -> None:
        waiting = list(lane.waiting)
        try:
            step(lane, now)
        except Exception as error:
            # A mistake of ours. Nothing of this turn was written, and the state cannot be trusted: tell the clients and load it anew.
            self._effects.append(Fault(lane.number, error))
            tickets = [ticket for ticket, _ in (*waiting, *lane.answers)]
            lane.answers, lane.waiting, lane.problem = [], [], repr(error)
            for ticket in tickets:
                self._reply(ticket, SluicewayError("internal", "the server made a mistake; nothing was written"))
            self._fail(lane, now, False)

    # ---- leases -----------------------------------------------------------------------------------------------

    def _deal(self, sources: list[Lane], now: Millis) -> None:
        """Serve waiters from lanes with ready items: the lane that has waited longest first, one lane a waiter where that will do."""
        if not sources or not self.waiters or "lease" in self.paused:
            return
        sources.sort(key=lambda lane: (lane.last_leased, -lane.partition.ready_count))
        waiters = self._servable(sum(lane.partition.ready_count for lane in sources), now)
        first: dict[int, LeaseInfo] = {}
        for index, lane in enumerate(sources):
            group = waiters[index :: len(sources)]
            shares = deal(lane.partition.ready_count, [ticket.request.batch_size for ticket in group])  # type: ignore[union-attr]
            for ticket, share in zip(group, shares, strict=True):
                info = self._lease(lane, ticket, share, now)
                if info is not None:
                    first[ticket.number] = info
        for ticket in waiters:
            self._lease_more(sources, ticket, first.get(ticket.number), now)

    def _servable(self, ready: int, now: Millis) -> list[Ticket]:
        """The waiters that come next; of those with one lease key only the first, and none whose earlier lease may still turn up."""
        chosen: list[Ticket] = []
        keys: set[tuple[str, str]] = set()
        hides_leases = self._hides_leases()
        held = {name for lane in self.lanes.values() for name in lane.partition.by_key}
        for ticket in self.waiters.values():
            if len(chosen) == ready:
                break
            if ticket.key_name is not None:
                if hides_leases or ticket.key_name in keys or (ticket.key_name in held and self._keyed(ticket, now)):
                    continue
                keys.add(ticket.key_name)
            chosen.append(ticket)
        return chosen

    def _lease_more(self, sources: list[Lane], ticket: Ticket, first: LeaseInfo | None, now: Millis) -> None:
        """From further lanes: for a waiter whose lane had none left, and for one that asked for several partitions."""
        request = ticket.request
        assert isinstance(request, Lease)
        had = set() if first is None else {first.partition}
        wanted = request.batch_size - (0 if first is None else first.items)
        for lane in sources:
            if wanted <= 0 or len(had) >= request.max_partitions:
                return
            info = None if lane.number in had else self._lease(lane, ticket, wanted, now)
            if info is not None:
                wanted -= info.items
                had.add(lane.number)

    def _lease(self, lane: Lane, ticket: Ticket, share: int, now: Millis) -> LeaseInfo | None:
        request = ticket.request
        assert isinstance(request, Lease)
        timeout = self.lease_timeout if request.lease_timeout is None else request.lease_timeout
        if not share:
            return None
        nothing_yet = ticket.room == MAX_LEASE_BYTES
        lease = lane.partition.lease(share, request.client_id, now + timeout, now, request.lease_key, ticket.room, nothing_yet)
        if lease is None:
            return None
        ticket.room -= max(lease.nbytes, 1)
        self._choices += 1
        lane.last_leased = self._choices
        self.waiters.pop(ticket.number, None)
        grant = lane.grant(lease.number, lease.count, now + timeout)
        ticket.awaiting += 1
        lane.answers.append((ticket, grant))
        return grant.info

    def _answer_empty(self, now: Millis) -> None:
        """End the waits whose time is up. A lane that is committing may have items for them in a moment."""
        lanes = self.lanes.values()
        coming = any(lane.state is LaneState.COMMITTING and lane.partition.ready_count and not lane.degraded for lane in lanes)
        for ticket in list(self.waiters.values()):
            if ticket.deadline > now:
                continue
            waits = coming or (ticket.keyed and self._keyed(ticket, now))
            if not waits or now - ticket.deadline >= LEASE_PATIENCE or (ticket.keyed and self._hides_leases()):
                self._end_wait(ticket, now)

    def _end_wait(self, ticket: Ticket, now: Millis) -> None:
        if ticket.keyed and (self._hides_leases() or self._keyed(ticket, now)):
            self._reply(ticket, SluicewayError("unavailable", "a partition that may hold this key's leases is busy or not open"))
        else:
            self._reply(ticket, [])

    # ---- commit and settle ------------------------------------------------------------------------------------

    def _commit(self, lane: Lane, now: Millis) -> None:
        taken = lane.partition.take_changes()
        if taken is None:
            lane.flight_txn = 0
            self._land(lane, True, now)
            return
        changes, fresh = taken
        lane.state, lane.flight_txn, lane.committing_since = LaneState.COMMITTING, changes.txn, now
        for ticket, _ in lane.answers:
            ticket.flying += 1
        self._effects.append(Commit(lane.number, lane.opening, changes, fresh))

    def _land(self, lane: Lane, done: bool, now: Millis) -> None:
        """The lane's answers are true (or, if not `done`, surely never happened)."""
        answers, lane.answers = lane.answers, []
        flew, lane.flight_txn = lane.flight_txn, 0
        for ticket, answer in answers:
            ticket.awaiting -= 1
            ticket.flying -= 1 if flew else 0
            if ticket.done:
                if done and isinstance(answer, Grant) and not ticket.keyed:
                    lane.given_back.append(answer.info.number)
                continue
            if done:
                ticket.add(answer)
            else:
                self._take_out(lane, ticket)
            again = ticket.number in self.produces or ticket.number in self.waiters
            if ticket.whole is not None or not (ticket.awaiting or again):
                self._reply(ticket, ticket.error or ticket.result(now))

    def _take_out(self, lane: Lane, ticket: Ticket) -> None:
        """Nothing was written for the ticket in this lane: a produce and a lease try again, a settle is told."""
        if isinstance(ticket.request, Produce):
            self.produces[ticket.number] = ticket
        elif isinstance(ticket.request, Lease):
            if not ticket.awaiting and not ticket.grants:
                self.waiters[ticket.number] = ticket
                ticket.room = MAX_LEASE_BYTES
        else:
            ticket.error = lane.unavailable()

    def _fail(self, lane: Lane, now: Millis, final: bool) -> None:
        """The partition has to be opened anew. What waits and is not in flight looks elsewhere."""
        first, most = REOPEN_AFTER
        lane.state = LaneState.STOPPED if final else LaneState.FAILED
        lane.retry_at = now + min(most, first << min(lane.failed_in_a_row, 10)) if lane.failed_in_a_row else now
        lane.failed_in_a_row += 1
        self._turn_away(lane)

    def _turn_away(self, lane: Lane) -> None:
        """What waits in the lane, and is not in flight, looks elsewhere."""
        for ticket, work in lane.take_back():
            if ticket.done:
                continue
            if isinstance(work, Produce):
                self.produces[ticket.number] = ticket
            else:
                ticket.error = lane.unavailable()
                if not ticket.awaiting:
                    self._reply(ticket, ticket.error)

    def _reply(self, ticket: Ticket, result: Result | SluicewayError) -> None:
        if not ticket.done:
            self._finish(ticket)
            self._effects.append(Reply(ticket, result))

    def _finish(self, ticket: Ticket) -> None:
        ticket.done = True
        self._unanswered.pop(ticket.number, None)
        self.produces.pop(ticket.number, None)
        self.waiters.pop(ticket.number, None)

    # ---- looking ----------------------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        work = [work for lane in self.lanes.values() for _, work in lane.waiting]
        produces = sum(isinstance(each, Produce) for each in work)
        return QueueStats(
            produce_waiting=len(self.produces) + produces,
            lease_waiting=len(self.waiters),
            complete_waiting=len(work) - produces,
            in_flight=sum(len(lane.answers) for lane in self.lanes.values()),
            partitions=[lane.stats() for lane in self.lanes.values()],
        )
