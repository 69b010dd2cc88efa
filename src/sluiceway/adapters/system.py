"""The system's real clock and real randomness. No other module touches either."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from copy import copy

from sluiceway.kernel.clock import Clock, Millis, format_duration
from sluiceway.kernel.ids import INCARNATION_ALPHABET, INCARNATION_LENGTH
from sluiceway.kernel.limits import CLOCK_PATIENCE

log = logging.getLogger("sluiceway.clock")

# On Linux the monotonic clock stands still while the machine sleeps; elsewhere there is no other.
_STEADY: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


_SAME = 200_000
"""Nanoseconds for which a reading stands: a call looks at the time in many places."""


def _steady_ns() -> int:
    return time.monotonic_ns() if _STEADY is None else time.clock_gettime_ns(_STEADY)


class _Clock:
    """`kernel.clock.Clock` over the real clocks; logs a jump of the wall clock, and its end."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._clock = Clock(time.time_ns(), _steady_ns())
        self._last = (0, 0)
        """The last reading: nanoseconds of the steady clock, and the result."""

    def now(self) -> Millis:
        steady, found = self._last
        if 0 <= _steady_ns() - steady < _SAME:
            return found
        clock = self._clock
        with self._mutex:
            # In this order: time between the readings makes the wall clock seem behind, so nothing comes early.
            wall, steady = time.time_ns(), _steady_ns()
            before, found, after = clock.jump, clock.read(wall, steady), clock.jump
            self._last = steady, found
        if bool(before) != bool(after):
            _tell(after)
        return found

    def copy(self) -> Clock:
        self.now()
        with self._mutex:
            return copy(self._clock)

    def follow(self, clock: Clock) -> None:
        with self._mutex:
            self._clock, self._last = clock, (0, 0)

    @property
    def ahead(self) -> Millis:
        return self._clock.ahead

    @property
    def jump(self) -> Millis:
        return self._clock.jump


def _tell(jump: Millis) -> None:
    if not jump:
        log.warning("the machine's clock and the server's time agree again")
        return
    log.error(
        "the machine's clock jumped %s by %s; the server's time continues as before and starts to follow after %s: "
        "correct the clock, or restart the server to follow it at once",
        "ahead" if jump > 0 else "back",
        format_duration(abs(jump)),
        format_duration(CLOCK_PATIENCE),
    )


class _Ahead(threading.local):
    millis: Millis = 0


_clock = _Clock()
_ahead = _Ahead()
_chance = secrets.SystemRandom()


def now() -> Millis:
    """Milliseconds since the Unix epoch, by `kernel.clock.Clock`: never goes back, and follows no jump of the wall clock. Thread-safe."""
    return _clock.now() + _ahead.millis


def clock() -> Clock:
    """A copy of the clock behind `now`, for another process of this machine."""
    return _clock.copy()


def follow(clock: Clock) -> None:
    """Have the time of another process of this machine from now on."""
    _clock.follow(clock)


def clock_jump() -> Millis:
    """Milliseconds that the wall clock is ahead of `now` (negative: behind) after a jump; 0 without one."""
    return _clock.jump


def clock_ahead() -> Millis:
    """Milliseconds that the wall clock is ahead of `now` (negative: behind)."""
    return _clock.ahead


def move_ahead(millis: Millis) -> None:
    """Advance time for this thread. An instance lives in one thread, so a test can move its time alone."""
    _ahead.millis += millis


def new_incarnation() -> str:
    """A fresh incarnation for a queue. Unpredictable; about 40 bits, so the caller still checks that it is not in use."""
    return "".join(secrets.choice(INCARNATION_ALPHABET) for _ in range(INCARNATION_LENGTH))


def new_secret() -> str:
    """192 random bits in hexadecimal digits: infeasible to guess."""
    return secrets.token_hex(24)


def chance() -> float:
    """A random number from 0 up to 1, for jitter between clients that wait for the same thing."""
    return _chance.random()


def steady() -> Millis:
    """Milliseconds of a clock with an arbitrary origin that cannot be set and keeps running while the machine sleeps: for leases."""
    return _steady_ns() // 1_000_000


def busy() -> float:
    """Seconds that this thread had work so far: running or, where the system tells (Linux), waiting for a processor."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran, waited, _ = file.read().split()
        return (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


def cpu_seconds() -> float:
    """Processor time of this thread in seconds; only differences are meaningful."""
    return time.thread_time()


def stopwatch() -> float:
    """Seconds from an arbitrary origin; only differences within this process are meaningful."""
    return time.perf_counter()


async def wait(event: asyncio.Event, timeout: Millis | None) -> None:
    """Wait until the event is set, at most `timeout` milliseconds (None: as long as it takes)."""
    # Not `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that coincides with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if timeout is None else timeout / 1000):
            await event.wait()
