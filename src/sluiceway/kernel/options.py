"""Options that a user says by name, as texts: each is parsed once, and a wrong one is named. Names are compared without regard to case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from sluiceway.kernel.clock import Millis, format_duration, parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid


def named(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """By the names as they stand in `names`. Raises `invalid_request` for any other."""
    known = {name.lower(): name for name in names}
    for key in options:
        if key.lower() not in known:
            raise unknown(key, names) or invalid(key, f"there is no such option; there are {', '.join(names)}")
    return {known[key.lower()]: value for key, value in options.items()}


def unknown(key: str, names: Sequence[str], likeness: float = 0.6) -> SluicewayError | None:
    """What to say of an option that is none of these, if it is like one of them."""
    known = {name.lower(): name for name in names}
    near = get_close_matches(key.lower(), list(known), n=1, cutoff=likeness)
    return invalid(key, f"there is no such option; did you mean {known[near[0]]}?") if near else None


def get(options: Mapping[str, str], name: str) -> str | None:
    """None: it was not said."""
    lower = name.lower()
    return next((value for key, value in options.items() if key.lower() == lower), None)


def required(options: Mapping[str, str], name: str, meaning: str) -> str:
    """Raises `invalid_request`, with what it means, if it was not said or is empty."""
    value = get(options, name)
    if not value:
        raise invalid(name, f"this option is required: {meaning}")
    return value


def count(options: Mapping[str, str], name: str, default: int, most: int) -> int:
    """From 1 to `most`. Raises `invalid_request`."""
    text = get(options, name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise invalid(name, f"{text[:40]!r} is not a whole number from 1 to {most:,}")
    return int(text)


def duration(options: Mapping[str, str], name: str, default: str, least: Millis, most: Millis) -> Millis:
    """Such as `30s`. Raises `invalid_request`."""
    text = get(options, name) or default
    millis = parse_duration(text, name)
    if not least <= millis <= most:
        raise invalid(name, f"{text} is out of range: from {format_duration(least)} to {format_duration(most)}")
    return millis
