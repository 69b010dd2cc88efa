"""What time does to a partition: leases expire, items fall due. Time is a number that the test says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluiceway.core.partition import partition as partition_module
from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import open_slices
from sluiceway.core.partition.records import LeaseState
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_CLOCK_STEP
from sluiceway.model.requests import Disposition, Settled
from tests.core.core_model import START, Rig, Row, Served, array_of, batch_of, rows_of

HOUR = 3_600_000


def test_an_expired_lease_gives_its_open_items_back() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b", "c"))
    lease = rig.lease(2, timeout=10)
    rig.settle([0])
    rig.reload()
    assert rig.machine.next_timer() == START + 10
    assert rig.machine.tick(START + 9) == 0
    assert rig.machine.tick(START + 10) == 1
    rig.commit()
    assert rig.ready() == [Served(2, 2, 0, b"c"), Served(3, 1, 1, b"b")]
    assert rig.machine.lease_of(lease.number, None) == "expired"
    assert rig.settle([0, 1]) == (Settled(), [(0, "completed"), (1, "expired")])
    assert (rig.machine.log.header.expired, rig.machine.leased_count) == (1, 0)


@pytest.mark.parametrize("keeps_dead", [False, True])
def test_an_item_whose_last_attempt_expires_dies(keeps_dead: bool) -> None:
    rig = Rig(max_attempts=2, keeps_dead=keeps_dead)
    rig.produce(rows_of("a", "b"))
    rig.lease(1, timeout=10)
    rig.machine.tick(START + 10)
    rig.lease(1, START + 10, timeout=10)
    rig.lease(1, START + 10, timeout=10)
    rig.reload()
    assert rig.machine.tick(START + 20) == 2
    rig.commit()
    assert rig.ready() == [Served(3, 1, 1, b"b")]
    assert rig.machine.log.header.expired == 2
    assert rig.machine.log.header.dead == (not keeps_dead)
    shown = [(transfer.transfer, rig.served(open_slices(transfer))) for transfer in rig.machine.transfers.by_number.values()]
    assert shown == ([("max_attempts 2 reached: the lease expired", [Served(2, 0, 2, b"a")])] if keeps_dead else [])


def test_scheduled_items_are_served_when_due_and_not_before() -> None:
    rig = Rig()
    rig.produce([Row(b"a", START + 20), Row(b"b", START + 10), Row(b"c", START + 20)])
    rig.reload()
    assert rig.machine.next_timer() == START + 10
    assert rig.machine.tick(START + 9) == 0
    assert rig.ready() == []
    assert rig.machine.tick(START + 10) == 1
    assert rig.machine.tick(START + 20) == 2
    rig.commit()
    assert rig.ready() == [Served(3, 1, 0, b"b"), Served(4, 0, 0, b"a"), Served(5, 2, 0, b"c")]
    assert rig.machine.next_timer() is None


def test_timers_are_served_in_the_order_of_their_times() -> None:
    rig = Rig()
    rig.produce([Row(b"a"), Row(b"b", START + 15), Row(b"c", START + 5)])
    rig.lease(1, timeout=10)
    rig.machine.tick(START + 100)
    rig.commit()
    assert [served.payload for served in rig.ready()] == [b"c", b"a", b"b"]


def test_one_turn_moves_a_bounded_number_of_entries_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_module, "TIMER_BATCH", 3)
    rig = Rig()
    rig.produce([*rows_of("a", "b", "c", "d"), *(Row(b"%d" % n, START + n) for n in range(1, 4))])
    for _ in range(4):
        rig.lease(1, timeout=2)
    assert [rig.machine.tick(START + 9) for _ in range(4)] == [3, 3, 1, 0]
    rig.commit()
    assert sorted(served.payload for served in rig.ready()) == [b"1", b"2", b"3", b"a", b"b", b"c", b"d"]


def test_a_closed_lease_has_no_timer() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b"))
    lease = rig.lease(1, timeout=10)
    rig.lease(1, timeout=30)
    rig.close(lease)
    assert rig.machine.next_timer() == START + 30
    assert rig.machine.tick(START + 29) == 0
    rig.commit()


def test_the_noted_time_does_not_go_back_when_an_owner_is_a_little_behind_the_one_before() -> None:
    rig = Rig()
    rig.produce(rows_of("a"), START + MAX_CLOCK_STEP)
    rig.reload()
    rig.produce(rows_of("b"), START)
    assert rig.machine.log.header.now == START + MAX_CLOCK_STEP
    rig.commit()


@pytest.mark.parametrize("behind", [50, MAX_CLOCK_STEP, MAX_CLOCK_STEP + 1, HOUR])
def test_all_is_decided_by_the_owners_clock_whatever_time_was_noted(behind: int) -> None:
    """Also after a clock that was an hour ahead has written its time."""
    rig = Rig(expire_timeout=1_000)
    rig.produce(rows_of("a"), START + behind)
    rig.lease(1, START + behind)
    rig.close(next(iter(rig.machine.leases.values())), START + behind)
    rig.reload()
    rig.produce([Row(b"b", START - 1), Row(b"c", START + 40)], START)
    assert (rig.machine.log.ready_count, rig.machine.log.scheduled_count) == (1, 1)
    assert rig.machine.next_timer() == START + 40
    rig.lease(1, START)
    rig.settle([1], Disposition("retry", retry_after=30), START)
    assert rig.machine.next_timer() == START + 30
    rig.machine.tick(START + 30)
    assert rig.machine.next_timer() == START + 40
    rig.machine.tick(START + 40)
    rig.machine.tick(START + 999)
    assert rig.machine.log.ready_count == 2
    rig.machine.tick(START + 1_000)
    assert rig.machine.log.ready_count == 1
    rig.machine.tick(START + 1_040)
    assert rig.machine.log.ready_count == 0
    rig.commit()
    assert rig.machine.log.header.now == START + max(1_040, behind if behind <= MAX_CLOCK_STEP else 0)


def test_an_item_that_keeps_coming_back_late_keeps_its_attempts() -> None:
    rig = Rig(max_attempts=4)
    rig.produce([Row(b"a", START + 1)])
    for attempt in range(1, 4):
        rig.machine.tick(START + attempt)
        lease = rig.lease(1, START + attempt)
        rig.commit()
        (served,) = rig.served(open_slices(lease))
        assert (served.attempts, served.origin) == (attempt, 0)
        rig.settle([served.offset], Disposition("retry", retry_after=1), START + attempt)
        rig.reload()
    assert rig.machine.log.scheduled_count == 1
    assert rig.machine.log.header.retried == 3


def close_one(machine: Partition, now: Millis) -> None:
    machine.produce(batch_of(rows_of("x")), now)
    close_last(machine, now)


def extend_one(machine: Partition, now: Millis) -> None:
    machine.extend(machine.leases[2], now + 2 * HOUR)


@pytest.mark.parametrize("use", [close_one, extend_one])
def test_deadlines_that_no_longer_hold_do_not_pile_up_behind_one_that_does(use: Callable[[Partition, Millis], None]) -> None:
    machine = Partition()
    machine.produce(batch_of(rows_of("first", "second")), START)
    leases: list[LeaseState | None] = [machine.lease(1, "c", START + HOUR // (2 - n) + n, START) for n in range(2)]
    first, second = leases
    assert first is not None
    assert second is not None
    for n in range(10_000):
        use(machine, START + n)
        machine.take_changes()
        machine.next_timer()
    assert len(machine.leases._deadlines) < 2_000
    for taken, rest in ((first, [second.number]), (second, [])):
        assert taken.deadline is not None
        assert machine.next_timer() == taken.deadline
        assert machine.tick(taken.deadline) == 1
        assert list(machine.leases) == rest


@pytest.mark.parametrize("is_deleted", [True, False])
def test_due_times_of_what_has_left_do_not_pile_up_behind_one_that_holds(is_deleted: bool) -> None:
    machine = Partition()
    machine.produce(batch_of([Row(b"first", START + HOUR)]), START)
    for n in range(2_500):
        machine.produce(batch_of([Row(b"x", START + 2 * HOUR + n)]), START)
        offsets = array_of([machine.log.header.next - 1])
        assert len((machine.log.drop if is_deleted else machine.log.make_ready)(offsets, START)) == 1
        machine.take_changes()
        machine.next_timer()
    assert len(machine.log.due_times) < 2_000
    machine.produce(batch_of([Row(b"last", START + 3 * HOUR)]), START)
    for due in (START + HOUR, START + 3 * HOUR):
        assert machine.next_timer() == due
        assert machine.tick(due) == 1
    assert machine.next_timer() is None


def test_expiries_of_what_has_left_do_not_pile_up_behind_one_that_waits() -> None:
    machine = Partition()
    machine.follow(Rules(expire_timeout=HOUR, keys=KeyRules(order=True)))
    machine.produce(batch_of([Row(b"held up", key="held up")] * 2), START)
    assert machine.lease(1, "c", START + 3 * HOUR, START) is not None
    for n in range(1, 2_501):
        machine.produce(batch_of([Row(b"x", key=f"{n}")]), START + n)
        close_last(machine, START + n)
        machine.take_changes()
        machine.next_timer()
    assert len(machine.log.expiries) < 2_000
    machine.produce(batch_of([Row(b"last", key="last")]), START + 6_000)
    for expires_at in (START + HOUR, START + 6_000 + HOUR):
        assert machine.next_timer() == expires_at
        assert machine.tick(expires_at) == 1
    assert machine.next_timer() == START + 3 * HOUR


def close_last(machine: Partition, now: Millis) -> None:
    taken = machine.lease(1, "c", now + HOUR, now)
    assert taken is not None
    machine.close_lease(taken, now, Settled())


def test_what_falls_due_after_it_has_expired_is_never_in_the_line() -> None:
    rig = Rig(expire_timeout=10_000)
    rig.produce(rows_of("a"))
    rig.lease(1)
    rig.settle([0], Disposition("retry", retry_after=HOUR))
    assert rig.machine.tick(START + 60_000, 1) > 0
    rig.commit()
    assert (rig.machine.log.ready_count, rig.machine.log.scheduled_count, rig.machine.log.header.dead) == (0, 0, 1)
    assert rig.machine.lease(1, "c", START + 90_000, START + 60_000) is None


def test_what_has_expired_is_not_leased_before_its_timer_comes() -> None:
    rig = Rig()
    for number, timeout in enumerate((10_000, 20_000, 30_000, 0)):
        rig.follow(Rules(expire_timeout=timeout))
        rig.produce(rows_of(str(number)))
        rig.commit()
    now = START + 20_000
    for _ in range(2):
        assert rig.machine.lease(9, "c", now + 100, now) is None
        assert rig.machine.tick(now, 1) == 1
    assert rig.lease(9, now).count == 2
