"""The real clock never goes back, and follows no jump, whatever happens to the wall clock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sluiceway.adapters import system
from sluiceway.kernel.ids import INCARNATION_ALPHABET, INCARNATION_LENGTH, parse_item_id

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE


class FakeTime:
    """Nanoseconds, as the standard library tells them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.steady = 1_000 * HOUR, HOUR
        self.between = 0
        """So much goes by after each reading."""
        monkeypatch.setattr(time, "time_ns", lambda: self._read("wall"))
        monkeypatch.setattr(system, "_steady_ns", lambda: self._read("steady"))
        monkeypatch.setattr(system, "_clock", system._Clock())

    def _read(self, clock: str) -> int:
        told = int(getattr(self, clock))
        self.wall += self.between
        self.steady += self.between
        return told

    def step(self, wall: int, steady: int) -> int:
        """The milliseconds that now() moved on."""
        before = system.now()
        self.wall += wall
        self.steady += steady
        return system.now() - before

    def behind(self) -> int:
        """Milliseconds by which now() is behind the wall clock."""
        return self.wall // 1_000_000 - system.now()


def test_now_is_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_clock", system._Clock())
    before = time.time_ns() // 1_000_000
    now = system.now()
    assert before <= now <= time.time_ns() // 1_000_000


def test_now_runs_with_the_steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    assert system.now() == 1_000 * 3_600_000
    assert fake.step(MINUTE, MINUTE) == 60_000
    assert fake.step(0, 0) == 0


@pytest.mark.parametrize("jump", [11 * SECOND, HOUR, 10_000 * HOUR, -11 * SECOND, -HOUR])
def test_a_jump_there_and_back_is_never_seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, jump: int) -> None:
    fake = FakeTime(monkeypatch)
    assert fake.step(jump + SECOND, SECOND) == 1_000
    assert system.clock_jump() == jump // 1_000_000
    for _ in range(50):
        assert fake.step(MINUTE, MINUTE) == 60_000
    assert len(caplog.records) == 1
    assert "the machine's clock jumped" in caplog.records[0].message
    assert fake.step(SECOND - jump, SECOND) == 1_000
    assert (fake.behind(), system.clock_jump()) == (0, 0)
    assert "agree again" in caplog.records[1].message


@pytest.mark.parametrize("step", [10 * SECOND, 3, -10 * SECOND])
def test_a_small_step_is_made_good_by_an_eighth_of_what_passes(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    fake = FakeTime(monkeypatch)
    way = 1 if step > 0 else -1
    fake.step(step, 0)
    assert system.clock_jump() == 0
    assert fake.step(8 * SECOND, 8 * SECOND) == 8_000 + way * min(1_000, abs(step) // 1_000_000)
    fake.step(72 * SECOND, 72 * SECOND)
    assert fake.behind() == 0
    assert fake.step(SECOND, SECOND) == 1_000


@pytest.mark.parametrize("rate", [0.9, 0.9995, 1.0005, 1.1])
def test_drift_is_followed(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    fake = FakeTime(monkeypatch)
    for _ in range(1_000):
        fake.step(round(rate * SECOND), SECOND)
        assert abs(fake.behind()) <= 1


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_jump_that_stays_is_followed_after_an_hour(monkeypatch: pytest.MonkeyPatch, jump: int) -> None:
    """Such as after a pause of a virtual machine, whose steady clock stood still, too."""
    fake = FakeTime(monkeypatch)
    fake.step(jump, 0)
    for _ in range(60):
        assert fake.step(MINUTE, MINUTE) == 60_000
    begun = fake.steady
    while fake.behind():
        assert abs(fake.step(MINUTE, MINUTE) - 60_000) <= 7_500
    assert 8 * HOUR <= fake.steady - begun <= 8 * HOUR + 2 * MINUTE


def test_a_second_jump_has_its_own_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    fake.step(HOUR, 0)
    fake.step(2 * HOUR, 2 * HOUR)
    assert fake.step(HOUR + MINUTE, MINUTE) == 60_000
    assert fake.step(MINUTE, MINUTE) == 60_000


def test_a_machine_that_slept_is_no_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    assert fake.step(HOUR, HOUR) == 3_600_000
    assert system.clock_jump() == 0


def test_now_is_not_early_for_good_once_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two readings of the clocks a process may stand still, for as long as it likes."""
    fake = FakeTime(monkeypatch)
    for fake.between in (SECOND, 0, SECOND, 0):
        fake.step(MINUTE, MINUTE)
        assert system.now() <= fake.wall // 1_000_000
    fake.step(MINUTE, MINUTE)
    assert fake.behind() == 0


def test_a_thread_can_be_ahead_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTime(monkeypatch)

    def moved() -> int:
        system.move_ahead(60_000)
        system.move_ahead(5)
        return system.now()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(moved).result() == system.now() + 60_005
        assert thread.submit(system.now).result() == system.now() + 60_005


def test_incarnations_differ_and_fit_an_id() -> None:
    incarnations = {system.new_incarnation() for _ in range(1_000)}
    assert len(incarnations) == 1_000
    assert all(len(text) == INCARNATION_LENGTH and set(text) <= set(INCARNATION_ALPHABET) for text in incarnations)
    assert parse_item_id(f"{incarnations.pop()}.0.1").offset == 1


def test_chances_are_spread() -> None:
    drawn = [system.chance() for _ in range(2_000)]
    assert all(0 <= each < 1 for each in drawn)
    # Each tenth has some; that one has fewer than a hundred, of 200 that it should have, does not happen.
    assert all(sum(tenth <= each * 10 < tenth + 1 for each in drawn) > 100 for tenth in range(10))
