"""Leases through a logical queue: who is served, from where, how long a wait lasts, and repeated lease keys."""

from __future__ import annotations

import pytest

from sluiceway.core.queue import lease_scheduler
from sluiceway.core.queue.lease_scheduler import LEASE_PATIENCE
from sluiceway.core.queue.tickets import Ticket
from sluiceway.kernel.limits import MAX_CYCLE_LEASES
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, Lease, Produce
from tests.core.queue_rig import LEASE_TIMEOUT, Rig, lease, produce, settle

REFUSED, UNKNOWN = Outcome.REFUSED, Outcome.UNKNOWN


def filled(*counts: int) -> Rig:
    rig = Rig(len(counts))
    for number, count in enumerate(counts):
        if count:
            rig.fill(number, count)
    return rig


# ---- up to an offset --------------------------------------------------------------------------------------------


def test_a_lease_takes_of_each_partition_what_lies_before_an_offset() -> None:
    rig = filled(5, 5, 5)
    ticket = rig.ask(Lease("me", 100, max_partitions=3, before={0: 3, 2: 5}))
    rig.end_all()
    assert sorted((info.partition, info.items) for info in rig.grants(ticket)) == [(0, 3), (2, 5)]
    rig.fill(1, 5)
    again = rig.submit(Lease("me", 100, max_partitions=3, before={0: 3, 2: 5}))
    other = rig.submit(Lease("other", 100, max_partitions=3))
    rig.cycle()
    rig.end_all()
    # It is answered at once, and takes nothing from others.
    assert rig.grants(again) == []
    assert sum(info.items for info in rig.grants(other)) == 12


# ---- who is served, and from where ----------------------------------------------------------------------------


def test_what_is_ready_is_dealt_among_those_who_wait() -> None:
    rig = Rig()
    tickets = [rig.ask(lease(count, 1_000)) for count in (20, 6, 1)]
    rig.fill(0, 23)
    assert [rig.grants(ticket)[0].items for ticket in tickets] == [16, 6, 1]


def test_under_pressure_those_who_wait_are_filled_one_after_the_other() -> None:
    rig = Rig()
    rig.is_pressed = True
    tickets = [rig.ask(lease(count, 1_000)) for count in (20, 6, 1)]
    rig.fill(0, 23)
    assert [[grant.items for grant in rig.grants(ticket)] for ticket in tickets[:2]] == [[20], [3]]
    assert tickets[2] not in rig.answers
    rig.fill(0, 1)
    assert rig.grants(tickets[2])[0].items == 1
    one, other = rig.ask(lease(100, 1_000)), rig.ask(lease(100, 1_000))
    rig.is_pressed = False
    rig.fill(0, 10)
    assert [rig.grants(ticket)[0].items for ticket in (one, other)] == [5, 5]


def test_under_pressure_each_partition_with_items_has_a_waiter_of_its_own() -> None:
    rig = filled(6, 6)
    rig.is_pressed = True
    assert shared(rig, 4, 4, 4, 4) == [[(0, 4)], [(1, 4)], [(0, 2)], [(1, 2)]]
    rig = filled(6, 6)
    rig.is_pressed = True
    assert shared(rig, 9, 9, 9) == [[(0, 6)], [(1, 6)], []]


def test_many_who_wait_are_served_in_several_cycles_and_share_as_in_one() -> None:
    rig = Rig()
    tickets = [rig.submit(lease(10, 1_000)) for _ in range(250)]
    rig.cycle()
    rig.submit(produce(500))
    rig.cycle()
    served = [ticket for ticket, _ in rig.commits[0].answers if isinstance(ticket.request, Lease)]
    assert served == tickets[:MAX_CYCLE_LEASES]
    rig.end_all()
    assert [sum(grant.items for grant in rig.grants(ticket)) for ticket in tickets] == [2] * 250
    # One with the items, and two more.
    assert rig.commit_count == 3


def test_the_next_cycle_for_those_who_are_left_comes_at_once_where_a_partition_is_idle() -> None:
    rig = filled(150, 150)
    tickets = [rig.submit(lease(1)) for _ in range(300)]
    rig.cycle()
    assert rig.queue.wake_at() == rig.now
    # Their time is over, but not their turn.
    assert not any(ticket in rig.answers for ticket in tickets)
    rig.cycle()
    assert set(rig.commits) == {0, 1}
    rig.end_all()
    assert [[grant.items for grant in rig.grants(ticket)] for ticket in tickets] == [[1]] * 300


def test_a_wait_that_is_left_for_the_next_cycle_ends_when_there_is_nothing() -> None:
    rig = filled(MAX_CYCLE_LEASES)
    tickets = [rig.submit(lease(1)) for _ in range(MAX_CYCLE_LEASES + 5)]
    rig.cycle()
    rig.end_all()
    assert [len(rig.grants(ticket)) for ticket in tickets] == [1] * MAX_CYCLE_LEASES + [0] * 5


def test_a_lease_from_several_partitions_has_all_of_them_though_others_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_scheduler, "MAX_CYCLE_LEASES", 1)
    rig = filled(2, 2, 2)
    one, other = (rig.submit(lease(6, most=3)) for _ in range(2))
    rig.cycle()
    rig.end_all()
    assert sorted(grant.partition for grant in rig.grants(one)) == [0, 1, 2]
    assert rig.grants(other) == []


def test_who_came_first_is_served_first() -> None:
    rig = Rig()
    tickets = [rig.ask(lease(count, 1_000)) for count in (1, 9, 1)]
    rig.fill(0, 1)
    assert [*rig.answers.keys() & {*tickets}] == tickets[:1]
    rig.fill(0, 1)
    assert [*rig.answers.keys() & {*tickets[1:]}] == tickets[1:2]


def test_leases_rotate_over_the_partitions() -> None:
    rig = filled(100, 1, 5)
    seen = []
    for _ in range(6):
        ticket = rig.ask(lease(1))
        rig.end_all()
        seen.append(rig.grants(ticket)[0].partition)
    assert seen == [0, 1, 2, 0, 2, 0]


def test_who_was_never_served_comes_where_nobody_was_and_most_waits() -> None:
    rig = filled(100, 1, 5)
    seen = []
    for client in "abcab":
        ticket = rig.ask(lease(1, client=client))
        rig.end_all()
        seen.append(rig.grants(ticket)[0].partition)
    # The second round is in the order of those who come: after 0 and after 2, of what there is.
    assert seen == [0, 2, 1, 2, 0]


def shared(rig: Rig, *wants: int) -> list[list[tuple[int, int]]]:
    """What waiters of one turn get, each (partition, items)."""
    tickets = [rig.submit(lease(count)) for count in wants]
    rig.cycle()
    rig.end_all()
    return [[(info.partition, info.items) for info in rig.grants(ticket)] for ticket in tickets]


def test_waiters_share_a_partition_as_far_as_it_has_enough_for_them() -> None:
    rig = filled(10, 17, 40)
    assert shared(rig, 4, 4, 4, 4, 4, 4, 4) == [[(2, 4)]] * 4 + [[(1, 4)]] * 3, "the fullest, as none was served before"
    assert shared(rig, 4, 4, 4, 4, 4, 4, 4) == [[(0, 4)]] * 2 + [[(2, 4)]] * 4 + [[(1, 4)]], "the next in turn, until it has too little"
    assert rig.commit_count == 3 + 2 + 3, "one for each turn and partition that it came from"


def test_where_there_is_not_enough_waiters_are_spread_over_the_partitions_evenly() -> None:
    assert shared(filled(6, 6), 4, 4, 4, 4) == [[(0, 3)], [(1, 3)], [(0, 3)], [(1, 3)]]
    assert shared(filled(1, 1, 2), 9, 9, 9, 9, 9) == [[(2, 1)], [(0, 1)], [(1, 1)], [(2, 1)], []]


@pytest.mark.parametrize(("most", "expected"), [(1, [(0, 3)]), (2, [(0, 3), (1, 3)]), (3, [(0, 3), (1, 3), (2, 1)])])
def test_a_lease_comes_from_as_many_partitions_as_it_may(most: int, expected: list[tuple[int, int]]) -> None:
    rig = filled(3, 3, 3)
    ticket = rig.ask(lease(7, most=most))
    rig.end_all()
    assert [(info.partition, info.items) for info in rig.grants(ticket)] == expected


def test_a_waiter_whose_partition_has_none_left_looks_at_the_others() -> None:
    assert shared(filled(1, 9), 3, 7, 1, 1) == [[(1, 3)], [(0, 1)], [(1, 1)], [(1, 1)]]


def test_an_item_produced_while_a_consumer_waits_is_leased_in_the_same_commit() -> None:
    rig = Rig()
    waiter = rig.ask(lease(5, 1_000))
    producer = rig.ask(produce(2))
    rig.end(0)
    assert rig.commit_count == 1
    assert rig.produced(producer).items == rig.grants(waiter)[0].items == 2


# ---- waiting --------------------------------------------------------------------------------------------------


def test_nothing_to_lease() -> None:
    rig = Rig()
    at_once, later = rig.ask(lease()), rig.ask(lease(timeout=300))
    assert rig.grants(at_once) == []
    rig.wait(299)
    assert later not in rig.answers
    rig.wait(1)
    assert rig.grants(later) == []


def test_a_waiter_is_woken_by_a_retry() -> None:
    rig = Rig()
    rig.take(0, 2)
    waiter = rig.ask(lease(5, 1_000))
    rig.ask(settle({0: [0]}, Disposition("retry")))
    rig.end_all()
    assert rig.grants(waiter)[0].items == 1


def test_a_waiter_is_woken_by_an_expiry() -> None:
    rig = Rig()
    rig.take(0, 2, lease_timeout=500)
    waiter = rig.ask(lease(5, 1_000))
    rig.wait(500)
    rig.end_all()
    assert rig.grants(waiter)[0].items == 1, "what ran out comes back in smaller leases"


def test_a_waiter_is_woken_when_an_item_is_due() -> None:
    rig = Rig()
    rig.ask(produce(2, due=rig.now + 700))
    rig.end_all()
    waiter = rig.ask(lease(5, 1_000))
    rig.wait(699)
    assert not rig.commits
    rig.wait(1)
    rig.end_all()
    assert rig.grants(waiter)[0].items == 2


def test_a_lease_that_does_not_wait_has_what_a_busy_partition_holds() -> None:
    rig = filled(3)
    rig.ask(produce())
    ticket = rig.ask(lease(9))
    assert ticket not in rig.answers
    rig.end(0)
    rig.end(0)
    assert rig.grants(ticket)[0].items == 4


def test_a_lease_that_does_not_wait_does_not_wait_for_a_hung_partition() -> None:
    rig = filled(3)
    rig.ask(produce())
    ticket = rig.ask(lease(9))
    rig.wait(LEASE_PATIENCE - 1)
    assert ticket not in rig.answers
    rig.wait(1)
    assert rig.grants(ticket) == []


def test_a_lease_that_does_not_wait_does_not_wait_for_settles() -> None:
    rig = Rig(2)
    rig.take(0, 9)
    rig.take(1, 9)
    rig.ask(settle({0: [0], 1: [0]}))
    rig.ask(settle({0: [1], 1: [1]}))
    ticket = rig.ask(lease(9))
    assert rig.grants(ticket) == []


def test_a_lease_in_flight_at_its_deadline_waits_for_the_commit() -> None:
    rig = filled(3)
    ticket = rig.ask(lease(3, 100))
    rig.wait(LEASE_PATIENCE // 2)
    assert ticket not in rig.answers
    rig.end(0)
    assert rig.grants(ticket)[0].items == 3


def test_a_lease_in_flight_is_unknown_when_patience_ends() -> None:
    rig = filled(3)
    ticket = rig.ask(lease(3, 100))
    rig.wait(100 + LEASE_PATIENCE - 1)
    assert ticket not in rig.answers
    rig.wait(1)
    assert rig.code(ticket) == "outcome_unknown"


def test_a_refused_lease_waits_on_and_is_served_elsewhere() -> None:
    rig = filled(3, 3)
    ticket = rig.ask(lease(3, 1_000))
    rig.end(0, REFUSED)
    rig.end(1)
    assert [(info.partition, info.items) for info in rig.grants(ticket)] == [(1, 3)]
    rig.open(0)
    assert rig.durable(0) == (3, 0, 0)


def test_a_refused_lease_whose_time_is_up_ends_empty() -> None:
    rig = filled(3)
    ticket = rig.ask(lease(3))
    rig.wait(200)
    rig.end(0, REFUSED)
    assert rig.grants(ticket) == []


def test_a_refused_lease_does_not_begin_a_long_wait_anew() -> None:
    rig = filled(3, 2)
    rig.ask(produce())
    assert list(rig.commits) == [1], "the other partition has items and hangs"
    ticket = rig.ask(lease(3, 100))
    rig.wait(200)
    rig.end(0, REFUSED)
    rig.wait(LEASE_PATIENCE)
    assert rig.grants(ticket) == []


def test_a_lease_that_does_not_wait_has_its_share_of_every_partition() -> None:
    rig = filled(2, 2)
    ticket = rig.ask(lease(4, most=2))
    rig.end(0)
    assert ticket not in rig.answers
    rig.end(1)
    assert [(info.partition, info.items) for info in rig.grants(ticket)] == [(0, 2), (1, 2)]


def test_what_is_durable_is_told_soon_after_the_deadline_though_another_partition_hangs() -> None:
    rig = filled(2, 2)
    ticket = rig.ask(lease(4, 300, most=2))
    rig.end(0)
    rig.wait(300 + LEASE_PATIENCE - 1)
    assert ticket not in rig.answers, "until then both may come"
    rig.wait(1)
    assert [(info.partition, info.items) for info in rig.grants(ticket)] == [(0, 2)]


def test_what_becomes_durable_after_the_client_was_told_unknown_comes_back() -> None:
    rig = filled(2, 2)
    ticket = rig.ask(lease(4, 300, most=2))
    rig.wait(300 + LEASE_PATIENCE)
    assert rig.code(ticket) == "outcome_unknown"
    rig.end_all()
    assert rig.durable(0) == rig.durable(1) == (2, 0, 0)


def test_a_lease_that_ran_out_before_it_was_told_is_not_told() -> None:
    rig = filled(2, 2)
    ticket = rig.ask(lease(4, 2_000, most=2, lease_timeout=400))
    rig.end(0)
    rig.wait(450)
    rig.end_all()
    assert rig.grants(ticket) == []


def test_a_cancelled_waiter_takes_nothing() -> None:
    rig = Rig()
    ticket = rig.ask(lease(3, 1_000))
    rig.queue.cancel(ticket)
    rig.fill(0, 3)
    assert ticket not in rig.answers
    assert rig.durable(0) == (3, 0, 0)


def test_the_queue_says_when_it_wants_a_turn() -> None:
    rig = Rig()
    assert rig.queue.wake_at() is None
    rig.take(0, 2, lease_timeout=900)
    assert rig.queue.wake_at() == rig.now + 900
    ticket = rig.ask(lease(timeout=400))
    assert rig.queue.wake_at() == rig.now + 400
    rig.queue.cancel(ticket)
    assert rig.queue.wake_at() == rig.now + 900


# ---- lease keys -----------------------------------------------------------------------------------------------


def test_a_repeated_key_is_answered_with_the_leases_of_the_first_call() -> None:
    rig = filled(2, 2, 2)
    request = lease(4, key="k", most=2)
    first = rig.ask(request)
    rig.end_all()
    again = rig.ask(request)
    assert rig.grants(again) == rig.grants(first)
    assert rig.offsets(again) == rig.offsets(first) == [0, 1, 0, 1]
    other = rig.ask(lease(4, key="k", client="another"))
    rig.end_all()
    assert [info.partition for info in rig.grants(other)] == [2]


def test_a_repeated_key_waits_for_the_first_call_in_flight() -> None:
    rig = filled(4)
    request = lease(2, 1_000, key="k")
    tickets = [rig.ask(request), rig.ask(request), rig.ask(request)]
    assert not rig.answers.keys() & {*tickets}
    rig.end_all()
    assert rig.grants(tickets[0]) == rig.grants(tickets[1]) == rig.grants(tickets[2])
    assert rig.durable(0) == (2, 2, 0)


def test_two_calls_of_one_key_in_one_turn_take_once() -> None:
    rig = filled(4, 4)
    tickets = [rig.submit(lease(2, 1_000, key="k")) for _ in range(2)]
    rig.cycle()
    rig.end_all()
    assert rig.grants(tickets[0]) == rig.grants(tickets[1])
    assert rig.durable(0)[1] + rig.durable(1)[1] == 2


def test_a_key_is_free_again_once_its_leases_are_closed() -> None:
    rig = filled(2)
    request = lease(1, key="k")
    first = rig.ask(request)
    rig.end_all()
    rig.ask(settle({0: [0]}))
    rig.end_all()
    second = rig.ask(request)
    rig.end_all()
    assert rig.grants(first)[0].number != rig.grants(second)[0].number


def test_a_repeated_key_finds_no_lease_that_has_run_out() -> None:
    rig = filled(2)
    request = lease(2, key="k", lease_timeout=500)
    first = rig.ask(request)
    rig.end_all()
    rig.now += 500
    second = rig.ask(request)
    rig.end_all()
    assert rig.grants(second)[0].number > rig.grants(first)[0].number
    assert rig.grants(second)[0].lease_deadline == rig.now + 500


@pytest.mark.parametrize("landed", [True, False])
def test_a_repeated_key_is_a_retryable_error_while_a_partition_that_may_hold_its_leases_is_not_open(landed: bool) -> None:
    rig = filled(2, 2)
    request = lease(4, 100, key="k", most=2)
    rig.ask(request)
    rig.end(1)
    rig.end(0, UNKNOWN, landed=landed)
    again = rig.ask(request)
    rig.wait(100)
    assert rig.code(again) == "unavailable", "half of the leases would leave the others to nobody"
    rig.open(0)
    last = rig.ask(request)
    assert [info.partition for info in rig.grants(last)] == ([0, 1] if landed else [1])


def test_a_key_takes_nothing_new_after_a_restart_until_every_partition_is_open() -> None:
    rig = filled(2, 2)
    request = lease(2, 100, key="k")
    first = rig.ask(request)
    rig.end_all()
    after = Rig(2, opened=False)
    after.stores = rig.stores
    after.open(1)
    again = after.ask(request)
    assert not after.commits
    after.open(0)
    assert after.grants(again) == rig.grants(first)


def keep_busy(rig: Rig) -> None:
    """An item for each partition."""
    for executor in rig.queue.executors.values():
        executor.put(Ticket(produce(), rig.now + 1_000), produce())


def test_a_repeated_key_is_answered_though_its_partitions_are_never_idle_at_one_moment() -> None:
    rig = filled(2, 2)
    request = lease(4, 10_000, key="k", most=2)
    first = rig.ask(request)
    rig.end_all()
    keep_busy(rig)
    rig.cycle()
    again = rig.ask(request)
    for number in (0, 1, 0, 1):
        # Each has its next commit before the other's is over.
        keep_busy(rig)
        rig.end(number)
    assert {*rig.grants(again)} == {*rig.grants(first)}


def test_a_stopped_partition_does_not_stop_lease_keys() -> None:
    rig = filled(2, 2)
    request = lease(1, key="k")
    first = rig.ask(request)
    rig.end_all()
    assert rig.grants(first)[0].partition == 0
    rig.queue.stop_executor(0, "damaged", rig.now)
    again = rig.ask(request)
    rig.end_all()
    assert rig.grants(again)[0].partition == 1


def away(rig: Rig, number: int, outcome: Outcome = REFUSED, *, landed: bool | None = None) -> None:
    """A commit of that partition fails, and so does each opening until `rig.open` says otherwise."""
    rig.end(number, outcome, landed=landed)
    assert not rig.queue.executors[number].takes_work


def test_while_a_partition_is_away_a_new_key_is_served_from_the_others() -> None:
    rig = filled(2, 2)
    old = lease(1, key="old")
    first = rig.ask(old)
    rig.end_all()
    assert rig.grants(first)[0].partition == 0
    rig.queue.executors[0].put(Ticket(produce(), rig.now + 1_000), produce())
    rig.cycle()
    away(rig, 0)
    new = rig.ask(lease(2, key="new", most=2))
    rig.end_all()
    assert [info.partition for info in rig.grants(new)] == [1]
    assert {*rig.grants(rig.ask(lease(2, key="new", most=2)))} == {*rig.grants(new)}, "a repetition is answered as the first call was"
    repeated = rig.ask(old)
    rig.wait(100)
    assert rig.code(repeated) == "unavailable", "what it took lies in the partition that is away"
    rig.open(0)
    assert rig.grants(rig.ask(old)) == rig.grants(first)
    rest = rig.ask(lease(2, key="later", most=2))
    rig.end_all()
    assert 0 in [info.partition for info in rig.grants(rest)], "the rest is picked up"


def test_a_key_whose_commit_was_refused_is_served_from_another_partition() -> None:
    rig = filled(2, 2)
    ticket = rig.ask(lease(1, 1_000, key="k"))
    away(rig, 0)
    rig.end(1)
    assert [info.partition for info in rig.grants(ticket)] == [1]
    assert [info.partition for info in rig.grants(rig.ask(lease(1, 1_000, key="k")))] == [1]


@pytest.mark.parametrize("landed", [True, False])
def test_a_key_whose_commit_is_unknown_takes_nothing_elsewhere(landed: bool) -> None:
    rig = filled(2, 2)
    request = lease(1, 1_000, key="k")
    rig.ask(request)
    away(rig, 0, UNKNOWN, landed=landed)
    again = rig.ask(request)
    assert not rig.commits
    rig.open(0)
    rig.end_all()
    assert [info.partition for info in rig.grants(again)] == ([0] if landed else [1])


@pytest.mark.parametrize("landed", [True, False])
def test_a_key_whose_leases_may_have_been_closed_takes_nothing_elsewhere(landed: bool) -> None:
    rig = filled(1, 1)
    request = lease(1, 10_000, key="k")
    first = rig.ask(request)
    rig.end_all()
    rig.ask(settle({0: [0]}))
    away(rig, 0, UNKNOWN, landed=landed)
    again = rig.ask(request)
    assert not rig.commits
    rig.open(0)
    rig.end_all()
    assert rig.grants(again)[0].partition == (1 if landed else 0)
    assert landed or rig.grants(again) == rig.grants(first)


def test_a_partition_that_is_loaded_anew_as_another_may_have_written_it_may_hold_any_key() -> None:
    rig = filled(1, 1)
    rig.queue.retry_now([0], rig.now, anew=True)
    again = rig.ask(lease(1, 10_000, key="k"))
    assert not rig.commits
    rig.open(0)
    rig.end_all()
    assert rig.grants(again)


def test_who_waits_behind_a_key_that_cannot_be_served_is_served() -> None:
    rig = filled(0, 1)
    rig.queue.retry_now([0], rig.now, anew=True)
    rig.cycle()
    blocked = rig.ask(lease(1, 5_000, key="k"))
    behind = rig.ask(lease(1, 5_000))
    rig.end(1)
    assert rig.grants(behind)[0].partition == 1
    assert blocked not in rig.answers


def test_a_key_in_flight_at_its_patience_is_unknown_and_its_repetition_is_told_to_come_back() -> None:
    rig = filled(2)
    request = lease(2, key="k")
    first, second = rig.ask(request), rig.ask(request)
    rig.wait(LEASE_PATIENCE)
    assert rig.code(second) == "unavailable"
    rig.wait(LEASE_PATIENCE)
    assert rig.code(first) == "outcome_unknown"
    rig.end(0)
    third = rig.ask(request)
    assert rig.grants(third)[0].items == 2


def test_the_lease_timeout_is_the_queues_unless_told() -> None:
    rig = filled(1, 1)
    plain, short = rig.ask(lease()), rig.ask(lease(lease_timeout=70))
    rig.end_all()
    assert rig.grants(plain)[0].lease_deadline == rig.now + LEASE_TIMEOUT
    assert rig.grants(short)[0].lease_deadline == rig.now + 70


def test_after_a_restart_a_repeated_key_is_not_answered_with_half_of_its_leases() -> None:
    rig = filled(2, 2)
    request = lease(4, 100, key="k", most=2)
    first = rig.ask(request)
    rig.end_all()
    after = Rig(2, opened=False)
    after.stores = rig.stores
    after.open(1)
    again = after.ask(request)
    assert again not in after.answers
    after.wait(100)
    assert after.code(again) == "unavailable"
    after.open(0)
    last = after.ask(request)
    assert after.grants(last) == rig.grants(first)


def test_requests_that_are_answered_leave_nothing_behind() -> None:
    """Their deadlines lie far ahead: a queue that answers many at once would remember all of them until then."""
    rig = Rig(1)
    patient = rig.ask(lease(timeout=60_000))
    for _ in range(3_000):
        assert rig.settled(rig.ask(settle({0: [0]}))).ignored
    assert len(rig.queue._deadlines) <= 1_002
    rig.wait(60_000)
    assert rig.grants(patient) == []


@pytest.mark.parametrize(("fair", "most"), [("key", 2), (None, 200)])
def test_in_a_fair_queue_the_partition_with_an_item_of_a_quiet_key_comes_first(fair: str | None, most: int) -> None:
    """Every other time, so that the others go on."""
    rig = Rig(4)
    rig.configure(fair=fair)
    for number in range(4):
        put(rig, number, "flood", 50)
    for _ in range(8):
        rig.ask(lease())
        rig.end_all()
    waits = []
    for turn in range(12):
        place = (turn % 4, put(rig, turn % 4, "quiet", 1))
        seen: list[tuple[int, int]] = []
        while place not in seen:
            ticket = rig.ask(lease())
            rig.end_all()
            (info,), (offset,) = rig.grants(ticket), rig.offsets(ticket)
            seen.append((info.partition, offset))
            rig.ask(settle({info.partition: [offset]}))
            rig.end_all()
        waits.append(len(seen))
    assert max(waits) <= most
    if fair is None:
        assert max(waits) > 100


@pytest.mark.parametrize(("priority", "most"), [(5, 2), (9, 2), (4, 300)])
def test_the_partition_with_an_item_above_the_default_priority_comes_first(priority: int, most: int) -> None:
    """Every other time, so that the others go on."""
    rig = Rig(4)
    rig.configure(priority="strict")
    for number in range(4):
        put(rig, number, "k", 60, 4)
    waits = []
    for turn in range(12):
        place = (turn % 4, put(rig, turn % 4, "k", 1, priority))
        seen: list[tuple[int, int]] = []
        while place not in seen:
            ticket = rig.ask(lease())
            rig.end_all()
            (info,), (offset,) = rig.grants(ticket), rig.offsets(ticket)
            seen.append((info.partition, offset))
        waits.append(len(seen))
        if waits[-1] > 100:
            break
    assert max(waits) <= most
    if priority == 4:
        assert max(waits) > 100


def put(rig: Rig, partition: int, key: str, count: int, priority: int | None = None) -> int:
    """Put items of that key into that very partition. Returns the offset of the first."""
    request = Produce(batch_from_rows([{"payload": b"x", "key": key, "priority": priority}] * count), 1_000)
    ticket = Ticket(request, rig.now + 1_000)
    rig.queue.executors[partition].put(ticket, request)
    rig.cycle()
    rig.end_all()
    return rig.produced(ticket).first_offset
