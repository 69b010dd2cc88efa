"""Validation of user-chosen names. An ASCII whitelist, so that a name is the same in a URL, a log, a metric and a shell."""

from __future__ import annotations

import re

from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_TEXT_BYTES

QUEUE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
ZONE = re.compile(r"[A-Za-z0-9_.\-]{0,64}")
QUEUE_PATTERN = re.compile(r"[A-Za-z0-9_.\-*]{1,128}")
"""Of queue names: `*` stands for any text."""


def check_queue_name(name: object, field: str = "queue_name") -> str:
    """Validate a queue's name: 1 to 128 of `A-Z a-z 0-9 _ . -`, not beginning with a dot or a dash. Raises `invalid_request`."""
    if not isinstance(name, str) or not name:
        raise invalid(field, "a queue name is required")
    if not QUEUE_NAME.fullmatch(name):
        raise invalid(field, f"{name[:64]!r} is not a queue name: 1 to 128 of A-Z a-z 0-9 _ . -, not beginning with . or -")
    return name


def check_zone(zone: object, field: str = "zone") -> str:
    """Validate the name of a zone: empty, or 1 to 64 of `A-Z a-z 0-9 _ . -`. Raises `invalid_request`."""
    if not isinstance(zone, str) or not ZONE.fullmatch(zone):
        raise invalid(field, f"{str(zone)[:64]!r} is not the name of a zone: 1 to 64 of A-Z a-z 0-9 _ . -")
    return zone


def check_text(text: object, field: str, limit: int = MAX_TEXT_BYTES) -> str:
    """Validate a short text of the user's (client id, key, reason): at most `limit` bytes. Raises `invalid_request`."""
    if not isinstance(text, str):
        raise invalid(field, "expected a string")
    if len(text.encode("utf-8", "surrogatepass")) > limit:
        raise invalid(field, f"longer than {limit} bytes")
    return text
