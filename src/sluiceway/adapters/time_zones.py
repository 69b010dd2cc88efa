"""Time zones of the IANA database: the system's, or that of the package tzdata."""

from __future__ import annotations

from datetime import datetime
from difflib import get_close_matches
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from sluiceway.core.schedules.timetable import Zone
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import invalid

_DAY: Millis = 86_400_000


class _Utc:
    def offset(self, at: Millis) -> Millis:
        return 0


class _Known:
    def __init__(self, zone: ZoneInfo) -> None:
        self._zone = zone

    def offset(self, at: Millis) -> Millis:
        offset = datetime.fromtimestamp(at // 1_000, self._zone).utcoffset()
        assert offset is not None, "every zone of the database has one"
        return offset.days * _DAY + offset.seconds * 1_000


@cache
def _names() -> list[str]:
    """All names. Finding them opens some hundred files, which any caller's mistake would cause."""
    return sorted(available_timezones())


@cache
def find_zone(name: str) -> Zone:
    """The zone of that IANA name, such as `Europe/Berlin`. Raises `invalid_request`, naming `timezone`."""
    if name == "UTC":
        return _Utc()
    try:
        return _Known(ZoneInfo(name))
    except (ValueError, OSError, LookupError):
        # Not a name, a folder of the database, or unknown.
        near = get_close_matches(name[:64], _names(), 1)
        hint = f"; did you mean {near[0]}?" if near else ", such as Europe/Berlin or UTC"
        raise invalid("timezone", f"{name[:64]!r} is not a time zone of the IANA database{hint}") from None
