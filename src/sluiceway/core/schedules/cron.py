"""Cron expressions, over the minutes of a wall clock. Pure, and without time zones: `timetable` has those.

A minute is a number: those since 1970-01-01 00:00, as a clock on the wall would count them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from sluiceway.kernel.errors import invalid

HOUR = 60
DAY = 24 * HOUR
MAX_CRON = 256
"""Characters of an expression: fields that list every value fit."""
MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_LONGEST_GAP = 41 * 366
"""Days between two times of an expression, at most: a 29 February that is a certain day of the week."""


class _Field(NamedTuple):
    """What a field may hold. `names`: of its values, beginning with `least`."""

    name: str
    least: int
    most: int
    names: tuple[str, ...] = ()


_MINUTE = _Field("minute", 0, 59)
_HOUR = _Field("hour", 0, 23)
_DAY = _Field("day of month", 1, 31)
_MONTH = _Field("month", 1, 12, _MONTHS)
_WEEKDAY = _Field("day of week", 0, 7, _DAYS)
_FIELDS = (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)


class Cron:
    """The times of an expression. Immutable; `parse_cron` makes it."""

    __slots__ = ("_days", "_either", "_hours", "_minutes", "_months", "_weekdays")

    def __init__(self, fields: Sequence[frozenset[int]], either: bool) -> None:
        minutes, hours, self._days, self._months, self._weekdays = fields
        self._minutes, self._hours = tuple(sorted(minutes)), tuple(sorted(hours))
        self._either = either
        """Whether a day matches by its number or its weekday; else by both."""

    def after(self, minute: int) -> int | None:
        """The first time after that minute; None: there is none."""
        day, rest = divmod(minute + 1, DAY)
        found = self._first(rest) if self._has(day) else None
        if found is not None:
            return day * DAY + found
        # Every day that matches has the same first time.
        following = self._day(day, 1)
        return None if following is None else following * DAY + self._hours[0] * HOUR + self._minutes[0]

    def before(self, minute: int) -> int | None:
        """The last time before that minute; None: there is none."""
        day, rest = divmod(minute - 1, DAY)
        found = self._last(rest) if self._has(day) else None
        if found is not None:
            return day * DAY + found
        earlier = self._day(day, -1)
        return None if earlier is None else earlier * DAY + self._hours[-1] * HOUR + self._minutes[-1]

    def _first(self, least: int) -> int | None:
        """The first time of a day, in minutes, at or after `least`."""
        hour, minute = divmod(least, HOUR)
        at = bisect_left(self._hours, hour)
        if at < len(self._hours) and self._hours[at] == hour:
            in_hour = bisect_left(self._minutes, minute)
            if in_hour < len(self._minutes):
                return hour * HOUR + self._minutes[in_hour]
            at += 1
        return None if at == len(self._hours) else self._hours[at] * HOUR + self._minutes[0]

    def _last(self, most: int) -> int | None:
        """The last time of a day, in minutes, at or before `most`."""
        hour, minute = divmod(most, HOUR)
        at = bisect_right(self._hours, hour) - 1
        if at >= 0 and self._hours[at] == hour:
            in_hour = bisect_right(self._minutes, minute) - 1
            if in_hour >= 0:
                return hour * HOUR + self._minutes[in_hour]
            at -= 1
        return None if at < 0 else self._hours[at] * HOUR + self._minutes[-1]

    def _day(self, day: int, step: int) -> int | None:
        """The next day that matches, after (`step` 1) or before (-1) that one."""
        return next((each for each in range(day + step, day + step * _LONGEST_GAP, step) if self._has(each)), None)

    def _has(self, day: int) -> bool:
        month, number = _date(day)
        if month not in self._months:
            return False
        # 1 January 1970 was a Thursday.
        by_number, by_weekday = number in self._days, (day + 4) % 7 in self._weekdays
        return by_number or by_weekday if self._either else by_number and by_weekday


@lru_cache(8_192)
def _date(day: int) -> tuple[int, int]:
    """Month and day of the month of a day since 1970, in the Gregorian calendar.

    Years begin in March here, so that the leap day is the last one of a year; an era is 400 of them.
    """
    of_era = (day + 719_468) % 146_097
    year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    return month + 3 if month < 10 else month - 9, of_year - (153 * month + 2) // 5 + 1


@lru_cache(4_096)
def parse_cron(text: str) -> Cron:
    """Parse an expression of five fields, or a macro such as `@hourly`. Raises `invalid_request`, naming the field at fault."""
    if len(text) > MAX_CRON:
        raise invalid("cron", f"longer than {MAX_CRON} characters")
    if text.strip().startswith("@"):
        name = text.strip().lower()
        if name not in MACROS:
            raise invalid("cron", f"{name[:40]!r} is not known; expected one of {', '.join(MACROS)}")
        text = MACROS[name]
    texts = text.lower().split()
    if len(texts) != len(_FIELDS):
        names = ", ".join(field.name for field in _FIELDS)
        raise invalid("cron", f"expected five fields ({names}), such as '*/5 * * * *', or @hourly; got {len(texts)}")
    *fields, weekdays = (_values(each, field) for each, field in zip(texts, _FIELDS, strict=True))
    either = not texts[2].startswith("*") and not texts[4].startswith("*")
    cron = Cron((*fields, frozenset(day % 7 for day in weekdays)), either)
    if cron.after(0) is None:
        raise invalid("cron", f"day of month: {texts[2]} never comes in month {texts[3]}")
    return cron


def _values(text: str, field: _Field) -> frozenset[int]:
    return frozenset(value for part in text.split(",") for value in _part(part, field))


def _part(text: str, field: _Field) -> range:
    """One element of a list: a value, a range, `*`, or one of these with a step."""
    what, slash, steps = text.partition("/")
    first, dash, last = what.partition("-")
    if what == "*":
        low, high = field.least, 6 if field is _WEEKDAY else field.most
    elif dash:
        low, high = _value(first, field), _value(last, field)
        if field is _WEEKDAY and high == 0 < low:
            # Sunday ends a week, too.
            high = 7
        if low > high:
            raise _wrong(field, f"the range {what} ends before it begins")
    else:
        low = high = _value(what, field)
        if slash:
            raise _wrong(field, f"the step of {text} needs a range or *, such as {what}-{field.most}/{steps}")
    if not slash:
        return range(low, high + 1)
    if not (steps.isascii() and steps.isdigit() and int(steps)):
        raise _wrong(field, f"{steps!r} is not a step; expected a number from 1, as in */5")
    return range(low, high + 1, int(steps))


def _value(text: str, field: _Field) -> int:
    if text in field.names:
        return field.names.index(text) + field.least
    if not (text.isascii() and text.isdigit()):
        names = f" or {field.names[0]} to {field.names[-1]}" if field.names else ""
        raise _wrong(
            field, f"{text!r} is not understood; expected *, {field.least} to {field.most}{names}, and lists, ranges and steps of them"
        )
    value = int(text)
    if not field.least <= value <= field.most:
        raise _wrong(field, f"{text} is not between {field.least} and {field.most}")
    return value


def _wrong(field: _Field, what: str) -> Exception:
    return invalid("cron", f"{field.name}: {what}")
