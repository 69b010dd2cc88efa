"""What shares a turn shares transactions, and a turn looks at those partitions only in which there is something to do."""

from __future__ import annotations

from collections import Counter

import pytest

from sluiceway.core.queue import logical_queue
from sluiceway.core.queue.lease_scheduler import LeaseScheduler
from sluiceway.core.queue.partition_executor import SOON, PartitionExecutor
from sluiceway.core.queue.tickets import Grant, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import BLOB_BYTES
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, Produce
from tests.core.queue_rig import START, Rig, lease, produce, settle

HOUR = 3_600_000

# ---- together -------------------------------------------------------------------------------------------------


def test_produces_of_one_turn_share_transactions_and_the_next_ones_others() -> None:
    rig = Rig(4)
    for chosen in ([0, 1], [2, 3], [0, 1]):
        tickets = [rig.submit(produce()) for _ in range(8)]
        rig.cycle()
        assert list(rig.commits) == chosen, "one that hangs has not got them all"
        rig.end_all()
        assert [rig.produced(ticket).partition for ticket in tickets] == [chosen[0]] * 4 + [chosen[1]] * 4


def test_idle_consumers_do_not_count_as_requests_under_way() -> None:
    rig = Rig(4)
    waiters = [rig.ask(lease(1, 60_000, client=f"c{n}", key="k")) for n in range(20)]
    rig.queue.paused = frozenset(("lease",))
    for _ in range(8):
        rig.submit(produce())
    rig.cycle()
    assert list(rig.commits) == [0, 1]
    assert not rig.answers.keys() & set(waiters)


def test_requests_that_wait_in_a_executor_count() -> None:
    rig = Rig(2)
    tickets = []
    for count in (3, 2, 2):
        tickets.append(rig.ask(produce(count)))
        rig.now += SOON + 1
    rig.end_all()
    assert [rig.produced(ticket).partition for ticket in tickets] == [0, 1, 1]


def test_large_produces_of_one_turn_are_divided() -> None:
    rig = Rig(3)
    size = BLOB_BYTES // 2 - 100
    tickets = [rig.submit(Produce(batch_from_rows([{"payload": bytes(size)}]), 5_000)) for _ in range(6)]
    rig.cycle()
    rig.end_all()
    assert [rig.produced(ticket).partition for ticket in tickets] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("calls", "most"), [(1, 1), (2, 1), (4, 2), (8, 4), (16, 4), (24, 6), (40, 10), (44, 12), (64, 32), (200, 64)])
def test_a_partition_that_hangs_has_not_got_most_of_what_is_under_way(calls: int, most: int) -> None:
    rig = Rig(4)
    tickets = [rig.submit(produce()) for _ in range(calls)]
    rig.cycle()
    rig.end_all()
    counts = Counter(rig.produced(ticket).partition for ticket in tickets)
    assert max(counts.values()) == most


@pytest.mark.parametrize(("consumers", "most"), [(1, 1), (2, 1), (4, 2), (8, 4), (16, 4), (64, 32)])
def test_a_partition_that_hangs_has_not_got_most_of_the_consumers(consumers: int, most: int) -> None:
    rig = Rig(4)
    for _ in range(4):
        rig.ask(produce(100))
        rig.end_all()
    tickets = [rig.submit(lease()) for _ in range(consumers)]
    rig.cycle()
    rig.end_all()
    counts = Counter(rig.grants(ticket)[0].partition for ticket in tickets)
    assert max(counts.values()) == most


def at_once(rig: Rig) -> Rig:
    """Each partition has items, and its store has been quick."""
    for number in rig.queue.executors:
        rig.ask(produce(100))
        rig.end(number, at_once=True)
    return rig


@pytest.mark.parametrize("calls", [2, 8, 64])
def test_where_a_commit_that_hangs_holds_up_everything_all_share_one(calls: int) -> None:
    rig = at_once(Rig(4))
    for ask in (produce, lease):
        tickets = [rig.submit(ask()) for _ in range(calls)]
        rig.cycle()
        (number,) = rig.commits
        rig.end(number, at_once=True)
        assert all(ticket in rig.answers for ticket in tickets)


def test_and_no_more_than_that() -> None:
    rig = at_once(Rig(4))
    tickets = [rig.submit(lease(1)) for _ in range(90)]
    rig.cycle()
    rig.end_all()
    assert sorted(Counter(rig.grants(ticket)[0].partition for ticket in tickets).values()) == [26, 64]


def test_what_is_still_being_written_was_not_made_at_once() -> None:
    rig = at_once(Rig(4))
    rig.ask(produce())
    rig.ask(produce())
    assert len(rig.commits) == 2


def test_a_partition_that_failed_is_not_held_to_be_quick() -> None:
    rig = at_once(Rig(4))
    rig.ask(produce())
    (number,) = rig.commits
    rig.end(number, Outcome.UNKNOWN, at_once=True)
    rig.open(number)
    assert [executor.at_once for executor in rig.queue.executors.values()] == [each != number for each in range(4)]


def test_a_slow_partition_serves_one_consumer_of_a_turn() -> None:
    rig = Rig(4)
    for _ in range(4):
        rig.ask(produce(100))
        rig.end_all()
    rig.queue.executors[2].commit_time = 1_000
    rig.queue.executors[2].touch()
    tickets = [rig.submit(lease()) for _ in range(12)]
    rig.cycle()
    rig.end_all()
    assert sorted(Counter(rig.grants(ticket)[0].partition for ticket in tickets).items())[2] == (2, 1)


def in_flight(rig: Rig, waited: int = 0) -> Rig:
    """Five calls are being written, in two partitions, and another comes so many milliseconds later."""
    for _ in range(5):
        rig.submit(produce())
    rig.cycle()
    assert list(rig.commits) == [0, 1]
    rig.now += waited
    rig.ask(produce())
    return rig


def test_a_produce_waits_for_a_commit_that_is_under_way_to_share_the_next() -> None:
    rig = in_flight(Rig(4))
    assert list(rig.commits) == [0, 1]
    rig.end_all()
    assert [rig.durable(number)[0] for number in range(4)] == [3, 3, 0, 0]


def test_a_produce_does_not_wait_for_a_commit_that_takes_long() -> None:
    rig = in_flight(Rig(4), SOON + 1)
    assert list(rig.commits) == [0, 1, 2]
    rig = Rig(4)
    rig.queue.executors[1].commit_time = SOON + 1
    assert list(in_flight(rig).commits) == [0, 1, 2]


@pytest.mark.parametrize(("takes", "commits"), [(2, [0]), (20, [0, 1])])
def test_a_produce_does_not_wait_for_a_partition_that_is_much_slower(takes: int, commits: list[int]) -> None:
    rig = Rig(2)
    for number, each in ((0, takes), (1, 1)):
        rig.queue.executors[number].commit_time = each
        rig.queue.executors[number].touch()
    rig.ask(produce())
    two_more(rig)
    assert list(rig.commits) == commits


def two_more(rig: Rig) -> None:
    for _ in range(2):
        rig.submit(produce())
    rig.cycle()


def test_of_two_calls_neither_waits_for_the_other() -> None:
    rig = Rig(2)
    rig.ask(produce())
    rig.ask(produce())
    assert list(rig.commits) == [0, 1]


def test_partitions_take_turns_also_if_none_ever_has_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logical_queue, "MAX_STREAK", 3)
    rig = Rig(4)
    tickets = [rig.submit(produce()) for _ in range(8)]
    rig.cycle()
    rig.end_all()
    assert [rig.produced(ticket).partition for ticket in tickets] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_slow_partition_that_was_stopped_is_not_slow_any_more() -> None:
    rig = Rig(2)
    rig.queue.executors[0].commit_time = 1_000
    rig.queue.executors[0].touch()
    rig.cycle()
    slow = [rig.queue.executors[0].degraded]
    rig.queue.stop_executor(0, "damaged", rig.now)
    rig.cycle()
    assert [*slow, rig.queue.executors[0].degraded] == [True, False]
    assert not rig.queue.index.may_be_slow(rig.now)


@pytest.mark.parametrize(("slack", "commits"), [(3, [0, 1]), (5, [0])])
def test_a_produce_waits_for_no_partition_that_has_much_more_than_another(
    slack: int, commits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logical_queue, "SLACK", slack)
    rig = Rig(2)
    rig.ask(produce(4))
    two_more(rig)
    assert list(rig.commits) == commits


def test_what_is_leased_in_one_turn_is_completed_in_as_few_transactions() -> None:
    rig = Rig(4)
    producers = [rig.submit(produce()) for _ in range(8)]
    rig.cycle()
    rig.end_all()
    consumers = [rig.submit(lease()) for _ in producers]
    rig.cycle()
    rig.end_all()
    places = [
        (partition, offset) for ticket in consumers for partition in [rig.grants(ticket)[0].partition] for offset in rig.offsets(ticket)
    ]
    assert len(set(places)) == 8
    for partition, offset in places:
        rig.submit(settle({partition: [offset]}))
    rig.cycle()
    rig.end_all()
    assert rig.commit_count == 6, "two for each step"
    assert all(rig.durable(number) == (0, 0, 0) for number in range(4))


# ---- only those that have something to do ---------------------------------------------------------------------


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The partitions whose timers somebody has looked at."""
    numbers: list[int] = []
    wakes_at = PartitionExecutor.wakes_at

    def noted(self: PartitionExecutor) -> int | None:
        numbers.append(self.number)
        return wakes_at(self)

    monkeypatch.setattr(PartitionExecutor, "wakes_at", noted)
    return numbers


def cycle(rig: Rig) -> None:
    """One item goes the whole way."""
    produced = rig.ask(produce())
    rig.end_all()
    ticket = rig.ask(lease())
    rig.end_all()
    assert rig.grants(ticket)[0].partition == rig.produced(produced).partition
    rig.ask(settle({rig.grants(ticket)[0].partition: rig.offsets(ticket)}))
    rig.end_all()


def test_a_cycle_looks_at_the_partition_that_it_is_in_alone(looked_at: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(200)
    rig.wait(1)
    monkeypatch.setattr(rig.queue.index, "overlooked", list)  # It looks at all of them, for the rig.
    looked_at.clear()
    for number in range(3):
        cycle(rig)
        assert set(looked_at) == {number}
        assert len(looked_at) < 20
        looked_at.clear()


def test_timers_of_idle_partitions_run(looked_at: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(100)
    rig.take(5, 2, lease_timeout=1_000)
    rig.take(70, 3, lease_timeout=2_000)
    monkeypatch.setattr(rig.queue.index, "overlooked", list)
    looked_at.clear()
    assert rig.queue.wake_at() == START + 1_000
    rig.wait(1_000)
    rig.end_all()
    assert rig.durable(5) == (2, 0, 0)
    assert set(looked_at) == {5}
    assert rig.queue.wake_at() == START + 2_000
    rig.wait(1_000)
    rig.end_all()
    assert rig.durable(70) == (3, 0, 0)
    assert rig.queue.wake_at() is None


def test_what_is_filed_follows_partitions_that_fail_come_and_go() -> None:
    rig = Rig(3)
    rig.fill(0, 3)
    ticket = rig.ask(lease(3))
    rig.end_all()
    rig.ask(settle({0: [0]}, Disposition("retry", retry_after=500)))
    rig.end(0, Outcome.UNKNOWN)
    assert not rig.queue.index.overlooked()
    assert rig.opens
    rig.open(0)
    rig.end_all()
    rig.queue.stop_executor(1, "damaged", rig.now)
    rig.cycle()
    assert [executor.number for executor in rig.queue.index.closed()] == [1]
    assert rig.queue.index.working == 2
    rig.wait(70_000)
    rig.end_all()
    assert rig.grants(ticket)[0].items == 3
    assert rig.durable(0)[0] == 3


def test_a_partition_that_changes_without_a_word_is_noticed() -> None:
    rig = Rig(2)
    rig.queue.executors[1].retry_at = 5
    rig.queue.executors[1].commit_time = 1_000
    assert rig.queue.index.overlooked() == [1]


def test_a_waiting_lease_with_a_key_or_over_its_time_is_found_among_many() -> None:
    rig = Rig(2)
    held = rig.take(0, 2, key="k", client="c")
    many = [rig.submit(lease(1, 10_000)) for _ in range(50)]
    keyed, late = rig.submit(lease(1, 5_000, key="k")), rig.submit(lease(1, 100))
    rig.wait(100)
    assert rig.grants(keyed) == [held]
    assert rig.grants(late) == []
    assert not rig.answers.keys() & set(many)
    rig.queue.stop_executor(0, "damaged", rig.now)
    rig.wait(10_000)
    assert all(rig.grants(ticket) == [] for ticket in many)
    assert logical_queue.LogicalQueue.wake_at(rig.queue) is None


def test_keys_that_hold_no_lease_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Ticket] = []
    real = LeaseScheduler._keyed

    def counting(scheduler: LeaseScheduler, ticket: Ticket, now: Millis) -> list[tuple[PartitionExecutor, Grant]]:
        looked.append(ticket)
        return real(scheduler, ticket, now)

    monkeypatch.setattr(LeaseScheduler, "_keyed", counting)
    rig = Rig(2)
    held = rig.ask(lease(1, HOUR, key="held"))
    rig.fill(0, 1)
    assert len(rig.grants(held)) == 1
    waiting = [rig.submit(lease(1, HOUR, key=f"{n}")) for n in range(1_000)]
    again = rig.submit(lease(1, HOUR, key="held"))
    looked.clear()
    rig.cycle()
    assert looked == [again]
    assert rig.grants(again) == rig.grants(held)
    looked.clear()
    rig.queue.executors[0].put(Ticket(produce(10), rig.now + 1_000), produce(10))
    rig.cycle()
    rig.end_all()
    assert sum(ticket in rig.answers for ticket in waiting) == 10
    assert looked == []


def test_a_lease_gets_what_lies_behind_more_expired_items_than_a_turn_has_timers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logical_queue, "TIMER_BATCH", 1)
    rig = Rig()
    rig.configure(expire_timeout=10_000)
    for _ in range(3):
        rig.fill(0, 1)
    retried = rig.ask(lease(1))
    rig.end_all()
    assert rig.offsets(retried) == [0]
    rig.ask(settle({0: [0]}, Disposition("retry", retry_after=HOUR)))
    rig.end_all()
    rig.now += 60_000
    rig.queue.executors[0].put(Ticket(produce(), rig.now + 1_000), produce())
    ticket = rig.ask(lease(9))
    while rig.commits:
        assert all(served_at > rig.now for served_at in leased_expiries(rig.queue.executors[0]))
        rig.end_all()
        rig.wait(1)
    assert rig.offsets(ticket) == [4], "3 was the retried one, when it fell due"
    assert rig.queue.executors[0].partition.log.header.dead == 3


def leased_expiries(executor: PartitionExecutor) -> list[Millis]:
    return [part.extent.expires_at for taken in executor.partition.leases.values() for part in taken.parts]
