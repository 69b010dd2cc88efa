from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.kernel.clock import format_duration, format_time, parse_duration, parse_time
from sluiceway.kernel.errors import SluicewayError

YEAR_2100 = 4_102_444_800_000
EXACT = 2**53


@pytest.mark.parametrize(
    ("text", "millis"),
    [("500ms", 500), ("30s", 30_000), ("1m", 60_000), ("1h30m", 5_400_000), ("7d", 604_800_000), ("0s", 0), ("1.5s", 1_500)],
)
def test_a_duration_is_read(text: str, millis: int) -> None:
    assert parse_duration(text, "lease_timeout") == millis


@pytest.mark.parametrize(
    "text", ["", "30", "s", "-1s", "1s ", " 1s", "1s\n", "1 s", "1y", "1S", "1.s", ".5s", "1e3s", "1,5s", "1" * 33 + "s"]
)
def test_what_is_no_duration_is_refused_by_field(text: str) -> None:
    with pytest.raises(SluicewayError, match="duration") as caught:
        parse_duration(text, "lease_timeout")
    assert (caught.value.code, caught.value.field) == ("invalid_request", "lease_timeout")


@pytest.mark.parametrize("value", [None, 30, 30.0, True, ["30s"], b"30s"])
def test_a_duration_is_a_string(value: object) -> None:
    with pytest.raises(SluicewayError, match="lease_timeout: expected a duration"):
        parse_duration(value, "lease_timeout")


@given(st.integers(0, EXACT))
def test_a_duration_survives_the_round_trip(millis: int) -> None:
    assert parse_duration(format_duration(millis), "f") == millis


@given(st.text(alphabet="0123456789.smhd-+ e", max_size=12))
def test_a_duration_is_read_or_refused_never_negative(text: str) -> None:
    try:
        millis = parse_duration(text, "f")
    except SluicewayError as error:
        assert error.field == "f"
    else:
        assert millis >= 0


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:00.001Z", 1),
        ("1970-01-01T01:00:00+01:00", 0),
        ("2026-01-31T08:00:00Z", 1_769_846_400_000),
        ("2026-01-31T08:00:00.123456Z", 1_769_846_400_123),
    ],
)
def test_a_time_is_read(text: str, millis: int) -> None:
    assert parse_time(text, "enqueue_at") == millis


@pytest.mark.parametrize("text", ["", "now", "2026-02-30T00:00:00Z", "2026-01-31T25:00:00Z", "1769846400000"])
def test_what_is_no_time_is_refused_by_field(text: str) -> None:
    with pytest.raises(SluicewayError, match="is not a time") as caught:
        parse_time(text, "enqueue_at")
    assert (caught.value.code, caught.value.field) == ("invalid_request", "enqueue_at")


@pytest.mark.parametrize("text", ["2026-01-31T08:00:00", "2026-01-31"])
def test_a_time_without_a_zone_is_refused(text: str) -> None:
    with pytest.raises(SluicewayError, match="no time zone"):
        parse_time(text, "enqueue_at")


@pytest.mark.parametrize("value", [None, 0, 1_769_846_400.0, b"2026-01-31T08:00:00Z"])
def test_a_time_is_a_string(value: object) -> None:
    with pytest.raises(SluicewayError, match="enqueue_at: expected a time"):
        parse_time(value, "enqueue_at")


@given(st.integers(0, YEAR_2100))
def test_a_time_survives_the_round_trip(at: int) -> None:
    text = format_time(at)
    assert text.endswith("Z")
    assert parse_time(text, "f") == at


@given(st.integers(0, YEAR_2100), st.integers(0, YEAR_2100))
def test_times_sort_as_text(one: int, other: int) -> None:
    assert (one < other) == (format_time(one) < format_time(other))


def test_a_long_text_is_refused_before_it_is_searched() -> None:
    """The search takes quadratic time: a megabyte of digits stopped a server for days."""
    with pytest.raises(SluicewayError, match="longer than 32 characters"):
        parse_duration("1" * 1_000_000, "request_timeout")
