"""Audit entries: the record of every change."""

from __future__ import annotations

from typing import Any

import msgspec

from sluiceway.kernel.clock import Millis


class AuditEntry(msgspec.Struct, frozen=True):
    """One change: author, action and time. Ids sort by time, across processes as far as their clocks agree.

    `action`: name of the call; `queue_name`: empty if no queue is concerned; `detail`: small, plain JSON, without secrets.
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
