"""The real clock and real randomness. Nothing else in the project touches either."""

from __future__ import annotations

import secrets
import threading
import time

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.ids import INCARNATION_ALPHABET, INCARNATION_LENGTH


class _Clock:
    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._now = time.time_ns()
        self._monotonic = time.monotonic_ns()

    def now(self) -> Millis:
        with self._mutex:
            # In this order: what passes between the readings would otherwise be counted twice, and nothing ever takes it back.
            wall = time.time_ns()
            monotonic = time.monotonic_ns()
            # When the wall clock is set back, time runs on from where it was: standing still would stop every lease from expiring.
            self._now = max(wall, self._now + monotonic - self._monotonic)
            self._monotonic = monotonic
            return self._now // 1_000_000


class _Ahead(threading.local):
    millis: Millis = 0


_clock = _Clock()
_ahead = _Ahead()
_chance = secrets.SystemRandom()
# On Linux the monotonic clock stands still while the machine sleeps; elsewhere there is no other.
_STEADY: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def now() -> Millis:
    """Milliseconds since the Unix epoch. Never goes backwards within the process, even if the wall clock is set back. Thread-safe."""
    return _clock.now() + _ahead.millis


def move_ahead(millis: Millis) -> None:
    """For this thread it is so much later from now on. An instance lives in one thread, so that a test can move its time alone."""
    _ahead.millis += millis


def new_incarnation() -> str:
    """A fresh incarnation for a queue. Unpredictable; about 40 bits, so the caller still checks that it is not in use."""
    return "".join(secrets.choice(INCARNATION_ALPHABET) for _ in range(INCARNATION_LENGTH))


def new_secret() -> str:
    """192 random bits in hexadecimal digits: nobody finds it by trying."""
    return secrets.token_hex(24)


def chance() -> float:
    """A number from 0 up to 1, at random: so that those who wait for the same thing do not all come back at once."""
    return _chance.random()


def steady() -> Millis:
    """Milliseconds from a point of no meaning, by a clock that nobody sets and that runs on while the machine sleeps: for leases."""
    return (time.monotonic_ns() if _STEADY is None else time.clock_gettime_ns(_STEADY)) // 1_000_000


def stopwatch() -> float:
    """Seconds from a point of no meaning: only differences within this process say something."""
    return time.perf_counter()
