"""Queues and partitions as the meta store records them."""

from __future__ import annotations

import msgspec

from sluiceway.contract.queue_settings import QueueSettings, Verb
from sluiceway.contract.rebalances import PartitionState
from sluiceway.kernel.clock import Millis


class PartitionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One partition. `backend` names the storage that holds it; numbers are never reused within an incarnation.

    `parents` are those that it takes over from, whether they are still there or not. Until those of `after` are gone, it gives out nothing:
    so the order of a queue with one partition survives its move.
    """

    partition: int
    backend: str = "default"
    state: PartitionState = "available"
    parents: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class QueueRecord(QueueSettings, frozen=True):
    """One queue with its settings. `incarnation` is given at creation and is part of every id.

    `version` counts the changes of the settings. Fields below `partitions` have come later: a record without them has their defaults.
    """

    queue_name: str
    incarnation: str
    created_at: Millis
    updated_at: Millis
    partitions: tuple[PartitionRecord, ...]
    version: int = 1
    paused: tuple[Verb, ...] = ()
    next_partition: int = 0
    """The number that a further partition is given; 0: one more than the highest there is, as none was ever removed."""
    slots: tuple[int, ...] = ()
    """The home partition of each slot of idempotency keys (`core.slots`), MOVING while its memory is on its way; (): never rebalanced."""
    rebalance: str | None = None
    """The id of the rebalance that is open."""
    cursor: int = 0
    """Rises whenever a rebalance changes what partitions and slots are for. What it asks of a partition carries it, so that what comes late
    is known for it."""

    @property
    def given(self) -> int:
        """How many partition numbers were ever given: those below are, or were, partitions."""
        return self.next_partition or 1 + max(each.partition for each in self.partitions)

    def partition(self, number: int) -> PartitionRecord | None:
        """The partition of that number, if it is there."""
        return next((each for each in self.partitions if each.partition == number), None)

    def holds_back(self, each: PartitionRecord) -> bool:
        """Whether that partition gives out nothing yet, as those that come before it are not finished."""
        return bool(each.after) and any(other.partition in each.after for other in self.partitions)


MOVING = -1
"""In place of a slot's home: nobody takes its keys for the moment."""


def encode_queue(record: QueueRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_queue(data: bytes) -> QueueRecord:
    return msgspec.json.decode(data, type=QueueRecord)
