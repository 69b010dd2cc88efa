"""Initial copy: the rows of a publication's tables as of one snapshot, before the changes that follow it.

The first reader of the partition creates its slot, whose creation exports a snapshot: the rows as of the very position at which the slot
begins. The reader copies the tables in the order of their names, and each in the order of its primary key. A position names the last row
that was copied, so another reader continues behind it.

**While one reader copies, the copy and the changes fit exactly.** Its snapshot goes with it, or with its connection. The next one has a
snapshot of its own, of later, for the rest of the rows; changes are still read from where the slot begins. So some changes come that the
rest of the copy has already. Applied by key, as a record's payload is meant to be (remove `key`, put `new`), they lead to the rows of the
tables all the same, once the changes up to that later snapshot have been read. One exception: a row whose primary key is changed meanwhile
may lack the columns named in its `unchanged`.

A batch cannot be repeated from another snapshot: after its reader has gone it is a PlanLostError, and is read anew.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import psycopg
import pyarrow as pa
from psycopg import sql

from sluiceway.adapters.storage.postgres_connections import Link
from sluiceway.capture.streams.pgoutput import Relation, format_lsn, qualified
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.ports.change_stream import CHANGES, Batch, PlanLostError, UnknownPositionError

BEGIN = "copy"
"""The position before the first row."""
_MOST_POSITION = 1_000

COPY_BYTES = 8 << 20
"""Values in one batch, in the server's text form, beyond which no more rows are fetched for it."""
_FIRST = 256
"""Rows of the first fetch. Further ones are as large as the rows before allow."""

_Row = tuple[bytes | None, ...]

_TABLES = """
SELECT published.schemaname::text, published.tablename::text, class.relkind::text, to_jsonb(published) ->> 'rowfilter', (
    SELECT jsonb_agg(jsonb_build_array(
        attribute.attname::text,
        attribute.atttypid::bigint,
        format_type(attribute.atttypid, attribute.atttypmod),
        CASE class.relreplident
            WHEN 'f' THEN true
            WHEN 'n' THEN false
            ELSE EXISTS (
                SELECT 1 FROM pg_index AS named WHERE named.indrelid = class.oid
                AND CASE class.relreplident WHEN 'd' THEN named.indisprimary ELSE named.indisreplident END
                AND array_position(named.indkey::int2[], attribute.attnum) < named.indnkeyatts)
        END,
        (SELECT array_position(primary_key.indkey::int2[], attribute.attnum) FROM pg_index AS primary_key
            WHERE primary_key.indrelid = class.oid AND primary_key.indisprimary
            AND array_position(primary_key.indkey::int2[], attribute.attnum) < primary_key.indnkeyatts),
        to_jsonb(published) -> 'attnames' IS NULL OR to_jsonb(published) -> 'attnames' ? attribute.attname::text
    ) ORDER BY attribute.attnum)
    FROM pg_attribute AS attribute
    WHERE attribute.attrelid = class.oid AND attribute.attnum > 0 AND NOT attribute.attisdropped AND attribute.attgenerated = ''
)::text
FROM pg_publication_tables AS published
JOIN pg_namespace AS namespace ON namespace.nspname = published.schemaname
JOIN pg_class AS class ON class.relnamespace = namespace.oid AND class.relname = published.tablename
WHERE published.pubname = %s"""
_NOW = "SELECT (extract(epoch FROM statement_timestamp()) * 1000)::bigint"


class Column(NamedTuple):
    name: str
    oid: int
    type_name: str
    identifies: bool
    """Whether it belongs to the replica identity, which is the key of a record."""
    order: int | None
    """Its place in the primary key."""
    published: bool


class Table:
    """A table to be copied. Raises `invalid_request` if it cannot be."""

    def __init__(self, schema: str, name: str, kind: str, row_filter: str | None, columns: Sequence[Column]) -> None:
        self.place = schema, name
        self.shown = qualified(schema, name)
        self._columns = [column for column in columns if column.published]
        self._keys = sorted((column for column in self._columns if column.order is not None), key=lambda column: column.order or 0)
        if not self._keys or len(self._keys) < sum(column.order is not None for column in columns):
            raise invalid(
                "snapshot",
                f"the table {self.shown} has no primary key in the publication, which the copy would be ordered by; add one, or publish "
                "the table in another publication, without snapshot",
            )
        self._at = [self._columns.index(column) for column in self._keys]
        self.relation = Relation(self.shown, [(column.identifies, column.name, column.oid) for column in self._columns])
        # An ordinary table without those that inherit from it, which are published by themselves; a partitioned one has no rows without.
        self._source = sql.SQL("{} {}").format(sql.SQL("" if kind == "p" else "ONLY"), sql.Identifier(schema, name))
        self._filter = None if row_filter is None else sql.SQL("({})").format(sql.SQL(row_filter))

    def key_of(self, row: _Row) -> tuple[str, ...]:
        """The primary key, in the server's text form."""
        return tuple((row[at] or b"").decode() for at in self._at)

    def select(self, after: Sequence[str], upto: Sequence[str]) -> sql.Composed:
        """The query for the rows after one key, up to another, in order; an empty one is none."""
        conditions = [] if self._filter is None else [self._filter]
        names = sql.SQL(", ").join(sql.Identifier(column.name) for column in self._keys)
        for operator, bound in ((">", after), ("<=", upto)):
            if bound:
                values = [
                    sql.SQL("CAST({} AS {})").format(sql.Literal(value), sql.SQL(column.type_name))
                    for value, column in zip(bound, self._keys, strict=True)
                ]
                conditions.append(sql.SQL("({}) {} ({})").format(names, sql.SQL(operator), sql.SQL(", ").join(values)))
        return sql.SQL("SELECT {} FROM {}{}{} ORDER BY {}").format(
            sql.SQL(", ").join(sql.Identifier(column.name) for column in self._columns),
            self._source,
            sql.SQL(" WHERE " if conditions else ""),
            sql.SQL(" AND ").join(conditions),
            names,
        )


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A position within the copy: everything up to the row with that `key` has been copied.

    `lsn`: where the slot begins. `since`: no change after that is older, in ms by the server's clock; 0: unknown.
    """

    lsn: str
    since: Millis
    schema: str = ""
    table: str = ""
    key: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{BEGIN} {msgspec.json.encode(self).decode()}"


def is_of_copy(position: str) -> bool:
    """Whether a position of the stream lies within, or before, the initial copy."""
    return position.partition(" ")[0] == BEGIN


def parse_place(position: str) -> Place | None:
    """Parse a position of the copy; None: before its first row. Raises UnknownPositionError."""
    if position == BEGIN:
        return None
    try:
        return msgspec.json.decode(position.removeprefix(f"{BEGIN} "), type=Place)
    except msgspec.DecodeError as error:
        raise UnknownPositionError(f"{position[:80]!r} is not a position of a copy: {error}") from None


class Beginning(NamedTuple):
    """A slot at its beginning. `link` is in a transaction whose snapshot is as of `lsn`, or later if the slot had been made before; then
    `since` is 0."""

    link: Link
    lsn: int
    since: Millis


class Slot(Protocol):
    """The replication slot that the copy belongs to."""

    publication: str

    def faults(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Turn the driver's errors into the port's."""
        ...

    async def begin_copy(self, is_first: bool) -> Beginning:
        """Make the slot, or find it; without `is_first` it must be there."""
        ...


class _Session:
    """One snapshot, for as long as its connection lasts."""

    def __init__(self, beginning: Beginning, tables: Sequence[Table]) -> None:
        self.link, self.lsn, self.since = beginning
        self.tables = sorted(tables, key=lambda table: table.place)
        self.given: deque[tuple[str, str]] = deque(maxlen=4)
        """The last batches: from where to where. Only these can be repeated."""


class InitialCopy:
    """The initial copy of one publication. For one call at a time."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._session: _Session | None = None

    async def read(self, position: str, upto: str | None, limit: int) -> Batch:
        """Read as `ChangeStream.read` does, for a position within the copy."""
        place = parse_place(position)
        try:
            async with self._slot.faults():
                if upto is None:
                    return await self._next(position, place, limit)
                return await self._again(position, place, upto)
        except BaseException:
            # A cancelled call leaves the connection in the middle of an answer.
            await self.close()
            raise

    async def close(self) -> None:
        """Let the snapshot go."""
        session, self._session = self._session, None
        if session is not None:
            await session.link.close()

    async def _next(self, position: str, place: Place | None, limit: int) -> Batch:
        session = self._session or await self._open(place)
        since = session.since if place is None else place.since
        lsn = format_lsn(session.lsn) if place is None else place.lsn
        for table in session.tables:
            if place is not None and table.place < (place.schema, place.table):
                continue
            is_begun = place is not None and table.place == (place.schema, place.table)
            rows = await self._rows(session, table, place.key if place is not None and is_begun else (), (), limit)
            if rows:
                upto = str(Place(lsn, since, *table.place, table.key_of(rows[-1])))
                if len(upto.encode()) > _MOST_POSITION:
                    raise invalid("snapshot", f"a primary key of the table {table.shown} is too long for a copy: {upto[:80]}…")
                session.given.append((position, upto))
                # Nothing of what was changed since then has been read.
                ((now,),) = await session.link.execute(_NOW)
                return Batch(_records(table, rows, lsn), upto, since or None, max(0, now - since) + 1 if since else None)
        await self.close()
        return Batch(pa.RecordBatch.from_pylist([], schema=CHANGES), lsn, since or None)

    async def _again(self, position: str, place: Place | None, upto: str) -> Batch:
        """Repeat a batch from the snapshot that it was read from."""
        session, end = self._session, parse_place(upto)
        if session is None or end is None or (position, upto) not in session.given:
            raise PlanLostError(f"the snapshot from which {upto[:80]} was copied has gone with its reader")
        table = next(table for table in session.tables if table.place == (end.schema, end.table))
        is_begun = place is not None and table.place == (place.schema, place.table)
        rows = await self._rows(session, table, place.key if place is not None and is_begun else (), end.key, None)
        return Batch(_records(table, rows, end.lsn), upto, end.since or None)

    async def _open(self, place: Place | None) -> _Session:
        beginning = await self._slot.begin_copy(place is None)
        try:
            rows = await beginning.link.execute(_TABLES, [self._slot.publication])
            tables = [
                Table(schema, name, kind, row_filter, msgspec.json.decode(columns or "[]", type=list[Column]))
                for schema, name, kind, row_filter, columns in rows
            ]
        except BaseException:
            await beginning.link.close()
            raise
        self._session = _Session(beginning, tables)
        return self._session

    async def _rows(self, session: _Session, table: Table, after: Sequence[str], upto: Sequence[str], limit: int | None) -> list[_Row]:
        """The rows between two keys: all, or about as many as a batch may have."""
        link = session.link
        try:
            await link.run(sql.SQL("DECLARE copied NO SCROLL CURSOR FOR {}").format(table.select(after, upto)))
        except psycopg.errors.InsufficientPrivilege as error:
            advice = "the copy reads the tables themselves, so the role needs SELECT on each, and all of their rows"
            raise SluicewayError("forbidden", f"{self._slot.publication}: {error}; {advice}") from error
        rows: list[_Row] = []
        size, step = 0, _FIRST
        while limit is None or (len(rows) < limit and size < COPY_BYTES):
            step = step if limit is None else min(step, limit - len(rows))
            found = await link.texts(sql.SQL("FETCH {} FROM copied").format(sql.SQL(str(step))))
            rows += found
            size += sum(len(value) for row in found for value in row if value is not None)
            if len(found) < step:
                break
            if limit is not None:
                step = max(1, min(4 * step, (COPY_BYTES - size) * len(rows) // max(1, size)))
        await link.run("CLOSE copied")
        return rows


def _records(table: Table, rows: Sequence[_Row], lsn: str) -> pa.RecordBatch:
    """Records of rows, in the columns of CHANGES. When they were written is unknown."""
    ending = f'"committed_at":null,"lsn":"{lsn}","xid":null,"seq":null'.encode()
    records = [table.relation.copied(row, ending) for row in rows]
    columns = [
        [f"{lsn}/{table.shown}:{msgspec.json.encode(table.key_of(row)).decode()}" for row in rows],
        [None] * len(records),
        [record.kind for record in records],
        [record.key for record in records],
        [record.payload for record in records],
    ]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, CHANGES, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGES)
