"""Records of queues and partitions in the meta store."""

from __future__ import annotations

import msgspec

from sluiceway.contract.queue_settings import QueueSettings, Verb
from sluiceway.contract.rebalances import PartitionState
from sluiceway.kernel.clock import Millis


class PartitionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One partition. `backend` names the storage that holds it; numbers are never reused within an incarnation.

    `parents`: partitions that it replaces, present or not. It gives out no items until those in `after` are gone, which keeps a queue with
    one partition in order while it moves.
    """

    partition: int
    backend: str = "default"
    state: PartitionState = "available"
    parents: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class QueueRecord(QueueSettings, frozen=True):
    """One queue with its settings. `incarnation` is given at creation and is part of every id.

    `version` counts the changes of the settings. Fields below `partitions` were added later: a record without them has their defaults.
    """

    queue_name: str
    incarnation: str
    created_at: Millis
    updated_at: Millis
    partitions: tuple[PartitionRecord, ...]
    version: int = 1
    paused: tuple[Verb, ...] = ()
    next_partition: int = 0
    """Number of the next partition; 0: one more than the highest, as no partition was ever removed."""
    slots: tuple[int, ...] = ()
    """Home partition of each slot of idempotency keys (`core.partition.key_slots`), MOVING during a handover; (): never rebalanced."""
    rebalance: str | None = None
    """Id of the open rebalance."""
    cursor: int = 0
    """Rises whenever a rebalance changes the use of partitions and slots. Its requests carry it, so that partitions recognise late ones."""

    @property
    def given(self) -> int:
        """Number of partition numbers ever given: the numbers below it are, or were, partitions."""
        return self.next_partition or 1 + max(each.partition for each in self.partitions)

    @property
    def goes_by_keys(self) -> bool:
        """Whether order, fairness or limits go by the items' keys."""
        return self.fair is not None or self.keeps_keys_together

    @property
    def keeps_keys_together(self) -> bool:
        """Whether all items of a key are in one partition, since they are in order, or limited."""
        return any(getattr(self, name) for name in KEEPING)

    @property
    def placing(self) -> str | None:
        """The setting for which only one partition can take an item; None: any may."""
        return next((name for name in PLACING if getattr(self, name)), None)

    def partition(self, number: int) -> PartitionRecord | None:
        """Return the partition of that number; None if it does not exist."""
        return next((each for each in self.partitions if each.partition == number), None)

    def holds_back(self, each: PartitionRecord) -> bool:
        """Whether the partition gives out no items yet, because partitions before it are not finished."""
        return bool(each.after) and any(other.partition in each.after for other in self.partitions)


KEEPING = ("order", "key_concurrency", "key_rate")
"""Settings for which all items of a key must be in one partition."""
PLACING = (*KEEPING, "unique")
MOVING = -1
"""In place of a slot's home: no partition takes its keys at the moment."""


def encode_queue(record: QueueRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_queue(data: bytes) -> QueueRecord:
    return msgspec.json.decode(data, type=QueueRecord)
