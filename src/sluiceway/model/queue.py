"""Queues and partitions as the meta store records them."""

from __future__ import annotations

import msgspec

from sluiceway.kernel.clock import Millis


class PartitionRecord(msgspec.Struct, frozen=True):
    """One partition. `backend` names the storage that holds it; numbers are never reused within an incarnation."""

    partition: int
    backend: str = "default"
    state: str = "available"


class QueueRecord(msgspec.Struct, frozen=True):
    """One queue. `incarnation` is given at creation and is part of every id; `max_attempts` 0 means no limit."""

    queue_name: str
    incarnation: str
    created_at: Millis
    updated_at: Millis
    lease_timeout: Millis
    max_attempts: int
    dead_queue: str | None
    reference: str
    partitions: tuple[PartitionRecord, ...]


def encode_queue(record: QueueRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_queue(data: bytes) -> QueueRecord:
    return msgspec.json.decode(data, type=QueueRecord)
