"""The circuit breaker of a queue at work: what is leased, which attempts count, and who hears of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sluiceway.contract.queue_settings import CircuitBreaker, RetryBackoff
from sluiceway.core.partition.circuit_breaker import FIRST_WAIT, PROBES
from sluiceway.core.queue.owned_queue import OwnedQueue
from sluiceway.core.queue.tickets import Ticket
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import DONE, RELEASE, Disposition
from tests.core.queue_rig import LEASE_TIMEOUT, Rig, lease, settle

RETRY, DEAD = Disposition("retry"), Disposition("dead", reason="bad")
BREAKER = CircuitBreaker(0.5, 20)


def served(items: int = 200, partitions: int = 1, **settings: object) -> Rig:
    """A queue with a breaker, and that many items in each partition."""
    rig = Rig(partitions)
    for number in range(partitions):
        rig.fill(number, items)
    rig.configure(circuit_breaker=BREAKER, **settings)
    return rig


def take(rig: Rig, items: int, **options: object) -> dict[int, list[int]]:
    """Lease items. Returns their offsets by partition."""
    ticket = rig.ask(lease(items, **options))  # type: ignore[arg-type]
    rig.end_all()
    return offsets(rig, ticket)


def offsets(rig: Rig, ticket: Ticket) -> dict[int, list[int]]:
    answer = rig.answers[ticket]
    assert isinstance(answer, list), answer
    return {grant.info.partition: [n for piece in grant.slices for n in piece.offsets.tolist()] for grant in answer}


def end(rig: Rig, leased: dict[int, list[int]], disposition: Disposition = DONE) -> None:
    rig.ask(settle(leased, disposition))
    rig.end_all()


def trip(rig: Rig) -> None:
    """Let the queue's first items fail."""
    end(rig, take(rig, 20), RETRY)
    assert rig.queue.circuit is not None
    assert rig.queue.circuit.state == "open"


def attempts(rig: Rig, number: int = 0) -> set[int]:
    log = rig.queue.executors[number].partition.log
    return {extent.attempts for extent in log.ready}


# ---- leases ---------------------------------------------------------------------------------------------------


def test_while_it_is_open_leases_wait_and_then_get_a_few_items() -> None:
    rig = served()
    trip(rig)
    hasty, patient = rig.ask(lease(100, 500)), rig.ask(lease(100, 20_000))
    rig.wait(FIRST_WAIT - 1)
    assert rig.grants(hasty) == []
    assert patient not in rig.answers
    rig.wait(1)
    rig.end_all()
    assert rig.grants(patient)[0].items == PROBES
    assert rig.ask(lease(100, 0)) in rig.answers, "the probes are out, and nothing else is leased"
    end(rig, offsets(rig, patient))
    assert len(take(rig, 100)[0]) == 100


def test_the_probes_of_several_partitions_and_clients_are_few_in_all() -> None:
    rig = served(partitions=3)
    trip(rig)
    waiting = [rig.ask(lease(3, 20_000, client=f"c{n}", most=3)) for n in range(4)]
    rig.wait(FIRST_WAIT)
    rig.end_all()
    got = [sum(info.items for info in rig.grants(ticket)) for ticket in waiting if ticket in rig.answers]
    assert got == [3, PROBES - 3]


def test_probes_that_fail_open_it_again_and_those_given_back_are_replaced() -> None:
    rig = served()
    trip(rig)
    rig.wait(FIRST_WAIT)
    end(rig, take(rig, 100), RELEASE)
    probes = take(rig, 100)
    assert len(probes[0]) == PROBES
    end(rig, probes, RETRY)
    waiter = rig.ask(lease(100, 20_000))
    rig.wait(2 * FIRST_WAIT - 1)
    assert waiter not in rig.answers
    rig.wait(1)
    rig.end_all()
    assert rig.grants(waiter)[0].items == PROBES


def test_a_probe_whose_lease_runs_out_has_failed() -> None:
    rig = served()
    trip(rig)
    rig.wait(FIRST_WAIT)
    take(rig, 100)
    rig.wait(LEASE_TIMEOUT)
    rig.end_all()
    assert rig.queue.circuit is not None
    assert (rig.queue.circuit.state, rig.queue.circuit.probe_at) == ("open", rig.now + 2 * FIRST_WAIT)


def test_without_a_breaker_or_once_it_is_gone_everything_is_leased() -> None:
    rig = served()
    trip(rig)
    waiter = rig.ask(lease(100, 20_000))
    rig.configure(circuit_breaker=CircuitBreaker(0.5, 20))
    assert waiter not in rig.answers, "the same breaker stays open"
    rig.configure()
    rig.end_all()
    assert rig.grants(waiter)[0].items == 100
    assert rig.queue.stats().circuit is None


def test_what_was_leased_before_is_settled_as_ever() -> None:
    rig = served()
    before = take(rig, 50)
    trip(rig)
    ticket = rig.ask(settle(before))
    rig.end_all()
    assert rig.settled(ticket).completed == 50


# ---- attempts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [[100], [10] * 10])
def test_at_most_as_many_failures_as_open_it_count_however_many_are_under_way(calls: Iterable[int]) -> None:
    rig = served(max_attempts=1, dead_queue="dead")
    leased = [take(rig, n) for n in calls]
    for each in leased:
        end(rig, each, RETRY)
    header = rig.queue.executors[0].partition.log.header
    gone = rig.queue.executors[0].partition.transfers.by_number.values()
    dead = sum(each.open for each in gone)
    assert dead < BREAKER.failures
    assert header.retried + dead == 100


def test_probes_use_no_attempts_up() -> None:
    rig = served(items=PROBES, max_attempts=2)
    rig.configure(circuit_breaker=CircuitBreaker(0.5, 1), max_attempts=2)
    end(rig, take(rig, 1), RETRY)
    for _ in range(10):
        rig.wait(60_000)
        probes = take(rig, 100)
        assert len(probes[0]) == PROBES
        end(rig, probes, RETRY)
    assert attempts(rig) == {0}


def test_an_item_that_kills_its_consumers_dies_all_the_same() -> None:
    rig = served(items=1, max_attempts=3)
    rig.configure(circuit_breaker=CircuitBreaker(0.5, 1), max_attempts=3)
    for _ in range(3):
        rig.wait(60_000)
        assert take(rig, 1)
        rig.wait(LEASE_TIMEOUT)
        rig.end_all()
    assert rig.queue.executors[0].partition.log.header.dead == 1


def test_a_bad_item_dies_while_others_succeed_and_one_that_is_called_dead_is() -> None:
    rig = served(items=30, max_attempts=3)
    for _ in range(3):
        leased = take(rig, 10)
        bad = leased[0][-1:]
        end(rig, {0: leased[0][:-1]})
        end(rig, {0: bad}, RETRY)
        leased = take(rig, 100)
        end(rig, leased, RELEASE)
    assert rig.queue.circuit is not None
    assert rig.queue.circuit.state == "closed"
    assert max(attempts(rig)) >= 1
    trip(served_again := served())
    served_again.wait(FIRST_WAIT)
    end(served_again, take(served_again, 1), DEAD)
    assert served_again.queue.executors[0].partition.log.header.dead == 1


def test_a_spared_item_backs_off_as_if_it_had_counted() -> None:
    backoff = RetryBackoff(5_000, 60_000)
    rig = served(retry_backoff=backoff)
    trip(rig)
    rig.wait(FIRST_WAIT)
    now = rig.now
    end(rig, take(rig, 1), RETRY)
    assert now + backoff.after(1, now) in {due.due_at for due in rig.queue.executors[0].partition.log.dues.values()}


# ---- faults and others ----------------------------------------------------------------------------------------


def test_a_partition_that_is_opened_again_reports_to_the_same_breaker() -> None:
    rig = served()
    leased = take(rig, 40)
    rig.ask(settle({0: leased[0][:20]}, RETRY))
    rig.end(0, Outcome.UNKNOWN, landed=False)
    rig.open(0)
    assert rig.queue.circuit is not None
    assert rig.queue.circuit.state == "open", "the items failed, whether or not that is stored"
    rig.wait(FIRST_WAIT)
    end(rig, take(rig, 100))
    assert rig.queue.circuit.room is None


def test_who_asks_for_its_counts_hears_of_it() -> None:
    rig = served()
    counted = rig.queue.stats().circuit
    assert counted is not None
    assert (counted.state, counted.since, counted.until) == ("closed", None, None)
    trip(rig)
    counted = rig.queue.stats().circuit
    assert counted is not None
    assert counted.state == "open"
    assert counted.since is not None
    assert counted.until is not None
    rig.wait(FIRST_WAIT)
    counted = rig.queue.stats().circuit
    assert counted is not None
    assert (counted.state, counted.until) == ("half_open", None)


def test_a_pause_goes_before_it() -> None:
    rig = served()
    trip(rig)
    rig.configure(circuit_breaker=BREAKER, paused=("lease",))
    waiter = rig.ask(lease(100, 20_000))
    rig.wait(10_000)
    assert waiter not in rig.answers
    rig.configure(circuit_breaker=BREAKER)
    rig.end_all()
    assert rig.grants(waiter)[0].items == PROBES


def test_other_instances_are_offered_no_more_than_its_probes() -> None:
    rig = served()
    share = OwnedQueue("q", LEASE_TIMEOUT)
    share.circuit, share.index, share.executors = rig.queue.circuit, rig.queue.index, rig.queue.executors
    assert share.load().ready == 200
    trip(rig)
    assert share.load().ready == 0
    rig.wait(FIRST_WAIT)
    assert share.load().ready == PROBES
