"""Faults of the core that a review found: what is kept too long, what is served too late, and work that is not worth doing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from sluiceway.core.partition import idempotency_keys
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.records import LeaseState
from sluiceway.core.queue import logical_queue
from sluiceway.core.queue.executor_health import DEGRADED
from sluiceway.core.queue.lease_scheduler import LeaseScheduler
from sluiceway.core.queue.partition_executor import PartitionExecutor
from sluiceway.core.queue.tickets import Grant, TakeOut, Ticket, TransferBegun
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, ProduceKey, Settled
from tests.core.core_model import START, Rig, array_of, batch_of, rows_of
from tests.core.queue_rig import Rig as QueueRig
from tests.core.queue_rig import lease, produce, settle

HOUR = 3_600_000


# ---- what is kept ---------------------------------------------------------------------------------------------


def test_an_answered_request_is_not_kept_while_an_earlier_one_waits() -> None:
    rig = QueueRig()
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


def test_a_closed_lease_over_neighbours_is_remembered_as_one_part() -> None:
    rig = Rig()
    for _ in range(1_000):
        rig.produce(rows_of("x"))
        rig.machine.take_changes()
    taken = rig.lease(1_000)
    assert len(taken.parts) == 1_000
    rig.settle([500], Disposition("retry"))
    rig.close(taken)
    assert rig.machine.closed._spans.starts == [0]
    assert [rig.machine.closed.why_offset(offset) for offset in (0, 499, 501, 999)] == ["completed"] * 4
    assert [rig.machine.closed.why_offset(offset) for offset in (500, 1_000)] == ["retried", None]


def test_a_closed_lease_over_a_gap_is_remembered_as_what_it_was() -> None:
    rig = Rig()
    rig.produce(rows_of(*"abcdef"))
    rig.commit()
    rig.machine.transfers.redrive(array_of([2, 3]), "elsewhere", START)
    taken = rig.lease(4)
    assert [(part.first, part.count) for part in taken.parts] == [(0, 2), (4, 2)]
    rig.settle([1, 5], Disposition("retry"))
    rig.close(taken)
    rig.commit()
    told = ["completed", "retried", None, None, "completed", "retried"]
    for machine in (rig.machine, rig.loaded()):
        assert [machine.closed.why_offset(offset) for offset in range(6)] == told


def close_one(machine: Partition, now: Millis) -> None:
    machine.produce(batch_of(rows_of("x")), now)
    taken = machine.lease(1, "c", now + HOUR, now)
    assert taken is not None
    machine.close_lease(taken, now, Settled())


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
    assert len(machine.deadlines) < 2_000
    for taken, rest in ((first, [second.number]), (second, [])):
        assert taken.deadline is not None
        assert machine.next_timer() == taken.deadline
        assert machine.tick(taken.deadline) == 1
        assert list(machine.leases) == rest


# ---- what has expired -----------------------------------------------------------------------------------------


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


def test_a_lease_gets_what_lies_behind_more_expired_items_than_a_turn_has_timers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logical_queue, "TIMER_BATCH", 1)
    rig = QueueRig()
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


# ---- idempotency groups ---------------------------------------------------------------------------------------


def test_a_group_takes_so_many_keys_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_keys, "MAX_GROUP_KEYS", 3)
    rig = Rig()
    for name in "abc":
        assert rig.produce(rows_of("x"), key=ProduceKey(name, "group", 1))[1:] == (1, False)
    with pytest.raises(SluicewayError) as refused:
        rig.produce(rows_of("x"), key=ProduceKey("d", "group", 1))
    assert (refused.value.code, refused.value.field) == ("invalid_request", "idempotency_group")
    assert rig.machine.log.header.next == 3
    assert rig.produce(rows_of("x"), key=ProduceKey("a", "group", 1)) == (0, 1, True)
    assert rig.produce(rows_of("x"), key=ProduceKey("d", "group", 2)) == (3, 1, False)
    assert rig.produce(rows_of("x"), key=ProduceKey("d", "another", 1)) == (4, 1, False)


# ---- what is taken out of a line that was opened anew ---------------------------------------------------------


def test_what_was_seen_before_a_partition_was_opened_anew_is_not_taken_out_of_it() -> None:
    rig = QueueRig()
    seen = rig.queue.executors[0].opening
    lost = rig.ask(produce(1, 200, text="lost"))
    rig.end(0, Outcome.REFUSED)
    rig.wait(200)
    rig.open(0)
    rig.end_all()
    rig.fill(0, 1)
    stale = rig.ask(TakeOut(0, array_of([0]), "elsewhere", 1_000, seen))
    assert rig.code(stale) == "unavailable"
    assert rig.code(lost) == "unavailable"
    assert rig.durable(0) == (1, 0, 0)
    fresh = rig.ask(TakeOut(0, array_of([0]), "elsewhere", 1_000, rig.queue.executors[0].opening))
    rig.end_all()
    begun = rig.answers[fresh]
    assert isinstance(begun, TransferBegun)
    assert begun.items == 1


# ---- who waits ------------------------------------------------------------------------------------------------


def test_a_lease_without_time_waits_for_a_commit_but_not_for_a_hung_one() -> None:
    rig = QueueRig(3)
    rig.fill(0, 3)
    rig.ask(lease(1))
    patient = rig.ask(lease(1))
    assert list(rig.commits) == [0]
    assert patient not in rig.answers, "the partition has items, and is about to be free"
    rig.wait(DEGRADED[0] + 1)
    assert rig.queue.executors[0].degraded
    ticket = rig.ask(lease(1))
    assert rig.answers[ticket] == []


def test_keys_that_hold_no_lease_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Ticket] = []
    real = LeaseScheduler._keyed

    def counting(scheduler: LeaseScheduler, ticket: Ticket, now: Millis) -> list[tuple[PartitionExecutor, Grant]]:
        looked.append(ticket)
        return real(scheduler, ticket, now)

    monkeypatch.setattr(LeaseScheduler, "_keyed", counting)
    rig = QueueRig(2)
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
