"""What is kept about every change that somebody made."""

from __future__ import annotations

from typing import Any

import msgspec

from sluiceway.kernel.clock import Millis


class AuditEntry(msgspec.Struct, frozen=True):
    """Who changed what, and when. Ids sort by time, also those of several processes as far as their clocks agree.

    `action` is the call's name; `queue_name` is empty for what is about no queue. `detail` is small, plain JSON, and has no secret.
    """

    id: str
    at: Millis
    actor: str
    action: str
    queue_name: str
    request_id: str
    detail: dict[str, Any]


def encode_entry(entry: AuditEntry) -> bytes:
    return msgspec.json.encode(entry)


def decode_entry(data: bytes) -> AuditEntry:
    return msgspec.json.decode(data, type=AuditEntry)
