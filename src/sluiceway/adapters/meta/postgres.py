"""PostgreSQL MetaStore, shared by processes on any number of machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import LiteralString

import psycopg
from psycopg import sql

from sluiceway.adapters.background import Calls
from sluiceway.adapters.meta.commit import HISTORY, check_commit, forgotten, known_at
from sluiceway.adapters.meta.watches import Watches, changed_by, hint_of
from sluiceway.adapters.storage.postgres_connections import Connections, Link
from sluiceway.adapters.storage.postgres_schema import Schema
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import ConflictError, Entry, MetaUnknownError, Stamp, View
from sluiceway.ports.partition_store import StoreUnavailableError

# Keys are UTF-8 bytes, so that a prefix is one index range whatever the database's collation.
MIGRATIONS: tuple[LiteralString, ...] = (
    """
    CREATE TABLE store (one int PRIMARY KEY CHECK (one = 1), stamp bigint NOT NULL) WITH (fillfactor = 10);
    CREATE TABLE entry (key bytea PRIMARY KEY, stamp bigint NOT NULL, value bytea) WITH (fillfactor = 70);
    CREATE INDEX trace ON entry (stamp) WHERE value IS NULL;
    INSERT INTO store VALUES (1, 0);
    """,
    # A commit is one call, so the lock that all others wait for is held only for the server's work, not for a client's absence. The row
    # lock serialises the commits of all processes; each statement after it sees all earlier commits.
    """
    CREATE FUNCTION commit_entries(
        check_keys bytea[], check_stamps bigint[], prefixes text[], firsts bytea[], pasts bytea[], sinces bigint[],
        put_keys bytea[], put_values bytea[], delete_keys bytea[], history bigint, channel text, OUT new_stamp bigint, OUT wrong text)
    LANGUAGE plpgsql AS $$
    #variable_conflict use_column
    DECLARE last_stamp bigint;
    BEGIN
        PERFORM set_config('synchronous_commit', 'on', true);
        SELECT stamp INTO last_stamp FROM store FOR UPDATE;
        SELECT convert_from(wanted.key, 'UTF8') INTO wrong FROM unnest(check_keys, check_stamps) AS wanted (key, stamp)
            LEFT JOIN entry ON entry.key = wanted.key AND entry.value IS NOT NULL
            WHERE entry.stamp IS DISTINCT FROM wanted.stamp LIMIT 1;
        IF wrong IS NULL THEN
            SELECT 'something under ' || span.prefix INTO wrong
                FROM unnest(prefixes, firsts, pasts, sinces) AS span (prefix, first, past, since)
                WHERE span.since < last_stamp AND (span.since < last_stamp - history OR EXISTS (
                    SELECT 1 FROM entry WHERE entry.key >= span.first AND entry.key < span.past AND entry.stamp > span.since)) LIMIT 1;
        END IF;
        IF wrong IS NOT NULL THEN
            RETURN;
        END IF;
        new_stamp := last_stamp + 1;
        UPDATE store SET stamp = new_stamp;
        INSERT INTO entry (key, stamp, value)
            SELECT fresh.key, new_stamp, fresh.value FROM unnest(put_keys, put_values) AS fresh (key, value)
            ON CONFLICT (key) DO UPDATE SET stamp = EXCLUDED.stamp, value = EXCLUDED.value;
        IF cardinality(delete_keys) > 0 THEN
            UPDATE entry SET value = NULL, stamp = new_stamp WHERE key = ANY (delete_keys) AND value IS NOT NULL;
            DELETE FROM entry WHERE value IS NULL AND stamp <= new_stamp - history;
        END IF;
        PERFORM pg_notify(channel, '');
    END $$;
    """,
    # Since this version a queue's record has the homes of its idempotency keys, and its draining partitions: an older version would lose
    # that.
    "",
    # A notification says what has changed, and a beat of a large group sends none: each wakes every connection that listens.
    """
    DROP FUNCTION commit_entries;
    CREATE FUNCTION commit_entries(
        check_keys bytea[], check_stamps bigint[], prefixes text[], firsts bytea[], pasts bytea[], sinces bigint[],
        put_keys bytea[], put_values bytea[], delete_keys bytea[], history bigint, channel text, told text,
        OUT new_stamp bigint, OUT wrong text)
    LANGUAGE plpgsql AS $$
    #variable_conflict use_column
    DECLARE last_stamp bigint;
    BEGIN
        PERFORM set_config('synchronous_commit', 'on', true);
        SELECT stamp INTO last_stamp FROM store FOR UPDATE;
        SELECT convert_from(wanted.key, 'UTF8') INTO wrong FROM unnest(check_keys, check_stamps) AS wanted (key, stamp)
            LEFT JOIN entry ON entry.key = wanted.key AND entry.value IS NOT NULL
            WHERE entry.stamp IS DISTINCT FROM wanted.stamp LIMIT 1;
        IF wrong IS NULL THEN
            SELECT 'something under ' || span.prefix INTO wrong
                FROM unnest(prefixes, firsts, pasts, sinces) AS span (prefix, first, past, since)
                WHERE span.since < last_stamp AND (span.since < last_stamp - history OR EXISTS (
                    SELECT 1 FROM entry WHERE entry.key >= span.first AND entry.key < span.past AND entry.stamp > span.since)) LIMIT 1;
        END IF;
        IF wrong IS NOT NULL THEN
            RETURN;
        END IF;
        new_stamp := last_stamp + 1;
        UPDATE store SET stamp = new_stamp;
        INSERT INTO entry (key, stamp, value)
            SELECT fresh.key, new_stamp, fresh.value FROM unnest(put_keys, put_values) AS fresh (key, value)
            ON CONFLICT (key) DO UPDATE SET stamp = EXCLUDED.stamp, value = EXCLUDED.value;
        IF cardinality(delete_keys) > 0 THEN
            UPDATE entry SET value = NULL, stamp = new_stamp WHERE key = ANY (delete_keys) AND value IS NOT NULL;
            DELETE FROM entry WHERE value IS NULL AND stamp <= new_stamp - history;
        END IF;
        IF told IS NOT NULL THEN
            PERFORM pg_notify(channel, told);
        END IF;
    END $$;
    """,
)
"""Migration number n takes the layout from version n to n + 1. Released ones never change."""

# One statement is one snapshot. The row without a key is the store's.
_READ = """
SELECT NULL::bytea, stamp, NULL::bytea FROM store
UNION ALL SELECT key, stamp, value FROM entry WHERE key = ANY (%s::bytea[]) AND value IS NOT NULL
UNION ALL SELECT entry.* FROM unnest(%s::bytea[], %s::bytea[]) AS span (first, past), LATERAL (
    SELECT key, stamp, value FROM entry WHERE key >= first AND key < past AND value IS NOT NULL) AS entry"""
# Deletes are traces without a value. Where traces since the view's stamp may be gone, as `known_at` has it, all rows are sent.
_REFRESH = """
SELECT NULL::bytea, stamp, NULL::bytea FROM store
UNION ALL SELECT key, stamp, value FROM entry WHERE key >= %s::bytea AND key < %s::bytea AND stamp > (
    SELECT CASE WHEN stamp BETWEEN %s::bigint AND %s::bigint THEN %s::bigint ELSE 0 END FROM store)"""
_COMMIT = """
SELECT new_stamp, wrong FROM commit_entries(%s::bytea[], %s::bigint[], %s::text[], %s::bytea[], %s::bytea[], %s::bigint[],
    %s::bytea[], %s::bytea[], %s::bytea[], %s::bigint, %s::text, %s::text)"""
_CHANGED = "SELECT 1 FROM entry WHERE key >= %s AND key < %s AND stamp > %s LIMIT 1"


def _range(prefix: str) -> tuple[bytes, bytes]:
    """The range from the first key under the prefix to just past the last: UTF-8 never contains the byte 0xff."""
    start = prefix.encode()
    return start, start + b"\xff"


class PostgresMetaStore:
    """A durable MetaStore shared across machines, in a schema of its own, created at the first use.

    As in the SQLite store, the stamp is a counter row that each commit raises inside its transaction, and a deleted key leaves a trace for
    HISTORY commits. `watch` listens for notifications, and also polls every `poll_interval`: a notification may be lost with its
    connection.

    A statement takes at most `statement_timeout`, plus a second if the server is hung. Any fault during a commit is a MetaUnknownError,
    during a read a StoreUnavailableError. A call that has begun is carried to its end even if its caller is cancelled. Use from one event
    loop.
    """

    def __init__(
        self, dsn: str, *, schema: str = "sluiceway_meta", statement_timeout: Millis = 5_000, poll_interval: Millis = 1_000
    ) -> None:
        self._poll_interval = poll_interval
        self._connections = Connections(dsn, schema, 8, statement_timeout)
        self._schema = Schema(self._connections, schema, MIGRATIONS)
        self._seen: Stamp = 0
        # Cancelled in mid-statement, the driver would cancel on the server, and wait for that.
        self._calls = Calls()
        self._watches = Watches(lambda prefix, since: self._calls.carry_out(self._changed_since(prefix, since)), poll_interval)
        self._listening: asyncio.Task[None] | None = None

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        return await self._calls.carry_out(self._read(keys, prefixes))

    async def _read(self, keys: Sequence[str], prefixes: Sequence[str]) -> View:
        ranges = [_range(prefix) for prefix in prefixes]
        wanted = [[key.encode() for key in keys], [first for first, _ in ranges], [past for _, past in ranges]]
        try:
            async with self._schema.link() as link:
                rows = await link.execute(_READ, wanted)
        except psycopg.Error as error:
            raise StoreUnavailableError(f"meta store: {error}") from error
        stamp = next(stamp for key, stamp, _ in rows if key is None)
        self._seen = max(self._seen, stamp)
        return View(stamp, {key.decode(): Entry(value, at) for key, at, value in rows if key is not None})

    async def refresh(self, view: View, prefix: str) -> View:
        return await self._calls.carry_out(self._refresh(view, prefix))

    async def _refresh(self, view: View, prefix: str) -> View:
        since = view.stamp
        try:
            async with self._schema.link() as link:
                rows = await link.execute(_REFRESH, [*_range(prefix), since, since + HISTORY, since])
        except psycopg.Error as error:
            raise StoreUnavailableError(f"meta store: {error}") from error
        stamp = next(stamp for key, stamp, _ in rows if key is None)
        self._seen = max(self._seen, stamp)
        return known_at(view, stamp).after(stamp, ((key.decode(), value, at) for key, at, value in rows if key is not None))

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        puts = dict(puts or {})
        check_commit(puts, deletes)
        # Copied: the caller may use them again, and this may outlive the call.
        return await self._calls.carry_out(self._commit(dict(checks or {}), dict(unchanged or {}), puts, tuple(deletes), hint))

    async def _commit(
        self,
        checks: Mapping[str, Stamp | None],
        unchanged: Mapping[str, Stamp],
        puts: Mapping[str, bytes],
        deletes: Sequence[str],
        hint: bool,
    ) -> Stamp:
        spans = [_range(prefix) for prefix in unchanged]
        wanted = [[key.encode() for key in checks], list(checks.values())]
        wanted += [list(unchanged), [first for first, _ in spans], [past for _, past in spans], list(unchanged.values())]
        written = [[key.encode() for key in puts], list(puts.values()), [key.encode() for key in deletes]]
        told = hint_of([*puts, *deletes]) if hint else None
        try:
            async with self._schema.link() as link:
                ((stamp, wrong),) = await link.execute(_COMMIT, [*wanted, *written, HISTORY, self._channel, told])
        except (psycopg.Error, StoreUnavailableError) as error:
            raise MetaUnknownError(f"meta store: {error}") from error
        if wrong is not None:
            raise ConflictError(f"{wrong} has changed")
        self._seen = max(self._seen, stamp)
        if hint:
            self._watches.wake([*puts, *deletes])
        return int(stamp)

    async def _changed(self, link: Link, prefix: str, since: Stamp, now: Stamp) -> bool:
        if since >= now or forgotten(since, now):
            return since < now
        return bool(await link.execute(_CHANGED, [*_range(prefix), since]))

    @property
    def _channel(self) -> str:
        # A channel's name has at most 63 bytes.
        return f"sluiceway {self._schema.name}".encode()[:63].decode(errors="ignore")

    # ---- watch ------------------------------------------------------------------------------------------------

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        """Yields for every change after this call. The first hint may be about an earlier one."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        return self._watches.watch(prefix, self._seen)

    async def _changed_since(self, prefix: str, since: Stamp) -> tuple[bool, Stamp]:
        try:
            async with self._schema.link() as link:
                now: Stamp = (await link.execute("SELECT stamp FROM store"))[0][0]
                return await self._changed(link, prefix, since, now), now
        except (psycopg.Error, StoreUnavailableError):
            # `read` reports faults; a hint may come late.
            return False, since

    async def _listen(self) -> None:
        """Wake the watchers at each notification; without a connection they poll."""
        while not self._watches.closed:
            with contextlib.suppress(StoreUnavailableError, psycopg.Error):
                link = await self._connections.connect()
                try:
                    await link.run(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
                    self._watches.wake()
                    async for told in link.notified():
                        self._watches.wake(changed_by(told))
                finally:
                    await link.close()
            await asyncio.sleep(self._poll_interval / 1_000)

    async def close(self) -> None:
        self._watches.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        await self._calls.ended()
        await self._connections.close()
