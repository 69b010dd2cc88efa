"""Restoration of a backup: into a data directory that does not exist yet, and into empty storage.

A restored server goes back in time. So that nothing from after the backup is taken for something of it, its owners have fences, and its
partitions assign offsets and lease numbers, above all that the backed-up server can have given since.
docs/adr/0057-backups-of-a-running-server.md has the reasons.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TextIO

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.disk import keep_private
from sluiceway.adapters.meta import sqlite as sqlite_meta
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage import partition_file
from sluiceway.cluster.cluster_secret import CLUSTER_SECRET
from sluiceway.cluster.compatibility_level import check_understood, level_in
from sluiceway.cluster.ownership import GRANT, KEYS
from sluiceway.core.group.group_records import Keys, Resource, decode_record, encode_record
from sluiceway.core.group.item_placement import RESTORED_ERAS
from sluiceway.core.partition.records import pack, unpack_header
from sluiceway.instance import restoration_log
from sluiceway.instance.adoption_mark import MARK
from sluiceway.instance.restoration_log import RestorationLog
from sluiceway.kernel.durability import sync_directory
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.local import stores
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.local.backend_pool import OpenStore
from sluiceway.local.partition_copy import SLICE_BYTES, SLICE_RECORDS, UNFINISHED
from sluiceway.local.partition_openings import OPENED, Opening, key_of
from sluiceway.local.storage_identity import record_of
from sluiceway.model.access import Actor
from sluiceway.model.backends import BackendSettings, MemoryBackend, SqliteBackend
from sluiceway.model.changes import Changes, Fence, PartitionRef, RecordKey
from sluiceway.model.meta import Entry, Stamp, View
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import PartitionStore, StoreUnavailableError
from sluiceway.wire.backup_records import decode_meta, decode_partition

NUMBERS: Final = 10**12
"""Offsets and lease numbers that a restored partition skips. A partition gives fewer in a year; an id has room for a million restores."""
GRANTS: Final = 10**6
"""Starts of a server that a restore skips."""
_LOCK: Final = "restoring.lock"
_RESOURCE: Final = re.compile(r"group/(.+)/resource")
_BACKENDS: Final = record_of("")


class SavedPartition(NamedTuple):
    """A partition of a backup, and where it was."""

    ref: PartitionRef
    queue_name: str
    backend: str


class SavedBackup(Protocol):
    """A backup to restore. What is read raises `invalid_request` if it is damaged."""

    @property
    def layouts(self) -> tuple[int, int]:
        """Versions of the records in the meta store and in partitions."""
        ...

    @property
    def partitions(self) -> Sequence[SavedPartition]: ...

    def meta(self) -> Iterator[bytes]:
        """The records of the meta store, in parts."""
        ...

    def records(self, ref: PartitionRef) -> Iterator[bytes]:
        """The records of a partition, in parts."""
        ...

    def blobs(self, ref: PartitionRef) -> Iterator[tuple[int, bytes]]:
        """The blobs of a partition, by number."""
        ...


class Restored(msgspec.Struct, frozen=True):
    """What was restored."""

    queues: int
    partitions: int
    bytes: int


async def restore(
    backup: SavedBackup,
    data: Path,
    backends: Mapping[str, BackendSettings],
    tell: Callable[[Restored], None],
    *,
    open_store: OpenStore = stores.open_store,
) -> Restored:
    """Restore the backup into `data`, which must be empty or missing, and into the storage of `backends`, those of the server that is to
    run on it. `tell` is called as it goes on. If it fails, nothing stays; what an interrupted one has left, a repeat removes.

    Raises `invalid_request` if the backup is damaged or of a newer version, or the storage has its partitions; `unavailable` during another
    restore into `data`; OSError, DirectoryInUseError, StoreUnavailableError, DamagedError.
    """
    _check_layouts(backup.layouts)
    _check_empty(data)
    settings = {each.backend: _settings(each.backend, backends) for each in backup.partitions}
    with _part_of(data) as part:
        await _remove_leftovers(part, backends, open_store)
        async with AsyncExitStack() as opened:
            restored = await _Restoration(backup, part, settings, open_store, opened, tell).run()
        # In one step, so that no server starts on a part of it.
        os.rename(part, data)
        sync_directory(part.parent)
        for name in (restoration_log.FILE, _LOCK):
            (data / name).unlink(missing_ok=True)
    return restored


def _check_empty(data: Path) -> None:
    if data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise invalid("data", f"{data} is not empty; restore into a new folder")


@contextmanager
def _part_of(data: Path) -> Iterator[Path]:
    """The folder beside `data` that is to become it, which an interrupted restore may have left; removed if the block fails. Raises
    `unavailable` during another restore into `data`."""
    part = data.absolute().with_name(f".{data.absolute().name}.restoring")
    keep_private(part)
    about = part.lstat()
    if stat.S_ISLNK(about.st_mode) or about.st_uid != os.geteuid():
        # Where all users may write, another one may have made it, to have the restored data.
        raise invalid("data", f"{part} is a link, or belongs to another user: remove it, or restore into another folder")
    with (part / _LOCK).open("w") as lock:
        if not _is_locked(lock, part / _LOCK):
            raise SluicewayError("unavailable", f"another restore into {data} is running", "data")
        try:
            yield part
        except BaseException:
            log = RestorationLog.left_in(part)
            # What could not be removed elsewhere is for a repeat.
            if log is None or not log.backends:
                shutil.rmtree(part, ignore_errors=True)
            raise


def _is_locked(lock: TextIO, path: Path) -> bool:
    """Whether the lock was free, and is the file at that path still: the other restore may just have ended."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


async def _remove_leftovers(part: Path, backends: Mapping[str, BackendSettings], open_store: OpenStore) -> None:
    """Remove what an interrupted restore has left in the folder, and before that what it has left in storage elsewhere."""
    log = RestorationLog.left_in(part)
    if log is not None:
        async with AsyncExitStack() as opened:
            stores: dict[str, PartitionStore] = {}
            for name in log.backends:
                if name not in backends:
                    why = f"an interrupted restore has left partitions there; pass the --config that it had, or remove the folder {part}"
                    raise invalid(f"backends.{name}", why)
                stores[name] = open_store(name, backends[name], part)
                opened.push_async_callback(stores[name].close)
            await log.remove_partitions(stores)
    _clear(part)


def _clear(part: Path) -> None:
    for left in part.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name != _LOCK:
            left.unlink()


def _is_inside(settings: BackendSettings) -> bool:
    """Whether a backend's partitions are in the data folder."""
    return isinstance(settings, SqliteBackend) and settings.path is None


def _check_layouts(found: tuple[int, int]) -> None:
    known = (len(sqlite_meta.MIGRATIONS), len(partition_file.MIGRATIONS))
    if found[0] > known[0] or found[1] > known[1]:
        raise invalid("dir", f"the backup was taken by a newer version of Sluiceway (layouts {found}; this one knows up to {known})")


def _settings(name: str, backends: Mapping[str, BackendSettings]) -> BackendSettings:
    found = backends.get(name)
    if found is None or isinstance(found, MemoryBackend):
        raise invalid(
            f"backends.{name}",
            f"the backup has partitions of backend {name!r}, so pass the --config of the server that is to run on it, with a lasting "
            f"backend {name!r}",
        )
    return found


class _Restoration:
    """One restore, into the folder `data`."""

    def __init__(
        self,
        backup: SavedBackup,
        data: Path,
        settings: Mapping[str, BackendSettings],
        open_store: OpenStore,
        opened: AsyncExitStack,
        tell: Callable[[Restored], None],
    ) -> None:
        self._backup, self._data, self._settings, self._tell = backup, data, settings, tell
        self._open_store, self._opened = open_store, opened
        self._log: RestorationLog | None = None
        self._made: list[tuple[PartitionStore, PartitionRef]] = []
        self._bytes = 0

    async def run(self) -> Restored:
        stamp, entries = self._read_meta()
        fence = _fence(entries)
        try:
            return await self._write(stamp, entries, fence)
        except BaseException:
            for store, ref in self._made:
                await store.drop(ref)
            if self._log is not None:
                self._log.clear()
            raise

    async def _write(self, stamp: Stamp, entries: dict[str, Entry], fence: Fence) -> Restored:
        kept = _StampedEntries(stamp, entries)
        targets: dict[str, PartitionStore] = {}
        elsewhere: dict[str, str] = {}
        for name, settings in self._settings.items():
            store = targets[name] = self._open_store(name, settings, self._data)
            self._opened.push_async_callback(store.close)
            identity = await store.identify(system.new_incarnation())
            assert identity is not None, "it was given one"
            kept.put(record_of(name), identity.encode())
            if not _is_inside(settings):
                elsewhere[name] = identity
        self._log = RestorationLog.begin(self._data, fence, elsewhere)
        for number, each in enumerate(self._backup.partitions):
            txn = await self._partition(each, targets[each.backend], fence, self._log if each.backend in elsewhere else None)
            kept.put(key_of(each.ref), msgspec.json.encode(Opening(fence, fence, txn)))
            self._tell(self._so_far(number + 1))
        await self._write_meta(kept)
        return self._so_far(len(self._backup.partitions))

    def _so_far(self, partitions: int) -> Restored:
        done = self._backup.partitions[:partitions]
        return Restored(len({each.ref.incarnation for each in done}), partitions, self._bytes)

    def _read_meta(self) -> tuple[Stamp, dict[str, Entry]]:
        stamp, entries = 0, dict[str, Entry]()
        for data in self._backup.meta():
            part = decode_meta(data)
            stamp = part.stamp
            entries |= {key: Entry(value, at) for key, at, value in part.entries}
        check_understood(level_in(View(stamp, entries)), "dir")
        return stamp, renewed(entries)

    async def _partition(self, saved: SavedPartition, store: PartitionStore, fence: Fence, log: RestorationLog | None) -> int:
        """Write a partition, noted in the log before. Returns its last cycle."""
        found = await store.browse(saved.ref)
        if found.txn or found.header is not None:
            what = f"partition {saved.ref.partition} of queue {saved.queue_name!r}"
            raise invalid(
                f"backends.{saved.backend}",
                f"the storage of this backend has {what} already; restore into empty storage: name another schema, prefix or path in the "
                "configuration, or empty this one. If an interrupted restore left it, repeat that one, with the same --data",
            )
        if log is not None:
            log.add(saved.backend, saved.ref)
        self._made.append((store, saved.ref))
        await store.open(saved.ref, fence)
        txn = 0
        async for changes in self._slices(saved.ref):
            if (outcome := await store.apply(saved.ref, changes, fence)) is not Outcome.DONE:
                raise StoreUnavailableError(f"partition {saved.ref.partition} of queue {saved.queue_name!r}: a write was {outcome.value}")
            txn = changes.txn
            self._bytes += sum(map(len, changes.blobs.values()))
        await store.release(saved.ref)
        return txn

    async def _slices(self, ref: PartitionRef) -> AsyncIterator[Changes]:
        """The cycles that make an empty partition equal to the saved one. Only the last has the header."""
        txn = count(1)
        blobs: dict[int, bytes] = {}
        for number, data in self._backup.blobs(ref):
            if blobs and sum(map(len, blobs.values())) + len(data) > SLICE_BYTES:
                yield Changes(next(txn), UNFINISHED, blobs=blobs)
                blobs = {}
            blobs[number] = data
        header: bytes | None = None
        records: list[tuple[RecordKey, bytes]] = []
        for data in self._backup.records(ref):
            part = decode_partition(data)
            header = part.header
            records += [((kind, key), value) for kind, key, value in part.records]
        if header is None:
            return
        while len(records) > SLICE_RECORDS:
            yield Changes(next(txn), UNFINISHED, puts=dict(records[-SLICE_RECORDS:]))
            del records[-SLICE_RECORDS:]
        yield Changes(next(txn), skipped(header), puts=dict(records), blobs=blobs)

    async def _write_meta(self, entries: _StampedEntries) -> None:
        meta = SqliteMetaStore(self._data / "meta.sqlite")
        try:
            await meta.fill(entries.stamp, entries.entries)
            audit = AuditTrail(meta)
            await audit.record("restore", Actor("command line"), detail={"partitions": len(self._backup.partitions)})
            await audit.close()
        finally:
            await meta.close()


class _StampedEntries:
    """Entries of a meta store, and more that are put in one commit after all of them."""

    def __init__(self, stamp: Stamp, entries: dict[str, Entry]) -> None:
        self.stamp = stamp + 1
        self.entries = entries

    def put(self, key: str, value: bytes) -> None:
        self.entries[key] = Entry(value, self.stamp)


def skipped(header: bytes) -> bytes:
    """The header of a restored partition: its next offset and lease have numbers that it has not given, nor can have given since the
    backup."""
    found = unpack_header(header)
    if found.head == found.next:
        found.head += NUMBERS
    found.next += NUMBERS
    found.lease_number += NUMBERS
    return pack(found)


def renewed(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The meta store of a restored server: what owners go by is above all that was there before, and what is about living processes and
    the former storage is gone. So is the cluster's secret, which whoever has the backup could have read: the first instance makes another.
    """
    groups = [found[1] for key in entries if (found := _RESOURCE.fullmatch(key))]
    living = (prefix for group in groups for prefix in (Keys(group).members, Keys(group).abouts, Keys(group).marks))
    gone = (OPENED, _BACKENDS, MARK, CLUSTER_SECRET, *living)
    kept = {key: entry for key, entry in entries.items() if not key.startswith(gone)}
    for group in groups:
        key = Keys(group).resource
        resource = decode_record(kept[key].value, Resource)
        after = msgspec.structs.replace(resource, era=resource.era + RESTORED_ERAS, version=resource.version + 1)
        kept[key] = kept[key]._replace(value=encode_record(after))
    # A cluster that was never a single server has none.
    entry = kept.get(GRANT, Entry(b"0", 0))
    # By the clock, too: a second restore of the same backup comes later.
    grant = max(int(entry.value) + GRANTS, system.now() // 1_000)
    kept[GRANT] = entry._replace(value=str(grant).encode())
    return kept


def _fence(entries: Mapping[str, Entry]) -> Fence:
    """The fence under which the partitions are written: below that of the first start."""
    entry = entries.get(KEYS.resource)
    era = 1 if entry is None else decode_record(entry.value, Resource).era
    return Fence(era, int(entries[GRANT].value), 0)
