"""In-memory partition store, for tests, and for queues whose loss at a restart is acceptable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, FencedError, Least, LostError, PartitionRef, RecordKey, Snapshot


@dataclass(slots=True)
class _Partition:
    fence: Fence
    txn: int = 0
    header: bytes | None = None
    records: dict[RecordKey, bytes] = field(default_factory=dict)
    blobs: dict[int, bytes] = field(default_factory=dict)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.txn, self.header, dict(self.records))


class MemoryDisk:
    """The data of a MemoryPartitionStore, which outlives it: stores given the same disk see the same partitions."""

    def __init__(self) -> None:
        self.partitions: dict[PartitionRef, _Partition] = {}
        self.identity: str | None = None


class MemoryPartitionStore:
    """A PartitionStore whose data lives as long as its disk. DONE only means stored on that disk. Use from one event loop at a time."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self._disk = disk or MemoryDisk()
        self._partitions = self._disk.partitions

    def at_once(self, ref: PartitionRef) -> bool:
        return True

    async def identify(self, new: str | None) -> str | None:
        self._disk.identity = self._disk.identity or new
        return self._disk.identity

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        partition = self._partitions.get(ref)
        name = f"{ref.incarnation}-{ref.partition}"
        if partition is not None:
            FencedError.check(name, partition.fence, fence)
        LostError.check(name, None if partition is None else Least(partition.fence, partition.txn), least)
        if partition is None:
            partition = self._partitions[ref] = _Partition(fence)
        partition.fence = fence
        return partition.snapshot()

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        partition = self._partitions.get(ref)
        if partition is None or partition.fence != fence or changes.txn not in (partition.txn, partition.txn + 1):
            return Outcome.REFUSED
        if changes.txn == partition.txn:
            return Outcome.DONE
        partition.txn, partition.header = changes.txn, changes.header
        partition.records.update(changes.puts)
        for key in changes.deletes:
            partition.records.pop(key, None)
        partition.blobs.update(changes.blobs)
        partition.blobs.update(changes.compacted_blobs)
        for number in changes.dropped_blobs:
            partition.blobs.pop(number, None)
        return Outcome.DONE

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        partition = self._partitions.get(ref)
        return {} if partition is None else {number: partition.blobs[number] for number in blobs if number in partition.blobs}

    async def browse(self, ref: PartitionRef) -> Snapshot:
        partition = self._partitions.get(ref)
        return Snapshot(0, None, {}) if partition is None else partition.snapshot()

    async def drop(self, ref: PartitionRef) -> None:
        self._partitions.pop(ref, None)

    async def release(self, ref: PartitionRef) -> None:
        """Nothing to free besides the partition itself."""

    async def close(self) -> None:
        self._partitions = {}
