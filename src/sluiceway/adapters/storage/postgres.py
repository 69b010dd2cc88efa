"""PostgreSQL partition store: all partitions share a few tables; one transaction and one round trip per scheduling cycle.

docs/adr/0007-postgres-layout.md has the reasons and the measurements behind the layout, the settings and the outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import LiteralString
from zlib import crc32

import psycopg
from psycopg.types.numeric import Int8

from sluiceway.adapters.background import Calls
from sluiceway.adapters.storage.postgres_connections import Connections, Link
from sluiceway.adapters.storage.postgres_openings import Openings
from sluiceway.adapters.storage.postgres_rows import (
    LOCK,
    LOOK,
    RECORDS,
    check_row,
    encoded,
    fence_of,
    name_of,
    place_of,
    record_crc,
    row_crc,
    snapshot_of,
    translated,
)
from sluiceway.adapters.storage.postgres_schema import MIGRATIONS, Schema, identity_of
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import (
    Changes,
    DamagedError,
    Fence,
    Least,
    PartitionRef,
    Snapshot,
    StoreUnavailableError,
)

DROP_ROWS = 1_000
"""Rows deleted per statement of `drop`, so that a large partition stays within the statement time-out."""

_READ = """
SELECT wanted.number, found.crc, found.data FROM partition, unnest(%b::int8[]) AS wanted (number), LATERAL (
    SELECT crc, data FROM blob WHERE blob.partition_id = partition.id AND blob.number = wanted.number LIMIT 1) AS found
WHERE incarnation = %s AND partition = %b"""

# A cycle is one statement, hence one transaction: all its changes depend on the row that `locked` found. Rows are looked up one by one in a
# subquery: for a join, the planner would read all rows while it believes that they are few.
_CYCLE: LiteralString = """
WITH locked AS (
    UPDATE partition SET txn = %b, header = %b, crc = %b
    WHERE incarnation = %s AND partition = %b AND fence_era = %b AND fence_grant = %b AND fence_opening = %b AND txn = %b
    RETURNING id)"""
_DROPPED_BLOBS: LiteralString = """, dropped AS (
    DELETE FROM blob WHERE ctid = ANY (ARRAY (
        SELECT (SELECT ctid FROM blob WHERE partition_id = locked.id AND number = gone.number)
        FROM locked, unnest(%b::int8[]) AS gone (number))))"""
_BLOBS: LiteralString = """, stored AS (
    INSERT INTO blob (partition_id, number, crc, data)
    SELECT id, fresh.* FROM locked, unnest(%b::int8[], %b::int8[], %b::bytea[]) AS fresh)"""
_COMPACTED_BLOBS: LiteralString = """, compacted AS (
    UPDATE blob SET crc = fresh.crc, data = fresh.data
    FROM unnest(%b::int8[], %b::int8[], %b::bytea[]) AS fresh (number, crc, data)
    WHERE blob.number = fresh.number AND ctid = ANY (ARRAY (
        SELECT (SELECT ctid FROM blob WHERE partition_id = locked.id AND number = old.number)
        FROM locked, unnest(%b::int8[]) AS old (number))))"""
_DELETES: LiteralString = """, deleted AS (
    DELETE FROM record WHERE ctid = ANY (ARRAY (
        SELECT (SELECT ctid FROM record WHERE partition_id = locked.id AND key = gone.key)
        FROM locked, unnest(%b::bytea[]) AS gone (key))))"""
_PUTS: LiteralString = """, put AS (
    INSERT INTO record (partition_id, key, crc, value)
    SELECT id, fresh.* FROM locked, unnest(%b::bytea[], %b::int8[], %b::bytea[]) AS fresh
    ON CONFLICT (partition_id, key) DO UPDATE SET crc = excluded.crc, value = excluded.value)"""
_CYCLE_END: LiteralString = """
SELECT (SELECT count(*) FROM locked), set_config('synchronous_commit', 'on', true)"""

_DROP_BLOBS = "DELETE FROM blob WHERE ctid = ANY (ARRAY (SELECT ctid FROM blob WHERE partition_id = %b LIMIT %b)) RETURNING 1"
_DROP_RECORDS = "DELETE FROM record WHERE ctid = ANY (ARRAY (SELECT ctid FROM record WHERE partition_id = %b LIMIT %b)) RETURNING 1"


class PostgresPartitionStore:
    """A PartitionStore in a schema of a PostgreSQL database (14 or newer). DONE means flushed to the server's log (`synchronous_commit=on`,
    whatever the server's default), and to its synchronous standbys if it has any.

    `dsn` is a connection string or URL; the tables are created in `schema` at the first call. Any number of stores and processes may use
    one schema concurrently. At most `max_connections` calls are with the server at a time; the others wait. A call that has begun is
    carried to its end even if its caller is cancelled. The server ends a statement after `statement_timeout` milliseconds; if it is still
    silent a second later it counts as hung, and a commit's outcome as UNKNOWN. The server's index REFUSES record keys of more than about
    2,600 bytes after compression.

    Used in one event loop. The constructor raises psycopg.ProgrammingError for an unreadable `dsn`, and does not connect.
    """

    def __init__(self, dsn: str, *, schema: str = "sluiceway", max_connections: int = 8, statement_timeout: Millis = 10_000) -> None:
        self._connections = Connections(dsn, schema, max_connections, statement_timeout)
        self._schema = Schema(self._connections, schema, MIGRATIONS)
        self._openings = Openings(self._connections, self._schema)
        # Cancelled in mid-statement, the driver would cancel on the server, and wait for that.
        self._calls = Calls()

    def at_once(self, ref: PartitionRef) -> bool:
        return False

    async def identify(self, new: str | None) -> str | None:
        return await self._calls.carry_out(self._identify(new))

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        return await self._openings.open(ref, fence, least)

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        return await self._calls.carry_out(self._apply(ref, changes.txn, fence, *_cycle(ref, changes, fence)))

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        return await self._calls.carry_out(self._read(ref, blobs)) if blobs else {}

    async def browse(self, ref: PartitionRef) -> Snapshot:
        return await self._calls.carry_out(self._browse(ref))

    async def drop(self, ref: PartitionRef) -> None:
        await self._calls.carry_out(self._drop(ref))

    async def release(self, ref: PartitionRef) -> None:
        """Nothing to free: connections are shared by all partitions."""

    async def close(self) -> None:
        await self._calls.ended()
        await self._openings.close()
        await self._connections.close()

    async def _identify(self, new: str | None) -> str | None:
        try:
            # A query creates nothing: this may be a different database.
            async with self._connections.one() if new is None else self._schema.link() as link:
                return await identity_of(link, self._schema.name, new)
        except psycopg.Error as error:
            raise StoreUnavailableError(f"schema {self._schema.name}: {error}") from error

    async def _apply(self, ref: PartitionRef, txn: int, fence: Fence, query: LiteralString, params: list[object]) -> Outcome:
        try:
            async with self._schema.link() as link:
                return await _commit(link, ref, txn, fence, query, params)
        except (StoreUnavailableError, psycopg.Error):
            # No connection or no schema: nothing of the cycle was sent.
            return Outcome.REFUSED

    async def _read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        with translated(ref):
            async with self._schema.link() as link:
                rows = await link.execute(_READ, [[*map(Int8, blobs)], *place_of(ref)])
        for number, crc, data in rows:
            if crc32(data) != crc:
                raise DamagedError(f"partition {name_of(ref)}: blob {number} failed its checksum")
        return {number: data for number, _, data in rows}

    async def _browse(self, ref: PartitionRef) -> Snapshot:
        with translated(ref):
            async with self._schema.link() as link, link.transaction("ISOLATION LEVEL REPEATABLE READ READ ONLY"):
                for row in await link.execute(LOOK, place_of(ref)):
                    check_row(ref, row)
                    return snapshot_of(ref, row, await link.execute(RECORDS, [Int8(row[0])]))
        return Snapshot(0, None, {})

    async def _drop(self, ref: PartitionRef) -> None:
        with translated(ref):
            async with self._schema.link() as link, link.transaction():
                for row in await link.execute(LOCK, place_of(ref)):
                    number = Int8(row[0])
                    for statement in (_DROP_BLOBS, _DROP_RECORDS):
                        while await link.execute(statement, [number, Int8(DROP_ROWS)]):
                            pass
                    await link.execute("DELETE FROM partition WHERE id = %b", [number])


async def _commit(link: Link, ref: PartitionRef, txn: int, fence: Fence, query: LiteralString, params: list[object]) -> Outcome:
    warnings = link.warnings
    try:
        found = (await link.execute(query, params))[0][0]
        if link.warnings > warnings:
            # The commit stopped waiting for a standby: it holds here, and would not after a fail-over.
            return Outcome.UNKNOWN
        if found:
            return Outcome.DONE
        rows = await link.execute(LOOK, place_of(ref))
    except psycopg.Error:
        # An error on a surviving connection came in place of the commit. On a broken connection, the commit may be on its way.
        return Outcome.UNKNOWN if link.closed else Outcome.REFUSED
    return Outcome.DONE if any(fence_of(row) == fence and row[4] == txn for row in rows) else Outcome.REFUSED


def _cycle(ref: PartitionRef, changes: Changes, fence: Fence) -> tuple[LiteralString, list[object]]:
    """The statement that carries out the changes, and its parameters."""
    crc = Int8(row_crc(fence, changes.txn, changes.header))
    parts = [_CYCLE]
    params: list[object] = [Int8(changes.txn), changes.header, crc, *place_of(ref), *map(Int8, fence), Int8(changes.txn - 1)]
    if changes.dropped_blobs:
        parts.append(_DROPPED_BLOBS)
        params.append([*map(Int8, changes.dropped_blobs)])
    if changes.blobs:
        parts.append(_BLOBS)
        blobs = list(changes.blobs.values())
        params += [[*map(Int8, changes.blobs)], [Int8(crc32(data)) for data in blobs], blobs]
    if changes.compacted_blobs:
        parts.append(_COMPACTED_BLOBS)
        blobs = list(changes.compacted_blobs.values())
        numbers = [*map(Int8, changes.compacted_blobs)]
        params += [numbers, [Int8(crc32(data)) for data in blobs], blobs, numbers]
    if changes.deletes:
        parts.append(_DELETES)
        params.append([encoded(key) for key in changes.deletes])
    if changes.puts:
        parts.append(_PUTS)
        keys, values = [encoded(key) for key in changes.puts], list(changes.puts.values())
        params += [keys, [Int8(record_crc(key, value)) for key, value in zip(keys, values, strict=True)], values]
    return "".join([*parts, _CYCLE_END]), params
