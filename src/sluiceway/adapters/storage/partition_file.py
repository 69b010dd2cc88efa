"""Partition file: one partition in one SQLite database. Synchronous; used by one thread at a time.

docs/adr/0002-sqlite-layout.md has the reasons and the measurements behind the layout and the settings.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import apsw
import numpy as np

from sluiceway.adapters.disk import create_private
from sluiceway.adapters.layout import migrate
from sluiceway.adapters.system import stopwatch
from sluiceway.adapters.wal_check import check_log
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.durability import sync_directory
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import (
    Changes,
    DamagedError,
    Fence,
    FencedError,
    Least,
    LostError,
    PackedRecords,
    RecordKind,
    Snapshot,
    StoreUnavailableError,
)

PAGE_BYTES = 8_192
CHECKPOINT_BYTES = 4 << 20
"""Log size that triggers a checkpoint. Small, so that a checkpoint is short and the log is overwritten in place, which syncs faster than a
growing file; large enough that the pages of a short-lived blob are mostly written back once for several uses."""

BUSY_TIMEOUT: Millis = 20
"""Timeout of a commit's wait for another process: a former owner that is about to learn that it is fenced off."""

TAKEOVER_TIMEOUT: Millis = 5_000
"""Timeout of `open` for another process's commit in progress: longer than a disk commonly takes."""

SET_UP_TRIES = 20
"""Times that the creator of a file lets other processes go first. Each time one of them finishes, so this suffices for all workers of a
machine that open the same partition, of which two are rare."""

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE partition (
        one INTEGER PRIMARY KEY CHECK (one = 1), era INTEGER NOT NULL, grant INTEGER NOT NULL, opening INTEGER NOT NULL,
        txn INTEGER NOT NULL, header BLOB, crc INTEGER NOT NULL);
    CREATE TABLE record (
        kind TEXT NOT NULL, key TEXT NOT NULL, crc INTEGER NOT NULL, value BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
    CREATE TABLE blob (number INTEGER PRIMARY KEY, crc INTEGER NOT NULL, data BLOB NOT NULL);
    """,
    # The sum of the checksums of the partition and its records detects a mix of intact pages from different moments.
    """
    ALTER TABLE partition ADD COLUMN crcs INTEGER NOT NULL DEFAULT 0;
    UPDATE partition SET crcs = crc + (SELECT coalesce(sum(crc), 0) FROM record);
    """,
    # Since this version a header says what the partition takes: an older version would drop that, and lose what it put into a shut one.
    "",
    # Since this version a key's record may be an intent, and a blob compacted: an older version can read neither.
    "",
    # Since this version there are records of failed attempts: an older version takes them for damage.
    "",
)
"""Migration number n takes the layout from version n to n + 1. Released ones never change."""

_KINDS = {kind.value: kind for kind in RecordKind}

_AT_ONCE = 10_000
"""Leases that are read in one step. As few, or fewer, are not packed."""

_LEASE = RecordKind.LEASE.value
_LEASE_CRC = crc32(f"{_LEASE}:".encode())


def _record_crc(kind: str, key: str, value: bytes) -> int:
    return crc32(value, crc32(f"{kind}:{key}".encode()))


class PartitionFile:
    """An open partition file. The constructor creates the file if needed, but no partition: `open` does.

    `shared`: other processes may have it open at the same time; all of them must set it. The constructor, `open`, `read` and `browse` raise
    DamagedError and StoreUnavailableError (also for a file of a newer version).
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self._name = path.stem
        self._shared = shared
        self._log_pages = 0
        self.commit_took = 0.0
        """Seconds that the last COMMIT took by itself: nearly all of a cycle's wait for the disk."""
        with self._translated():
            created = not path.exists()
            if created:
                create_private(path)
            self._db = apsw.Connection(str(path))
            try:
                self._set_up()
                if created:
                    sync_directory(path.parent)
            except BaseException:
                self._db.close()
                raise

    def _set_up(self) -> None:
        db = self._db
        if self._shared:
            db.set_busy_timeout(TAKEOVER_TIMEOUT)
        else:
            # One connection per file: the lock is kept, and the log's index lives in memory instead of a third file.
            db.pragma("locking_mode", "exclusive")
        check_log(db, f"partition {self._name}")
        db.pragma("page_size", PAGE_BYTES)
        self._use_log()
        db.pragma("synchronous", "full")
        # Twice the checkpoint size, so that in normal operation the log is never truncated and regrown.
        db.pragma("journal_size_limit", 2 * CHECKPOINT_BYTES)
        # Replaces SQLite's own checkpoint inside COMMIT: ours runs after the answer.
        db.set_wal_hook(self._note_log)
        migrate(db, MIGRATIONS, f"partition {self._name}")
        db.set_busy_timeout(BUSY_TIMEOUT)

    def _use_log(self) -> None:
        """Enable the write-ahead log. When several processes create the file at once, SQLite reports it as locked to all, without
        waiting."""
        for _ in range(SET_UP_TRIES):
            with contextlib.suppress(apsw.BusyError):
                self._db.pragma("journal_mode", "wal")
                return
            # This does wait.
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("ROLLBACK")
        self._db.pragma("journal_mode", "wal")

    def _note_log(self, _db: apsw.Connection, _schema: str, pages: int) -> int:
        self._log_pages = pages
        return apsw.SQLITE_OK

    def open(self, fence: Fence, least: Least | None = None) -> Snapshot:
        """PartitionStore.open, durable when it returns."""
        with self._translated():
            self._begin_takeover()
            try:
                row = self._row()
                if row is not None:
                    FencedError.check(self._name, Fence(*row[:3]), fence)
                LostError.check(self._name, None if row is None else Least(Fence(*row[:3]), row[3]), least)
                snapshot = self._load(row, packs=True)
                state = (*fence, snapshot.txn, snapshot.header)
                crc = _row_crc(*state)
                crcs = crc if row is None else row[6] - row[5] + crc
                self._db.execute("REPLACE INTO partition VALUES (1, ?, ?, ?, ?, ?, ?, ?)", (*state, crc, crcs))
                self._db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
            return snapshot

    def _begin_takeover(self) -> None:
        self._db.set_busy_timeout(TAKEOVER_TIMEOUT)
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            what = f"another process has been in the middle of a commit for {TAKEOVER_TIMEOUT} ms; if it hangs, end it"
            raise StoreUnavailableError(f"partition {self._name}: {what}") from None
        finally:
            self._db.set_busy_timeout(BUSY_TIMEOUT)

    def apply(self, changes: Changes, fence: Fence) -> Outcome:
        """PartitionStore.apply."""
        try:
            early = self._prepare(changes, fence)
        except apsw.Error:
            early = Outcome.REFUSED
        except BaseException:
            self._roll_back()
            raise
        if early is not None:
            self._roll_back()
            return early
        began = stopwatch()
        try:
            self._db.execute("COMMIT")
        except (apsw.FullError, apsw.BusyError):
            # The commit mark is written last, and there was no room for it or no lock to write it under.
            self._roll_back()
            return Outcome.REFUSED
        except apsw.Error:
            # The commit mark may be in the log although its write or sync failed: a crash now could bring it back to life. The next commit
            # (that of `open`) overwrites it, which settles the matter.
            self._roll_back()
            return Outcome.UNKNOWN
        finally:
            self.commit_took = stopwatch() - began
        return Outcome.DONE

    def _prepare(self, changes: Changes, fence: Fence) -> Outcome | None:
        """Write everything but COMMIT; returns the outcome if there is nothing to commit."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        found = db.execute("SELECT era, grant, opening, txn FROM partition").fetchone()
        if found is None or Fence(*found[:3]) != fence or changes.txn not in (found[3], found[3] + 1):
            return Outcome.REFUSED
        if changes.txn == found[3]:
            return Outcome.DONE
        crc = _row_crc(*fence, changes.txn, changes.header)
        state = (changes.txn, changes.header, crc, crc + self._write_records(changes))
        db.execute("UPDATE partition SET txn = ?, header = ?, crc = ?, crcs = crcs - crc + ?", state)
        if changes.dropped_blobs:
            db.executemany("DELETE FROM blob WHERE number = ?", ((number,) for number in changes.dropped_blobs))
        if changes.blobs:
            db.executemany("INSERT INTO blob VALUES (?, ?, ?)", ((number, crc32(data), data) for number, data in changes.blobs.items()))
        if changes.compacted_blobs:
            compacted = ((crc32(data), data, number) for number, data in changes.compacted_blobs.items())
            db.executemany("UPDATE blob SET crc = ?, data = ? WHERE number = ?", compacted)
        return None

    def _write_records(self, changes: Changes) -> int:
        """Write the records. Returns the change in the sum of their checksums."""
        gone: Iterator[tuple[Any, ...]] = self._db.executemany(
            "DELETE FROM record WHERE kind = ? AND key = ? RETURNING crc",
            ((kind.value, key) for kind, key in itertools.chain(changes.deletes, changes.puts)),
        )
        change = -sum(int(crc) for (crc,) in gone)
        rows = [(kind.value, key, _record_crc(kind.value, key, value), value) for (kind, key), value in changes.puts.items()]
        if rows:
            self._db.executemany("INSERT INTO record VALUES (?, ?, ?, ?)", rows)
        return change + sum(row[2] for row in rows)

    def read(self, blobs: Sequence[int]) -> dict[int, bytes]:
        """PartitionStore.read. A missing blob that has a record is damage, too."""
        found: dict[int, bytes] = {}
        with self._translated(), self._moment():
            rows: Iterator[tuple[Any, ...]] = self._db.executemany(
                "SELECT number, crc, data FROM blob WHERE number = ?", ((number,) for number in blobs)
            )
            for number, crc, data in rows:
                if crc32(data) != crc:
                    raise DamagedError(f"partition {self._name}: blob {number} failed its checksum")
                found[number] = data
            for number in blobs:
                known = "SELECT 1 FROM record WHERE kind = ? AND key = ?"
                if number not in found and self._db.execute(known, (RecordKind.BLOB.value, str(number))).fetchone():
                    raise DamagedError(f"partition {self._name}: blob {number} is missing")
        return found

    def browse(self) -> Snapshot:
        """PartitionStore.browse."""
        with self._translated(), self._moment():
            return self._load(self._row(), packs=False)

    @property
    def log_bytes(self) -> int:
        """Bytes of the log not yet in the database file."""
        return self._log_pages * PAGE_BYTES

    @property
    def checkpoint_is_due(self) -> bool:
        """Whether the log has reached CHECKPOINT_BYTES."""
        return self.log_bytes >= CHECKPOINT_BYTES

    def checkpoint(self) -> None:
        """Move the log's content into the database file. On failure the log keeps it, and the next commit tries again."""
        with contextlib.suppress(apsw.Error):
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            self._log_pages = 0

    def reusable(self) -> int:
        """Bytes of free pages, after a checkpoint."""
        self.checkpoint()
        with self._translated():
            return int(self._db.pragma("freelist_count")) * PAGE_BYTES

    @property
    def is_gone(self) -> bool:
        """Whether the path no longer names this file: another process has dropped the partition."""
        moved = ctypes.c_int()
        self._db.file_control("main", apsw.SQLITE_FCNTL_HAS_MOVED, ctypes.addressof(moved))
        return bool(moved.value)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _moment(self) -> Iterator[None]:
        """A block whose reads are consistent as of one moment."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._roll_back()

    def _row(self) -> tuple[Any, ...] | None:
        row = self._db.execute("SELECT era, grant, opening, txn, header, crc, crcs FROM partition").fetchone()
        if row is not None and _row_crc(*row[:5]) != row[5]:
            raise DamagedError(f"partition {self._name}: the header failed its checksum")
        return row

    def _load(self, row: tuple[Any, ...] | None, *, packs: bool) -> Snapshot:
        """Read the records; `packs`: many leases as packed records."""
        if row is None:
            return Snapshot(0, None, {})
        snapshot = Snapshot(row[3], row[4], {})
        crcs = row[5] + self._read_leases(snapshot, packs)
        # Each part is a range of the primary key.
        parts = "SELECT * FROM record WHERE kind < ? UNION ALL SELECT * FROM record WHERE kind > ?"
        for kind, key, crc, value in self._db.execute(parts, (_LEASE, _LEASE)):
            if kind not in _KINDS or _record_crc(kind, key, value) != crc:
                raise self._record_damaged(kind, key)
            snapshot.records[_KINDS[kind], key] = value
            crcs += crc
        if crcs != row[6]:
            raise DamagedError(f"partition {self._name}: its records are inconsistent")
        return snapshot

    def _read_leases(self, snapshot: Snapshot, packs: bool) -> int:
        """Read the records of leases into the snapshot, of which there may be a million. Returns the sum of their checksums."""
        crcs = 0
        rows = self._db.execute("SELECT CAST(key AS BLOB), crc, value FROM record WHERE kind = ?", (_LEASE,))
        while some := list(itertools.islice(rows, _AT_ONCE)):
            keys, known, values = zip(*some, strict=True)
            for key, crc, value in some:
                if crc32(value, crc32(key, _LEASE_CRC)) != crc:
                    raise self._record_damaged(_LEASE, key.decode(errors="replace"))
            crcs += sum(known)
            if packs and (snapshot.leases or len(some) == _AT_ONCE):
                ends = np.cumsum(np.array([len(value) for value in values], np.int64))
                snapshot.leases.append(PackedRecords(np.array([int(key) for key in keys], np.int64), ends, b"".join(values)))
            else:
                snapshot.records.update(((RecordKind.LEASE, key.decode()), value) for key, value in zip(keys, values, strict=True))
        return crcs

    def _record_damaged(self, kind: str, key: str) -> DamagedError:
        return DamagedError(f"partition {self._name}: record {kind}:{key} failed its checksum")

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError, TypeError, ValueError) as error:
            # The last two: a column's value has the wrong type, or is not text.
            raise DamagedError(f"partition {self._name}: the database file is damaged ({error})") from error
        except (apsw.Error, OSError) as error:
            raise StoreUnavailableError(f"partition {self._name}: {error}") from error


def _row_crc(era: int, grant: int, opening: int, txn: int, header: bytes | None) -> int:
    # The flag distinguishes a header that was never written from an empty one.
    return crc32(header or b"", crc32(f"{era}.{grant}.{opening}.{txn}.{header is None}".encode()))
