"""PartitionStore: where the bulk lies. One partition is a header, small records, and blobs, whose rows never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sluiceway.model.changes import Changes, Fence, Least, PartitionRef, RecordKey, RecordKind, Snapshot
from sluiceway.model.outcomes import Outcome

__all__ = [
    "Changes",
    "DamagedError",
    "Fence",
    "FencedError",
    "Least",
    "LostError",
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
    """The partition is not there, or older than what was acknowledged: the storage is empty, another one, or an old copy. Nothing was
    changed."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"partition {name} {what}, and it has acknowledged more: this is another or an older storage. "
            "Put the right one back (a disk that is not mounted? another database? an old copy of a file?) and start again. "
            "If it is lost for good, or restored on purpose: sluiceway backend accept"
        )

    @staticmethod
    def check(name: str, found: Least | None, least: Least | None) -> None:
        """Raises LostError if a storage in which `found` is (None: nothing) is not the one that has at least `least` (None: may be new)."""
        if least is None:
            return
        if found is None:
            raise LostError(name, "is not there")
        if found.fence < least.fence:
            raise LostError(name, f"was last opened with {found.fence}, below {least.fence}")
        if found.txn < least.txn:
            raise LostError(name, f"ends with turn {found.txn} of {least.txn}")


class StoreUnavailableError(Exception):
    """The store could not be reached or read. Nothing was changed."""


class FencedError(Exception):
    """A higher fence has opened the partition, or the same one before: this owner is not the owner."""

    @staticmethod
    def check(name: str, found: Fence, fence: Fence) -> None:
        """Raises FencedError if a partition that was last opened with `found` is not to be opened with `fence`."""
        if found > fence:
            raise FencedError(f"partition {name} was opened with {found}, above {fence}")
        if found == fence:
            raise FencedError(
                f"partition {name} was opened with {found} before, and no fence is given twice. Does a copy of this server's data "
                "directory run somewhere else? Stop one of the two, and start the other again"
            )


class PartitionStore(Protocol):
    """Durable storage of partitions. All methods may be called concurrently, for different partitions in parallel.

    `apply` for one partition is called by one caller at a time. A call that has begun is carried to its end although its caller is
    cancelled: who gives up on one cannot know what becomes of it, and opens the partition anew.
    """

    async def identify(self, new: str | None) -> str | None:
        """The name that the storage was given, which is its own for good and the same for every store on it. One that has none is given
        `new`, durably and once, whatever is asked at the same moment; with None it stays as it is. Raises StoreUnavailableError."""
        ...

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        """Raise the partition's fence and load it, in one atomic step.

        `least` is what it has acknowledged. A partition that is not there, or was last opened with a lower fence, or has applied fewer
        turns, is a LostError: it is never created, and its fence stays. Only without `least` an empty partition is created; the caller
        knows then that nothing was ever acknowledged in it, so that to create it twice does no harm.

        When this returns, no `apply` with a lower fence can land any more, and the snapshot shows every one that did.
        Raises FencedError if this fence or a higher one has opened it, DamagedError, StoreUnavailableError. An owner never opens twice with
        one fence, so another one has: two that write under one fence would take each other's turns for their own.
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
