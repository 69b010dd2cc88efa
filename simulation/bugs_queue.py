"""Planted bugs of the logical queue."""

from __future__ import annotations

import heapq
from itertools import count, takewhile
from typing import Any

from simulation.planting import Bug, shelf
from sluiceway.core.partition.circuit_breaker import PROBES, Circuit
from sluiceway.core.partition.idempotency_keys import PLACED, KeyMemory
from sluiceway.core.partition.partition import Intended, Partition
from sluiceway.core.queue import lease_scheduler, logical_queue
from sluiceway.core.queue.lease_scheduler import LeaseScheduler
from sluiceway.core.queue.logical_queue import LogicalQueue
from sluiceway.core.queue.partition_executor import ExecutorState, PartitionExecutor
from sluiceway.core.queue.tickets import Reply, Route
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition

BUGS: list[Bug] = []
bug = shelf(BUGS)


@bug(LogicalQueue, "_commit")
def replies_before_the_commit(original: Any) -> Any:
    """A reply leaves when its commit begins."""

    def commit(self: Any, executor: Any, now: int) -> None:
        answers = list(executor.answers)
        original(self, executor, now)
        if executor.state is ExecutorState.COMMITTING:
            executor.answers = answers
            self._land(executor, True, now)

    return commit


@bug(LogicalQueue, "committed")
def takes_unknown_for_refused(original: Any) -> Any:
    """A request that may have landed is tried again elsewhere."""

    def committed(self: Any, number: int, opening: int, outcome: Outcome, now: int, **named: Any) -> None:
        original(self, number, opening, Outcome.REFUSED if outcome is Outcome.UNKNOWN else outcome, now, **named)

    return committed


@bug(LogicalQueue, "committed")
def takes_unknown_for_done(original: Any) -> Any:
    """A request that may not have landed is acknowledged."""

    def committed(self: Any, number: int, opening: int, outcome: Outcome, now: int, **named: Any) -> None:
        original(self, number, opening, Outcome.DONE if outcome is Outcome.UNKNOWN else outcome, now, **named)

    return committed


@bug(LogicalQueue, "committed")
def keeps_its_state_after_a_refusal(original: Any) -> Any:
    """The state in memory stays ahead of the store."""

    def committed(self: Any, number: int, opening: int, outcome: Outcome, now: int, **named: Any) -> None:
        executor = self.executors[number]
        if outcome is Outcome.REFUSED and opening == executor.opening:
            executor.state = ExecutorState.READY
            self._land(executor, False, now)
        else:
            original(self, number, opening, outcome, now, **named)

    return committed


@bug(LogicalQueue, "opened")
def never_sees_that_it_landed(original: Any) -> Any:
    """After an unknown outcome the transaction number in the store is misread by one."""

    def opened(self: Any, number: int, opening: int, *rest: Any) -> None:
        if opening == self.executors[number].opening:
            self.executors[number].flight_txn += 1
        original(self, number, opening, *rest)

    return opened


@bug(LogicalQueue, "opened")
def opens_again_without_a_pause(original: Any) -> Any:
    """A partition that opens but takes no commit is reopened without a pause."""

    def opened(self: Any, number: int, *rest: Any) -> None:
        original(self, number, *rest)
        self.executors[number].failed_in_a_row = 0

    return opened


@bug(LogicalQueue, "_fail")
def gives_a_partition_up(original: Any) -> Any:
    """After three failures a partition is never opened again."""

    def fail(self: Any, executor: Any, now: int, final: bool) -> None:
        original(self, executor, now, final)
        if executor.failures == 3:
            executor.state = ExecutorState.STOPPED

    return fail


@bug(LogicalQueue, "_attempt")
def works_on_after_a_mistake(original: Any) -> Any:
    """A cycle that failed in the middle is not undone: the partition keeps the half-done state."""

    def attempt(self: Any, step: Any, executor: Any, now: int) -> None:
        kept = (executor.state, executor.retry_at, executor.failed_in_a_row)
        original(self, step, executor, now)
        if executor.state is ExecutorState.FAILED:
            executor.state, executor.retry_at, executor.failed_in_a_row = kept

    return attempt


@bug(LogicalQueue, "cancel")
def answers_the_cancelled(original: Any) -> Any:
    """A cancelled request is answered."""

    def cancel(self: Any, ticket: Any) -> None:
        self._effects.append(Reply(ticket, SluicewayError("unavailable", "cancelled")))
        original(self, ticket)

    return cancel


@bug(LogicalQueue, "_reply")
def calls_unknown_unavailable(original: Any) -> Any:
    """A client is told that nothing was done although it may have been."""

    def reply(self: Any, ticket: Any, result: Any) -> None:
        if isinstance(result, SluicewayError) and result.code == "outcome_unknown":
            result = SluicewayError("unavailable", "nothing was done")
        original(self, ticket, result)

    return reply


@bug(LogicalQueue, "transferred")
def lets_go_of_a_transfer_that_failed(original: Any) -> Any:
    """Dead items are dropped before the dead queue has them."""

    def transferred(self: Any, number: int, lease: int, end: Any, now: int) -> None:
        original(self, number, lease, end._replace(done=True), now)

    return transferred


@bug(LogicalQueue, "_retry_unwritten")
def forgets_a_produce_that_was_refused(original: Any) -> Any:
    """A produce that is to be tried elsewhere is never answered."""

    def retry(self: Any, executor: Any, ticket: Any) -> None:
        original(self, executor, ticket)
        self.produces.pop(ticket.number, None)
        self._unanswered.pop(ticket.number, None)
        ticket.done = True

    return retry


@bug(LeaseScheduler, "_keyed")
def serves_a_lease_key_twice(original: Any) -> Any:
    """A repeated lease key takes more."""
    return lambda *_: []


@bug(LeaseScheduler, "_keyed")
def finds_leases_that_are_over(original: Any) -> Any:
    """A repeated lease key is answered with an expired lease."""

    def keyed(self: Any, ticket: Any, now: int) -> Any:
        return original(self, ticket, now - 600)

    return keyed


@bug(LeaseScheduler, "answer_repeated")
def answers_a_lease_key_with_what_it_has(original: Any) -> Any:
    """A repeated lease key is answered while some of its leases may not be durable."""

    def answer(self: Any, now: int) -> None:
        for ticket in [ticket for ticket in self.waiters.values() if ticket.keyed]:
            grants = [grant for executor, grant in self._keyed(ticket, now) if executor.state is ExecutorState.READY]
            if grants:
                self._reply(ticket, grants)

    return answer


@bug(LeaseScheduler, "_hides_leases")
def looks_away_from_closed_partitions(original: Any) -> Any:
    """A repeated lease key is answered while a partition that may hold its leases is closed."""
    return lambda *_: False


@bug(LeaseScheduler, "_hides_leases")
def waits_for_stopped_partitions(original: Any) -> Any:
    """While one partition is damaged, no lease with a key is served."""
    return lambda self, ticket: any(not executor.takes_work for executor in self._index.executors.values())


@bug(LogicalQueue, "committed")
def takes_what_is_unknown_for_refused(original: Any) -> Any:
    """Leases of a commit with an unknown outcome count as not taken."""

    def committed(self: Any, number: int, opening: int, outcome: Outcome, *rest: Any, **options: Any) -> None:
        if outcome is Outcome.UNKNOWN and opening == self.executors[number].opening:
            self.executors[number].partition.keys_refused()
        original(self, number, opening, outcome, *rest, **options)

    return committed


@bug(LeaseScheduler, "_hides_leases")
def keeps_lease_keys_waiting_for_all(original: Any) -> Any:
    """While any partition that will open again is closed, no lease with a key is served."""
    return lambda self, ticket: any(
        not executor.takes_work and executor.state is not ExecutorState.STOPPED for executor in self._index.executors.values()
    )


@bug(LeaseScheduler, "_assign")
def lets_a_lease_key_block_the_line(original: Any) -> Any:
    """A waiter blocked by its lease key blocks all waiters behind it."""

    def assign(self: Any, now: int, *more: Any) -> Any:
        def is_free(waiter: tuple[int, Any]) -> bool:
            ticket = waiter[1]
            return not ticket.keyed or not (self._keyed(ticket, now) or self._hides_leases(ticket))

        waiters = self.waiters
        self.waiters = dict(takewhile(is_free, waiters.items()))
        try:
            return original(self, now, *more)
        finally:
            self.waiters = waiters

    return assign


@bug(LogicalQueue, "_put_now")
def settles_by_half(original: Any) -> Any:
    """A settle over several partitions succeeds although one was not open."""

    def put_now(self: Any, ticket: Any, number: int, work: Any) -> None:
        if self.executors[number].takes_work:
            original(self, ticket, number, work)

    return put_now


@bug(LeaseScheduler, "time_out")
def holds_a_lease_for_ever(original: Any) -> Any:
    """A lease in flight past its deadline is never answered."""
    return lambda *_: None


@bug(LeaseScheduler, "time_out")
def answers_a_lease_in_part(original: Any) -> Any:
    """At its deadline a lease over several partitions is answered with only the earliest ones."""

    def time_out(self: Any, ticket: Any, now: int) -> Any:
        if ticket.grants:
            return self._reply(ticket, ticket.result(now))
        return original(self, ticket, now)

    return time_out


@bug(lease_scheduler, "LEASE_PATIENCE")
def waits_behind_a_hung_commit(original: Any) -> Any:
    """A lease without time to wait stays until another partition's commit ends."""
    return 20_000


@bug(LogicalQueue, "wake_at")
def sleeps_through_a_reopening(original: Any) -> Any:
    """No timer wakes the owner when a failed partition is due."""

    def wake_at(self: Any) -> Any:
        failed = [executor for executor in self.executors.values() if executor.state is ExecutorState.FAILED]
        for executor in failed:
            executor.state = ExecutorState.OPENING
            executor.touch()
        at = original(self)
        for executor in failed:
            executor.state = ExecutorState.FAILED
            executor.touch()
        return at

    return wake_at


@bug(PartitionExecutor, "put")
def loses_sight_of_a_partition(original: Any) -> Any:
    """Work added to a partition during its commit goes unnoticed, and may wait forever."""

    def put(self: Any, *rest: Any) -> None:
        touched, self.touched = self.touched, set()
        original(self, *rest)
        self.touched = touched

    return put


@bug(LogicalQueue, "close")
def stops_without_a_word(original: Any) -> Any:
    """Requests in flight when the owner stops are never answered."""

    def close(self: Any, final: bool) -> None:
        if not final:
            original(self, final)

    return close


@bug(logical_queue, "home_of")
def moves_a_key_about(original: Any) -> Any:
    """A repetition is sent to another partition than the first call."""
    calls = count()
    return lambda record, key: record.partitions[next(calls) % len(record.partitions)].partition


# ---- keyed produces -------------------------------------------------------------------------------------------


@bug(LogicalQueue, "_target")
def always_stays_at_home(original: Any) -> Any:
    """A keyed produce goes to its home, however much waits there."""
    return lambda self, home, request: home


@bug(LogicalQueue, "_commit")
def writes_the_target_before_the_intent(original: Any) -> Any:
    """Items go to their target while the home's intent is still being written."""

    def commit(self: Any, executor: Any, now: int) -> None:
        original(self, executor, now)
        if executor.state is ExecutorState.COMMITTING:
            intends = [pair for pair in executor.answers if isinstance(pair[1], Intended) and not pair[0].done]
            executor.answers = [pair for pair in executor.answers if pair not in intends]
            for ticket, intended in intends:
                ticket.awaiting -= 1
                ticket.flying -= 1
                self._follow_intent(ticket, intended, now)

    return commit


@bug(KeyMemory, "intend")
def keeps_intents_in_memory(original: Any) -> Any:
    """An intent is forgotten when its home is reloaded."""

    def intend(self: Any, key: Any, *rest: Any) -> Any:
        seen = original(self, key, *rest)
        self.touched.clear()
        return seen

    return intend


@bug(KeyMemory, "is_sure")
def goes_elsewhere_while_the_target_is_unknown(original: Any) -> Any:
    """An intent is replaced although its target may have the items."""
    return lambda self, key, intent: True


@bug(Route, "is_alone")
def sends_two_of_a_key_at_once(original: Any) -> Any:
    """A repetition does not wait for a produce with its key in transit to a target."""
    return property(lambda self: False)


@bug(KeyMemory, "remember")
def forgets_at_the_target_first(original: Any) -> Any:
    """The target of a keyed produce remembers the key only for a moment."""

    def remember(self: Any, key: Any, seen: Any, now: int, *role: Any) -> None:
        original(self, key, seen, now, *role)
        if role == (PLACED,):
            record = self.records[f"tk{key.key}" if key.group is None else f"tg{key.group}"]
            record.until = now + 100
            heapq.heappush(self._ends, (record.until, f"tk{key.key}" if key.group is None else f"tg{key.group}"))

    return remember


# ---- circuit breaker ------------------------------------------------------------------------------------------


@bug(Circuit, "room")
def leases_while_its_circuit_is_open(original: Any) -> Any:
    """An open circuit breaker lets probes through at any time."""
    return property(lambda self: None if self.state == "closed" else max(0, PROBES - self._out))


@bug(Circuit, "wake_at")
def forgets_to_probe(original: Any) -> Any:
    """No cycle is due when an open circuit breaker would let probes through."""
    return property(lambda self: None)


@bug(Partition, "_collect_returns")
def spares_what_ran_out(original: Any) -> Any:
    """A lease that runs out while the circuit breaker is open does not count as an attempt."""

    def collect(self: Any, lease: Any, positions: Any, disposition: Any, *rest: Any) -> Any:
        spares = disposition is None and self.circuit is not None and self.circuit.spares
        return original(self, lease, positions, Disposition("retry") if spares else disposition, *rest)

    return collect
