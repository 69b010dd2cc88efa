"""A mass expiry is done in slices, of a size that fits the machine, with room for everything else between them."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from sluiceway.adapters import system
from sluiceway.core.partition.queries import load
from sluiceway.core.queue.owned_queue import OwnedQueue
from sluiceway.core.queue.tickets import Commit, Effect
from sluiceway.core.queue.timer_pacing import FIRST_SLICE, MIN_SLICE, TimerPace
from sluiceway.kernel.limits import TIMER_BATCH, TIMER_SLICE
from sluiceway.local import queue_driver as driver_module
from sluiceway.model.outcomes import Outcome
from sluiceway.testing.drive import driven
from tests.core.queue_rig import Rig
from tests.core.queue_rig import lease as lease_request
from tests.core.queue_rig import produce as produce_request
from tests.instance.instance_rig import eventually, lease, produce, serving, spec

SECOND, HOUR = 1_000, 3_600_000
SLICE = TIMER_SLICE / 1_000

# ---- the pace -------------------------------------------------------------------------------------------------


def test_a_slice_grows_until_it_takes_its_time_and_the_timers_rest_as_long() -> None:
    pace, now = TimerPace(), 0.0
    sizes = []
    for _ in range(8):
        entries = pace.allowance("q", now)
        sizes.append(entries)
        each = SLICE / 100
        pace.note("q", entries, entries * each, entries * each, now)
        assert pace.allowance("q", now + entries * each / 2) == 0
        assert pace.wait("q", now) == pytest.approx(entries * each)
        now += entries * each
    assert sizes[0] == FIRST_SLICE
    assert all(99 <= size <= 101 for size in sizes[1:]), sizes


def test_on_a_slow_machine_slices_shrink_but_not_without_end() -> None:
    pace, now = TimerPace(), 0.0
    for _ in range(8):
        pace.note("q", pace.allowance("q", now), 1.0, 1.0, now)
        now = pace.rests_until
    assert pace.allowance("q", now) == MIN_SLICE


def test_on_a_quick_machine_a_slice_has_an_end() -> None:
    pace, now = TimerPace(), 0.0
    for _ in range(8):
        pace.note("q", pace.allowance("q", now), 0.0, 0.0, now)
        now = pace.rests_until
    assert pace.allowance("q", now) == TIMER_BATCH


def test_on_a_busy_machine_slices_are_as_large_and_the_timers_rest_longer() -> None:
    pace = TimerPace()
    pace.note("q", FIRST_SLICE, SLICE, 10 * SLICE, 0.0)
    assert pace.allowance("q", 9 * SLICE) == 0
    assert pace.allowance("q", 10 * SLICE) == FIRST_SLICE


def test_one_turn_that_was_interrupted_halves_the_slices_at_most() -> None:
    pace = TimerPace()
    pace.note("q", FIRST_SLICE, 60.0, 60.0, 0.0)
    assert pace.allowance("q", pace.rests_until) == FIRST_SLICE // 2


def test_after_a_few_that_were_all_that_was_due_there_is_no_rest() -> None:
    pace = TimerPace()
    pace.note("q", FIRST_SLICE - 1, 1.0, 1.0, 5.0)
    assert pace.allowance("q", 5.0) == FIRST_SLICE


def test_queues_that_wait_take_turns_whichever_asks_first() -> None:
    pace, now = TimerPace(), 0.0
    served = []
    for _ in range(9):
        for queue in ("a", "b", "c"):  # Always in this order.
            if entries := pace.allowance(queue, now):
                served.append(queue)
                pace.note(queue, entries, SLICE, SLICE, now)
            pace.wait(queue, now)
        now = pace.rests_until
    assert served == ["a", *["a", "b", "c"] * 2, "a", "b"]


def test_a_queue_that_has_nothing_left_delays_the_others_by_one_rest() -> None:
    pace = TimerPace()
    pace.note("a", FIRST_SLICE, SLICE, SLICE, 0.0)
    pace.wait("gone", 0.0)
    pace.wait("a", 0.0)
    assert pace.allowance("a", SLICE) == 0
    entries = pace.allowance("a", 2 * SLICE)
    assert entries
    pace.note("a", entries, SLICE, SLICE, 2 * SLICE)
    assert pace.allowance("a", 3 * SLICE), "the queue that is gone is in line no more"


# ---- a turn ---------------------------------------------------------------------------------------------------


def run_out(partitions: int, leases: int) -> Rig:
    """A rig in whose partitions so many leases of one item each have just run out."""
    rig = Rig(partitions)
    for number in range(partitions):
        for _ in range(leases):
            rig.take(number, 1, lease_timeout=SECOND)
    rig.now += SECOND
    return rig


def turn(rig: Rig, timers: int) -> dict[int, int]:
    """The records of the transactions of a turn, by partition. They land."""
    effects: list[Effect] = rig.queue.cycle(rig.now, timers)
    commits = {each.partition: each for each in effects if isinstance(each, Commit)}
    for number, each in commits.items():
        assert rig.stores[number].apply(each.changes, (1, each.opening))
    return {number: each.opening for number, each in commits.items()}


def test_a_slice_is_of_one_partition_and_the_next_of_another() -> None:
    rig = run_out(3, 4)
    served = []
    for _ in range(6):
        commits = turn(rig, 2)
        assert rig.queue.timers_done == 2
        served.append(list(commits))
        for number, opening in commits.items():
            rig.queue.committed(number, opening, Outcome.DONE, rig.now)
    assert served == [[0], [1], [2]] * 2
    assert [rig.durable(number) for number in range(3)] == [(4, 0, 0)] * 3


def test_a_slice_goes_on_in_the_next_partition_once_one_has_nothing_left() -> None:
    rig = run_out(3, 4)
    assert list(turn(rig, 10)) == [0, 1, 2]
    assert [rig.durable(number)[0] for number in range(3)] == [4, 4, 2]


def test_while_timers_rest_a_produce_is_written_and_they_come_after() -> None:
    rig = run_out(2, 2)
    ticket = rig.submit(produce_request())
    assert len(turn(rig, 0)) == 1
    assert rig.queue.timers_done == 0
    assert sum(rig.durable(number)[0] for number in range(2)) == 1
    wake = rig.queue.wake_at()
    assert wake is not None
    assert wake <= rig.now
    assert not ticket.done


def test_a_lease_that_finds_only_what_expired_waits_for_its_timers() -> None:
    rig = Rig()
    rig.configure(expire_timeout=SECOND)
    rig.fill(0, 1)
    rig.configure()
    rig.fill(0, 1)
    rig.now += SECOND
    ticket = rig.submit(lease_request(1))
    assert turn(rig, 0) == {}
    assert not ticket.done, "the item that has not expired is behind the one that has"
    rig.cycle()
    rig.end_all()
    assert rig.offsets(ticket) == [1]


# ---- the driver -----------------------------------------------------------------------------------------------


@driven
async def test_slices_follow_the_processor_time_of_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = 0.0

    def cpu_seconds() -> float:
        nonlocal spent
        spent += 10 * SLICE
        return spent

    done: list[int] = []
    original = OwnedQueue.cycle

    def turn(self: OwnedQueue, now: int, timers: int | None = None, is_pressed: bool = False) -> Any:
        effects = original(self, now, timers, is_pressed)
        if self.timers_done:
            done.append(self.timers_done)
        return effects

    monkeypatch.setattr(system, "cpu_seconds", cpu_seconds)
    monkeypatch.setattr(OwnedQueue, "cycle", turn)
    count = 2 * FIRST_SLICE + FIRST_SLICE // 2 + 2 * MIN_SLICE
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", *"x" * count)
        await asyncio.gather(*(lease(service, "q", 1, 60_000, lease_timeout=HOUR) for _ in range(count)))
        system.move_ahead(HOUR)
        try:
            service._drivers["q"]._cycle()
            await eventually(lambda: service.stats("q").partitions[0].total_leased == 0)
        finally:
            system.move_ahead(-HOUR)
    # The first slice of a backlog is not measured.
    assert done == [FIRST_SLICE, FIRST_SLICE, FIRST_SLICE // 2, MIN_SLICE, MIN_SLICE]


@driven
async def test_who_moves_the_clock_ahead_finds_all_done_whatever_the_pace(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", *"x" * 300)
        await asyncio.gather(*(lease(service, "q", 1, 60_000, lease_timeout=HOUR) for _ in range(300)))
        service._context.pace.rests_until = float("inf")
        system.move_ahead(HOUR)
        try:
            await service.catch_up()
            assert service.stats("q").partitions[0].ready == 300
        finally:
            system.move_ahead(-HOUR)


@driven
async def test_a_mass_expiry_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    count = 4 * TIMER_BATCH
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", *"x" * count)
        await asyncio.gather(*(lease(service, "q", 1, 60_000, lease_timeout=HOUR) for _ in range(count)))
        driver = service._drivers["q"]
        system.move_ahead(HOUR)
        try:
            driver._cycle()
            await driver.stop()
            assert driver.queue.stats().partitions[0].total_leased >= count - FIRST_SLICE
        finally:
            system.move_ahead(-HOUR)


@driven
async def test_the_collector_does_not_look_through_what_is_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def noting(snapshot: Any) -> Any:
        states.append(gc.isenabled())
        return load(snapshot)

    monkeypatch.setattr(driver_module, "load", noting)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
    assert states == [False, False]
    assert gc.isenabled()


@driven
async def test_a_large_partition_is_loaded_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MANY_RECORDS", 2)
    threads = []

    def noting(snapshot: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return load(snapshot)

    monkeypatch.setattr(driver_module, "load", noting)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", *"abc")
        await asyncio.gather(*(lease(service, "q", 1) for _ in range(3)))
        await service._drivers["q"].reload(10 * SECOND)
        assert service.stats("q").partitions[0].total_leased == 3
    assert threads == [True, False]
    assert gc.isenabled()


@driven
async def test_a_large_partition_is_not_scanned_again_once_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MANY_RECORDS", 2)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "x")
        await lease(service, "q", 1)
        gc.unfreeze()
        await service._drivers["q"].reload(10 * SECOND)
        frozen, kept = gc.get_freeze_count(), gc.get_objects()
        leases = service._drivers["q"].executor(0).partition.leases
        gc.unfreeze()
    assert frozen
    assert len(leases) == 1
    assert all(each is not state for each in kept for state in leases.values())
    assert gc.isenabled()
