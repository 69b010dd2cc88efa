"""SQLite MetaStore: one file, shared by the processes of one machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import apsw

from sluiceway.adapters.disk import keep_database_private
from sluiceway.adapters.layout import migrate
from sluiceway.adapters.lock import one_at_a_time
from sluiceway.adapters.meta.commit import HISTORY, check_commit, forgotten, known_at
from sluiceway.adapters.meta.watches import Watches
from sluiceway.adapters.wal_check import check_log
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.durability import sync_directory
from sluiceway.ports.meta_store import ConflictError, Entry, MetaUnknownError, Stamp, View
from sluiceway.ports.partition_store import DamagedError, StoreUnavailableError

T = TypeVar("T")

# Keys are UTF-8 bytes, so that a prefix is one index range whatever its characters.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), stamp INTEGER NOT NULL);
    CREATE TABLE entry (key BLOB PRIMARY KEY, stamp INTEGER NOT NULL, value BLOB) WITHOUT ROWID;
    CREATE INDEX trace ON entry (stamp) WHERE value IS NULL;
    INSERT INTO store VALUES (1, 0);
    """,
    # Since this version a queue's record has the homes of its idempotency keys, and its draining partitions: an older version would lose
    # that.
    "",
)
"""Migration number n takes the layout from version n to n + 1. Released ones never change."""


def _range(prefix: str) -> tuple[bytes, bytes]:
    """The range from the first key under the prefix to just past the last: UTF-8 never contains the byte 0xff."""
    start = prefix.encode()
    return start, start + b"\xff"


class SqliteMetaStore:
    """A durable MetaStore for the processes of one machine.

    The stamp is a counter row that each commit raises inside its transaction, so stamps become visible in commit order. A deleted key stays
    as a row without a value, for `unchanged` and `watch` to find; such a trace goes after HISTORY commits, and a question about an older
    stamp is answered as *changed*, which costs the caller one more read. `watch` wakes at once for commits made through this object, and
    polls for those of other processes every `poll_interval`.

    A transaction waits up to `busy_timeout` for another process. Any later fault during a commit is a MetaUnknownError, during a read or
    the constructor a StoreUnavailableError. Use from one event loop.
    """

    def __init__(self, path: Path, *, busy_timeout: Millis = 10_000, poll_interval: Millis = 200) -> None:
        self._seen: Stamp = 0
        self._watches = Watches(self._changed_since, poll_interval)
        try:
            keep_database_private(path)
            self._db = apsw.Connection(str(path))
            try:
                # SQLite does not wait for another process that enables the new file's write-ahead log, too: it fails at once.
                with one_at_a_time(path.parent):
                    self._set_up(path, busy_timeout)
                    sync_directory(path.parent)
            except BaseException:
                self._db.close()
                raise
        except DamagedError as error:
            raise StoreUnavailableError(str(error)) from error
        except (apsw.Error, OSError) as error:
            raise StoreUnavailableError(f"meta store {path}: {error}") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluiceway-meta")

    def _set_up(self, path: Path, busy_timeout: Millis) -> None:
        db = self._db
        db.set_busy_timeout(busy_timeout)
        check_log(db, f"meta store {path}")
        db.pragma("journal_mode", "wal")
        db.pragma("synchronous", "full")
        migrate(db, MIGRATIONS, f"meta store {path}")

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        try:
            view = await self._run(lambda: self._read(keys, prefixes))
        except apsw.Error as error:
            raise StoreUnavailableError(f"meta store: {error}") from error
        self._seen = max(self._seen, view.stamp)
        return view

    def _read(self, keys: Sequence[str], prefixes: Sequence[str]) -> View:
        with self._transaction("BEGIN"):
            stamp = self._stamp()
            found: dict[str, Entry] = {}
            columns = "SELECT key, value, stamp FROM entry WHERE value IS NOT NULL AND"
            for where, bindings in (("key = ?", [(key.encode(),) for key in keys]), ("key >= ? AND key < ?", map(_range, prefixes))):
                rows: Iterator[tuple[Any, ...]] = self._db.executemany(f"{columns} {where}", bindings)
                found.update((key.decode(), Entry(value, at)) for key, value, at in rows)
        return View(stamp, found)

    async def refresh(self, view: View, prefix: str) -> View:
        try:
            fresh = await self._run(lambda: self._refresh(view, prefix))
        except apsw.Error as error:
            raise StoreUnavailableError(f"meta store: {error}") from error
        self._seen = max(self._seen, fresh.stamp)
        return fresh

    def _refresh(self, view: View, prefix: str) -> View:
        with self._transaction("BEGIN"):
            stamp = self._stamp()
            known = known_at(view, stamp)
            query = "SELECT key, value, stamp FROM entry WHERE key >= ? AND key < ? AND stamp > ?"
            rows: Iterator[tuple[Any, ...]] = self._db.execute(query, (*_range(prefix), known.stamp))
            return known.after(stamp, ((key.decode(), value, at) for key, value, at in rows))

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        puts = puts or {}
        check_commit(puts, deletes)
        try:
            stamp = await self._run(lambda: self._commit(checks or {}, unchanged or {}, puts, deletes))
        except apsw.Error as error:
            raise MetaUnknownError(f"meta store: {error}") from error
        self._seen = max(self._seen, stamp)
        if hint:
            self._watches.wake([*puts, *deletes])
        return stamp

    def _commit(
        self, checks: Mapping[str, Stamp | None], unchanged: Mapping[str, Stamp], puts: Mapping[str, bytes], deletes: Sequence[str]
    ) -> Stamp:
        db = self._db
        with self._transaction("BEGIN IMMEDIATE"):
            now = self._stamp()
            for key, expected in checks.items():
                row = db.execute("SELECT stamp FROM entry WHERE key = ? AND value IS NOT NULL", (key.encode(),)).fetchone()
                if (row and row[0]) != expected:
                    raise ConflictError(f"{key} has changed")
            for prefix, since in unchanged.items():
                if self._changed(prefix, since, now):
                    raise ConflictError(f"something under {prefix} has changed")
            stamp = now + 1
            db.execute("UPDATE store SET stamp = ?", (stamp,))
            db.executemany("REPLACE INTO entry VALUES (?, ?, ?)", ((key.encode(), stamp, value) for key, value in puts.items()))
            if deletes:
                gone = ((stamp, key.encode()) for key in deletes)
                db.executemany("UPDATE entry SET value = NULL, stamp = ? WHERE key = ? AND value IS NOT NULL", gone)
                db.execute("DELETE FROM entry WHERE value IS NULL AND stamp <= ?", (stamp - HISTORY,))
        return stamp

    async def fill(self, stamp: Stamp, entries: Mapping[str, Entry]) -> None:
        """Give a new, empty store these entries with their stamps, in one commit, and `stamp` as its own. Raises StoreUnavailableError."""

        def fill() -> None:
            with self._transaction("BEGIN IMMEDIATE"):
                self._db.execute("UPDATE store SET stamp = ?", (stamp,))
                rows = ((key.encode(), entry.stamp, entry.value) for key, entry in entries.items())
                self._db.executemany("INSERT INTO entry VALUES (?, ?, ?)", rows)

        try:
            await self._run(fill)
        except apsw.Error as error:
            raise StoreUnavailableError(f"meta store: {error}") from error

    def _stamp(self) -> Stamp:
        row: Any = self._db.execute("SELECT stamp FROM store").fetchone()
        return int(row[0])

    def _changed(self, prefix: str, since: Stamp, now: Stamp) -> bool:
        if since >= now or forgotten(since, now):
            return since < now
        query = "SELECT 1 FROM entry WHERE key >= ? AND key < ? AND stamp > ? LIMIT 1"
        return self._db.execute(query, (*_range(prefix), since)).fetchone() is not None

    async def _changed_since(self, prefix: str, since: Stamp) -> tuple[bool, Stamp]:
        def look() -> tuple[bool, Stamp]:
            with self._transaction("BEGIN"):
                now = self._stamp()
                return self._changed(prefix, since, now), now

        try:
            return await self._run(look)
        except apsw.Error:
            # `read` reports faults; a hint may come late.
            return False, since

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        """Yields for every change after this call. The first hint may be about an earlier one."""
        return self._watches.watch(prefix, self._seen)

    async def close(self) -> None:
        if not self._watches.closed:
            self._watches.close()
            await self._run(self._db.close)
            self._thread.shutdown()

    async def _run(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self._db.execute(begin)
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
