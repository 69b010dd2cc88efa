"""Openings of partitions in PostgreSQL. Those asked for at the same moment share a transaction.

docs/adr/0078-openings-in-groups.md has the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

import psycopg
from psycopg.types.numeric import Int8

from sluiceway.adapters.storage.postgres_connections import Connections, Link
from sluiceway.adapters.storage.postgres_rows import (
    FIELDS,
    LOCK,
    LOOK,
    RECORDS,
    Row,
    check_row,
    fence_of,
    name_of,
    place_of,
    row_crc,
    snapshot_of,
    translated,
)
from sluiceway.adapters.storage.postgres_schema import Schema
from sluiceway.kernel.clock import Millis
from sluiceway.ports.partition_store import (
    DamagedError,
    Fence,
    FencedError,
    Least,
    LostError,
    PartitionRef,
    Snapshot,
    StoreUnavailableError,
)

TAKEOVER_TIMEOUT: Millis = 500
"""Milliseconds that an opening waits for a transaction in flight before it ends that transaction's connection."""

MAX_GROUP = 250
"""Partitions opened in one transaction. A larger one would be hardly cheaper, and hold all of its rows for longer."""

MANY_RECORDS = 100
"""Records from which on a partition is opened on its own: reading them would hold up the rest of its group."""

# Creates the row or locks the existing one, and returns its newest state either way.
_CLAIM: LiteralString = f"""
INSERT INTO partition (incarnation, partition, fence_era, fence_grant, fence_opening, txn, header, crc)
VALUES (%s, %b, %b, %b, %b, 0, NULL, %b)
ON CONFLICT (incarnation, partition) DO UPDATE SET txn = partition.txn
RETURNING {FIELDS}, xmax = 0"""
_MADE = 7
"""Index of `xmax = 0` in the row: the row was newly created."""
_RAISE = "UPDATE partition SET fence_era = %b, fence_grant = %b, fence_opening = %b, crc = %b WHERE id = %b"
_END_BLOCKERS = "SELECT pg_terminate_backend(pid) FROM unnest(pg_blocking_pids(%b::int)) AS pid"

_SHORT_WAIT: Final[LiteralString] = f"SET LOCAL lock_timeout = {TAKEOVER_TIMEOUT}"

# The same for a group. Its rows are looked up one by one, as in a cycle: see there.
_CREATE_ALL: LiteralString = """
INSERT INTO partition (incarnation, partition, fence_era, fence_grant, fence_opening, crc, txn)
SELECT wanted.*, 0 FROM unnest(%s::text[], %b::int8[], %b::int8[], %b::int8[], %b::int8[], %b::int8[]) AS wanted
ON CONFLICT (incarnation, partition) DO NOTHING RETURNING incarnation, partition"""
_LOCK_ALL: LiteralString = f"""
SELECT wanted.place, EXISTS (
    SELECT FROM partition WHERE incarnation = wanted.incarnation AND partition = wanted.partition), found.*
FROM unnest(%s::text[], %b::int8[]) WITH ORDINALITY AS wanted (incarnation, partition, place) LEFT JOIN LATERAL (
    SELECT {FIELDS} FROM partition WHERE incarnation = wanted.incarnation AND partition = wanted.partition
    LIMIT 1 FOR UPDATE SKIP LOCKED) AS found ON true"""
_RECORDS_OF_ALL: LiteralString = """
SELECT wanted.id, found.* FROM unnest(%b::int8[]) AS wanted (id), LATERAL (
    SELECT key, crc, value FROM record WHERE partition_id = wanted.id LIMIT %b) AS found"""
_RAISE_ALL: LiteralString = """
UPDATE partition SET fence_era = raised.era, fence_grant = raised.granted, fence_opening = raised.opening, crc = raised.crc
FROM unnest(%b::int8[], %b::int8[], %b::int8[], %b::int8[], %b::int8[]) AS raised (id, era, granted, opening, crc)
WHERE partition.id = raised.id"""


class _Wanted(NamedTuple):
    """An opening that was asked for."""

    ref: PartitionRef
    fence: Fence
    least: Least | None
    future: asyncio.Future[Snapshot]

    def end(self, result: Snapshot | Exception) -> None:
        if self.future.done():
            # Its caller was cancelled.
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


_Results = dict[PartitionRef, Snapshot | Exception]


class Openings:
    """`PartitionStore.open` of one store. Each opening has its own result, whatever becomes of the others in its group."""

    def __init__(self, connections: Connections, schema: Schema) -> None:
        self._connections = connections
        self._schema = schema
        self._waiting: list[_Wanted] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None) -> Snapshot:
        """Open the partition, together with those for which that is asked before the event loop comes round again."""
        wanted = _Wanted(ref, fence, least, asyncio.get_running_loop().create_future())
        self._waiting.append(wanted)
        if len(self._waiting) == 1:
            task = asyncio.create_task(self._open_waiting())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await wanted.future

    async def close(self) -> None:
        """Wait for what has begun."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _open_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        first = dict[PartitionRef, _Wanted]()
        again = [each for each in waiting if first.setdefault(each.ref, each) is not each]
        # In one order, so that groups of different processes do not wait for one another in a circle.
        group = sorted(first.values(), key=lambda each: each.ref)
        await asyncio.gather(*(self._open_group(group[at : at + MAX_GROUP]) for at in range(0, len(group), MAX_GROUP)))
        for each in again:
            await self._open_alone(each)

    async def _open_group(self, group: Sequence[_Wanted]) -> None:
        results = await self._open_together(group) if len(group) > 1 else {}
        for each in group:
            if each.ref in results:
                each.end(results[each.ref])
        await asyncio.gather(*(self._open_alone(each) for each in group if each.ref not in results))

    async def _open_alone(self, wanted: _Wanted) -> None:
        try:
            wanted.end(await self._open(wanted.ref, wanted.fence, wanted.least))
        except Exception as error:
            wanted.end(error)

    # ---- in a group -------------------------------------------------------------------------------------------

    async def _open_together(self, group: Sequence[_Wanted]) -> _Results:
        """Open the partitions in one transaction. Those without a result are to be opened alone: surely nothing has happened to them."""
        is_ending = False
        try:
            async with self._schema.link() as link, link.transaction():
                results = await _open_all(link, group)
                is_ending = True
            return results
        except psycopg.Error as error:
            if not is_ending and error.sqlstate is not None:
                # The server answers, and it may be for one of them that it refuses all.
                return {}
            return {each.ref: StoreUnavailableError(f"partition {name_of(each.ref)}: {error}") for each in group}
        except StoreUnavailableError as error:
            return {each.ref: StoreUnavailableError(str(error)) for each in group}
        except Exception as error:
            return {each.ref: error for each in group}

    # ---- alone ------------------------------------------------------------------------------------------------

    async def _open(self, ref: PartitionRef, fence: Fence, least: Least | None) -> Snapshot:
        with translated(ref):
            async with self._schema.link() as link:
                # Checked before locking: a former owner must not end the current owner's transactions.
                for row in await link.execute(LOOK, place_of(ref)):
                    FencedError.check(name_of(ref), fence_of(row), fence)
                async with link.transaction():
                    row = await self._claim(link, ref, fence, least)
                    check_row(ref, row)
                    if least is not None or not row[_MADE]:
                        FencedError.check(name_of(ref), fence_of(row), fence)
                    LostError.check(name_of(ref), Least(fence_of(row), row[4]), least)
                    number, txn, header = row[0], row[4], row[5]
                    await link.execute(_RAISE, [*map(Int8, fence), Int8(row_crc(fence, txn, header)), Int8(number)])
                    # A separate statement, so that it sees everything committed before the row was locked. Records come with cycles.
                    return snapshot_of(ref, row, [] if header is None else await link.execute(RECORDS, [Int8(number)]))

    async def _claim(self, link: Link, ref: PartitionRef, fence: Fence, least: Least | None) -> Row:
        """Lock the partition's row, which excludes every other transaction that would change the partition."""
        if least is None:
            params = [*place_of(ref), *map(Int8, fence), Int8(row_crc(fence, 0, None))]
            claiming = asyncio.create_task(link.execute(_CLAIM, params))
        else:
            claiming = asyncio.create_task(link.execute(LOCK, place_of(ref)))
        done, _ = await asyncio.wait([claiming], timeout=TAKEOVER_TIMEOUT / 1000)
        if not done:
            # If this fails, claiming fails too, at its lock time-out.
            with contextlib.suppress(StoreUnavailableError, psycopg.Error):
                await self._end_blockers(link.backend_pid)
        rows = await claiming
        if not rows:
            LostError.check(name_of(ref), None, least)
        return rows[0]

    async def _end_blockers(self, backend_pid: int) -> None:
        """Terminate the connections whose locks that backend waits for. Their uncommitted work is undone."""
        helper = await self._connections.connect()
        try:
            await helper.execute(_END_BLOCKERS, [Int8(backend_pid)])
        finally:
            await helper.close()


async def _open_all(link: Link, group: Sequence[_Wanted]) -> _Results:
    """Raise the fences and load, within a transaction. Left out is what another transaction has locked, what is missing and must not be
    created, and what has many records."""
    results, rows, new = dict[PartitionRef, Snapshot | Exception](), dict[PartitionRef, Row](), list[_Wanted]()
    for place, is_there, *columns in await link.execute(_LOCK_ALL, _places(group)):
        each, row = group[place - 1], tuple(columns)
        if row[0] is None:
            new += [each] if each.least is None and not is_there else []
        elif (reason := _reason_against(each, row)) is None:
            rows[each.ref] = row
        else:
            results[each.ref] = reason
    # A separate statement, so that it sees everything committed before the rows were locked.
    records = await _records(link, rows)
    raised = []
    for each in group:
        if each.ref in records:
            try:
                results[each.ref] = snapshot_of(each.ref, rows[each.ref], records[each.ref])
                raised.append((each.fence, rows[each.ref]))
            except DamagedError as error:
                results[each.ref] = error
    await _raise(link, raised)
    return results | await _create(link, new)


def _reason_against(wanted: _Wanted, row: Row) -> Exception | None:
    """Why the partition, whose row is locked, must not be opened."""
    name = name_of(wanted.ref)
    try:
        FencedError.check(name, fence_of(row), wanted.fence)
        check_row(wanted.ref, row)
        LostError.check(name, Least(fence_of(row), row[4]), wanted.least)
    except (DamagedError, FencedError) as error:
        return error
    return None


async def _records(link: Link, rows: Mapping[PartitionRef, Row]) -> dict[PartitionRef, list[tuple[bytes, int, bytes]]]:
    """The records of each partition that has few."""
    # Records come with cycles, and a cycle writes the header.
    used = {row[0]: ref for ref, row in rows.items() if row[5] is not None}
    records: dict[PartitionRef, list[tuple[bytes, int, bytes]]] = {ref: [] for ref in rows}
    for number, key, crc, value in await link.execute(_RECORDS_OF_ALL, [[*map(Int8, used)], Int8(MANY_RECORDS)]) if used else ():
        records[used[number]].append((key, crc, value))
    return {ref: found for ref, found in records.items() if len(found) < MANY_RECORDS}


async def _raise(link: Link, opened: Sequence[tuple[Fence, Row]]) -> None:
    """Raise the fences of those locked rows."""
    if opened:
        numbers = [Int8(row[0]) for _, row in opened]
        crcs = [Int8(row_crc(fence, row[4], row[5])) for fence, row in opened]
        await link.execute(_RAISE_ALL, [numbers, *_columns([fence for fence, _ in opened]), crcs])


async def _create(link: Link, new: Sequence[_Wanted]) -> dict[PartitionRef, Snapshot]:
    """Create those that no other owner creates at this moment."""
    if not new:
        return {}
    await link.run(_SHORT_WAIT)
    crcs = [Int8(row_crc(each.fence, 0, None)) for each in new]
    made = await link.execute(_CREATE_ALL, [*_places(new), *_columns([each.fence for each in new]), crcs])
    return {PartitionRef(incarnation, partition): Snapshot(0, None, {}) for incarnation, partition in made}


def _places(those: Sequence[_Wanted]) -> list[object]:
    return [[each.ref.incarnation for each in those], [Int8(each.ref.partition) for each in those]]


def _columns(fences: Sequence[Fence]) -> list[list[Int8]]:
    return [[*map(Int8, column)] for column in zip(*fences, strict=True)]
