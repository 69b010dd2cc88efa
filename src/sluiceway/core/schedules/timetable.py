"""Timetables: the moments that a cron expression means in a time zone, and by how much each is delayed.

A time fires at the first moment at which the zone's clock shows it or a later time. So one that the clock skips fires at the change, one
that it shows twice fires once, and the moments rise with the times.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Protocol

from sluiceway.core.schedules.cron import Cron
from sluiceway.kernel.clock import Millis

MINUTE: Millis = 60_000
_DAY: Millis = 86_400_000


class Zone(Protocol):
    """A time zone's clock."""

    def offset(self, at: Millis) -> Millis:
        """How far the clock is ahead of UTC at that moment. Changes at most once within three days."""
        ...

    def __hash__(self) -> int: ...


class Timetable:
    """The moments of `cron` in `zone`. `name` and `jitter` make the delays; deterministic. Immutable."""

    __slots__ = ("_cron", "_jitter", "_seed", "_zone")

    def __init__(self, cron: Cron, zone: Zone, name: str = "", jitter: Millis = 0) -> None:
        self._cron, self._zone = cron, zone
        self._seed, self._jitter = zlib.crc32(name.encode()), jitter

    def after(self, at: Millis) -> Millis | None:
        """The first moment after `at`; None: there is none."""
        # Several times are the same moment where the clock skips them, and where it goes back some that it shows are past.
        minute = self._cron.after((at + self._zone.offset(at)) // MINUTE)
        while minute is not None and (found := self._moment(minute)) <= at:
            minute = self._cron.after(minute)
        return None if minute is None else found

    def before(self, at: Millis) -> Millis | None:
        """The last moment before `at`; None: there is none."""
        # The clock may have shown more than it does now, before it went back.
        shown = at + max(self._zone.offset(at), self._zone.offset(at - _DAY))
        minute = self._cron.before(shown // MINUTE + 1)
        while minute is not None and (found := self._moment(minute)) >= at:
            minute = self._cron.before(minute)
        return None if minute is None else found

    def due(self, at: Millis) -> Millis:
        """When the moment `at` is to be fired: later by a part of the jitter, and before the next moment."""
        if not self._jitter:
            return at
        following = self.after(at)
        most = self._jitter if following is None else min(self._jitter, following - at)
        return at + zlib.crc32(at.to_bytes(8, signed=True), self._seed) * most // (1 << 32)

    def _moment(self, minute: int) -> Millis:
        """The first moment at which the clock shows that minute, or a later one."""
        shown = minute * MINUTE
        before, after, change = _offsets(self._zone, shown // _DAY)
        return shown - before if shown - before < change else max(change, shown - after)


@lru_cache(8_192)
def _offsets(zone: Zone, day: int) -> tuple[Millis, Millis, Millis]:
    """The offsets around a day of the zone's clock, and from when on the second one holds."""
    # Moments before and after any at which a clock can show a time of this day.
    early, late = (day - 1) * _DAY, (day + 2) * _DAY
    before, after = zone.offset(early), zone.offset(late)
    if before == after:
        return before, after, late
    while late - early > 1_000:
        middle = (early + late) // 2_000 * 1_000
        if zone.offset(middle) == before:
            early = middle
        else:
            late = middle
    return before, after, late
