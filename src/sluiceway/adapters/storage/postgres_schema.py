"""Tables of a PostgreSQL partition store, and their migrations. docs/adr/0007-postgres-layout.md has the reasons."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import LiteralString

from psycopg import sql

from sluiceway.adapters.storage.postgres_connections import Connections, Link
from sluiceway.ports.partition_store import StoreUnavailableError

_CHURN = "autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off"

MIGRATIONS: tuple[LiteralString, ...] = (
    f"""
    CREATE TABLE partition (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, incarnation text COLLATE "C" NOT NULL, partition bigint NOT NULL,
        fence_era bigint NOT NULL, fence_grant bigint NOT NULL, fence_opening bigint NOT NULL,
        txn bigint NOT NULL, header bytea, crc bigint NOT NULL, UNIQUE (incarnation, partition))
    WITH (fillfactor = 25, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0, {_CHURN});

    CREATE TABLE record (
        partition_id bigint NOT NULL, crc bigint NOT NULL, key bytea NOT NULL, value bytea NOT NULL, PRIMARY KEY (partition_id, key))
    WITH (fillfactor = 80, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0.05, {_CHURN});

    CREATE TABLE blob (
        partition_id bigint NOT NULL, number bigint NOT NULL, crc bigint NOT NULL, data bytea NOT NULL, PRIMARY KEY (partition_id, number))
    WITH (autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.05, {_CHURN},
        toast.autovacuum_vacuum_threshold = 20000, toast.autovacuum_vacuum_scale_factor = 0.05,
        toast.autovacuum_vacuum_cost_delay = 0, toast.vacuum_truncate = off);
    ALTER TABLE blob ALTER COLUMN data SET STORAGE EXTERNAL;
    """,
    # Since this version a header says what the partition takes: an older version would drop that, and lose what it put into a shut one.
    "",
    # Since this version a key's record may be an intent, and a blob compacted: an older version can read neither.
    "",
    # Since this version there are records of failed attempts: an older version takes them for damage.
    "",
)
"""Migration number n takes the layout from version n to n + 1. Released ones never change."""


class Schema:
    """A schema in the newest of these layouts. The first link to it upgrades it; any number of processes may do so concurrently."""

    def __init__(self, connections: Connections, name: str, migrations: Sequence[LiteralString]) -> None:
        self._connections = connections
        self.name = name
        self._migrations = migrations
        self._migrating = asyncio.Lock()
        self._migrated = False

    @contextlib.asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        """A link for the length of a block. Raises StoreUnavailableError, also if a newer Sluiceway wrote the schema, psycopg.Error."""
        async with self._connections.one() as link:
            if not self._migrated:
                async with self._migrating:
                    await _migrate(link, self.name, self._migrations)
                    self._migrated = True
            yield link


async def _migrate(link: Link, schema: str, migrations: Sequence[LiteralString]) -> None:
    if await _version(link, schema) == len(migrations):
        return
    async with link.transaction():
        await link.execute("SELECT pg_advisory_xact_lock(hashtextextended('sluiceway layout ' || %s, 0))", [schema])
        version = await _version(link, schema)
        if version > len(migrations):
            known = f"layout {version}; this one knows up to {len(migrations)}"
            raise StoreUnavailableError(f"schema {schema!r} was written by a newer version of Sluiceway ({known})")
        if version == 0:
            if not await link.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [schema]):
                await link.run(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
            await link.run("CREATE TABLE layout (version bigint NOT NULL)")
        for script in migrations[version:]:
            await link.run(script)
        await link.run("DELETE FROM layout")
        await link.execute("INSERT INTO layout VALUES (%s)", [len(migrations)])


async def identity_of(link: Link, schema: str, new: str | None) -> str | None:
    """PartitionStore.identify. Raises psycopg.Error. The table is not part of the layout: older versions ignore it."""
    known = "SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'identity'"
    if not await link.execute(known, [schema]):
        if new is None:
            return None
        async with link.transaction():
            await link.execute("SELECT pg_advisory_xact_lock(hashtextextended('sluiceway identity ' || %s, 0))", [schema])
            await link.run("CREATE TABLE IF NOT EXISTS identity (one boolean PRIMARY KEY CHECK (one), name text NOT NULL)")
            await link.execute("INSERT INTO identity VALUES (true, %s) ON CONFLICT DO NOTHING", [new])
    rows = await link.execute("SELECT name FROM identity")
    return str(rows[0][0]) if rows else None


async def _version(link: Link, schema: str) -> int:
    """The schema's layout version; 0: it is empty."""
    if not await link.execute("SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'layout'", [schema]):
        return 0
    rows = await link.execute("SELECT version FROM layout")
    return int(rows[0][0])
