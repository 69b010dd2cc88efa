"""Time in the core: whole milliseconds since the Unix epoch, and durations as text.

The core never reads a clock; it is given `now`. Only `adapters/system.py` reads the real one.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import CLOCK_PATIENCE, MAX_CLOCK_STEP

Millis = int
"""A point in time (`…_at`, `…_deadline`) or a duration (`…_timeout`), in milliseconds."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNIT = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_LONGEST = 32
_MILLI = 1_000_000
"""Nanoseconds."""
_SLEW = 8
"""Differences from the wall clock are corrected at most at this fraction (an eighth) of the elapsed time."""


class Clock:
    """Time of a process, from readings of the wall clock, which can be set, and of a steady clock, which cannot. Pure.

    It follows the steady clock and never goes back. Drift and small steps of the wall clock, up to MAX_CLOCK_STEP, are corrected by at most
    an eighth of the elapsed time. A larger difference is a jump: it is ignored for CLOCK_PATIENCE, in which the clock may be set right
    again, and then corrected at the same rate. All readings are in nanoseconds.
    """

    def __init__(self, wall: int, steady: int) -> None:
        self._now = wall
        self._steady = steady
        self._ahead = 0
        self._jumped_at: int | None = None

    def read(self, wall: int, steady: int) -> Millis:
        """Milliseconds since the epoch, given both readings in nanoseconds."""
        passed = max(0, steady - self._steady)
        self._steady += passed
        ahead = wall - self._now - passed
        if abs(ahead) <= MAX_CLOCK_STEP * _MILLI:
            self._jumped_at = None
        elif self._jumped_at is None or abs(ahead - self._ahead) > MAX_CLOCK_STEP * _MILLI:
            # A further jump gets the full time again in which it may be set right.
            self._jumped_at = self._steady
        if self._jumped_at is None or self._steady - self._jumped_at > CLOCK_PATIENCE * _MILLI:
            most = passed // _SLEW
            passed += max(-most, min(most, ahead))
        self._now += passed
        self._ahead = wall - self._now
        return self._now // _MILLI

    @property
    def jump(self) -> Millis:
        """Milliseconds that the wall clock is ahead of this one (negative: behind) after a jump; 0 without one."""
        return 0 if self._jumped_at is None else round(self._ahead / _MILLI)

    @property
    def ahead(self) -> Millis:
        """Milliseconds that the wall clock is ahead of this one, jump or not."""
        return round(self._ahead / _MILLI)


def parse_duration(text: object, field: str) -> Millis:
    """Parse `500ms`, `30s`, `1m`, `1h30m`, `7d` to milliseconds. Raises `invalid_request` that names `field`."""
    expected = "expected a duration such as 500ms, 30s, 1m or 1h30m"
    if not isinstance(text, str):
        raise invalid(field, expected)
    # Checked first: the search below takes quadratic time for a long invalid text.
    if len(text) > _LONGEST:
        raise invalid(field, f"{text[:40]!r}… is longer than {_LONGEST} characters; {expected}")
    found = _read(text)
    if found is None:
        raise invalid(field, f"{text[:40]!r} is not a duration; {expected}")
    return found


@lru_cache(1_024)
def _read(text: str) -> Millis | None:
    """Milliseconds, or None for an invalid text. Cached, since most calls use one of a few."""
    total, at = 0.0, 0
    for part in _PART.finditer(text):
        if part.start() != at:
            break
        total += float(part[1]) * _UNIT[part[2]]
        at = part.end()
    return round(total) if text and at == len(text) else None


def format_duration(millis: Millis) -> str:
    """Format milliseconds as a text that `parse_duration` reads back exactly."""
    if millis <= 0:
        return "0s"
    parts, rest = [], millis
    for unit in ("d", "h", "m", "s", "ms"):
        count, rest = divmod(rest, _UNIT[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def check_duration(text: object, field: str, least: Millis, most: Millis) -> Millis:
    """A duration of `least` to `most` milliseconds. Anything else is an error that names `field`."""
    millis = parse_duration(text, field)
    if millis < least:
        raise invalid(field, f"must be at least {least}ms")
    if millis > most:
        raise invalid(field, f"{text!r} is longer than the limit of {format_duration(most)}")
    return millis


def parse_time(text: object, field: str) -> Millis:
    """Parse an RFC 3339 time to milliseconds since the epoch. Raises `invalid_request`, also for a time without a zone, which is
    ambiguous."""
    if not isinstance(text, str):
        raise invalid(field, "expected a time such as 2026-01-31T08:00:00Z")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise invalid(field, f"{text[:40]!r} is not a time such as 2026-01-31T08:00:00Z") from None
    if moment.tzinfo is None:
        raise invalid(field, f"{text[:40]!r} has no time zone; write 2026-01-31T08:00:00Z")
    return as_millis(moment)


def as_millis(moment: datetime) -> Millis:
    """An aware `datetime` in milliseconds since the epoch."""
    return round((moment - _EPOCH) / timedelta(milliseconds=1))


@lru_cache(256)
def format_time(at: Millis) -> str:
    """Format as RFC 3339 in UTC, always with milliseconds: the texts sort as the times do."""
    second, millis = divmod(at, 1_000)
    return f"{_second(second)}.{millis:03}Z"


@lru_cache(1_024)
def _second(at: int) -> str:
    """Cached, since formatted times are mostly close together."""
    return (_EPOCH + timedelta(seconds=at)).isoformat().removesuffix("+00:00")
