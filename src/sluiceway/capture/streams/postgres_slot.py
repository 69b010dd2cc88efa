"""PostgresStream: PostgreSQL's logical replication as a change stream.

A partition is a publication, read through a replication slot of its own. Changes in a publication are totally ordered, so to read several
tables in parallel, divide them over several publications. A publication can be added to a capture later; it begins then.

* **Requirements**: PostgreSQL 13 or newer with `wal_level = logical`; a role with REPLICATION; publications that exist before the capture
  begins and are never dropped; `REPLICA IDENTITY` of tables as PostgreSQL demands it for updates and deletes. Changes from before the
  slot's creation are not read, but the rows that there are by then can be copied first (`postgres_copy`).
* **The slot keeps the server's log** until records are handed on, even without any reader. After ending a capture, drop its slots (`SELECT
  pg_drop_replication_slot('sluiceway_…')`).
* **A batch is whole transactions.** One with more records than fit is a batch by itself, held in memory as a whole: at most 2 GB of
  payloads, otherwise it cannot be read.
* **Only durable changes are read**: nothing that a killed server could lose.
* A slot is occupied only during a call, so a stopped or frozen reader blocks no other.

Records are described in `pgoutput`. Reading peeks into the slot without consuming; only `kept` lets the server forget. Each peek begins at
a point that the server moves about every 15 seconds, and decodes again everything in between. That costs about a millisecond per MB of the
log, and is least if `kept` is called about as often as batches are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from sluiceway.adapters.storage.postgres_connections import Connections, Link
from sluiceway.capture.streams import postgres_copy
from sluiceway.capture.streams.pgoutput import Decoder, Lsn, ProtocolError, Transaction, format_lsn, parse_lsn
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.options import named
from sluiceway.kernel.secrets import read_secret
from sluiceway.ports.change_stream import CHANGES, AnnouncedPartition, Batch, BrokenOffError, SeedsUpto, UnknownPositionError
from sluiceway.ports.partition_store import StoreUnavailableError

_LOG = logging.getLogger(__name__)

OPTIONS = ("dsn_env", "dsn_file", "publications", "snapshot")

SLACK: Millis = 10_000
"""Two concurrent commits may have their times in one order, and their places in the log in the other: by less than this."""

STATEMENT_TIMEOUT: Millis = 30_000
"""Time limit for one answer of the server; doubled, up to an hour, when it was too short for a transaction."""
_LONGEST: Millis = 3_600_000

MAX_BATCH_BYTES = 64 << 20
"""Payloads in one batch, unless its first transaction alone has more."""
_MOST_BYTES = (1 << 31) - 1

MOVE_BYTES = 1 << 20
MOVE_AFTER = 30.0
"""Without published changes, the position moves after this many bytes of the log, or seconds. Not at once: if positions are kept in the
same database, storing one adds to the log."""

WAIT = 0.5
"""Seconds that a read waits for changes."""
_POLL = 0.1
_OCCUPIED = 5.0
"""Seconds that a call waits for another one to leave the slot."""

_LASTING = ("0A", "28", "3D", "42", "53400", "55000")
"""SQLSTATEs, and classes of them, of lasting errors: permissions, names, settings, a slot."""
_FORBIDDEN = ("28000", "28P01", "42501")
_ADVICE = {
    "42501": "; the role needs REPLICATION (ALTER ROLE … REPLICATION)",
    "42704": "; changes from before the publication was created cannot be read; if it was dropped and created again, start another capture",
    "53400": "; drop unused slots, or raise max_replication_slots",
}

_LOOK = """
SELECT slot.slot_name IS NOT NULL, slot.plugin = 'pgoutput' AND slot.database = current_database(), slot.wal_status,
    slot.confirmed_flush_lsn::text, pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text,
    (extract(epoch FROM statement_timestamp()) * 1000)::bigint
FROM (SELECT %s::name AS name) AS wanted LEFT JOIN pg_replication_slots AS slot ON slot.slot_name = wanted.name"""
_PEEK = "SELECT data FROM pg_logical_slot_peek_binary_changes(%s::name, %s::pg_lsn, %s::int, VARIADIC %s::text[])"
# A location beyond the durable log may lie inside a commit, which the server would then forget.
_KEPT = """
SELECT pg_replication_slot_advance(slot_name, %s::pg_lsn) FROM pg_replication_slots
WHERE slot_name = %s::name AND confirmed_flush_lsn < %s::pg_lsn AND %s::pg_lsn <= pg_current_wal_flush_lsn()"""
_CREATE = "SELECT 1 FROM pg_create_logical_replication_slot(%s::name, 'pgoutput')"
_NEEDED = """
SELECT current_setting('wal_level'), ARRAY(SELECT pubname::text FROM pg_publication WHERE pubname = ANY (%s::name[])),
    (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user)"""
# Values come as texts that must not depend on the settings of a machine, a role or a database.
_SESSION = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "iso_8601",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    # How soon the server notices a killed client, and stops its work for it. Servers before 14 finish it.
    "client_connection_check_interval": "1000",
}
# A copy keeps its snapshot while its records are handed on, and must not pass over rows silently.
_COPY_SESSION = _SESSION | {"idle_in_transaction_session_timeout": "0", "row_security": "off"}
_SET = """
SELECT set_config(setting.name, wanted.value, false)
FROM unnest(%s::text[], %s::text[]) AS wanted (name, value) JOIN pg_settings AS setting ON setting.name = wanted.name"""


def from_options(name: str, options: Mapping[str, str]) -> PostgresStream:
    """The stream of the capture of that name. Option names are case-insensitive.

    `publications`: their names, separated by commas. `dsn_env` or `dsn_file`: the environment variable, or the file, that contains the
    connection string. `snapshot`: `initial`, to copy the tables first. Raises `invalid_request` that names the option.
    """
    given = named(options, OPTIONS)
    publications = [part.strip() for part in given.get("publications", "").split(",")]
    for publication in publications:
        if not 0 < len(publication.encode()) < 64:
            raise invalid("publications", "expected names of publications, separated by commas")
    if len(set(publications)) < len(publications) or len(",".join(publications).encode()) > 1_000:
        raise invalid("publications", "one is named twice, or together they are longer than 1,000 bytes")
    if given.get("snapshot", "") not in ("", "initial"):
        raise invalid("snapshot", f"expected initial, or nothing, not {given['snapshot'][:40]!r}")
    return PostgresStream(name, _dsn(given), publications, snapshot=bool(given.get("snapshot")))


def _dsn(options: Mapping[str, str]) -> str:
    field, how = ("dsn_file", "file") if options.get("dsn_file") else ("dsn_env", "env")
    if bool(options.get("dsn_file")) == bool(options.get("dsn_env")):
        raise invalid(field, "give either dsn_env or dsn_file, which says where the connection string is")
    dsn = read_secret(f"{how}:{options[field]}", field, os.environ) or ""
    try:
        conninfo_to_dict(dsn)
    except psycopg.Error:
        # The driver's message may quote a password.
        raise invalid(field, "the value is neither a PostgreSQL URL nor a connection string") from None
    return dsn


def slot_name(name: str, publication: str) -> str:
    """The slot's name: at most 63 of `a-z 0-9 _`, unique for each pair of names.

    `sluiceway_<name>_<publication>` if that qualifies, with a hash otherwise.
    """
    plain = f"sluiceway_{name}_{publication}"
    if re.fullmatch("[a-z0-9]+", name) and re.fullmatch("[a-z0-9_]+", publication) and len(plain) <= 63:
        return plain
    short = re.sub("[^a-z0-9]+", "_", f"{name}_{publication}".lower()).strip("_")[:32]
    return f"sluiceway__{short}_{hashlib.sha256(f'{name},{publication}'.encode()).hexdigest()[:16]}"


class _Look(NamedTuple):
    """State of the slot and the server's log. Without a slot, all is None but the log."""

    exists: bool
    ours: bool | None
    """Whether it is a logical one of this database with the right plugin; None: no slot, or a physical one."""
    wal_status: str | None
    confirmed: Lsn | None
    inserted: Lsn
    """The end of the log."""
    flushed: Lsn
    """The end of the durable part."""
    now: Millis


class _Found(NamedTuple):
    """Transactions for a batch."""

    transactions: list[Transaction]
    cut: bool
    """Whether there may be more."""


class PostgresStream:
    """A ChangeStream. Positions are LSNs of the ends of commits, in PostgreSQL's notation, and those of `postgres_copy` before."""

    def __init__(self, name: str, dsn: str, publications: Sequence[str], *, snapshot: bool = False) -> None:
        """`snapshot`: new partitions begin with the rows that their tables have."""
        self._name, self._publications = name, list(publications)
        given = conninfo_to_dict(dsn)
        self._dsn = make_conninfo("", **{"application_name": f"sluiceway capture {name}", **given, "client_encoding": "UTF8"})
        self._slots: dict[str, _Slot] = {}
        self._snapshot = snapshot
        self._copies: dict[str, postgres_copy.InitialCopy] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def seeds(self, after: str) -> SeedsUpto:
        """Create missing slots, unless a copy comes first: then its first reader does. Also raises `invalid_request`, with advice, if the
        server cannot be read.

        An existing slot continues where it is. Creating one waits for the transactions open at that time.
        """
        known = set(after.split(",")) - {""}
        wanted = [publication for publication in self._publications if publication not in known]
        if not wanted:
            return SeedsUpto(after, ())
        await self._slot(wanted[0]).check(wanted)
        if self._snapshot:
            born = [AnnouncedPartition(publication, start=postgres_copy.BEGIN) for publication in wanted]
        else:
            born = [AnnouncedPartition(publication, start=format_lsn(await self._slot(publication).make())) for publication in wanted]
        return SeedsUpto(",".join(sorted(known.union(wanted))), tuple(born))

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        if postgres_copy.is_of_copy(position):
            return await self._copy(partition).read(position, upto, limit)
        slot = self._slot(partition)
        try:
            after, until = parse_lsn(position), None if upto is None else parse_lsn(upto)
        except ValueError as error:
            raise UnknownPositionError(str(error)) from None
        if until is not None:
            return await slot.again(after, until)
        deadline = asyncio.get_running_loop().time() + WAIT
        while True:
            batch = await slot.next(after, limit)
            if batch.upto is not None or asyncio.get_running_loop().time() > deadline:
                return batch
            await asyncio.sleep(_POLL)

    async def kept(self, partition: str, position: str) -> None:
        if postgres_copy.is_of_copy(position):
            # The changes since the slot's beginning are still to be read.
            return
        try:
            await self._slot(partition).keep(parse_lsn(position))
        except SluicewayError as error:
            # A hint may fail; reading reports what can be repaired.
            raise BrokenOffError(str(error)) from error

    def left(self, partition: str) -> None:
        """Let the snapshot of a copy go. Otherwise its slot has one idle connection here."""
        copy = self._copies.pop(partition, None)
        if copy is not None:
            closing = asyncio.create_task(copy.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for partition in list(self._copies):
            self.left(partition)
        if self._closing:
            await asyncio.wait(self._closing)
        for slot in self._slots.values():
            await slot.close()

    def _slot(self, publication: str) -> _Slot:
        if publication not in self._slots:
            self._slots[publication] = _Slot(self._dsn, slot_name(self._name, publication), publication)
        return self._slots[publication]

    def _copy(self, publication: str) -> postgres_copy.InitialCopy:
        if publication not in self._copies:
            self._copies[publication] = postgres_copy.InitialCopy(self._slot(publication))
        return self._copies[publication]


class _Slot:
    """One replication slot, and a connection to read it, for one call at a time."""

    def __init__(self, dsn: str, name: str, publication: str) -> None:
        self._dsn, self._name, self.publication = dsn, name, publication
        quoted = publication.replace('"', '""')
        self._plugin = ["proto_version", "1", "publication_names", f'"{quoted}"']
        self._timeout = STATEMENT_TIMEOUT
        self._connections = Connections(dsn, "pg_catalog", 1, self._timeout)
        self._link: Link | None = None
        self._ahead = 0
        """Messages between the kept position and the reading position, as far as known."""
        self._barren: tuple[Lsn, Lsn] | None = None
        """A range of the log known to be empty."""
        self._moved_at = 0.0

    async def check(self, publications: Sequence[str]) -> None:
        async with self._one() as link:
            """Check the server's settings, the publications and the role. Raises `invalid_request`."""
            ((wal_level, known, may),) = await link.execute(_NEEDED, [list(publications)])
        if wal_level != "logical":
            raise invalid("stream", f"the server runs with wal_level = {wal_level}; set wal_level = logical and restart it")
        for publication in publications:
            if publication not in known:
                quoted = publication.replace('"', '""')
                raise invalid("publications", f'there is no {publication!r}; create it with: CREATE PUBLICATION "{quoted}" FOR TABLE …')
        if not may:
            # Managed services have their own ways to permit it, so the server has the last word.
            _LOG.warning("the role does not have REPLICATION; if the slots are refused: ALTER ROLE … REPLICATION")

    async def make(self) -> Lsn:
        """The slot's position; creates a missing slot."""
        deadline = asyncio.get_running_loop().time() + _OCCUPIED
        async with self._one() as link:
            while not (look := await self._look(link)).exists:
                # Another leader may do the same at the same moment.
                try:
                    await link.execute(_CREATE, [self._name])
                except psycopg.errors.DuplicateObject:
                    continue
                except psycopg.errors.InsufficientPrivilege as error:
                    raise _may_not_create(error) from None
            while look.confirmed is None and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_POLL)
                look = await self._look(link)
        if look.confirmed is None:
            raise BrokenOffError(f"the slot {self._name} is being created by another session")
        if not look.ours or look.wal_status == "lost":
            advice = f"SELECT pg_drop_replication_slot('{self._name}')"
            raise invalid("publications", f"the slot {self._name} cannot be read from; check it, then drop it: {advice}")
        return look.confirmed

    async def begin_copy(self, is_first: bool) -> postgres_copy.Beginning:
        """Begin a transaction whose snapshot is as of the slot's beginning, if `is_first` and the slot is not there; else as of now."""
        link = await self._connections.connect()
        try:
            await link.execute(_SET, [list(_COPY_SESSION), list(_COPY_SESSION.values())])
            look, since = await self._look(link), 0
            if is_first and not look.exists:
                async with self._exported() as snapshot:
                    if snapshot is not None:
                        begin = sql.SQL("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {}")
                        await link.run(begin.format(sql.Literal(snapshot)))
                        since = look.now - SLACK
                look = await self._look(link)
                if not look.exists:
                    # Nothing has been read yet, so nothing is lost.
                    raise BrokenOffError(f"the session that was creating the slot {self._name} has not finished")
            if not since:
                await link.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            self._check(look, look.flushed if look.confirmed is None else look.confirmed)
            assert look.confirmed is not None
            return postgres_copy.Beginning(link, look.confirmed, since)
        except BaseException:
            await link.close()
            raise

    @contextlib.asynccontextmanager
    async def _exported(self) -> AsyncIterator[str | None]:
        """Create the slot. For the block, there is a snapshot as of its beginning, of that name; None: another process has created it."""
        # As long as transactions that are open now: it waits for them.
        link = Link(await self._connect_for_replication(), _LONGEST / 1_000)
        name = None
        try:
            with contextlib.suppress(psycopg.errors.DuplicateObject):
                create = sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput EXPORT_SNAPSHOT").format(sql.Identifier(self._name))
                ((_, _, snapshot, _),) = await link.texts(create)
                name = None if snapshot is None else snapshot.decode()
            yield name
        except psycopg.errors.InsufficientPrivilege as error:
            raise _may_not_create(error) from None
        finally:
            await link.close()

    async def _connect_for_replication(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        try:
            async with asyncio.timeout(self._timeout / 1_000):
                return await psycopg.AsyncConnection.connect(make_conninfo(self._dsn, replication="database"), autocommit=True)
        except (TimeoutError, OSError) as error:
            raise BrokenOffError(f"{self.publication}: the server cannot be reached: {str(error) or 'time-out'}") from error

    async def next(self, after: Lsn, limit: int) -> Batch:
        """The next batch after that position; possibly empty."""
        async with self._one() as link:
            look = await self._look(link)
            self._check(look, after)
            if self._barren is not None and self._barren[0] == after and look.flushed <= self._barren[1]:
                found = _Found([], False)
            else:
                found = await self._find(link, after, limit)
        if any(transaction.records for transaction in found.transactions):
            upto: Lsn | None = found.transactions[-1].end
        else:
            upto = self._idle(after, look, found)
        at = found.transactions[-1].at if found.transactions else None
        # Changes not durable yet have been committed, and come later.
        heartbeat = look.now if look.inserted <= look.flushed and not found.cut else at
        return Batch(
            _batch(found.transactions),
            None if upto is None else format_lsn(upto),
            at=None if heartbeat is None else heartbeat - SLACK,
            behind=max(0, look.now - at) + 1 if found.cut and at is not None else 0,
        )

    async def again(self, after: Lsn, until: Lsn) -> Batch:
        """Re-read exactly what lies between the two positions."""
        async with self._one() as link:
            look = await self._look(link)
            self._check(look, after)
            self._check(look, until)
            messages = await self._peek(link, until, None)
        transactions = [transaction for transaction in await self._decode(after, messages) if transaction.end <= until]
        at = transactions[-1].at if transactions else None
        behind = None if at is None else max(0, look.now - at)
        return Batch(_batch(transactions), format_lsn(until), None if at is None else at - SLACK, behind)

    async def keep(self, position: Lsn) -> None:
        text = format_lsn(position)
        async with self._one() as link:
            await self._unoccupied(functools.partial(link.execute, _KEPT, [text, self._name, text, text]))

    async def close(self) -> None:
        await self._connections.close()

    # ---- steps of `next` ------------------------------------------------------------------------------------------------

    async def _find(self, link: Link, after: Lsn, limit: int) -> _Found:
        wanted = limit + self._ahead
        while True:
            messages = await self._peek(link, None, wanted)
            transactions = await self._decode(after, messages)
            cut = len(messages) >= wanted
            if transactions or not cut:
                break
            # All of it lies before the position, and is not known to be safe yet.
            wanted *= 4
        taken = _first(transactions, limit)
        self._ahead = taken[-1].upto if taken else len(messages)
        return _Found(taken, cut or len(taken) < len(transactions))

    def _idle(self, after: Lsn, look: _Look, found: _Found) -> Lsn | None:
        """New position without changes, or None: it moves rarely, to let the server trim its log."""
        upto = max([after, *(transaction.end for transaction in found.transactions)])
        if not found.cut:
            # This may lie inside a log record. The server has read that record to its end, and it was no published commit.
            upto = max(upto, look.flushed)
            self._barren = after, look.flushed
        now = asyncio.get_running_loop().time()
        if upto > after and (found.cut or upto - after >= MOVE_BYTES or now - self._moved_at > MOVE_AFTER):
            self._moved_at = now
            return upto
        return None

    async def _decode(self, after: Lsn, messages: Sequence[bytes]) -> list[Transaction]:
        try:
            # In a thread, so that other partitions continue meanwhile.
            transactions = await asyncio.to_thread(Decoder(after).feed, messages)
        except ProtocolError as error:
            detail = f"the slot {self._name} sent a message that cannot be decoded: {error}. Nothing is skipped; please report it"
            raise SluicewayError("internal", detail) from error
        return [transaction for transaction in transactions if transaction.end > after]

    # ---- calls to the server --------------------------------------------------------------------------------------------

    async def _peek(self, link: Link, until: Lsn | None, wanted: int | None) -> list[bytes]:
        params = [self._name, None if until is None else format_lsn(until), wanted, self._plugin]
        rows = await self._unoccupied(functools.partial(link.execute, _PEEK, params))
        return [data for (data,) in rows]

    async def _look(self, link: Link) -> _Look:
        ((exists, ours, wal_status, confirmed, inserted, flushed, now),) = await link.execute(_LOOK, [self._name])
        known = None if confirmed is None else parse_lsn(confirmed)
        return _Look(exists, ours, wal_status, known, parse_lsn(inserted), parse_lsn(flushed), now)

    def _check(self, look: _Look, position: Lsn) -> None:
        """Check that reading can continue from there. Raises UnknownPositionError, BrokenOffError."""
        if look.ours is not None and look.confirmed is None:
            # Checked first: the server stores the name of a new slot a moment before its plugin, so it is not `ours` yet.
            raise BrokenOffError(f"the slot {self._name} is being created")
        if not look.ours or look.confirmed is None:
            raise UnknownPositionError(f"the slot {self._name} no longer exists, and neither do the changes that it kept")
        if look.wal_status == "lost":
            raise UnknownPositionError(f"the server dropped the changes of the slot {self._name} (max_slot_wal_keep_size)")
        if position < look.confirmed:
            raise UnknownPositionError(f"the slot {self._name} keeps nothing before {format_lsn(look.confirmed)}")
        if position > look.flushed:
            raise UnknownPositionError(f"the server's log ends at {format_lsn(look.flushed)}: it lost changes, or it is another server")

    @contextlib.asynccontextmanager
    async def _one(self) -> AsyncIterator[Link]:
        """The connection, for one call. Its faults become BrokenOffError."""
        async with self.faults(), self._connections.one() as link:
            if link is not self._link:
                self._link, self._barren = link, None
                await link.execute(_SET, [list(_SESSION), list(_SESSION.values())])
            yield link

    @contextlib.asynccontextmanager
    async def faults(self) -> AsyncIterator[None]:
        """Turn the faults of a connection into BrokenOffError, and the server's lasting errors into SluicewayError."""
        try:
            yield
        except StoreUnavailableError as error:
            raise BrokenOffError(str(error)) from error
        except psycopg.errors.QueryCanceled as error:
            await self._be_patient()
            raise BrokenOffError(f"{self.publication}: {error}; the next attempt may take {self._timeout // 1_000} s") from error
        except psycopg.Error as error:
            raise self._meaning(error) from error

    def _meaning(self, error: psycopg.Error) -> Exception:
        state = error.sqlstate or ""
        if not state.startswith(_LASTING):
            return BrokenOffError(f"{self.publication}: {str(error) or 'the connection was cut'}")
        advice = _ADVICE.get(state, "")
        return SluicewayError("forbidden" if state in _FORBIDDEN else "invalid_request", f"{self.publication}: {error}{advice}")

    async def _be_patient(self) -> None:
        self._timeout = min(2 * self._timeout, _LONGEST)
        await self._connections.close()
        self._connections = Connections(self._dsn, "pg_catalog", 1, self._timeout)

    async def _unoccupied(self, call: Callable[[], Awaitable[list[tuple[Any, ...]]]]) -> list[tuple[Any, ...]]:
        """Call once the slot is free: another process may be re-reading it, or was killed a moment ago."""
        deadline = asyncio.get_running_loop().time() + _OCCUPIED
        while True:
            try:
                return await call()
            except psycopg.errors.ObjectInUse as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise BrokenOffError(str(error)) from error
            await asyncio.sleep(_POLL / 2)


def _may_not_create(error: psycopg.Error) -> SluicewayError:
    return invalid("stream", f"the server refused to create a slot ({error}); grant it with ALTER ROLE … REPLICATION")


def _first(transactions: Sequence[Transaction], limit: int) -> list[Transaction]:
    """The first transactions that make a batch: one at least."""
    records = size = 0
    for n, transaction in enumerate(transactions):
        records += len(transaction.records)
        size += transaction.size
        if n and (records > limit or size > MAX_BATCH_BYTES):
            return list(transactions[:n])
    return list(transactions)


def _batch(transactions: Sequence[Transaction]) -> pa.RecordBatch:
    """Their records, in the columns of CHANGES."""
    if sum(transaction.size for transaction in transactions) > _MOST_BYTES:
        raise invalid(
            "publications",
            f"the transaction at {format_lsn(transactions[0].lsn)} has more than 2 GB of payloads and cannot be read, so this capture "
            "cannot continue. Start another capture, which begins after that transaction, and drop this one's slot, which holds back the "
            "server's log",
        )
    records = [record for transaction in transactions for record in transaction.records]
    kinds, keys, payloads = zip(*records, strict=True) if records else ((), (), ())
    positions, times = [], []
    for transaction in transactions:
        lsn, count = format_lsn(transaction.lsn), len(transaction.records)
        positions += [f"{lsn}/{seq}" for seq in range(1, count + 1)]
        times += [transaction.at] * count
    columns = [pa.array(values, field.type) for values, field in zip((positions, times, kinds, keys, payloads), CHANGES, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGES)
