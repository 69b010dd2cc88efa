"""Named options given as text, parsed with errors that name the option. Names are case-insensitive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from sluiceway.kernel.clock import Millis, format_duration, parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid


def named(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the options under their canonical `names`. Raises `invalid_request` for any other name."""
    known = {name.lower(): name for name in names}
    for key in options:
        if key.lower() not in known:
            raise unknown(key, names) or invalid(key, f"unknown option; expected one of {', '.join(names)}")
    return {known[key.lower()]: value for key, value in options.items()}


def unknown(key: str, names: Sequence[str], likeness: float = 0.6) -> SluicewayError | None:
    """The error for an unknown option that resembles one of `names`; None if it resembles none."""
    known = {name.lower(): name for name in names}
    near = get_close_matches(key.lower(), list(known), n=1, cutoff=likeness)
    return invalid(key, f"unknown option; did you mean {known[near[0]]}?") if near else None


def get(options: Mapping[str, str], name: str) -> str | None:
    """The option's value; None: not given."""
    lower = name.lower()
    return next((value for key, value in options.items() if key.lower() == lower), None)


def required(options: Mapping[str, str], name: str, meaning: str) -> str:
    """The option's value. Raises `invalid_request`, with its `meaning`, if it is missing or empty."""
    value = get(options, name)
    if not value:
        raise invalid(name, f"this option is required: {meaning}")
    return value


def count(options: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A whole number from 1 to `most`. Raises `invalid_request`."""
    text = get(options, name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise invalid(name, f"{text[:40]!r} is not a whole number from 1 to {most:,}")
    return int(text)


def duration(options: Mapping[str, str], name: str, default: str, least: Millis, most: Millis) -> Millis:
    """A duration such as `30s`, in milliseconds from `least` to `most`. Raises `invalid_request`."""
    text = get(options, name) or default
    millis = parse_duration(text, name)
    if not least <= millis <= most:
        raise invalid(name, f"{text} is out of range: from {format_duration(least)} to {format_duration(most)}")
    return millis
