"""JSON text for people."""

from __future__ import annotations

import msgspec


def indented(payload: bytes) -> bytes | None:
    """The JSON object or array over several lines, with its numbers and texts as they were written; None: it is not one."""
    if payload.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        return msgspec.json.format(payload, indent=2)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
