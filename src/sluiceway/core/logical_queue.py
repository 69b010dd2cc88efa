"""The logical queue: the single-threaded point at which requests meet partitions.

A pure machine. Events come in by `submit`, `cancel`, `opened`, `committed`, `transferred`; `turn(now)` decides and returns effects for the
driver to carry out. A turn gathers what waits, distributes it over the lanes, makes one change set per lane and settles what was committed.
No reply leaves before the commit that it depends on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from sluiceway.core.dealing import Dealing
from sluiceway.core.distribution import slot
from sluiceway.core.health import PROBE_EVERY, choose, judge, least_patience
from sluiceway.core.lane import Lane, LaneState, not_here
from sluiceway.core.partition import Partition
from sluiceway.core.parts import Work, parts_of
from sluiceway.core.rules import Rules
from sluiceway.core.slots import home_of
from sluiceway.core.states import Allows, allows
from sluiceway.core.tickets import Commit, Effect, Fault, Grant, Open, Reply, Result, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_LEASE_BYTES, MAX_WAITING, TIMER_BATCH
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import PartitionState, QueueRecord
from sluiceway.model.requests import Lease, Produce, QueueStats

REOPEN_AFTER = (50, 1_000)
"""Milliseconds before a failed partition is opened again: first, and at most (doubling)."""

TRANSFER_RETRY = 1_000
"""Milliseconds before a transfer that failed is tried again."""

SLACK = 10_000
"""Items that a partition may have more than the emptiest and still be given the next produce, to share a transaction: what consumers lease
in a call or two. While nothing is being written there is no slack."""

STAYS = 64
"""Produces in a row that go to one partition: all are used, also where consumers take each item at once."""


class LogicalQueue(Dealing):
    """Serves the given partitions of one queue. `lease_timeout` is the queue's. Until it has a record, its partitions are all there are."""

    def __init__(self, incarnation: str, partitions: Iterable[int], lease_timeout: Millis) -> None:
        super().__init__(incarnation, partitions, lease_timeout)
        self._record: QueueRecord | None = None
        """If it has partitions."""
        self._states: dict[int, tuple[PartitionState, Allows]] = {}
        self._rules: Rules | None = None
        self._patience = 0.0
        self._uneven = False
        """Some lane is far slower than the others."""
        self._last = -1
        """The lane that took the last produce that any may take, ..."""
        self._stays = 0
        """... so many in a row, and ..."""
        self._fewest: int | None = None
        """... what the emptiest has or will have, as seen in this turn."""
        self.produces: dict[int, Ticket] = {}
        self._unanswered: dict[int, Ticket] = {}
        self._tickets = 0
        self._again_at: Millis | None = None
        """A turn is due, as some requests have not found their lane."""
        self._effects: list[Effect] = []

    def configure(self, record: QueueRecord) -> None:
        """Follow the queue's settings from now on, and what may be asked of its partitions: what waits and may not be here looks again."""
        self.lease_timeout = record.lease_timeout
        self.paused = frozenset(record.paused)
        dead_queue = record.dead_queue
        self._rules = Rules(record.max_attempts, dead_queue is not None, record.expire_timeout, record.retry_backoff, dead_queue)
        changed = self._record is None or self._record.partitions != record.partitions or self._record.slots != record.slots
        self._record = record if record.partitions else None
        self._states = {each.partition: (each.state, allows(record, each)) for each in record.partitions}
        for lane in self.lanes.values():
            self._instruct(lane)
            if changed:
                self._give_up(lane.take_back_produces(keyed=True))
        self.produces = dict(sorted(self.produces.items()))

    def _instruct(self, lane: Lane) -> None:
        """Let the lane follow the settings."""
        lane.touch()
        if self._rules is not None:
            lane.partition.follow(self._rules)
        # One that the queue has no more takes nothing, and gives nothing out.
        lane.recorded, lane.allows = self._states.get(lane.number, ("available", Allows(not self._states, not self._states)))

    def _give_up(self, produces: Iterable[tuple[Ticket, Produce]]) -> None:
        """What was taken back from a lane looks for another, or waits."""
        self.produces.update((ticket.number, ticket) for ticket, _ in produces if not ticket.done)

    # ---- events -----------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Take a request. Raises too_many_requests, queue_paused; otherwise exactly one Reply follows, unless it is cancelled."""
        if isinstance(ticket.request, Produce) and "produce" in self.paused and not ticket.request.lives:
            raise SluicewayError("queue_paused", "the queue is paused: it takes no items until it is resumed")
        if len(self._unanswered) >= MAX_WAITING:
            raise SluicewayError("too_many_requests", f"{MAX_WAITING} requests wait on this queue already; try later")
        self._tickets += 1
        ticket.number = self._tickets
        self._unanswered[ticket.number] = ticket
        self._note_deadline(ticket)
        request = ticket.request
        if isinstance(request, Produce):
            self.produces[ticket.number] = ticket
        elif isinstance(request, Lease):
            if request.partition is not None and request.partition not in self.lanes:
                self._reply(ticket, not_here(request.partition))
            else:
                self.waiters[ticket.number] = ticket
                if request.lease_key is not None:
                    self._keyed_leases[ticket.number] = ticket
        else:
            for number, work in parts_of(ticket, self.lanes, self.lease_timeout):
                self._put_now(ticket, number, work)
            if not ticket.awaiting:
                self._reply(ticket, ticket.error or ticket.result(ticket.deadline))

    def _note_deadline(self, ticket: Ticket) -> None:
        heapq.heappush(self._deadlines, (ticket.deadline, ticket.number))
        if len(self._deadlines) > 2 * len(self._unanswered) + 1_000:
            # Those of what was answered at once would pile up until they are over.
            self._deadlines = [(each.deadline, each.number) for each in self._unanswered.values()]
            heapq.heapify(self._deadlines)

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
        lane.touch()
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

    def committed(self, number: int, opening: int, outcome: Outcome, now: Millis, *, at_once: bool = False) -> None:
        """The answer to `Commit`. `at_once`: the next may be made while nothing else happens, if it is small."""
        lane = self.lanes[number]
        if opening != lane.opening:
            return
        lane.sample(now)
        lane.at_once = at_once
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
        lane.touch()
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
            lane.touch()

    def retry_now(self, numbers: Iterable[int], now: Millis, *, anew: bool = False) -> None:
        """Do not wait any longer with opening these partitions again; `anew`: neither those that serve, nor those that were stopped."""
        for lane in [self.lanes[number] for number in numbers]:
            if anew and lane.state is not LaneState.OPENING:
                self._fail(lane, now, False)
            if lane.state is LaneState.FAILED:
                lane.retry_at = now
                lane.touch()

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
        self._again_at = None
        self._time_out(now)
        self._reopen(self.board.begin_turn(now), now)
        self._find_keyed(now)
        self._spread(now)
        self._distribute(now)
        idle = [lane for lane in self.board.visited() if lane.state is LaneState.READY]
        due = {lane.number for lane in idle if lane.is_due(now)}
        timers = max(1, TIMER_BATCH // len(due)) if due else 0
        for lane in idle:
            if lane.number in due or lane.waiting or lane.transferred or lane.called_back or lane.given_back:
                self._attempt(lambda lane, now: lane.work(now, timers), lane, now)
                self._look_on(lane, now)
        self._deal(now)
        for lane in self.board.visited():
            if lane.state is LaneState.READY and (lane.answers or lane.partition.is_changed):
                self._attempt(self._commit, lane, now)
            transfer = lane.start_transfer(now)
            if transfer is not None:
                self._effects.append(transfer)
        self._answer_empty(now)
        self.board.end_turn()
        effects, self._effects = self._effects, []
        return effects

    def _look_on(self, lane: Lane, now: Millis) -> None:
        """What the partition has refused in this turn, as it was shut in it, looks elsewhere in the next, which comes at once."""
        turned_away, lane.turned_away = lane.turned_away, []
        self.produces.update((ticket.number, ticket) for ticket in turned_away if not ticket.done)
        if turned_away:
            self._again_at = now

    def wake_at(self) -> Millis | None:
        """When a turn is due though nothing happened."""
        while self._deadlines and self._deadlines[0][1] not in self._unanswered:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._again_at is not None:
            times.append(self._again_at)
        if (at := self.board.wake_at()) is not None:
            times.append(at)
        if self._patience:
            times += [
                int(lane.committing_since + self._patience) + 1 for lane in self.board.writing() if lane.accepted and not lane.degraded
            ]
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

    def _reopen(self, lanes: Iterable[Lane], now: Millis) -> None:
        for lane in lanes:
            if lane.state is LaneState.FAILED and lane.retry_at <= now:
                lane.state = LaneState.OPENING
                lane.opening += 1
                lane.touch()
                self._effects.append(Open(lane.number, lane.opening))

    def _judge(self, now: Millis) -> None:
        """See which lanes are far slower than the others, if any may be."""
        if self._uneven or self.board.may_be_slow(now):
            self._patience = judge(self.lanes.values(), now)
            self._uneven = any(lane.degraded for lane in self.lanes.values())
        else:
            self._patience = least_patience(self.board.working)

    def _spread(self, now: Millis) -> None:
        """Take from lanes that hang what has not begun, and may go elsewhere."""
        self._judge(now)
        for lane in self.lanes.values() if self._uneven else ():
            if lane.degraded and lane.state is LaneState.COMMITTING and lane.accepted:
                self._give_up(lane.take_back_produces())

    def _distribute(self, now: Millis) -> None:
        self._fewest = None
        for ticket in list(self.produces.values()):
            request = ticket.request
            assert isinstance(request, Produce)
            number = self._number_for(request)
            lane = self._lane_for(request.batch.nbytes, now) if number is None else self.lanes.get(number)
            if lane is not None and lane.takes_produce(request):
                del self.produces[ticket.number]
                self._choices += 1
                lane.last_produced = self._choices
                lane.probe_at = now + PROBE_EVERY
                lane.put(ticket, request)
            elif self._is_elsewhere(lane, request):
                self._reply(ticket, not_here(number))

    def _lane_for(self, nbytes: int, now: Millis) -> Lane | None:
        """The lane for a produce that any may take: the one that took the last, to share a transaction that comes there, or the emptiest.

        It may hang by itself: hence no transaction gets most of what is under way, unless its partition is emptier than the others by as
        much.
        """
        last = self.lanes.get(self._last)
        requests = len(self._unanswered) - len(self.waiters)
        if last is not None and (self._stays >= STAYS or not last.shares(nbytes, requests, now)):
            last = None
        if last is None or self._fewest is None or last.has_or_will > self._fewest + SLACK:
            lane = choose(self.lanes.values(), now) if self._uneven else self.board.emptiest()
            if lane is None or lane.degraded:
                return lane
            self._fewest = lane.has_or_will
            if last is None or last.has_or_will > self._fewest + SLACK or last.is_slower(lane, now):
                last = lane
                self._last, self._stays = lane.number, 0
        self._stays += 1
        return last

    def _number_for(self, request: Produce) -> int | None:
        """The partition that must take it; None: any may. MOVING is none that there is."""
        if request.partition is not None or request.key is None:
            return request.partition
        if self._record is not None:
            return home_of(self._record, request.key)
        return sorted(self.lanes)[slot(request.key, len(self.lanes))] if self.lanes else None

    def _is_elsewhere(self, lane: Lane | None, request: Produce) -> bool:
        """Whether another owner may take what this one can not. One whose partitions are served by nobody else waits."""
        return False

    def _attempt(self, step: Callable[[Lane, Millis], None], lane: Lane, now: Millis) -> None:
        waiting = list(lane.waiting)
        lane.touch()
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
        lane.touch()
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
        lane.touch()
        lane.state, lane.at_once = LaneState.STOPPED if final else LaneState.FAILED, False
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
        self._keyed_leases.pop(ticket.number, None)
        self._late_leases.pop(ticket.number, None)

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
