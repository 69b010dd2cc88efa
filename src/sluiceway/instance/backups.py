"""Backups of a running server: everything in its stores as of one moment, read part by part while it works on.

docs/adr/0057-backups-of-a-running-server.md has the reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sluiceway.adapters import system
from sluiceway.cluster.cluster_secret import CLUSTER_SECRET
from sluiceway.cluster.ownership import Ownership
from sluiceway.contract.backup_answers import BlobsPart, RecordsPart
from sluiceway.core.partition.records import BlobRecord, unpack_blob
from sluiceway.core.partition.snapshots import Snapshot as Pinned
from sluiceway.core.partition.snapshots import of_blobs
from sluiceway.core.queue.partition_executor import PartitionExecutor
from sluiceway.core.queue.routing import HERE, Peer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import BACKUP_IDLE, BACKUP_PART_BYTES
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.local.commit_gate import CommitGate
from sluiceway.local.partition_openings import decode, key_of
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.access import Actor
from sluiceway.model.changes import PartitionRef, RecordKey, RecordKind, Snapshot
from sluiceway.model.meta import View
from sluiceway.model.peers import BackupStep, BackupVerb, FrozenFence, PeerRequest, ReadBackup
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.partition_store import DamagedError, StoreUnavailableError
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError, Transport
from sluiceway.wire.backup_records import MetaRecords, PartitionRecords, encode

PATIENCE: Millis = 5_000
"""How long commits may be held back for those in flight, and then for the meta store."""
STEP_TIMEOUT: Millis = 2 * PATIENCE
RECORD_TIMEOUT: Millis = 600_000
"""Reading records takes some seconds per million."""
READ_TIMEOUT: Millis = 60_000


@dataclass
class FrozenPartition:
    """A partition in a backup. Its blobs are pinned."""

    ref: PartitionRef
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

    def has(self, id: str) -> bool:
        """Whether this is a part of that backup, which has not ended."""
        return self._id == id

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
                        self._check(id)
        except BaseException:
            # If it has ended meanwhile, what was read since is still followed.
            if self._id in (id, ""):
                self.stop()
            raise
        self._keep()

    async def hold(self, id: str) -> None:
        """Hold commits back, for PATIENCE at most. Raises `unavailable`, `snapshot_gone`."""
        self._check(id)
        await self._gate.close(PATIENCE)
        if not self.has(id):
            self._gate.open()
            raise gone()
        self._opening = asyncio.get_running_loop().call_later(PATIENCE / 1000, self._let_commit)

    async def freeze(self, id: str) -> list[FrozenFence]:
        """Keep the open partitions as they are since `hold`, and let commits begin. Returns the partitions with their fences.

        Raises `unavailable` if commits have begun already, `snapshot_gone`, `partition_damaged`.
        """
        self._check(id)
        fences = []
        for driver in list(self._drivers.values()):
            for executor in driver.executors:
                if executor.takes_work and (frozen := await self._freeze(driver, executor)) is not None:
                    self._partitions[frozen.ref] = frozen
                    era, grant, _ = driver.fence_of(executor)
                    fences.append(FrozenFence(*frozen.ref, era, grant))
        if self._opening is None:
            raise SluicewayError("unavailable", "the stores did not answer in time; try again")
        self._let_commit()
        self._keep()
        return fences

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
        return FrozenPartition(PartitionRef(executor.incarnation, number), driver, stored, pinned)

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
            raise gone()

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


def gone() -> SluicewayError:
    """The error for a backup that there is not, or not any more."""
    return SluicewayError("snapshot_gone", "the backup has ended, or was not read for too long; begin another one", "backup_id")


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
        # A backup is kept for long, and in other hands. A restored cluster makes a secret of its own.
        return sorted(self.meta.entries.keys() - {CLUSTER_SECRET})

    def part_of_meta(self, start: int) -> RecordsPart:
        """The entries of the meta store from that one on, up to BACKUP_PART_BYTES."""
        entries = self.meta.entries
        end = start + _fitting(len(key) + len(entries[key].value) for key in self._meta_keys[start:])
        keys = self._meta_keys[start:end]
        data = encode(MetaRecords(self.meta.stamp, [(key, entries[key].stamp, entries[key].value) for key in keys]))
        return RecordsPart(data, [], end if end < len(self._meta_keys) else None)


@dataclass(frozen=True)
class PlacedPartition:
    """A partition in a backup: what the queue's record has of it, and the instance that has frozen it."""

    queue_name: str
    backend: str
    owner: Peer


class Backups:
    """Takes backups of a server or of a cluster, one at a time.

    A backup has the records and blobs of every partition, and the meta store, as of one moment: what a power cut at that moment would have
    left. For it no instance begins a commit until those in flight everywhere have ended and the meta store was read. The records are read
    before, partition by partition, and kept current; blobs, which never change, are pinned and read after it.

    A backup is taken by the instance that is asked for it, whose name is in its id, so that any instance can be asked for a part.
    """

    def __init__(
        self,
        drivers: Mapping[str, QueueDriver],
        ownership: Ownership,
        transport: Transport | None,
        meta: MetaStore,
        audit: AuditTrail,
        gate: CommitGate,
    ) -> None:
        self._share = BackupShare(drivers, gate)
        self._ownership, self._transport, self._meta, self._audit = ownership, transport, meta, audit
        self._current: Backup | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def begin(self, by: Actor) -> Backup:
        """Take a backup. It is kept until `end`, or for BACKUP_IDLE after it was last read.

        Raises `too_many_requests` while there is another one, `unavailable` unless every partition is open and every instance answers,
        `partition_damaged`.
        """
        id = f"{system.new_secret()}@{self._ownership.name}"
        peers = self._ownership.peers()
        await self._share.record(id)
        try:
            await self._record_everywhere(peers, id)
            backup = await self._take(peers, id)
        except BaseException:
            self._share.end(id)
            await self._tell(peers, id, "end")
            raise
        self._current = backup
        if peers:
            self._keeping = asyncio.create_task(self._keep(peers, id))
        await self._audit.record("backups.begin", by, detail={"partitions": len(backup.partitions)})
        return backup

    async def _record_everywhere(self, peers: Sequence[Peer], id: str) -> None:
        """Have the other instances read their records. Those that have read theirs keep them until the last one has, which may take many
        times BACKUP_IDLE."""

        async def keep() -> None:
            while True:
                await asyncio.sleep(BACKUP_IDLE / 4_000)
                if self._share.has(id):
                    self._share.touch(id)
                await self._tell(peers, id, "keep")

        keeping = asyncio.create_task(keep())
        try:
            await self._everywhere(peers, id, "record", RECORD_TIMEOUT)
        finally:
            keeping.cancel()

    async def _take(self, peers: Sequence[Peer], id: str) -> Backup:
        await asyncio.gather(self._share.hold(id), self._everywhere(peers, id, "hold", STEP_TIMEOUT))
        taken_at = system.now()
        try:
            async with asyncio.timeout(PATIENCE / 1000):
                view = await self._meta.read(prefixes=[""])
        except (StoreUnavailableError, TimeoutError) as error:
            raise SluicewayError("unavailable", f"the meta store does not answer: {error}") from error
        here, there = await asyncio.gather(self._share.freeze(id), self._everywhere(peers, id, "freeze", STEP_TIMEOUT))
        owners = dict.fromkeys(here, HERE) | {fence: peer for peer, fences in zip(peers, there, strict=True) for fence in fences}
        queues = [decode_queue(entry.value) for entry in view.prefix(QUEUE).values()]
        return Backup(id, taken_at, view, {ref: placed for record in queues for ref, placed in _placed(record, view, owners)})

    async def _everywhere(self, peers: Sequence[Peer], id: str, step: BackupVerb, timeout: Millis) -> list[tuple[FrozenFence, ...]]:
        """Have all of them take that step. Returns their answers."""
        answers: list[tuple[FrozenFence, ...]] = await asyncio.gather(*(self._ask(peer, BackupStep(id, step), timeout) for peer in peers))
        return answers

    async def _ask(self, peer: Peer, request: PeerRequest, timeout: Millis) -> Any:
        assert self._transport is not None, "an instance that is alone has no peers"
        try:
            return await self._transport.ask(peer.address, request, timeout)
        except (PeerRefusedError, PeerUnknownError) as error:
            raise SluicewayError("unavailable", f"instance {peer.name} does not answer: {error}") from error

    async def _tell(self, peers: Sequence[Peer], id: str, step: BackupVerb) -> None:
        """Have all of them take that step. One that does not answer finds out by itself."""
        steps = (self._ask(peer, BackupStep(id, step), STEP_TIMEOUT) for peer in peers)
        await asyncio.gather(*steps, return_exceptions=True)

    async def _keep(self, peers: Sequence[Peer], id: str) -> None:
        """Keep the other instances' parts as long as the backup is read."""
        while self._share.has(id):
            await self._tell(peers, id, "keep")
            await asyncio.sleep(BACKUP_IDLE / 4_000)
        await self._tell(peers, id, "end")

    async def answer(self, request: BackupStep | ReadBackup) -> tuple[FrozenFence, ...] | bytes:
        """Answer another instance, which takes a backup, or was asked for a part of one that is taken here."""
        if isinstance(request, ReadBackup):
            ref = PartitionRef(request.incarnation, request.partition)
            if self._is_taken_here(request.id):
                return await self._read(request)
            if request.blobs:
                return encode(await self._share.blobs(request.id, ref, request.blobs))
            return encode(self._share.records(request.id, ref, request.start))
        if request.step == "record":
            await self._share.record(request.id)
        elif request.step == "hold":
            await self._share.hold(request.id)
        elif request.step == "freeze":
            return tuple(await self._share.freeze(request.id))
        elif request.step == "keep":
            self._share.touch(request.id)
        else:
            await self.end(request.id)
        return ()

    async def records(self, id: str, ref: PartitionRef | None, start: int) -> bytes:
        """The records of a partition (None: of the meta store) from the one numbered `start` on, as a RecordsPart. Raises `snapshot_gone`,
        `unavailable`."""
        return await self._read(ReadBackup(id, *(ref or ("", 0)), start))

    async def blobs(self, id: str, ref: PartitionRef, numbers: Sequence[int]) -> bytes:
        """The first of those blobs, as many as fit into BACKUP_PART_BYTES, at least one, as a BlobsPart. Raises `snapshot_gone`,
        `unavailable`, `partition_damaged`."""
        return await self._read(ReadBackup(id, *ref, blobs=tuple(numbers)))

    def _is_taken_here(self, id: str) -> bool:
        return self._current is not None and self._current.id == id and self._share.has(id)

    async def _read(self, request: ReadBackup) -> bytes:
        if not self._is_taken_here(request.id):
            peer = self._taker(request.id)
            if peer is None:
                raise gone()
            there: bytes = await self._ask(peer, request, READ_TIMEOUT)
            return there
        assert self._current is not None
        self._share.touch(request.id)
        if not request.incarnation:
            return encode(self._current.part_of_meta(request.start))
        ref = PartitionRef(request.incarnation, request.partition)
        placed = self._current.partitions.get(ref)
        if placed is None:
            raise SluicewayError("invalid_request", f"the backup has no partition {ref.incarnation}.{ref.partition}", "partition")
        if placed.owner is not HERE:
            from_owner: bytes = await self._ask(placed.owner, request, READ_TIMEOUT)
            return from_owner
        return encode(
            await self._share.blobs(request.id, ref, request.blobs)
            if request.blobs
            else self._share.records(request.id, ref, request.start)
        )

    def _taker(self, id: str) -> Peer | None:
        """The other instance that took the backup; None: there is none."""
        name = id.partition("@")[2]
        return next((peer for peer in self._ownership.peers() if peer.name == name), None)

    async def end(self, id: str) -> None:
        """End a backup, which is not read any more. One that has ended already is no error."""
        if self._is_taken_here(id):
            self._share.end(id)
            self._current = None
            await self._stop_keeping()
            await self._tell(self._ownership.peers(), id, "end")
            return
        self._share.end(id)

    async def end_anywhere(self, id: str) -> None:
        """End a backup, whichever instance took it."""
        peer = None if self._is_taken_here(id) else self._taker(id)
        await (self.end(id) if peer is None else self._tell([peer], id, "end"))

    async def stop(self) -> None:
        """End the backup that there is."""
        self._share.stop()
        self._current = None
        await self._stop_keeping()

    async def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            self._keeping = None


def _placed(record: QueueRecord, view: View, owners: Mapping[FrozenFence, Peer]) -> Iterable[tuple[PartitionRef, PlacedPartition]]:
    """The queue's partitions that have contents. Raises `unavailable` if the backup does not have one of them, of its owner then."""
    for each in record.partitions:
        ref = PartitionRef(record.incarnation, each.partition)
        opening = decode(view.entries.get(key_of(ref)))
        if opening is None or opening.opened is None:
            # Just created: nothing in it was ever acknowledged.
            continue
        owner = owners.get(FrozenFence(*ref, *opening.opened[:2]))
        if owner is None or opening.claimed[:2] != opening.opened[:2]:
            detail = f"partition {each.partition} of queue {record.queue_name!r} is not open; `sluiceway stats` shows why"
            raise SluicewayError("unavailable", detail)
        yield ref, PlacedPartition(record.queue_name, each.backend, owner)
