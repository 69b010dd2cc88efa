"""Backups of a running server: everything in its stores as of one moment, read part by part while it works on.

docs/adr/0057-backups-of-a-running-server.md has the reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sluiceway.adapters import system
from sluiceway.cluster.ownership import Ownership
from sluiceway.contract.backup_answers import BlobsPart, RecordsPart
from sluiceway.core.partition.records import BlobRecord, unpack_blob
from sluiceway.core.partition.snapshots import Snapshot as Pinned
from sluiceway.core.partition.snapshots import of_blobs
from sluiceway.core.queue.partition_executor import PartitionExecutor
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import BACKUP_IDLE, BACKUP_PART_BYTES
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.local.commit_gate import CommitGate
from sluiceway.local.partition_openings import decode, key_of
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.access import Actor
from sluiceway.model.changes import Fence, PartitionRef, RecordKey, RecordKind, Snapshot
from sluiceway.model.meta import View
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.partition_store import DamagedError, StoreUnavailableError
from sluiceway.wire.backup_records import MetaRecords, PartitionRecords, encode

PATIENCE: Millis = 5_000
"""How long commits may be held back for those in flight, and then for the meta store."""


@dataclass
class FrozenPartition:
    """A partition in a backup. Its blobs are pinned. `fence`: that of its owner."""

    ref: PartitionRef
    fence: Fence
    driver: QueueDriver
    stored: Snapshot
    pinned: Pinned

    # Not in the moment in which commits are held back.
    @cached_property
    def keys(self) -> list[RecordKey]:
        """The names of its records, in the order in which they are read."""
        return sorted(self.stored.records)

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Approximate bytes of each blob."""
        return {int(key): self._blob(key).nbytes for kind, key in self.keys if kind is RecordKind.BLOB}

    def _blob(self, key: str) -> BlobRecord:
        return unpack_blob(self.stored.records[RecordKind.BLOB, key])

    def part(self, start: int) -> RecordsPart:
        """The records from that one on, up to BACKUP_PART_BYTES."""
        records = self.stored.records
        end = start + _fitting(len(key) + len(records[kind, key]) for kind, key in self.keys[start:])
        keys = self.keys[start:end]
        data = encode(PartitionRecords(self.stored.txn, self.stored.header, [(kind, key, records[kind, key]) for kind, key in keys]))
        blobs = [(int(key), _state(self._blob(key))) for kind, key in keys if kind is RecordKind.BLOB]
        return RecordsPart(data, blobs, end if end < len(self.keys) else None)

    def let_go(self) -> None:
        """Let the partition drop the blobs that only the backup kept."""
        self.pinned.until = system.now()
        executor = self.driver.queue.executors.get(self.ref.partition)
        if executor is not None:
            executor.touch()
            self.driver.cycle_soon()


def _state(blob: BlobRecord) -> str:
    """What the bytes of a blob depend on, beside its number: numbers of a partition are not reused, and a blob is only ever compacted."""
    return f"{blob.written_at}.{blob.kept}"


def _fitting(sizes: Iterable[int]) -> int:
    """How many of the sizes, at least one if there are any, fit into BACKUP_PART_BYTES together."""
    count = total = 0
    for size in sizes:
        total += size
        if count and total > BACKUP_PART_BYTES:
            break
        count += 1
    return count


class BackupShare:
    """An instance's part of a backup: `record` and `hold`, then `freeze` while no commit begins anywhere; then it is read, until `end`.

    One that is not used for BACKUP_IDLE ends by itself, and commits are held back for PATIENCE at most.
    """

    def __init__(self, drivers: Mapping[str, QueueDriver], gate: CommitGate) -> None:
        self._drivers, self._gate = drivers, gate
        self._id = ""
        self._partitions: dict[PartitionRef, FrozenPartition] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._opening: asyncio.TimerHandle | None = None
        """Opens the gate that is held; None: it is not."""

    @property
    def is_used(self) -> bool:
        """Whether there is a backup."""
        return bool(self._id)

    async def record(self, id: str) -> None:
        """Read the records of all open partitions, and follow them. Raises `too_many_requests` while there is another backup,
        `unavailable`, `partition_damaged`."""
        if self._id:
            raise SluicewayError("too_many_requests", "another backup of this server is being read; try again when it has ended")
        self._id = id
        try:
            for driver in list(self._drivers.values()):
                for executor in driver.executors:
                    if executor.takes_work:
                        await _reading(driver, executor.number)
        except BaseException:
            self.end(id)
            raise
        self._check(id)
        self._keep()

    async def hold(self, id: str) -> None:
        """Hold commits back, for PATIENCE at most. Raises `unavailable`, `snapshot_gone`."""
        self._check(id)
        await self._gate.close(PATIENCE)
        self._opening = asyncio.get_running_loop().call_later(PATIENCE / 1000, self._let_commit)

    async def freeze(self, id: str) -> list[FrozenPartition]:
        """The open partitions as they are since `hold`, and let commits begin. Raises `unavailable` if they have begun, `snapshot_gone`,
        `partition_damaged`."""
        self._check(id)
        for driver in list(self._drivers.values()):
            for executor in driver.executors:
                if executor.takes_work and (frozen := await self._freeze(driver, executor)) is not None:
                    self._partitions[frozen.ref] = frozen
        if self._opening is None:
            raise SluicewayError("unavailable", "the stores did not answer in time; try again")
        self._let_commit()
        self._keep()
        return list(self._partitions.values())

    async def _freeze(self, driver: QueueDriver, executor: PartitionExecutor) -> FrozenPartition | None:
        number, partition = executor.number, executor.partition
        recording = driver.recordings.get(number)
        stored = None if recording is None else recording.after(partition.txn)
        if stored is None:
            # New, or reopened meanwhile.
            await _reading(driver, number)
            stored = driver.recordings[number].after(partition.txn)
        if stored is None:
            return None
        # It stays as it was from now on.
        del driver.recordings[number]
        pinned = of_blobs(partition.log.blobs.values())
        pinned.until = system.now() + BACKUP_IDLE
        partition.log.pin(system.new_secret(), pinned)
        executor.touch()
        return FrozenPartition(PartitionRef(executor.incarnation, number), driver.fence_of(executor), driver, stored, pinned)

    def _let_commit(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
            self._gate.open()

    def records(self, id: str, ref: PartitionRef, start: int) -> RecordsPart:
        """The records of a partition from the one numbered `start` on. Raises `snapshot_gone`."""
        return self._partition(id, ref).part(start)

    async def blobs(self, id: str, ref: PartitionRef, numbers: Sequence[int]) -> BlobsPart:
        """The first of those blobs, as many as fit into BACKUP_PART_BYTES, at least one. Raises `snapshot_gone`, `unavailable`,
        `partition_damaged`."""
        partition = self._partition(id, ref)
        if unknown := [number for number in numbers if number not in partition.sizes]:
            raise SluicewayError("invalid_request", f"the backup has no blob {unknown[0]} in that partition", "blobs")
        wanted = numbers[: _fitting(partition.sizes[number] for number in numbers)]
        try:
            found = await partition.driver.backend(ref.partition).read(ref, wanted)
        except DamagedError as error:
            raise SluicewayError("partition_damaged", str(error)) from error
        except (StoreUnavailableError, KeyError) as error:
            raise SluicewayError("unavailable", f"partition {ref.partition} cannot be read: {error}") from error
        if len(found) < len(set(wanted)):
            raise SluicewayError("snapshot_gone", f"partition {ref.partition} was reopened; begin another backup", "backup_id")
        return BlobsPart(found)

    def _partition(self, id: str, ref: PartitionRef) -> FrozenPartition:
        self._check(id)
        self._keep()
        found = self._partitions.get(ref)
        if found is None:
            raise SluicewayError("invalid_request", f"the backup has no partition {ref.incarnation}.{ref.partition}", "partition")
        return found

    def _check(self, id: str) -> None:
        if self._id != id:
            raise SluicewayError("snapshot_gone", "the backup has ended, or was not read for too long; begin another one", "backup_id")

    def _keep(self) -> None:
        """Keep the backup for another BACKUP_IDLE."""
        for partition in self._partitions.values():
            partition.pinned.until = system.now() + BACKUP_IDLE
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(BACKUP_IDLE / 1000, self.end, self._id)

    def touch(self, id: str) -> None:
        """Keep the backup, of which something else was read. Raises `snapshot_gone`."""
        self._check(id)
        self._keep()

    def end(self, id: str) -> None:
        """End a backup, which is not read any more. One that has ended already is no error."""
        if id and self._id == id:
            self.stop()

    def stop(self) -> None:
        """End the backup that there is."""
        self._let_commit()
        if self._expiry is not None:
            self._expiry.cancel()
        for driver in self._drivers.values():
            driver.recordings.clear()
        partitions, self._partitions, self._id = self._partitions, {}, ""
        for partition in partitions.values():
            partition.let_go()


async def _reading(driver: QueueDriver, number: int) -> None:
    """Begin to follow the records of a partition. Raises `unavailable`, `partition_damaged`."""
    try:
        await driver.follow_records(number)
    except DamagedError as error:
        raise SluicewayError("partition_damaged", str(error)) from error
    except (StoreUnavailableError, KeyError) as error:
        raise SluicewayError("unavailable", f"partition {number} cannot be read: {error}") from error


@dataclass
class Backup:
    """A backup that is read: the meta store and the partitions as of `taken_at`."""

    id: str
    taken_at: Millis
    meta: View
    partitions: Mapping[PartitionRef, PlacedPartition]

    @cached_property
    def _meta_keys(self) -> list[str]:
        return sorted(self.meta.entries)

    def part_of_meta(self, start: int) -> RecordsPart:
        """The entries of the meta store from that one on, up to BACKUP_PART_BYTES."""
        entries = self.meta.entries
        end = start + _fitting(len(key) + len(entries[key].value) for key in self._meta_keys[start:])
        keys = self._meta_keys[start:end]
        data = encode(MetaRecords(self.meta.stamp, [(key, entries[key].stamp, entries[key].value) for key in keys]))
        return RecordsPart(data, [], end if end < len(self._meta_keys) else None)


@dataclass(frozen=True)
class PlacedPartition:
    """A partition in a backup, as the queue's record has it."""

    queue_name: str
    backend: str


class Backups:
    """Takes backups of a server that owns all partitions, one at a time.

    A backup has the records and blobs of every partition, and the meta store, as of one moment: what a power cut at that moment would have
    left. For it no commit begins until those in flight have ended and the meta store was read. The records are read before, partition by
    partition, and kept current; blobs, which never change, are pinned and read after it.
    """

    def __init__(
        self, drivers: Mapping[str, QueueDriver], ownership: Ownership, meta: MetaStore, audit: AuditTrail, gate: CommitGate
    ) -> None:
        self._share = BackupShare(drivers, gate)
        self._ownership, self._meta, self._audit = ownership, meta, audit
        self._current: Backup | None = None

    async def begin(self, by: Actor) -> Backup:
        """Take a backup. It is kept until `end`, or for BACKUP_IDLE after it was last read.

        Raises `invalid_request` in a cluster, `too_many_requests` while there is another one, `unavailable` unless every partition is open,
        `partition_damaged`.
        """
        if not self._ownership.is_alone:
            what = "this server is an instance of a cluster, and only a server that is alone can be backed up while it runs"
            raise SluicewayError("invalid_request", what)
        id = system.new_secret()
        await self._share.record(id)
        try:
            self._current = backup = await self._take(id)
        except BaseException:
            self._share.end(id)
            raise
        await self._audit.record("backups.begin", by, detail={"partitions": len(backup.partitions)})
        return backup

    async def _take(self, id: str) -> Backup:
        await self._share.hold(id)
        taken_at = system.now()
        try:
            async with asyncio.timeout(PATIENCE / 1000):
                view = await self._meta.read(prefixes=[""])
        except (StoreUnavailableError, TimeoutError) as error:
            raise SluicewayError("unavailable", f"the meta store does not answer: {error}") from error
        fences = {each.ref: each.fence for each in await self._share.freeze(id)}
        queues = [decode_queue(entry.value) for entry in view.prefix(QUEUE).values()]
        return Backup(id, taken_at, view, {ref: placed for record in queues for ref, placed in _placed(record, view, fences.get)})

    def records(self, id: str, ref: PartitionRef | None, start: int) -> RecordsPart:
        """The records of a partition (None: of the meta store) from the one numbered `start` on. Raises `snapshot_gone`."""
        if ref is not None:
            return self._share.records(id, ref, start)
        self._share.touch(id)
        assert self._current is not None, "the share is that of the backup"
        return self._current.part_of_meta(start)

    async def blobs(self, id: str, ref: PartitionRef, numbers: Sequence[int]) -> BlobsPart:
        """As `BackupShare.blobs`."""
        return await self._share.blobs(id, ref, numbers)

    def end(self, id: str) -> None:
        """End a backup, which is not read any more. One that has ended already is no error."""
        self._share.end(id)
        if not self._share.is_used:
            self._current = None

    def stop(self) -> None:
        """End the backup that there is."""
        self._share.stop()
        self._current = None


def _placed(
    record: QueueRecord, view: View, fence_of: Callable[[PartitionRef], Fence | None]
) -> Iterable[tuple[PartitionRef, PlacedPartition]]:
    """The queue's partitions that have contents. Raises `unavailable` if the backup does not have one of them, of its owner then."""
    for each in record.partitions:
        ref = PartitionRef(record.incarnation, each.partition)
        opening = decode(view.entries.get(key_of(ref)))
        if opening is None or opening.opened is None:
            # Just created: nothing in it was ever acknowledged.
            continue
        fence = fence_of(ref)
        if fence is None or not opening.opened[:2] == opening.claimed[:2] == fence[:2]:
            detail = f"partition {each.partition} of queue {record.queue_name!r} is not open; `sluiceway stats` shows why"
            raise SluicewayError("unavailable", detail)
        yield ref, PlacedPartition(record.queue_name, each.backend)
