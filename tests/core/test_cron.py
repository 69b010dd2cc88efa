"""Cron expressions, against a clock on the wall that is looked at every minute."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

import pytest

from sluiceway.adapters.time_zones import find_zone
from sluiceway.core.schedules.cron import MACROS, parse_cron
from sluiceway.core.schedules.timetable import MINUTE, Timetable
from sluiceway.kernel.clock import Millis, as_millis
from sluiceway.kernel.errors import SluicewayError

FIELDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
NAMES = (MONTHS, ["sun", "mon", "tue", "wed", "thu", "fri", "sat"])
CHANGES = {
    "Europe/Berlin": ["2027-03-28", "2027-10-31"],
    "America/New_York": ["2027-03-14", "2027-11-07"],
    # Half an hour.
    "Australia/Lord_Howe": ["2027-04-04", "2027-10-03"],
    # At midnight, so that a day begins at 01:00.
    "America/Santiago": ["2027-09-05", "2027-04-04"],
    # Winter time is the exception.
    "Europe/Dublin": ["2027-03-28", "2027-10-31"],
    # Across the date line: a day is missing.
    "Pacific/Apia": ["2011-12-30"],
    "Asia/Kathmandu": ["2027-01-01"],
}


class Expression:
    """A random expression, with the values that its fields have."""

    def __init__(self, chance: random.Random, *, often: bool = False) -> None:
        self.values: list[set[int]] = []
        texts = []
        for place, (least, most) in enumerate(FIELDS):
            text, values = (
                ("*", set(range(least, most + 1))) if chance.random() < (0.7 if often or place > 1 else 0.2) else some(chance, place)
            )
            texts.append(text)
            self.values.append(values)
        self.text = " ".join(texts)
        self.either = texts[2][0] != "*" and texts[4][0] != "*"

    def has(self, shown: datetime) -> bool:
        minutes, hours, days, months, weekdays = self.values
        if shown.minute not in minutes or shown.hour not in hours or shown.month not in months:
            return False
        day, weekday = shown.day in days, shown.isoweekday() % 7 in weekdays
        return day or weekday if self.either else day and weekday


def some(chance: random.Random, place: int) -> tuple[str, set[int]]:
    """A field's text, and its values."""
    least, most = FIELDS[place]
    names = dict(enumerate(NAMES[place - 3], least)) if place > 2 and chance.random() < 0.5 else {}
    parts, values = [], set[int]()
    for _ in range(chance.choice((1, 1, 2, 3))):
        low, high = sorted(chance.sample(range(least, most + 1), 2))
        first, last = (names.get(each, str(each)) for each in (low, high))
        step = chance.randint(1, 12)
        text, found = chance.choice(
            [
                (first, {low}),
                (f"{first}-{last}", set(range(low, high + 1))),
                (f"{first}-{last}/{step}", set(range(low, high + 1, step))),
                (f"*/{step}", set(range(least, most + 1, step))),
            ]
        )
        parts.append(text.upper() if chance.random() < 0.2 else text)
        values |= found
    return ",".join(parts), values


@lru_cache(1)
def clock(zone: str, first: datetime, last: datetime) -> list[tuple[Millis, list[datetime]]]:
    """For each minute after `first`, up to `last`: the times that the clock shows then, or has passed over, for the first time."""
    at, found = first, []
    latest = shown_by(at, zone)
    while (at := at + timedelta(minutes=1)) <= last:
        now = shown_by(at, zone)
        new = []
        while latest < now:
            latest += timedelta(minutes=1)
            new.append(latest)
        found.append((as_millis(at), new))
    return found


def watched(expression: Expression, zone: str, first: datetime, last: datetime) -> list[Millis]:
    """The moments after `first`, up to `last`: look at the clock every minute, and fire if it shows a time for the first time, or has
    passed over it."""
    return [at for at, new in clock(zone, first, last) if any(map(expression.has, new))]


def shown_by(at: datetime, zone: str) -> datetime:
    return at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)


@pytest.mark.parametrize("zone", CHANGES)
def test_the_moments_are_those_of_a_clock_that_is_looked_at_every_minute(zone: str) -> None:
    chance = random.Random(zone)
    for day in CHANGES[zone]:
        middle = datetime.fromisoformat(day).replace(tzinfo=UTC)
        first, last = middle - timedelta(days=2), middle + timedelta(days=2)
        for _ in range(12):
            expression = Expression(chance, often=True)
            expected = watched(expression, zone, first, last)
            table = Timetable(parse_cron(expression.text), find_zone(zone))
            assert list(forth(table, as_millis(first), as_millis(last))) == expected, expression.text
            assert list(back(table, as_millis(last), as_millis(first)))[::-1] == expected, expression.text
            for _ in range(10):
                at = chance.randrange(as_millis(first), as_millis(last))
                later, earlier = expected[bisect_right(expected, at) :], expected[: bisect_left(expected, at)]
                assert not later or table.after(at) == later[0], (expression.text, at)
                assert not earlier or table.before(at) == earlier[-1], (expression.text, at)


def forth(table: Timetable, first: Millis, last: Millis) -> Iterator[Millis]:
    at = table.after(first)
    while at is not None and at <= last:
        yield at
        at = table.after(at)


def back(table: Timetable, last: Millis, first: Millis) -> Iterator[Millis]:
    at = table.before(last + 1)
    while at is not None and at > first:
        yield at
        at = table.before(at)


def test_years_of_minutes() -> None:
    """The calendar: leap years, ends of months, days of the week."""
    chance = random.Random(3)
    for year in (1999, 2024, 2027, 2100):
        first, last = datetime(year, 2, 20, tzinfo=UTC), datetime(year, 3, 12, tzinfo=UTC)
        for _ in range(12):
            expression = Expression(chance)
            table = Timetable(parse_cron(expression.text), find_zone("UTC"))
            expected = watched(expression, "UTC", first, last)
            assert list(forth(table, as_millis(first), as_millis(last))) == expected, expression.text
            assert list(back(table, as_millis(last), as_millis(first)))[::-1] == expected, expression.text


@pytest.mark.parametrize(
    ("cron", "zone", "after", "expected"),
    [
        ("30 2 * * *", "Europe/Berlin", "2027-03-27T12:00Z", ["2027-03-28T01:00Z", "2027-03-29T00:30Z"]),
        ("*/20 2 * * *", "Europe/Berlin", "2027-03-27T12:00Z", ["2027-03-28T01:00Z", "2027-03-29T00:00Z"]),
        ("30 2 * * *", "Europe/Berlin", "2027-10-30T12:00Z", ["2027-10-31T00:30Z", "2027-11-01T01:30Z"]),
        ("*/30 * * * *", "Europe/Berlin", "2027-10-31T00:00Z", ["2027-10-31T00:30Z", "2027-10-31T02:00Z"]),
        ("0 0 29 2 *", "UTC", "2097-01-01T00:00Z", ["2104-02-29T00:00Z", "2108-02-29T00:00Z"]),
        ("0 12 13 * fri", "UTC", "2027-08-01T00:00Z", ["2027-08-06T12:00Z", "2027-08-13T12:00Z", "2027-08-20T12:00Z"]),
        ("0 12 */2 * fri", "UTC", "2027-08-01T00:00Z", ["2027-08-13T12:00Z", "2027-08-27T12:00Z"]),
        ("0 0 * * 7", "UTC", "2027-08-01T00:00Z", ["2027-08-08T00:00Z"]),
        ("0 0 * * sat-sun", "UTC", "2027-08-01T00:00Z", ["2027-08-07T00:00Z", "2027-08-08T00:00Z", "2027-08-14T00:00Z"]),
        (" @Daily ", "UTC", "2027-08-01T00:00Z", ["2027-08-02T00:00Z"]),
    ],
)
def test_times_that_the_guide_speaks_of(cron: str, zone: str, after: str, expected: list[str]) -> None:
    table = Timetable(parse_cron(cron), find_zone(zone))
    at: Millis | None = as_millis(datetime.fromisoformat(after))
    found = []
    for _ in expected:
        assert at is not None
        at = table.after(at)
        found.append(at)
    assert found == [as_millis(datetime.fromisoformat(each)) for each in expected]


@pytest.mark.parametrize(
    ("cron", "detail"),
    [
        ("", "cron: expected five fields (minute, hour, day of month, month, day of week), such as '*/5 * * * *', or @hourly; got 0"),
        ("* * * *", "got 4"),
        ("0 0 0 * * *", "got 6"),
        ("60 * * * *", "cron: minute: 60 is not between 0 and 59"),
        ("* 24 * * *", "cron: hour: 24 is not between 0 and 23"),
        ("* * 0 * *", "cron: day of month: 0 is not between 1 and 31"),
        ("* * * 13 *", "cron: month: 13 is not between 1 and 12"),
        ("* * * * 8", "cron: day of week: 8 is not between 0 and 7"),
        ("* * * jann *", "cron: month: 'jann' is not understood; expected *, 1 to 12 or jan to dec, and lists, ranges and steps of them"),
        ("mon * * * *", "cron: minute: 'mon' is not understood; expected *, 0 to 59, and lists, ranges and steps of them"),
        ("5-1 * * * *", "cron: minute: the range 5-1 ends before it begins"),
        ("*/0 * * * *", "cron: minute: '0' is not a step; expected a number from 1, as in */5"),
        ("*/x * * * *", "cron: minute: 'x' is not a step"),
        ("5/10 * * * *", "cron: minute: the step of 5/10 needs a range or *, such as 5-59/10"),
        ("1,,2 * * * *", "cron: minute: '' is not understood"),
        ("² * * * *", "cron: minute: '²' is not understood"),
        ("* * ? * *", "cron: day of month: '?' is not understood"),
        ("0 0 30 feb *", "cron: day of month: 30 never comes in month feb"),
        ("@reboot", "cron: '@reboot' is not known; expected one of @yearly"),
        ("*" * 300, "cron: longer than 256 characters"),
    ],
)
def test_an_expression_that_is_wrong_is_refused_by_the_field_at_fault(cron: str, detail: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        parse_cron(cron)
    assert refused.value.code == "invalid_request"
    assert refused.value.field == "cron"
    assert detail in refused.value.detail


def test_every_macro_is_its_expression() -> None:
    at = as_millis(datetime(2027, 5, 5, 5, 5, tzinfo=UTC))
    for macro, cron in MACROS.items():
        assert Timetable(parse_cron(macro), find_zone("UTC")).after(at) == Timetable(parse_cron(cron), find_zone("UTC")).after(at)


@pytest.mark.parametrize("name", ["", "Europe/Berln", "../../etc/passwd", "/etc/localtime", "Europe", "x" * 300, "a\0b", "berlin"])
def test_a_time_zone_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        find_zone(name)
    assert refused.value.field == "timezone"
    assert name != "Europe/Berln" or "did you mean Europe/Berlin?" in refused.value.detail


def test_jitter_is_the_same_each_time_differs_by_name_and_never_reaches_the_next_time() -> None:
    at = as_millis(datetime(2027, 5, 5, tzinfo=UTC))
    delays = set()
    for number in range(200):
        table = Timetable(parse_cron("* * * * *"), find_zone("UTC"), f"s{number}", 600_000)
        again = Timetable(parse_cron("* * * * *"), find_zone("UTC"), f"s{number}", 600_000)
        assert at <= table.due(at) == again.due(at) < at + MINUTE
        delays.add(table.due(at) - at)
    assert len(delays) > 190
    assert max(delays) - min(delays) > 0.9 * MINUTE
    hourly = Timetable(parse_cron("@hourly"), find_zone("UTC"), "s", 600_000)
    assert max(hourly.due(at + hour * 60 * MINUTE) - hour * 60 * MINUTE for hour in range(100)) - at in range(9 * MINUTE, 10 * MINUTE)
