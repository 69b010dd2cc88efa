"""PartitionStore: where the bulk lies. One partition is a header, small records, and immutable blobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sluiceway.model.changes import Changes, Fence, PartitionRef, RecordKey, RecordKind, Snapshot
from sluiceway.model.outcomes import Outcome

__all__ = [
    "Changes",
    "DamagedError",
    "Fence",
    "FencedError",
    "PartitionRef",
    "PartitionStore",
    "RecordKey",
    "RecordKind",
    "Snapshot",
    "StoreUnavailableError",
]


class DamagedError(Exception):
    """A stored blob or record failed its checksum. Names the partition and the blob; nothing was changed."""


class StoreUnavailableError(Exception):
    """The store could not be reached or read. Nothing was changed."""


class FencedError(Exception):
    """A higher fence has opened the partition: this owner is no longer the owner."""


class PartitionStore(Protocol):
    """Durable storage of partitions. All methods may be called concurrently, for different partitions in parallel.

    `apply` for one partition is called by one caller at a time. A call that has begun is carried to its end although its caller is
    cancelled: who gives up on one cannot know what becomes of it, and opens the partition anew.
    """

    async def open(self, ref: PartitionRef, fence: Fence) -> Snapshot:
        """Raise the partition's fence and load it, in one atomic step; creates an empty partition.

        When this returns, no `apply` with a lower fence can land any more, and the snapshot shows every one that did.
        Raises FencedError if a higher fence has opened it (equal is allowed only for the same txn history: an owner never opens twice
        with one fence), DamagedError, StoreUnavailableError.
        """
        ...

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        """Carry out one turn, atomically and durably, if `fence` is the partition's fence — checked inside the transaction.

        DONE: durable, survives power loss. REFUSED: surely nothing happened. UNKNOWN: it may have landed or may land later;
        only `open` with a higher fence settles it. Applying a `txn` that was applied before is DONE and changes nothing.
        Never raises for storage faults.
        """
        ...

    def at_once(self, ref: PartitionRef) -> bool:
        """Whether the next `apply` for that partition, if it is a small one, would be done before it first lets go of the event loop, as
        the store has been quick. Only a guess."""
        ...

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        """The bytes of those blobs; one that is not there is missing from the answer. Raises DamagedError, StoreUnavailableError."""
        ...

    async def browse(self, ref: PartitionRef) -> Snapshot:
        """A consistent snapshot without touching the fence. A partition that does not exist has an empty one."""
        ...

    async def drop(self, ref: PartitionRef) -> None:
        """Remove the partition and all its data. Removing what is not there is no error."""
        ...

    async def release(self, ref: PartitionRef) -> None:
        """Free what is held for a partition of which probably nothing more is asked here: another owner has it, or it is gone.

        Nothing stored changes, and whatever is asked all the same is answered as ever. Never raises: what cannot be freed is kept.
        """
        ...

    async def close(self) -> None:
        """Finish what is in flight and release every handle. The store is not used afterwards."""
        ...
