"""Firings: each time once, whoever crashes, freezes and takes over; and nothing but what the guide says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluiceway.adapters.time_zones import find_zone
from sluiceway.contract.schedule_answers import CatchUp
from sluiceway.core.schedules import firings
from sluiceway.core.schedules.cron import parse_cron
from sluiceway.core.schedules.firings import FIRST_PAUSE, LAST_PAUSE, MISSED_AFTER, REACH, Firing, Firings
from sluiceway.core.schedules.timetable import MINUTE, Timetable
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import GROUP_KEEP, MAX_CATCH_UP
from tests.core.schedules_world import BEGIN, DAY, HOUR, Queue, Run

NOON: Millis = 1_803_038_400_000
UTC = find_zone("UTC")


def table(cron: str = "* * * * *") -> Timetable:
    return Timetable(parse_cron(cron), UTC)


def held(catch_up: CatchUp = "last", cron: str = "* * * * *", through: Millis = NOON) -> Firings:
    found = Firings()
    found.hold("s", "i", table(cron), catch_up, through)
    return found


def fire_all(machine: Firings, now: Millis) -> list[Millis]:
    """What it fires at that moment, one after the other."""
    fired = []
    while (due := machine.due()) is not None and due <= now:
        for firing in machine.begin(now, 10):
            fired.append(firing.at)
            machine.fired(firing)
    return fired


# ---- the simulated month --------------------------------------------------------------------------------------------


def check(seed: str, schedules: int, crashes: int) -> int:
    """Returns how many moments were fired."""
    run = Run(seed, schedules, crashes)
    queue, wanted = run.queue, run.wanted
    got = {name: queue.items.get(name, []) for name in wanted}
    twice = [name for name, moments in got.items() if len(moments) != len(set(moments))]
    assert not twice, twice[:3]
    wrong = {
        name: (sorted(set(got[name]) ^ set(wanted[name])), got[name] == sorted(got[name])) for name in wanted if got[name] != wanted[name]
    }
    assert not wrong, dict(list(wrong.items())[:3])
    return sum(map(len, got.values()))


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_each_time_is_fired_once_in_a_month_of_crashes(seed: str) -> None:
    assert check(seed, 100, 60) > 1_000


@pytest.mark.slow
def test_a_hundred_thousand_schedules_through_a_month_of_a_thousand_crashes() -> None:
    assert sum(check(f"{group}", 1_000, 10) for group in range(100)) > 1_000_000


def test_a_queue_without_a_memory_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control group: then what two fire, and what a crash has forgotten, is there twice."""

    def forgetful(self: Queue, group: str, sequence: Millis, now: Millis) -> None:
        self.items.setdefault(group, []).append(sequence)

    monkeypatch.setattr(Queue, "produce", forgetful)
    with pytest.raises(AssertionError):
        check("a", 100, 60)


def test_a_machine_that_forgets_what_it_fired_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded: the memory of the queue alone keeps the times apart, and does."""
    run = Run("a", 100, 60, record=False)
    assert all(len(moments) == len(set(moments)) for moments in run.queue.items.values())
    monkeypatch.setattr(firings, "REACH", 10 * REACH)
    begin, fired = Queue(), []
    for now in (NOON, NOON + GROUP_KEEP + MINUTE):
        # Nobody recorded the first, and nobody remembers it.
        machine = held("all", "0 12 * * *", NOON - 1)
        for at in fire_all(machine, now):
            begin.produce("s", at, now)
            fired.append(at)
    assert begin.items["s"].count(NOON) == 2


# ---- the bound of the queue's memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("catch_up", ["last", "all"])
def test_nothing_is_fired_again_that_the_queue_may_have_forgotten(catch_up: CatchUp) -> None:
    """However long the record is missing: a crash before it, and then weeks without a server."""
    for late in (0, HOUR, GROUP_KEEP - 2 * DAY, REACH, REACH + 1, GROUP_KEEP - 1, GROUP_KEEP, GROUP_KEEP + DAY, 3 * GROUP_KEEP):
        queue = Queue()
        for now in (NOON, NOON + late):
            for at in fire_all(held(catch_up, "0 12 19 2 *", NOON - 1), now):
                queue.produce("s", at, now)
        assert queue.items.get("s", []) == [NOON], late


def test_a_time_is_fired_as_late_as_the_queue_surely_remembers_it_and_no_later() -> None:
    assert fire_all(held("last", "0 12 19 2 *", NOON - 1), NOON + REACH) == [NOON]
    assert fire_all(held("last", "0 12 19 2 *", NOON - 1), NOON + REACH + 1) == []
    assert GROUP_KEEP - REACH == DAY


# ---- missed times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catch_up", "late", "expected"),
    [
        ("last", 5 * MINUTE, [5]),
        ("skip", 5 * MINUTE, [5]),
        ("all", 5 * MINUTE, [1, 2, 3, 4, 5]),
        ("last", 5 * MINUTE + MISSED_AFTER - 1, [5]),
        ("skip", MINUTE + MISSED_AFTER - 1, [1]),
        ("last", 1 * MINUTE, [1]),
        ("last", MINUTE - 1, []),
    ],
)
def test_a_schedule_of_every_minute_that_nobody_fired(catch_up: CatchUp, late: Millis, expected: list[int]) -> None:
    machine = held(catch_up)
    assert fire_all(machine, NOON + late) == [NOON + number * MINUTE for number in expected]
    following = NOON + (late // MINUTE + 1) * MINUTE
    assert machine.due() == following
    assert fire_all(machine, following) == [following]


@pytest.mark.parametrize(
    ("catch_up", "late", "fired"),
    [("skip", MISSED_AFTER - 1, 1), ("skip", MISSED_AFTER, 0), ("last", MISSED_AFTER, 1), ("all", DAY // 2, 1)],
)
def test_a_minute_late_is_missed(catch_up: CatchUp, late: Millis, fired: int) -> None:
    assert len(fire_all(held(catch_up, "@daily", NOON), NOON + DAY // 2 + late)) == fired


def test_all_means_the_latest_thousand() -> None:
    fired = fire_all(held("all"), NOON + 3 * DAY)
    assert fired == [NOON + 3 * DAY - number * MINUTE for number in range(MAX_CATCH_UP)][::-1]
    assert fire_all(held("all"), NOON + MAX_CATCH_UP * MINUTE)[0] == NOON + MINUTE
    daily = fire_all(held("all", "@daily"), NOON + 100 * DAY)
    assert len(daily) == 29


def test_all_means_the_latest_thousand_also_after_failures() -> None:
    """The first attempt after an outage often fails, as the queue's partitions are not open yet."""
    machine, now = held("all"), NOON + 3 * DAY
    (firing,) = machine.begin(now, 10)
    machine.failed(firing, now)
    assert fire_all(machine, now + FIRST_PAUSE) == [now - number * MINUTE for number in range(MAX_CATCH_UP)][::-1]


@pytest.mark.parametrize("give_up", [Firings.failed, Firings.put_back])
def test_all_means_the_latest_thousand_also_if_it_is_the_queue_that_is_away(give_up: Callable[[Firings, Firing, Millis], None]) -> None:
    machine, now = held("all"), NOON + MINUTE
    while now < NOON + 3 * DAY:
        for firing in machine.begin(now, 10):
            give_up(machine, firing, now)
        now += HOUR
    fired = fire_all(machine, now)
    assert fired == [fired[-1] - number * MINUTE for number in range(MAX_CATCH_UP)][::-1]
    assert now - fired[-1] < MINUTE


def test_what_is_skipped_is_recorded() -> None:
    machine = held("skip", "@daily")
    assert fire_all(machine, NOON + DAY) == []
    assert machine.through("s") == NOON + DAY // 2
    assert [*machine.touched] == ["s"]


def test_schedules_that_come_and_go_leave_nothing() -> None:
    """As with each move of their partitions, long before they fire."""
    machine = Firings()
    for _ in range(5_000):
        for number in range(3):
            machine.hold(f"s{number}", "i", table(f"{number} 0 1 1 *"), "last", NOON)
        for number in range(2):
            machine.drop(f"s{number}")
    assert len(machine._heap) < 2_000
    at = table("2 0 1 1 *").after(NOON)
    assert at is not None
    assert fire_all(machine, at) == [at]


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_firing_is_repeated_after_growing_pauses_and_then_forgotten() -> None:
    machine = held("last", "@daily", NOON - DAY)
    now = NOON - DAY // 2
    pauses = []
    for _ in range(12):
        (firing,) = machine.begin(now, 10)
        assert firing.at == NOON - DAY // 2
        machine.failed(firing, now)
        due = machine.due()
        assert due is not None
        assert machine.begin(due - 1, 10) == []
        pauses.append(due - now)
        now = due
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LAST_PAUSE
    (firing,) = machine.begin(now, 10)
    machine.fired(firing)
    assert machine.due() == NOON + DAY // 2


def test_a_firing_that_fails_until_it_is_missed_is_skipped() -> None:
    machine, now = held("skip", "@daily", NOON), NOON + DAY // 2
    while firings_now := machine.begin(now, 10):
        machine.failed(firings_now[0], now)
        now = machine.due() or 0
    assert MISSED_AFTER <= now - (NOON + DAY // 2) < MISSED_AFTER + LAST_PAUSE
    assert machine.due() == NOON + DAY // 2 + DAY


def test_a_schedule_has_one_firing_in_flight() -> None:
    machine = held("all")
    (firing,) = machine.begin(NOON + 5 * MINUTE, 10)
    assert machine.begin(NOON + 6 * MINUTE, 10) == []
    machine.fired(firing)
    assert [each.at for each in machine.begin(NOON + 6 * MINUTE, 10)] == [NOON + 2 * MINUTE]


# ---- changes while a firing is in flight ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Firings.fired, lambda machine, firing: machine.failed(firing, NOON + MINUTE)], ids=["fired", "failed"])
def test_a_late_end_of_a_firing_means_nothing_to_another_incarnation(end: Callable[[Firings, Firing], None]) -> None:
    machine = held()
    (firing,) = machine.begin(NOON + MINUTE, 10)
    machine.hold("s", "j", table(), "last", NOON)
    assert [each.incarnation for each in machine.begin(NOON + MINUTE, 10)] == ["j"]
    end(machine, firing)
    assert machine.through("s") == NOON
    assert machine.begin(NOON + MINUTE, 10) == []


def test_new_settings_take_effect_once_the_firing_in_flight_has_ended() -> None:
    machine = held()
    (firing,) = machine.begin(NOON + MINUTE, 10)
    machine.hold("s", "i", table("30 * * * *"), "last", NOON + MINUTE)
    assert machine.begin(NOON + HOUR, 10) == []
    machine.fired(firing)
    assert machine.due() == NOON + 30 * MINUTE


def test_a_change_takes_nothing_back_that_was_decided() -> None:
    machine = held()
    assert fire_all(machine, NOON + 5 * MINUTE) == [NOON + 5 * MINUTE]
    machine.hold("s", "i", table(), "all", NOON)
    assert machine.due() == NOON + 6 * MINUTE


def test_a_dropped_schedule_fires_nothing() -> None:
    machine = held()
    machine.drop("s")
    assert machine.begin(NOON + HOUR, 10) == []
    assert "s" not in machine


def test_many_due_at_once_are_begun_as_many_as_there_is_room_for() -> None:
    machine = Firings()
    for number in range(100):
        machine.hold(f"s{number}", "i", table("@hourly"), "skip" if number % 2 else "last", NOON - number)
    first = machine.begin(NOON + 30 * MINUTE, 40)
    assert 0 < len(first) <= 40
    assert machine.due() == NOON
    while (due := machine.due()) is not None and due <= NOON + 30 * MINUTE:
        first += machine.begin(NOON + 30 * MINUTE, 40)
    # One that begins at noon itself has not missed it.
    assert len(first) == 49
    assert len({each.key for each in first}) == 49


def test_a_month_begins_where_the_simulation_says() -> None:
    assert BEGIN < NOON < BEGIN + DAY
