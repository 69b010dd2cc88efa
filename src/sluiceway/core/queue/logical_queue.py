"""Logical queue: the single-threaded scheduler between requests and partitions.

A pure machine. Events come in through `submit`, `cancel`, `opened`, `committed`, `transferred`; `cycle(now)` is one scheduling cycle: it
decides, and returns effects for the driver to carry out. A cycle gathers waiting requests, distributes them over the executors (leases:
`LeaseScheduler`), makes one change set per executor and settles what was committed. No reply leaves before the commit that it depends on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from sluiceway.contract.fields import time_field
from sluiceway.contract.queue_settings import Verb
from sluiceway.contract.queue_stats import CircuitStats, Limit, LogicalQueueStats
from sluiceway.contract.rebalances import PartitionState
from sluiceway.core.partition.circuit_breaker import Circuit
from sluiceway.core.partition.idempotency_keys import KeyResult
from sluiceway.core.partition.key_flows import key_rules
from sluiceway.core.partition.key_slots import home_of, slot
from sluiceway.core.partition.partition import Intended, Partition
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.partition_states import Allows, allows
from sluiceway.core.queue.executor_health import PROBE_EVERY, choose, least_patience, mark_degraded
from sluiceway.core.queue.executor_index import ExecutorIndex
from sluiceway.core.queue.lease_scheduler import Demand, LeaseScheduler
from sluiceway.core.queue.partition_executor import ExecutorState, PartitionExecutor, gone_elsewhere, not_here
from sluiceway.core.queue.queue_rate import QueueRate
from sluiceway.core.queue.queue_slots import QueueSlots
from sluiceway.core.queue.request_split import Work, parts_of
from sluiceway.core.queue.tickets import (
    AdjustSlots,
    Answer,
    Commit,
    Effect,
    Fault,
    Forward,
    Grant,
    Open,
    Reply,
    Result,
    Route,
    TakeTokens,
    Ticket,
    TransferEnd,
)
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_WAITING, TIMER_BATCH
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Lease, Produce, Produced, ProduceKey
from sluiceway.model.small_batch import digest as digest_of

REOPEN_AFTER = (50, 1_000)
"""Milliseconds before a failed partition is reopened: first, and at most (doubling)."""

MAX_LANDED = 100
"""Keyed produces that may be kept after they have landed. Each holds its payload."""

TRANSFER_RETRY = 1_000
"""Milliseconds before a failed transfer is retried."""

SLACK = 10_000
"""Items. A partition with up to this many more than the emptiest may still get the next produce, to share a transaction: consumers lease as
much in a call or two. No slack while nothing is being written."""

MIN_TOLERANCE = 256
MAX_UNEVEN = 8
"""A key's home takes the items itself, in one transaction, if its items exceed the emptiest partition's by no more than MIN_TOLERANCE, half
of the produce, or a MAX_UNEVENth of the emptiest's items, whichever is most."""

MAX_STREAK = 64
"""Consecutive produces to one partition: all partitions are used, even where consumers take each item at once."""


class LogicalQueue:
    """Serves the given partitions of one queue. `lease_timeout` is the queue's. Until it has a record, these are its only partitions."""

    def __init__(self, incarnation: str, partitions: Iterable[int], lease_timeout: Millis) -> None:
        self.index = ExecutorIndex(PartitionExecutor(number, incarnation) for number in partitions)
        self.executors = self.index.executors
        self.lease_scheduler = LeaseScheduler(self.index, lease_timeout, self._reply)
        self.paused: frozenset[Verb] = frozenset()
        self.circuit: Circuit | None = None
        self.rate: QueueRate | None = None
        self.slots: QueueSlots | None = None
        self.tolerance = MIN_TOLERANCE
        self._record: QueueRecord | None = None
        """None while the record has no partitions."""
        self._states: dict[int, tuple[PartitionState, Allows]] = {}
        self._rules: Rules | None = None
        self._patience = 0.0
        self._uneven = False
        """Whether some executor is far slower than the others."""
        self._is_low = False
        """Whether some executor's disk is low."""
        self._last_number = -1
        """Executor of the most recent unkeyed produce."""
        self._last_streak = 0
        """Consecutive unkeyed produces sent to it."""
        self._fewest: int | None = None
        """Present and expected items of the emptiest executor, as last seen in this cycle."""
        self.produces: dict[int, Ticket] = {}
        self._routed: dict[tuple[str | None, str], Ticket] = {}
        """Produces on their way, by key: others with that key wait while one goes to a target. One that has landed is dropped, since it
        holds its payload."""
        self._unanswered: dict[int, Ticket] = {}
        # Numbers, not tickets: an answered ticket must not be kept, with its payload, until its deadline.
        self._deadlines: list[tuple[Millis, int]] = []
        self._tickets = 0
        self._choices = 0
        """Orders the executors by when each was last chosen."""
        self._again_at: Millis | None = None
        """Time of the next cycle for requests that have found no executor."""
        self._effects: list[Effect] = []
        self.timers_done = 0
        """Expired leases and due entries handled by the last cycle."""

    def configure(self, record: QueueRecord, dead_incarnation: str | None = None) -> None:
        """Follow the queue's settings and partition states from now on. Waiting requests no longer allowed where they are look again.

        `dead_incarnation`: that of the dead queue that the record names; None: it is not known.
        """
        self.lease_scheduler.lease_timeout = record.lease_timeout
        self.paused = frozenset(record.paused)
        dead_queue = record.dead_queue
        if record.circuit_breaker != (None if self.circuit is None else self.circuit.rule):
            self.circuit = None if record.circuit_breaker is None else Circuit(record.circuit_breaker)
            self.lease_scheduler.circuit = self.circuit
        if record.rate != (None if self.rate is None else self.rate.rate):
            # Tokens of the former rate are dropped.
            self.rate = None if record.rate is None else QueueRate(record.rate, record.version)
            self.lease_scheduler.rate = self.rate
        elif self.rate is not None:
            self.rate.version = record.version
        if bool(record.concurrency) != (self.slots is not None):
            self.slots = QueueSlots(record.concurrency) if record.concurrency else None
            self.lease_scheduler.slots = self.slots
            self.lease_scheduler.refused.clear()
        elif self.slots is not None:
            self.slots.follow(record.concurrency)
        self._rules = Rules(
            record.max_attempts,
            dead_queue is not None,
            record.expire_timeout,
            record.retry_backoff,
            dead_queue,
            self.circuit,
            key_rules(record),
            record.unique,
            dead_incarnation,
        )
        changed = self._record is None or self._record.partitions != record.partitions or self._record.slots != record.slots
        self._record = record if record.partitions else None
        self._states = {each.partition: (each.state, allows(record, each)) for each in record.partitions}
        for executor in self.executors.values():
            self._instruct(executor)
            if changed:
                self._requeue_all(executor.take_back_produces(keyed=True))
        self.produces = dict(sorted(self.produces.items()))

    def _instruct(self, executor: PartitionExecutor) -> None:
        """Apply the settings to the executor."""
        executor.touch()
        if self._rules is not None:
            executor.partition.follow(self._rules)
        executor.quota = None if self.slots is None else self.slots.quota(executor.number)
        # A partition that the queue no longer has takes nothing and gives nothing out.
        executor.recorded, executor.allows = self._states.get(executor.number, ("available", Allows(not self._states, not self._states)))

    def _requeue_all(self, produces: Iterable[tuple[Ticket, Produce]]) -> None:
        """Requeue produces taken back from an executor: each finds another, or waits."""
        for ticket, _ in produces:
            self._requeue(ticket)

    def _requeue(self, ticket: Ticket) -> None:
        """Requeue a produce that surely was not written where it was sent."""
        route, ticket.route = ticket.route, None
        if route is not None:
            _unreserve(route, ticket)
            self._forget_landed(ticket)
            if route.was_sure and route.intended is not None:
                route.intended.memory.be_sure(_key(ticket), route.intended.intent)
        if not ticket.done:
            self.produces[ticket.number] = ticket

    # ---- events -----------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Accept a request. Raises too_many_requests, queue_paused, storage_full; otherwise exactly one Reply follows, unless it is
        cancelled."""
        request = ticket.request
        # A call that takes a transfer back (no rows) adds nothing, and must learn whether it has come before.
        if isinstance(request, Produce) and "produce" in self.paused and request.batch.num_rows and not request.lives:
            raise SluicewayError("queue_paused", "the queue is paused: it takes no items until it is resumed")
        if self._is_low and isinstance(request, Produce) and request.batch.num_rows and not request.lives:
            self._check_room(request)
        if len(self._unanswered) >= MAX_WAITING:
            raise SluicewayError("too_many_requests", f"{MAX_WAITING} requests, the maximum, already wait on this queue; try again later")
        self._tickets += 1
        ticket.number = self._tickets
        self._unanswered[ticket.number] = ticket
        self._note_deadline(ticket)
        if isinstance(request, Produce):
            self.produces[ticket.number] = ticket
        elif isinstance(request, Lease):
            if request.partition is not None and request.partition not in self.executors:
                self._reply(ticket, not_here(request.partition))
            else:
                self.lease_scheduler.add(ticket)
        else:
            for number, work in parts_of(ticket, self.executors, self.lease_scheduler.lease_timeout):
                self._put_now(ticket, number, work)
            if not ticket.awaiting:
                self._reply(ticket, ticket.error or ticket.result(ticket.deadline))

    def set_rooms(self, rooms: Mapping[int, int]) -> None:
        """Limit the bytes that produces may add to these partitions, whose disk is low; all others are unlimited."""
        self._is_low = bool(rooms)
        for executor in self.executors.values():
            if executor.room != rooms.get(executor.number):
                executor.room = rooms.get(executor.number)
                executor.touch()

    def _check_room(self, request: Produce) -> None:
        number = self._number_for(request)
        executors = [executor for executor in self.executors.values() if number in (None, executor.number)]
        if executors and not any(executor.has_room for executor in executors):
            which = "every partition that could take it" if number is None else f"partition {number}"
            raise SluicewayError("storage_full", f"the disk of {which} is full; complete or clear items, or free space on it")

    def _note_deadline(self, ticket: Ticket) -> None:
        heapq.heappush(self._deadlines, (ticket.deadline, ticket.number))
        if len(self._deadlines) > 2 * len(self._unanswered) + 1_000:
            # Entries of requests answered at once would pile up until their deadlines.
            self._deadlines = [(each.deadline, each.number) for each in self._unanswered.values()]
            heapq.heapify(self._deadlines)

    def _put_now(self, ticket: Ticket, number: int, work: Work) -> None:
        """Pass settling work on without waiting for a partition that is down: the client may be about to lose its lease."""
        executor = self.executors.get(number)
        if executor is not None and executor.takes(work):
            executor.put(ticket, work)
        else:
            ticket.error = not_here(number) if executor is None else executor.unavailable()

    def cancel(self, ticket: Ticket) -> None:
        """Handle a client's disconnect: drop work not begun, and give back its unkeyed leases. Work in flight continues."""
        for grant in () if ticket.done or ticket.keyed else ticket.grants:
            self.give_back(grant.info.partition, grant.info.number)
        self._finish(ticket)

    def opened(self, number: int, opening: int, loaded: Partition | Exception, now: Millis, final: bool = False) -> None:
        """Handle the result of `Open`: the partition's state, or an error (`final`: retrying is useless)."""
        executor = self.executors[number]
        if executor.state is not ExecutorState.OPENING or opening != executor.opening:
            # Of an earlier time that the partition was here.
            return
        executor.touch()
        if isinstance(loaded, Exception):
            executor.problem = str(loaded)
            self._fail(executor, now, final)
            return
        landed = executor.flight_txn and loaded.txn >= executor.flight_txn
        if self._rules is not None:
            loaded.follow(self._rules)
        executor.partition, executor.state, executor.problem, executor.knows_keys = loaded, ExecutorState.READY, "", True
        executor.transferring = {}
        executor.durable_leased = loaded.leased_count
        self._land(executor, bool(landed), now)

    def committed(self, number: int, opening: int, outcome: Outcome, now: Millis, *, at_once: bool = False) -> None:
        """Handle the result of `Commit`. `at_once`: the next one, if small, may run inline."""
        executor = self.executors[number]
        if executor.state is not ExecutorState.COMMITTING or opening != executor.opening:
            # Of an earlier time that the partition was here. One that has just come back under the same grant has the opening of that
            # time until it is opened, and nothing in memory: it must not be taken for open.
            return
        executor.sample(now)
        executor.at_once = at_once
        if outcome is Outcome.DONE:
            # Only now: a partition that opens but takes no commit would otherwise be reopened in a tight loop.
            executor.state, executor.failed_in_a_row = ExecutorState.READY, 0
            executor.durable_leased = executor.partition.leased_count
            executor.partition.keys_landed()
            self._land(executor, True, now)
            return
        executor.failures += 1
        executor.problem = f"a commit was {outcome.value}"
        if outcome is Outcome.REFUSED:
            executor.partition.keys_refused()
            self._land(executor, False, now)
        # The state in memory is ahead of the store: only reopening, with a higher fence, shows what holds.
        self._fail(executor, now, False)

    def transferred(self, number: int, lease: int, end: TransferEnd, now: Millis) -> None:
        """Handle the result of `Transfer`."""
        self.executors[number].transfer_ended(lease, end, now + TRANSFER_RETRY)

    def forwarded(self, ticket: Ticket, answer: Produced | SluicewayError, now: Millis) -> None:
        """Handle the result of `Forward`."""
        ticket.awaiting -= 1
        ticket.flying -= 1
        self._forget_landed(ticket)
        if isinstance(answer, Produced) and answer.items:
            self._settle_intent(ticket, answer)
            self._reply(ticket, answer)
        elif isinstance(answer, Produced):
            self._target_refused(ticket)
        elif answer.code == "invalid_request" and answer.field == "partition":
            # The partition was removed; the record that says so is here, or on its way.
            self._requeue(ticket)
            self._again_at = now
        else:
            self._reply(ticket, answer)

    def give_back(self, number: int, lease: int) -> None:
        """Give back a durable lease whose client disconnected before it received it. While the partition is away, this waits."""
        executor = self.executors[number]
        if executor.state is not ExecutorState.STOPPED and not executor.leaving:
            executor.given_back.append(lease)
            executor.touch()

    def retry_now(self, numbers: Iterable[int], now: Millis, *, anew: bool = False) -> None:
        """Reopen these partitions without further delay; `anew`: including those that serve and those that were stopped."""
        for executor in [self.executors[number] for number in numbers]:
            if anew:
                # Another process may have written the store, as a restore does.
                executor.knows_keys = False
                executor.given_back, executor.returning = [], []
            if anew and executor.state is not ExecutorState.OPENING:
                self._fail(executor, now, False)
            if executor.state is ExecutorState.FAILED:
                executor.retry_at = now
                executor.touch()

    def stop_executor(self, number: int, problem: str, now: Millis) -> None:
        """Stop a damaged partition: serve nothing from it until an operator intervenes."""
        executor = self.executors[number]
        executor.problem = problem
        executor.opening += 1  # ignore the results of work in flight
        self._fail(executor, now, True)

    def close(self, final: bool) -> None:
        """Stop: answer requests that have not begun; if `final`, also those in flight, whose outcome will never be known."""
        for ticket in list(self._unanswered.values()):
            if ticket.awaiting and not final:
                continue
            if ticket.flying:
                self._reply(ticket, SluicewayError("outcome_unknown", "the server stopped while the write was in progress"))
            elif isinstance(ticket.request, Lease) and ticket.request.lease_key is None:
                self._reply(ticket, [])
            else:
                self._reply(ticket, ticket.error or SluicewayError("unavailable", "the server is stopping"))

    # ---- scheduling cycle -------------------------------------------------------------------------------------

    def cycle(self, now: Millis, timers: int | None = None, is_pressed: bool = False) -> list[Effect]:
        """Run one scheduling cycle and return its effects, for the driver to carry out in order.

        Handles at most `timers` expired leases and due entries (None: TIMER_BATCH); `timers_done` has their number. `is_pressed`: as
        `LeaseScheduler.serve` has it.
        """
        self._again_at = None
        self._time_out(now)
        if self.slots is not None:
            self._set_quotas(self.slots)
        self._reopen(self.index.begin_cycle(now), now)
        self.lease_scheduler.answer_repeated(now)
        self._unload_hung(now)
        self._distribute(now)
        idle = [executor for executor in self.index.visited() if executor.state is ExecutorState.READY]
        self.timers_done = 0
        self._run_timers(idle, TIMER_BATCH if timers is None else timers, now)
        for executor in idle:
            if executor.has_work and executor.state is ExecutorState.READY:
                self._attempt(PartitionExecutor.work, executor, now)
                self._requeue_refused(executor, now)
        if self.circuit is not None:
            self.circuit.judge(now)
        is_cut = "lease" not in self.paused and self.lease_scheduler.serve(now, is_pressed)
        if is_cut:
            # Not at once: what has come meanwhile is served first.
            self._again_at = now
        if self.rate is not None:
            self._take_tokens(self.rate, now)
        if self.slots is not None:
            self._adjust_slots(self.slots, now)
        for executor in self.index.visited():
            if executor.state is ExecutorState.READY and (executor.answers or executor.partition.is_changed):
                self._attempt(self._commit, executor, now)
            self._effects += executor.start_transfers(now)
        self.lease_scheduler.end_waits(now, is_cut)
        self.index.end_cycle()
        effects, self._effects = self._effects, []
        return effects

    def _take_tokens(self, rate: QueueRate, now: Millis) -> None:
        """Take tokens for the leases that still wait, if it is time."""
        demand = Demand(0, 0, now) if "lease" in self.paused else self.lease_scheduler.demand(now)
        if want := rate.wish(demand.items, demand.servable, demand.until, now):
            self._effects.append(TakeTokens(rate, want, demand.until))

    def _set_quotas(self, slots: QueueSlots) -> None:
        """Let each partition lease what it may now."""
        for executor in self.executors.values():
            if executor.quota != (quota := slots.quota(executor.number)):
                executor.quota = quota
                executor.touch()

    def _adjust_slots(self, slots: QueueSlots, now: Millis) -> None:
        """Look at the record of the concurrency, if it is time."""
        unmet = {} if "lease" in self.paused else self.lease_scheduler.unmet()
        for number, executor in self.executors.items():
            leased = max(executor.durable_leased, executor.partition.leased_count)
            slots.note(number, executor.takes_work, leased, unmet.get(number, 0), now)
        if slots.wish(now):
            self._effects.append(AdjustSlots(slots))

    def _run_timers(self, executors: Iterable[PartitionExecutor], most: int, now: Millis) -> None:
        """Handle up to `most` expired leases and due entries, starting with the partition whose timers ran longest ago.

        Partition by partition: a small share of each would make many small transactions.
        """
        due = [executor for executor in executors if executor.is_due(now)] if most > 0 else []
        for executor in sorted(due, key=lambda executor: executor.last_timed):
            self._choices += 1
            executor.last_timed = self._choices
            self._attempt(partial(PartitionExecutor.run_timers, most=most), executor, now)
            self.timers_done += executor.partition.ticked
            most -= executor.partition.ticked
            if most <= 0:
                break

    def _requeue_refused(self, executor: PartitionExecutor, now: Millis) -> None:
        """Requeue the produces that a partition, shut in this cycle, has refused; the next cycle follows at once."""
        refused, executor.refused = executor.refused, []
        for ticket in refused:
            self._requeue(ticket)
        if refused:
            self._again_at = now

    def wake_at(self) -> Millis | None:
        """Due time of the next cycle without further events."""
        while self._deadlines and self._deadlines[0][1] not in self._unanswered:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._again_at is not None:
            times.append(self._again_at)
        if (at := self.index.wake_at()) is not None:
            times.append(at)
        if self.circuit is not None and (at := self.circuit.wake_at) is not None:
            times.append(at)
        if self.rate is not None and self.rate.wake_at is not None:
            times.append(self.rate.wake_at)
        if self.slots is not None and self.slots.wake_at is not None:
            times.append(self.slots.wake_at)
        if self._patience:
            times += [
                int(executor.committing_since + self._patience) + 1
                for executor in self.index.writing()
                if (executor.accepted or (self._routed and (executor.waiting or executor.answers))) and not executor.degraded
            ]
        return min(times) if times else None

    def _time_out(self, now: Millis) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = self._unanswered.get(heapq.heappop(self._deadlines)[1])
            if ticket is None:
                continue
            if isinstance(ticket.request, Lease):
                again_at = self.lease_scheduler.time_out(ticket, now)
                if again_at is not None:
                    heapq.heappush(self._deadlines, (again_at, ticket.number))
            elif ticket.flying and not (ticket.route is not None and ticket.route.only_intends):
                self._reply(ticket, SluicewayError("outcome_unknown", "request_timeout passed while the write was in progress"))
            else:
                self._reply(ticket, ticket.error or SluicewayError("unavailable", "no partition took the request within request_timeout"))

    def _reopen(self, executors: Iterable[PartitionExecutor], now: Millis) -> None:
        for executor in executors:
            if executor.state is ExecutorState.FAILED and executor.retry_at <= now:
                executor.state = ExecutorState.OPENING
                executor.opening += 1
                executor.touch()
                self._effects.append(Open(executor.number, executor.opening))

    def _compare_speeds(self, now: Millis) -> None:
        """Find the executors that are far slower than the others, if any may be."""
        if self._uneven or self.index.may_be_slow(now):
            self._patience = mark_degraded(self.executors.values(), now)
            self._uneven = any(executor.degraded for executor in self.executors.values())
        else:
            self._patience = least_patience(self.index.working)

    def _unload_hung(self, now: Millis) -> None:
        """Take work not yet begun, and movable, from executors that hang."""
        self._compare_speeds(now)
        for executor in self.executors.values() if self._uneven else ():
            if executor.degraded and executor.state is ExecutorState.COMMITTING:
                if executor.waiting:
                    self._requeue_all(executor.take_back_produces())
                self._fail_hung_intents(executor)

    def _distribute(self, now: Millis) -> None:
        """Give each waiting produce to an executor, or refuse it if another owner may take it. Otherwise it waits on."""
        self._fewest = None
        for ticket in list(self.produces.values()):
            request = ticket.request
            assert isinstance(request, Produce)
            if request.key is not None and not request.key.is_system and request.part is None:
                self._distribute_keyed(ticket, request, request.key, now)
                continue
            number = self._number_for(request)
            executor = self._choose_executor(request.batch.nbytes, now) if number is None else self.executors.get(number)
            if executor is not None and executor.takes_produce(request):
                del self.produces[ticket.number]
                self._choices += 1
                executor.last_produced = self._choices
                executor.probe_at = now + PROBE_EVERY
                executor.put(ticket, request)
            elif self._is_elsewhere(executor, request):
                self._reply(ticket, not_here(number))
            elif request.part is not None and (executor is None or executor.gave_away(request)):
                self._reply(ticket, gone_elsewhere(number))

    def _choose_executor(self, nbytes: int, now: Millis) -> PartitionExecutor | None:
        """The executor for an unkeyed produce: the one that took the last, to share its transaction, or the emptiest."""
        last = self.executors.get(self._last_number)
        # Requests that would hang with the transaction; waiting leases are in none.
        requests = len(self._unanswered) - len(self.lease_scheduler.waiters)
        if last is not None and (self._last_streak >= MAX_STREAK or not last.shares(nbytes, requests, now)):
            last = None
        if last is None or self._fewest is None or last.has_or_will > self._fewest + SLACK:
            # Nothing to share, or the emptiest is not known in this cycle, or was far emptier: look at it.
            emptiest = choose(self.executors.values(), now) if self._uneven else self.index.emptiest()
            if emptiest is None or emptiest.degraded:
                return emptiest
            self._fewest = emptiest.has_or_will
            if last is None or last.has_or_will > self._fewest + SLACK or last.is_slower(emptiest, now):
                last = emptiest
                self._last_number, self._last_streak = emptiest.number, 0
        self._last_streak += 1
        return last

    # ---- keyed produces (ADR 34) --------------------------------------------------------------------------------

    def _distribute_keyed(self, ticket: Ticket, request: Produce, key: ProduceKey, now: Millis) -> None:
        """Send a keyed produce to its key's home, for its items or an intent. Per key, one produce at a time goes to a target."""
        other = self._routed.get(key.identity)
        if other is not None and other is not ticket and other.awaiting and other.route is not None and other.route.is_alone:
            return
        number = self._number_for(request)
        executor = None if number is None else self.executors.get(number)
        if request.partition is not None:
            # The home belongs to another owner, and has an intent.
            takes, route = executor is not None and _answers(executor), Route(at_target=True)
        else:
            takes, route = executor is not None and self._home_takes(executor, request, now), Route()
        if executor is None or not takes:
            if self._is_elsewhere(executor, request):
                self._reply(ticket, not_here(number))
            elif key.is_generated and request.partition is None and self._has_healthy_other_than(executor):
                self._reply(ticket, SluicewayError("unavailable", "the home partition of the key is not available; use another key"))
            return
        if request.partition is None:
            target = self._target(executor, request)
            if target is not executor:
                route.target, route.reserved = target.number, target
                target.reserve(request.batch.num_rows)
        ticket.route = route
        self._send(ticket, request, executor)
        executor.probe_at = now + PROBE_EVERY

    def _send(self, ticket: Ticket, request: Produce, executor: PartitionExecutor) -> None:
        self.produces.pop(ticket.number, None)
        if len(self._routed) > 2 * len(self._unanswered) + MAX_LANDED:
            # Those that timed out while they waited, and were taken back later.
            self._routed = {name: each for name, each in self._routed.items() if each.awaiting}
        self._routed[_key(ticket).identity] = ticket
        if not (ticket.route is not None and ticket.route.only_intends):
            self._choices += 1
            executor.last_produced = self._choices
        executor.put(ticket, request)

    def _home_takes(self, home: PartitionExecutor, request: Produce, now: Millis) -> bool:
        """Whether the produce may wait at its home. A hung home is left alone; a slow one is tried once a second, and by produces whose key
        cannot be replaced."""
        if not home.takes_produce(request):
            return False
        assert request.key is not None
        if not home.degraded:
            return True
        replaceable = request.key.is_generated and self._has_healthy_other_than(home)
        return home.state is ExecutorState.READY and (not replaceable or home.probe_at <= now)

    def _has_healthy_other_than(self, home: PartitionExecutor | None) -> bool:
        """Whether a key with another home could be served at once."""
        return any(executor is not home and executor.takes_items and not executor.degraded for executor in self.executors.values())

    def _target(self, home: PartitionExecutor, request: Produce) -> PartitionExecutor:
        """The executor for a keyed produce's items: its home, if that is among the emptiest, or the emptiest."""
        rows = request.batch.num_rows
        if home.degraded or (self._fewest is not None and _is_even(home, self._fewest, rows, self.tolerance)):
            return home
        if self._uneven:
            quick = [executor for executor in self.executors.values() if executor.takes_items and not executor.degraded]
            emptiest = min(quick, key=PartitionExecutor.candidate, default=None)
        else:
            emptiest = self.index.emptiest()
        if emptiest is None or emptiest is home:
            return home
        # For the rest of the cycle: until its end the value only grows.
        self._fewest = emptiest.has_or_will
        return home if _is_even(home, self._fewest, rows, self.tolerance) else emptiest

    def _follow_intent(self, ticket: Ticket, intended: Intended, now: Millis) -> None:
        """Send the items to the target of the home's durable intent, unless the target has them already."""
        key, request, memory = _key(ticket), ticket.request, intended.memory
        assert isinstance(request, Produce)
        assert ticket.route is not None
        _unreserve(ticket.route, ticket)
        executor, is_sure = self.executors.get(intended.target), memory.is_sure(key, intended.intent)
        if executor is None and self._is_removed(intended.target):
            # Removal waits until the homes have noted its answers (see `core.rebalance`): it had none for this key.
            memory.be_sure(key, intended.intent)
            self._requeue(ticket)
            self._again_at = now
        elif executor is not None and not (executor.takes_items and not _hangs(executor) if is_sure else _answers(executor)):
            self._requeue(ticket)
        else:
            memory.doubt(key)
            ticket.route = Route(intended=intended, at_target=True, was_sure=is_sure)
            if executor is not None:
                self._send(ticket, request, executor)
            else:
                ticket.awaiting += 1
                ticket.flying += 1
                left = max(1, ticket.deadline - now)
                asked = Produce(request.batch, left, key, intended.target, bundle=request.bundle)
                self._effects.append(Forward(ticket, intended.target, asked))

    def _is_removed(self, number: int) -> bool:
        """Whether a rebalance has removed that partition. An unknown number may have been created since."""
        record = self._record
        return record is not None and number < record.given and record.partition(number) is None

    def _target_refused(self, ticket: Ticket) -> None:
        """Handle a target's durable refusal of the key: another target may be chosen."""
        route = ticket.route
        if route is None or route.intended is None:
            # The asking home's owner must be told.
            self._reply(ticket, Produced(-1 if ticket.request.partition is None else ticket.request.partition, 0, 0, False))  # type: ignore[union-attr]
            return
        route.was_sure = True
        self._requeue(ticket)

    def _settle_intent(self, ticket: Ticket, answer: Produced) -> None:
        """Record in the home that the items are durable at the target."""
        route, request = ticket.route, ticket.request
        if route is not None and route.intended is not None and isinstance(request, Produce):
            executor = self.executors.get(answer.partition)
            digest = executor.partition.keys.digest_as_target(_key(ticket)) if executor is not None else None
            if digest is None:
                digest = digest_of(request.batch)
            seen = KeyResult(digest, answer.first_offset, answer.items, answer.partition, route.intended.intent.intended_at)
            route.intended.memory.settle(_key(ticket), route.intended.intent, seen)

    def _fail_hung_intents(self, executor: PartitionExecutor) -> None:
        """Answer produces whose intent hangs at their home: they surely wrote no items. Replaceable keys need not wait."""
        if not self._has_healthy_other_than(executor):
            return
        for ticket, _ in executor.answers:
            if ticket.route is not None and ticket.route.only_intends and _key(ticket).is_generated:
                self._reply(ticket, SluicewayError("unavailable", "the home partition of the key does not respond; use another key"))

    def _number_for(self, request: Produce) -> int | None:
        """The partition that must take it; None: any may. MOVING matches no partition."""
        if request.partition is not None or request.key is None:
            return request.partition
        if self._record is not None:
            return home_of(self._record, request.key)
        return sorted(self.executors)[slot(request.key, len(self.executors))] if self.executors else None

    def _is_elsewhere(self, executor: PartitionExecutor | None, request: Produce) -> bool:
        """Whether another owner may take a request that this instance cannot. Never here; a share overrides it."""
        return False

    def _attempt(self, step: Callable[[PartitionExecutor, Millis], None], executor: PartitionExecutor, now: Millis) -> None:
        waiting = list(executor.waiting)
        executor.touch()
        try:
            step(executor, now)
        except Exception as error:
            # An internal error: nothing of this cycle was written, and the state is suspect. Tell the clients and reload it.
            self._effects.append(Fault(executor.number, error))
            tickets = [ticket for ticket, _ in (*waiting, *executor.answers)]
            for ticket in tickets:
                if isinstance(ticket.request, Produce):
                    ticket.awaiting = 0
            executor.answers, executor.waiting, executor.problem, executor.knows_keys = [], [], repr(error), False
            # It may be one of these that the partition cannot take back.
            executor.returning = []
            for ticket in tickets:
                self._reply(ticket, SluicewayError("internal", "internal error of the server; nothing was written"))
            self._fail(executor, now, False)

    # ---- commit and settle ------------------------------------------------------------------------------------

    def _commit(self, executor: PartitionExecutor, now: Millis) -> None:
        taken = executor.partition.take_changes()
        if taken is None:
            executor.flight_txn = 0
            self._land(executor, True, now)
            return
        changes, fresh = taken
        executor.state, executor.flight_txn, executor.committing_since = ExecutorState.COMMITTING, changes.txn, now
        executor.answered += len(executor.answers)
        executor.written += sum(map(len, changes.blobs.values()))
        for ticket, _ in executor.answers:
            ticket.flying += 1
        self._effects.append(Commit(executor.number, executor.opening, changes, fresh, executor.answers))

    def _land(self, executor: PartitionExecutor, done: bool, now: Millis) -> None:
        """Release the executor's answers: durable, or, if not `done`, surely without effect."""
        executor.touch()
        answers, executor.answers = executor.answers, []
        flew, executor.flight_txn = executor.flight_txn, 0
        returning, executor.returning = executor.returning, []
        if not done:
            # Nobody else knows of these leases, and a lease that is durable keeps its number.
            executor.given_back += returning
        for ticket, answer in answers:
            ticket.awaiting -= 1
            ticket.flying -= 1 if flew else 0
            if ticket.route is None:
                self._land_answer(executor, ticket, answer, done, now)
            else:
                if not self._land_routed(ticket, answer, done, now):
                    self._land_answer(executor, ticket, answer, done, now)
                self._forget_landed(ticket)

    def _land_answer(self, executor: PartitionExecutor, ticket: Ticket, answer: Answer, done: bool, now: Millis) -> None:
        if ticket.done:
            if done and isinstance(answer, Grant) and not ticket.keyed:
                executor.given_back.append(answer.info.number)
            return
        if done:
            ticket.add(answer)
        else:
            self._retry_unwritten(executor, ticket)
        again = ticket.number in self.produces or ticket.number in self.lease_scheduler.waiters
        if ticket.whole is not None or not (ticket.awaiting or again):
            self._reply(ticket, ticket.ending(now))

    def _forget_landed(self, ticket: Ticket) -> None:
        """Drop a keyed produce from `_routed` if it is not on its way."""
        identity = _key(ticket).identity
        if not ticket.awaiting and self._routed.get(identity) is ticket:
            del self._routed[identity]

    def _land_routed(self, ticket: Ticket, answer: Answer, done: bool, now: Millis) -> bool:
        """Handle the landing of a keyed produce. Returns whether it goes on, or has ended."""
        route = ticket.route
        assert route is not None
        if not done:
            if ticket.done:
                self._requeue(ticket)
        elif isinstance(answer, Intended):
            if not ticket.done:
                self._follow_intent(ticket, answer, now)
            return True
        elif isinstance(answer, Produced) and not answer.items:
            self._target_refused(ticket)
            return True
        elif isinstance(answer, Produced):
            self._settle_intent(ticket, answer)
        elif isinstance(answer, SluicewayError) and route.was_sure and route.intended is not None:
            route.intended.memory.be_sure(_key(ticket), route.intended.intent)
        return False

    def _retry_unwritten(self, executor: PartitionExecutor, ticket: Ticket) -> None:
        """Handle a ticket of which this executor surely wrote nothing: produces and leases retry, settles get an error."""
        if isinstance(ticket.request, Produce):
            self._requeue(ticket)
        elif isinstance(ticket.request, Lease):
            if not ticket.awaiting and not ticket.grants:
                self.lease_scheduler.retry(ticket)
        else:
            ticket.error = executor.unavailable()

    def _fail(self, executor: PartitionExecutor, now: Millis, final: bool) -> None:
        """Schedule the partition's reopening. Waiting work not in flight goes elsewhere."""
        first, most = REOPEN_AFTER
        executor.touch()
        executor.state, executor.at_once = ExecutorState.STOPPED if final else ExecutorState.FAILED, False
        executor.retry_at = now + min(most, first << min(executor.failed_in_a_row, 10)) if executor.failed_in_a_row else now
        executor.failed_in_a_row += 1
        self._reroute_waiting(executor)

    def _reroute_waiting(self, executor: PartitionExecutor) -> None:
        """Send the executor's waiting work, not in flight, elsewhere."""
        for ticket, work in executor.take_back():
            if ticket.done:
                continue
            if isinstance(work, Produce):
                self._requeue(ticket)
            else:
                ticket.error = executor.unavailable()
                if not ticket.awaiting:
                    self._reply(ticket, ticket.error)

    def _reply(self, ticket: Ticket, result: Result | SluicewayError) -> None:
        if not ticket.done:
            self._finish(ticket)
            self._effects.append(Reply(ticket, result))

    def _finish(self, ticket: Ticket) -> None:
        ticket.done = True
        if ticket.route is not None:
            _unreserve(ticket.route, ticket)
            self._forget_landed(ticket)
        self._unanswered.pop(ticket.number, None)
        self.produces.pop(ticket.number, None)
        self.lease_scheduler.remove(ticket)

    # ---- queries ----------------------------------------------------------------------------------------------

    def _limited_by(self) -> Limit | None:
        """The setting because of which leases waited in the last cycle."""
        if self.slots is not None and self.slots.holds_back:
            return "concurrency"
        return "rate" if self.rate is not None and self.rate.holds_back else None

    def stats(self) -> LogicalQueueStats:
        work = [work for executor in self.executors.values() for _, work in executor.waiting]
        produces = sum(isinstance(each, Produce) for each in work)
        return LogicalQueueStats(
            produce_waiting=len(self.produces) + produces,
            lease_waiting=len(self.lease_scheduler.waiters),
            complete_waiting=len(work) - produces,
            in_flight=sum(len(executor.answers) for executor in self.executors.values()),
            circuit=None if self.circuit is None else _circuit(self.circuit),
            limited_by=self._limited_by(),
            partitions=[executor.stats() for executor in self.executors.values()],
        )


def _circuit(circuit: Circuit) -> CircuitStats:
    since = None if circuit.state == "closed" else circuit.since
    return CircuitStats(
        state=circuit.state, since=time_field(since), until=time_field(circuit.probe_at if circuit.state == "open" else None)
    )


def _key(ticket: Ticket) -> ProduceKey:
    """The key of a produce that has one."""
    request = ticket.request
    assert isinstance(request, Produce)
    assert request.key is not None
    return request.key


def _unreserve(route: Route, ticket: Ticket) -> None:
    """Release the reservation of a produce whose intent is no longer being written."""
    if route.reserved is not None:
        assert isinstance(ticket.request, Produce)
        route.reserved.reserve(-ticket.request.batch.num_rows)
        route.reserved = None


def _is_even(home: PartitionExecutor, fewest: int, rows: int, tolerance: int) -> bool:
    """Whether a home has hardly more items than the emptiest, so that a second transaction does not pay."""
    return home.has_or_will <= fewest + max(tolerance, rows // 2, fewest // MAX_UNEVEN)


def _hangs(executor: PartitionExecutor) -> bool:
    return executor.degraded and executor.state is ExecutorState.COMMITTING


def _answers(executor: PartitionExecutor) -> bool:
    """Whether the executor can be asked about a key now."""
    return executor.takes_work and not _hangs(executor)
