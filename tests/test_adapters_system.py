"""The real clock never goes backwards, whatever happens to the wall clock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sluiceway.adapters import system
from sluiceway.kernel.ids import INCARNATION_ALPHABET, INCARNATION_LENGTH, parse_item_id

HOUR = 3_600_000_000_000
MINUTE = 60_000_000_000


class FakeTime:
    """Nanoseconds, as the standard library tells them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.monotonic = 1_000 * HOUR, HOUR
        self.between = 0
        """So much goes by after each reading."""
        monkeypatch.setattr(time, "time_ns", lambda: self._read("wall"))
        monkeypatch.setattr(time, "monotonic_ns", lambda: self._read("monotonic"))
        monkeypatch.setattr(system, "_clock", system._Clock())

    def _read(self, clock: str) -> int:
        told = int(getattr(self, clock))
        self.wall += self.between
        self.monotonic += self.between
        return told

    def step(self, wall: int, monotonic: int) -> int:
        """The milliseconds that now() moved on."""
        before = system.now()
        self.wall += wall
        self.monotonic += monotonic
        return system.now() - before


def test_now_is_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_clock", system._Clock())
    before = time.time_ns() // 1_000_000
    now = system.now()
    assert before <= now <= time.time_ns() // 1_000_000


def test_now_follows_the_wall_clock_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    assert system.now() == 1_000 * 3_600_000
    assert fake.step(MINUTE, MINUTE) == 60_000
    assert fake.step(HOUR, MINUTE) == 3_600_000


def test_now_runs_on_when_the_wall_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    assert fake.step(-HOUR, MINUTE) == 60_000
    assert fake.step(MINUTE, MINUTE) == 60_000
    assert fake.step(0, 0) == 0
    assert fake.step(2 * HOUR, 0) == 3_600_000 - 60_000


def test_now_is_not_early_for_good_once_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two readings of the clocks a process may stand still, for as long as it likes."""
    fake = FakeTime(monkeypatch)
    for fake.between in (MINUTE, 0, MINUTE, 0):
        fake.step(MINUTE, MINUTE)
        assert system.now() <= fake.wall // 1_000_000
    assert system.now() == fake.wall // 1_000_000


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
