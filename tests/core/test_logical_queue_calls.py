"""Whose lease it is, extend and release by item, how much a lease may hold, fairness, and logical queues side by side."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluiceway.core.queue import executor_index, lease_scheduler
from sluiceway.core.queue.tickets import Ticket
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import RELEASE, Disposition, Extend, Extended, Produce, ProduceKey, Selection, Settle
from tests.core.queue_rig import LEASE_TIMEOUT, Rig, array, lease, produce, settle

HOUR = 3_600_000


def extended(rig: Rig, ticket: Ticket) -> Extended:
    answer = rig.answers[ticket]
    assert isinstance(answer, Extended), answer
    return answer


# ---- whose it is ----------------------------------------------------------------------------------------------


def test_only_what_the_client_has_leased_is_touched_if_it_says_who_it_is() -> None:
    rig = Rig(2)
    mine, theirs = rig.take(0, 2, client="c"), rig.take(1, 2, client="d")
    ticket = rig.ask(settle({0: [0], 1: [0, 1]}, client="c"))
    rig.end_all()
    answer = rig.settled(ticket)
    assert answer.completed == 1
    assert answer.ignored == [("q.1.0", "not_yours"), ("q.1.1", "not_yours")]
    leases = {n: [Selection(Disposition("done"), lease=info.number)] for n, info in enumerate((mine, theirs))}
    ticket = rig.ask(Settle(leases, 1_000, client_id="c"))
    rig.end_all()
    assert rig.settled(ticket).completed == 1
    assert rig.settled(ticket).ignored == [(f"q.1.L{theirs.number}", "not_yours")]
    assert rig.durable(1) == (0, 2, 0)


def test_an_item_stands_for_the_lease_that_it_is_in() -> None:
    rig = Rig(2)
    leases = [rig.take(0, 3), rig.take(0, 2), rig.take(1, 2)]
    request = Extend([(0, leases[0].number)], 1_000, 90_000, offsets={0: array([0, 1, 4, 99]), 1: array([1])})
    ticket = rig.ask(request)
    rig.end_all()
    assert sorted(extended(rig, ticket).leases) == [(info.partition, info.number, info.items, rig.now + 90_000) for info in leases]
    assert extended(rig, ticket).ignored == [("q.0.99", "unknown")]


def test_a_lease_is_not_extended_for_another_client_nor_when_it_is_over() -> None:
    rig = Rig()
    over, theirs = rig.take(0, 1, lease_timeout=500), rig.take(0, 1, client="d")
    rig.wait(500)
    rig.end_all()
    numbers = [(0, over.number), (0, theirs.number)]
    ticket = rig.ask(Extend(numbers, 1_000, 90_000, offsets={0: array([0, 1])}, client_id="c"))
    rig.end_all()
    assert extended(rig, ticket).leases == []
    assert extended(rig, ticket).ignored == [
        (f"q.0.L{over.number}", "expired"),
        (f"q.0.L{theirs.number}", "not_yours"),
        ("q.0.0", "expired"),
        ("q.0.1", "not_yours"),
    ]
    assert rig.stores[0].look().leases[theirs.number].deadline == theirs.lease_deadline


def test_what_was_not_touched_is_released_by_item_or_by_lease_and_counts_no_attempt() -> None:
    rig = Rig(max_attempts=1)
    info = rig.take(0, 4)
    some = rig.ask(settle({0: [1, 3]}, RELEASE))
    rig.end_all()
    rest = rig.ask(Settle({0: [Selection(RELEASE, lease=info.number)]}, 1_000))
    rig.end_all()
    assert (rig.settled(some).released, rig.settled(rest).released) == (2, 2)
    again = rig.ask(settle({0: [0]}, RELEASE))
    assert rig.settled(again).ignored == [("q.0.0", "released")]
    ticket = rig.ask(lease(9))
    rig.end_all()
    answer = rig.answers[ticket]
    assert isinstance(answer, list)
    assert [(piece.rows.tolist(), piece.attempts) for grant in answer for piece in grant.slices] == [([1, 3], 1), ([0, 2], 1)]


# ---- how much -------------------------------------------------------------------------------------------------

ROOM = 10_000
"""Bytes that an answer may take, in place of the real 32 MiB."""


def heavy(payload: int, counts: list[int]) -> Rig:
    """Partitions with so many items of so many bytes."""
    rig = Rig(len(counts))
    for number, count in enumerate(counts):
        request = Produce(batch_from_rows([{"payload": b"x" * payload}] * count), 1_000)
        rig.queue.executors[number].put(Ticket(request, rig.now + 1_000), request)
    rig.cycle()
    rig.end_all()
    return rig


def ask(rig: Rig, count: int, most: int) -> list[tuple[int, int]]:
    request = lease(count, most=most)
    ticket = Ticket(request, rig.now, room=ROOM)
    rig.queue.submit(ticket)
    rig.cycle()
    rig.end_all()
    return sorted((info.partition, info.items) for info in rig.grants(ticket))


@pytest.fixture
def small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_scheduler, "MAX_LEASE_BYTES", ROOM)


@pytest.mark.usefixtures("small_answers")
def test_the_leases_of_several_partitions_share_the_room_of_one_answer() -> None:
    rig = heavy(1_500, [4, 4, 4])
    assert ask(rig, 12, 3) == [(0, 4), (1, 2)], "six fit, of which the third partition has none"
    assert ask(rig, 12, 3) == [(1, 2), (2, 4)]
    assert ask(rig, 12, 3) == []


@pytest.mark.usefixtures("small_answers")
def test_an_item_that_is_larger_than_an_answer_may_be_comes_alone() -> None:
    rig = heavy(ROOM + 1, [2, 2])
    assert [ask(rig, 4, 2) for _ in range(5)] == [[(0, 1)], [(1, 1)], [(0, 1)], [(1, 1)], []]


# ---- fairness -------------------------------------------------------------------------------------------------


def test_one_consumer_serves_each_of_a_hundred_partitions_within_one_rotation() -> None:
    rig = Rig(100)
    for number in range(100):
        rig.fill(number, 2 + number % 3)
    for _ in range(2):
        served = set()
        for _ in range(100):
            rig.fill(0, 5)
            ticket = rig.ask(lease(1))
            rig.end_all()
            served.add(rig.grants(ticket)[0].partition)
        assert len(served) == 100


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4)), max_size=25))
def test_no_partition_with_ready_items_waits_longer_than_one_rotation(steps: list[tuple[int, int, int, int]]) -> None:
    rig = Rig(4)
    passed_over = dict.fromkeys(range(4), 0)
    for number, count, want, most in steps:
        if count:
            rig.fill(number, count)
        had = {number: rig.durable(number)[0] for number in range(4)}
        ticket = rig.ask(lease(want, most=most))
        rig.end_all()
        grants = rig.grants(ticket)
        served = {info.partition for info in grants}
        items = sum(info.items for info in grants)
        assert items <= want
        assert items == want or len(grants) == min(most, sum(map(bool, had.values()))), "more could have been had"
        for number in range(4):
            passed_over[number] = passed_over[number] + len(served) if had[number] and number not in served else 0
            assert passed_over[number] < 4, "all the others were served, and one of them twice"


def test_consumers_in_step_with_the_partitions_take_evenly_of_all() -> None:
    rig = Rig(4)
    for number in range(4):
        rig.fill(number, 1_000)
    seen: dict[str, list[int]] = {client: [] for client in "abcd"}
    for _ in range(8):
        for client, want in zip(seen, (100, 1, 1, 1), strict=True):
            ticket = rig.ask(lease(want, client=client))
            rig.end_all()
            seen[client].append(rig.grants(ticket)[0].partition)
    for client, partitions in seen.items():
        assert sorted(partitions[:4]) == sorted(partitions[4:]) == [0, 1, 2, 3], client
    assert [rig.durable(number)[0] for number in range(4)] == [1_000 - 206] * 4


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3), st.integers(0, 3), st.integers(1, 4)), max_size=40))
def test_no_partition_waits_longer_than_two_rounds_whoever_comes(steps: list[tuple[str, int, int, int]]) -> None:
    rig = Rig(4)
    passed_over = dict.fromkeys(range(4), 0)
    for client, number, count, want in steps:
        if count:
            rig.fill(number, count)
        had = [number for number in range(4) if rig.durable(number)[0]]
        ticket = rig.ask(lease(want, client=client))
        rig.end_all()
        served = {info.partition for info in rig.grants(ticket)}
        assert bool(served) == bool(had)
        for number in range(4):
            passed_over[number] = passed_over[number] + 1 if number in had and number not in served else 0
            assert passed_over[number] <= 6, "the rest of a round and the next: each of the others twice"


def test_of_clients_that_come_and_go_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_index, "MAX_REMEMBERED_CLIENTS", 3)
    rig = Rig(2)
    for number in range(2):
        rig.fill(number, 50)
    for n in range(20):
        for client in (f"client-{n}", "stays"):
            rig.ask(lease(1, client=client))
            rig.end_all()
    assert list(rig.queue.index._served) == ["client-18", "client-19", "stays"]


def test_a_lease_takes_no_more_partitions_than_it_needs() -> None:
    rig = Rig(3)
    for number, count in enumerate([4, 9, 6]):
        rig.fill(number, count)
    ticket = rig.ask(lease(8, most=3))
    rig.end_all()
    assert [(info.partition, info.items) for info in rig.grants(ticket)] == [(1, 8)], "the fullest of those never served"


# ---- side by side ---------------------------------------------------------------------------------------------


def test_logical_queues_side_by_side_each_serve_their_own_partitions() -> None:
    rigs = [Rig((0, 2)), Rig((1, 3))]
    for rig in rigs:
        tickets = []
        for _ in range(4):
            tickets.append(rig.ask(produce(5)))
            rig.end_all()
        assert {rig.produced(ticket).partition for ticket in tickets} == rig.stores.keys()
    for rig in rigs:
        ticket = rig.ask(lease(50, most=4))
        rig.end_all()
        grants = rig.grants(ticket)
        assert {info.partition for info in grants} == rig.stores.keys()
        assert {info.lease_deadline for info in grants} == {rig.now + LEASE_TIMEOUT}
        done = rig.ask(settle({info.partition: range(info.items) for info in grants}))
        rig.end_all()
        assert rig.settled(done).completed == 20
    assert [each.partition for rig in rigs for each in rig.queue.stats().partitions] == [0, 2, 1, 3]


def test_a_key_has_its_home_among_the_partitions_of_its_logical_queue() -> None:
    rig = Rig((3, 5))
    homes = set()
    for n in range(8):
        tickets = [rig.ask(produce(2, key=ProduceKey(f"key-{n}"))) for _ in range(2)]
        rig.end_all()
        first, second = (rig.produced(ticket) for ticket in tickets)
        assert second == first._replace(deduplicated=True)
        homes.add(first.partition)
    assert homes == {3, 5}


def test_an_answered_request_is_not_kept_while_an_earlier_one_waits() -> None:
    rig = Rig()
    rig.configure(paused=("lease",))
    waiter = rig.ask(lease(1, 1_000))
    payloads = []
    for _ in range(50):
        request = produce(timeout=HOUR)
        payloads.append(weakref.ref(request.batch))
        ticket = rig.ask(request)
        rig.end_all()
        assert rig.produced(ticket).items == 1
        rig.queue.wake_at()
    del request, ticket
    rig.answers.clear()
    gc.collect()
    assert [payload() for payload in payloads] == [None] * 50
    assert waiter not in rig.answers
    rig.wait(1_000)
    assert rig.answers[waiter] == []
