"""Queues and partitions as the meta store records them."""

from __future__ import annotations

from typing import Literal

import msgspec

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import KEY_WINDOW, MAX_LEASE_TIMEOUT


class PartitionRecord(msgspec.Struct, frozen=True):
    """One partition. `backend` names the storage that holds it; numbers are never reused within an incarnation."""

    partition: int
    backend: str = "default"
    state: str = "available"


class Backoff(msgspec.Struct, frozen=True):
    """How long a retry without a time of its own waits: `first` ms after the first attempt, twice as long each time, `most` ms at most."""

    first: Millis
    most: Millis

    def after(self, attempts: int) -> Millis:
        """The delay after that many attempts (1 or more)."""
        return min(self.most, self.first << min(attempts - 1, 40))


Verb = Literal["produce", "lease"]
LogicalQueues = int | Literal["auto"] | None
"""How many logical queues a queue has, on as many instances; None: one on each; `auto`: as many as its load takes."""


class QueueRecord(msgspec.Struct, frozen=True):
    """One queue. `incarnation` is given at creation and is part of every id; `max_attempts` 0 means no limit, `expire_timeout` 0 never.

    `version` counts the changes of the settings. Fields below `partitions` have come later: a record without them has their defaults.
    """

    queue_name: str
    incarnation: str
    created_at: Millis
    updated_at: Millis
    lease_timeout: Millis
    max_attempts: int
    dead_queue: str | None
    reference: str
    partitions: tuple[PartitionRecord, ...]
    version: int = 1
    max_lease_timeout: Millis = MAX_LEASE_TIMEOUT
    expire_timeout: Millis = 0
    retry_backoff: Backoff | None = None
    idempotency_window: Millis = KEY_WINDOW
    write_timeout: Millis | None = None
    """At most this long may a commit take before it is taken to be unknown; None: as long as the backend allows."""
    paused: tuple[Verb, ...] = ()
    logical_queues: LogicalQueues = None


def encode_queue(record: QueueRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_queue(data: bytes) -> QueueRecord:
    return msgspec.json.decode(data, type=QueueRecord)
