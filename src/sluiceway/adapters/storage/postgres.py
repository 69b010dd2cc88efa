"""PostgreSQL partition store: all partitions share a few tables; one transaction and one round trip per scheduling cycle.

docs/adr/0007-postgres-layout.md has the reasons and the measurements behind the layout, the settings and the outcomes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, LiteralString, TypeVar
from zlib import crc32

import psycopg
from psycopg.types.numeric import Int8

from sluiceway.adapters.storage.postgres_connections import Connections, Link
from sluiceway.adapters.storage.postgres_schema import MIGRATIONS, Schema, identity_of
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import (
    Changes,
    DamagedError,
    Fence,
    FencedError,
    Least,
    LostError,
    PartitionRef,
    RecordKey,
    RecordKind,
    Snapshot,
    StoreUnavailableError,
)

T = TypeVar("T")

_KINDS = {kind.value.encode(): kind for kind in RecordKind}

TAKEOVER_TIMEOUT: Millis = 500
"""Milliseconds that `open` waits for a transaction in flight before it ends that transaction's connection."""

DROP_ROWS = 1_000
"""Rows deleted per statement of `drop`, so that a large partition stays within the statement time-out."""

_FIELDS: LiteralString = "id, fence_era, fence_grant, fence_opening, txn, header, crc"
_LOOK: LiteralString = f"SELECT {_FIELDS} FROM partition WHERE incarnation = %s AND partition = %b"

_LOCK: LiteralString = f"{_LOOK} FOR UPDATE"

# Creates the row or locks the existing one, and returns its newest state either way.
_CLAIM: LiteralString = f"""
INSERT INTO partition (incarnation, partition, fence_era, fence_grant, fence_opening, txn, header, crc)
VALUES (%s, %b, %b, %b, %b, 0, NULL, %b)
ON CONFLICT (incarnation, partition) DO UPDATE SET txn = partition.txn
RETURNING {_FIELDS}, xmax = 0"""
_MADE = 7
"""Index of `xmax = 0` in the row: the row was newly created."""
_RAISE = "UPDATE partition SET fence_era = %b, fence_grant = %b, fence_opening = %b, crc = %b WHERE id = %b"
_RECORDS = "SELECT key, crc, value FROM record WHERE partition_id = %b"
_END_BLOCKERS = "SELECT pg_terminate_backend(pid) FROM unnest(pg_blocking_pids(%b::int)) AS pid"
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
        self._calls: set[asyncio.Task[Any]] = set()

    def at_once(self, ref: PartitionRef) -> bool:
        return False

    async def identify(self, new: str | None) -> str | None:
        return await self._carry_out(self._identify(new))

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        return await self._carry_out(self._open(ref, fence, least))

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        return await self._carry_out(self._apply(ref, changes.txn, fence, *_cycle(ref, changes, fence)))

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        return await self._carry_out(self._read(ref, blobs)) if blobs else {}

    async def browse(self, ref: PartitionRef) -> Snapshot:
        return await self._carry_out(self._browse(ref))

    async def drop(self, ref: PartitionRef) -> None:
        await self._carry_out(self._drop(ref))

    async def release(self, ref: PartitionRef) -> None:
        """Nothing to free: connections are shared by all partitions."""

    async def close(self) -> None:
        if self._calls:
            await asyncio.wait(self._calls)
        await self._connections.close()

    async def _carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        # Cancelled in mid-statement, the driver would cancel on the server, and wait for that.
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _identify(self, new: str | None) -> str | None:
        try:
            # A query creates nothing: this may be a different database.
            async with self._connections.one() if new is None else self._schema.link() as link:
                return await identity_of(link, self._schema.name, new)
        except psycopg.Error as error:
            raise StoreUnavailableError(f"schema {self._schema.name}: {error}") from error

    async def _open(self, ref: PartitionRef, fence: Fence, least: Least | None) -> Snapshot:
        with _translated(ref):
            async with self._schema.link() as link:
                # Checked before locking: a former owner must not end the current owner's transactions.
                for row in await link.execute(_LOOK, _place(ref)):
                    _check_fence(ref, row, fence)
                async with link.transaction():
                    row = await self._claim(link, ref, fence, least)
                    _check_row(ref, row)
                    if least is not None or not row[_MADE]:
                        _check_fence(ref, row, fence)
                    LostError.check(_name(ref), Least(Fence(*row[1:4]), row[4]), least)
                    number, txn, header = row[0], row[4], row[5]
                    await link.execute(_RAISE, [*map(Int8, fence), Int8(_row_crc(fence, txn, header)), Int8(number)])
                    # A separate statement, so that it sees everything committed before the row was locked.
                    return await _load(link, ref, row)

    async def _claim(self, link: Link, ref: PartitionRef, fence: Fence, least: Least | None) -> tuple[Any, ...]:
        """Lock the partition's row, which excludes every other transaction that would change the partition."""
        if least is None:
            params = [*_place(ref), *map(Int8, fence), Int8(_row_crc(fence, 0, None))]
            claiming = asyncio.create_task(link.execute(_CLAIM, params))
        else:
            claiming = asyncio.create_task(link.execute(_LOCK, _place(ref)))
        done, _ = await asyncio.wait([claiming], timeout=TAKEOVER_TIMEOUT / 1000)
        if not done:
            # If this fails, claiming fails too, at its lock time-out.
            with contextlib.suppress(StoreUnavailableError, psycopg.Error):
                await self._end_blockers(link.backend_pid)
        rows = await claiming
        if not rows:
            LostError.check(_name(ref), None, least)
        return rows[0]

    async def _end_blockers(self, backend_pid: int) -> None:
        """Terminate the connections whose locks that backend waits for. Their uncommitted work is undone."""
        helper = await self._connections.connect()
        try:
            await helper.execute(_END_BLOCKERS, [Int8(backend_pid)])
        finally:
            await helper.close()

    async def _apply(self, ref: PartitionRef, txn: int, fence: Fence, query: LiteralString, params: list[object]) -> Outcome:
        try:
            async with self._schema.link() as link:
                return await _commit(link, ref, txn, fence, query, params)
        except (StoreUnavailableError, psycopg.Error):
            # No connection or no schema: nothing of the cycle was sent.
            return Outcome.REFUSED

    async def _read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        with _translated(ref):
            async with self._schema.link() as link:
                rows = await link.execute(_READ, [[*map(Int8, blobs)], *_place(ref)])
        for number, crc, data in rows:
            if crc32(data) != crc:
                raise DamagedError(f"partition {_name(ref)}: blob {number} failed its checksum")
        return {number: data for number, _, data in rows}

    async def _browse(self, ref: PartitionRef) -> Snapshot:
        with _translated(ref):
            async with self._schema.link() as link, link.transaction("ISOLATION LEVEL REPEATABLE READ READ ONLY"):
                for row in await link.execute(_LOOK, _place(ref)):
                    _check_row(ref, row)
                    return await _load(link, ref, row)
        return Snapshot(0, None, {})

    async def _drop(self, ref: PartitionRef) -> None:
        with _translated(ref):
            async with self._schema.link() as link, link.transaction():
                for row in await link.execute(_LOCK, _place(ref)):
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
        rows = await link.execute(_LOOK, _place(ref))
    except psycopg.Error:
        # An error on a surviving connection came in place of the commit. On a broken connection, the commit may be on its way.
        return Outcome.UNKNOWN if link.closed else Outcome.REFUSED
    return Outcome.DONE if any(Fence(*row[1:4]) == fence and row[4] >= txn for row in rows) else Outcome.REFUSED


def _cycle(ref: PartitionRef, changes: Changes, fence: Fence) -> tuple[LiteralString, list[object]]:
    """The statement that carries out the changes, and its parameters."""
    crc = Int8(_row_crc(fence, changes.txn, changes.header))
    parts = [_CYCLE]
    params: list[object] = [Int8(changes.txn), changes.header, crc, *_place(ref), *map(Int8, fence), Int8(changes.txn - 1)]
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
        params.append([_encoded(key) for key in changes.deletes])
    if changes.puts:
        parts.append(_PUTS)
        keys, values = [_encoded(key) for key in changes.puts], list(changes.puts.values())
        params += [keys, [Int8(_record_crc(key, value)) for key, value in zip(keys, values, strict=True)], values]
    return "".join([*parts, _CYCLE_END]), params


async def _load(link: Link, ref: PartitionRef, row: tuple[Any, ...]) -> Snapshot:
    records: dict[RecordKey, bytes] = {}
    for key, crc, value in await link.execute(_RECORDS, [Int8(row[0])]):
        kind, _, name = key.partition(b":")
        if kind not in _KINDS or _record_crc(key, value) != crc:
            raise DamagedError(f"partition {_name(ref)}: record {key.decode(errors='replace')} failed its checksum")
        records[_KINDS[kind], name.decode()] = value
    return Snapshot(row[4], row[5], records)


def _check_row(ref: PartitionRef, row: tuple[Any, ...]) -> None:
    if _row_crc(Fence(*row[1:4]), row[4], row[5]) != row[6]:
        raise DamagedError(f"partition {_name(ref)}: the header failed its checksum")


def _check_fence(ref: PartitionRef, row: tuple[Any, ...], fence: Fence) -> None:
    FencedError.check(_name(ref), Fence(*row[1:4]), fence)


def _place(ref: PartitionRef) -> list[object]:
    return [ref.incarnation, Int8(ref.partition)]


def _name(ref: PartitionRef) -> str:
    return f"{ref.incarnation}-{ref.partition}"


def _encoded(key: RecordKey) -> bytes:
    return f"{key[0].value}:{key[1]}".encode()


def _record_crc(key: bytes, value: bytes) -> int:
    return crc32(value, crc32(key))


def _row_crc(fence: Fence, txn: int, header: bytes | None) -> int:
    # The flag distinguishes a header that was never written from an empty one.
    return crc32(header or b"", crc32(f"{fence.era}.{fence.grant}.{fence.opening}.{txn}.{header is None}".encode()))


@contextlib.contextmanager
def _translated(ref: PartitionRef) -> Iterator[None]:
    try:
        yield
    except (psycopg.errors.DataCorrupted, psycopg.errors.IndexCorrupted) as error:
        raise DamagedError(f"partition {_name(ref)}: the server found damage ({error})") from error
    except psycopg.Error as error:
        raise StoreUnavailableError(f"partition {_name(ref)}: {error}") from error
