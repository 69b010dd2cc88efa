"""PartitionStore: bulk storage. A partition is a header, small records, and blobs, whose rows never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sluiceway.model.changes import Changes, Fence, Least, PackedRecords, PartitionRef, RecordKey, RecordKind, Snapshot
from sluiceway.model.outcomes import Outcome

__all__ = [
    "Changes",
    "DamagedError",
    "Fence",
    "FencedError",
    "Least",
    "LostError",
    "PackedRecords",
    "PartitionRef",
    "PartitionStore",
    "RecordKey",
    "RecordKind",
    "Snapshot",
    "StoreUnavailableError",
]


class DamagedError(Exception):
    """A stored blob or record failed its checksum. Names the partition and the blob; nothing was changed."""


class LostError(DamagedError):
    """The partition is missing, or older than what was acknowledged: the storage is empty, a different one, or an old copy. Nothing was
    changed."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"partition {name} {what}: this storage is older than what the partition has acknowledged, or a different one. "
            "Put the right one back (is a disk not mounted, is this another database, or an old copy of a file?) and start again. "
            "If the original is lost for good, or was restored on purpose, run: sluiceway backend accept"
        )

    @staticmethod
    def check(name: str, found: Least | None, least: Least | None) -> None:
        """Raise LostError unless a storage at `found` (None: nothing there) has reached at least `least` (None: it may be new)."""
        if least is None:
            return
        if found is None:
            raise LostError(name, "is not there")
        if found.fence < least.fence:
            raise LostError(name, f"was last opened with {found.fence}, below {least.fence}")
        if found.txn < least.txn:
            raise LostError(name, f"ends with cycle {found.txn} of {least.txn}")


class StoreUnavailableError(Exception):
    """The store could not be reached or read. Nothing was changed."""


class FencedError(Exception):
    """A higher fence, or this very one, has opened the partition before: the caller is not its owner."""

    @staticmethod
    def check(name: str, found: Fence, fence: Fence) -> None:
        """Raise FencedError if a partition last opened with `found` must not be opened with `fence`."""
        if found > fence:
            raise FencedError(
                f"partition {name} was opened with {found}, above {fence}: by a later owner, or by this server before an older meta store "
                "was restored (docs/guides/backup.md)"
            )
        if found == fence:
            raise FencedError(
                f"partition {name} was opened with {found} before, and no fence is given twice. Does a copy of this server's data "
                "directory run somewhere else? Stop one of the two, and start the other again"
            )


class PartitionStore(Protocol):
    """Durable storage of partitions. All methods may be called concurrently, for different partitions in parallel.

    `apply` for one partition has one caller at a time. A call that has begun is carried to its end even if its caller is cancelled: a
    caller that gives up cannot know the outcome, and reopens the partition.
    """

    async def identify(self, new: str | None) -> str | None:
        """Return the storage's permanent name, the same for every store on it. A storage without a name is given `new`, durably and once,
        even with concurrent calls; None leaves it unnamed. Raises StoreUnavailableError."""
        ...

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        """Raise the partition's fence and load it, in one atomic step. The records of many leases may be in `Snapshot.leases`.

        `least` is its acknowledged state. A partition that is missing, was last opened with a lower fence, or has applied fewer cycles,
        is a LostError: it is never created, and its fence stays. Only without `least` is an empty partition created; nothing in it was ever
        acknowledged then, so creating it twice is harmless.

        When this returns, no `apply` with a lower fence can land any more, and the snapshot shows every one that did. Raises FencedError if
        this fence or a higher one has opened it, DamagedError, StoreUnavailableError. An owner never uses a fence twice, so the same fence
        means a second owner: two writers under one fence would take each other's cycles for their own.

        A store may open partitions together for which that is asked at the same moment. Each then has its own result, as if alone.
        """
        ...

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        """Carry out one scheduling cycle's changes, atomically and durably, if `fence` is the partition's fence — checked inside the
        transaction.

        DONE: durable, survives power loss. REFUSED: surely nothing happened. UNKNOWN: it may have landed or may land later; only `open`
        with a higher fence settles it. Applying the newest `txn` once more is DONE and changes nothing; an earlier one is REFUSED, since
        its sender does not know what the partition holds. Never raises for storage faults.
        """
        ...

    def at_once(self, ref: PartitionRef) -> bool:
        """Whether the next `apply` for that partition, if small, would finish before it first yields to the event loop, since the store has
        been quick. Only a guess."""
        ...

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of those blobs; missing blobs are omitted. Raises DamagedError, StoreUnavailableError."""
        ...

    async def browse(self, ref: PartitionRef) -> Snapshot:
        """Return a consistent snapshot without touching the fence, with all records in `records`; an empty one for a missing partition."""
        ...

    async def drop(self, ref: PartitionRef) -> None:
        """Remove the partition and all its data. Removing a missing one is no error."""
        ...

    async def release(self, ref: PartitionRef) -> None:
        """Free resources held for a partition that is probably no longer used here: another owner has it, or it is gone.

        Stored data does not change, and later calls still work. Never raises: what cannot be freed is kept.
        """
        ...

    async def close(self) -> None:
        """Finish work in flight and release every handle. The store is not used afterwards."""
        ...
