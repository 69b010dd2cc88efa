"""PostgreSQL connections with bounded waits.

docs/adr/0007-postgres-layout.md has the reasons for the settings, and for a custom pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ConnStatus, TransactionStatus

from sluiceway.kernel.clock import Millis
from sluiceway.ports.partition_store import StoreUnavailableError

MARGIN = 1_000
"""Milliseconds that a working server gets beyond its own time-out to report it. After that it counts as hung."""
LEAST_TURN = 2
"""Seconds that each of several hosts has to take a connection, at least: the driver gives none less."""

_SET = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS setting (name, value)"


def _session(schema: str, statement_timeout: Millis) -> dict[str, str]:
    return {
        "search_path": '"' + schema.replace('"', '""') + '"',
        "statement_timeout": str(statement_timeout),
        "default_transaction_isolation": "read committed",
        "lock_timeout": str(max(1, statement_timeout // 2)),
        "idle_in_transaction_session_timeout": str(statement_timeout + MARGIN),
        # The server's side of a dead line: connections of vanished clients must not keep their locks.
        "tcp_keepalives_idle": "5",
        "tcp_keepalives_interval": "2",
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": str(statement_timeout),
        # Every statement looks rows up by key. The plan is made once, and must not depend on a table having been small then.
        "enable_seqscan": "off",
        "plan_cache_mode": "force_generic_plan",
        "jit": "off",
    }


class Link:
    """One connection. A statement without an answer within `patience` seconds raises psycopg.OperationalError, and the link is closed."""

    def __init__(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], patience: float) -> None:
        self._connection = connection
        self._patience = patience
        self.warnings = 0
        """Number of warnings received from the server."""
        connection.add_notice_handler(self._note)

    @property
    def closed(self) -> bool:
        return self._connection.closed

    @property
    def idle(self) -> bool:
        """Whether it is usable, and in no transaction."""
        return self._connection.pgconn.transaction_status == TransactionStatus.IDLE

    @property
    def backend_pid(self) -> int:
        return self._connection.pgconn.backend_pid

    async def execute(self, query: LiteralString, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one prepared statement and return its rows; outside of a transaction it is also committed. Raises psycopg.Error."""
        with self._bounded():
            cursor = await self._connection.execute(query, params, prepare=True, binary=True)
            return await cursor.fetchall() if cursor.description else []

    async def run(self, script: LiteralString | sql.Composed) -> None:
        """Run statements without parameters or rows. Raises psycopg.Error."""
        with self._bounded():
            await self._connection.execute(script, prepare=False)

    async def texts(self, statement: sql.Composed) -> list[tuple[bytes | None, ...]]:
        """Run one statement without parameters, and return its rows in the server's text form. Raises psycopg.Error."""
        with self._bounded():
            result = (await self._connection.execute(statement, prepare=False)).pgresult
        if result is None:
            return []
        return [tuple(result.get_value(row, column) for column in range(result.nfields)) for row in range(result.ntuples)]

    @contextlib.asynccontextmanager
    async def transaction(self, mode: LiteralString = "ISOLATION LEVEL READ COMMITTED") -> AsyncIterator[None]:
        """A transaction, durable once the block has been left; an exception rolls it back."""
        await self.run(f"BEGIN {mode}; SET LOCAL synchronous_commit = on")
        try:
            yield
        except BaseException:
            if not self.closed:
                with contextlib.suppress(psycopg.Error):
                    await self.run("ROLLBACK")
            raise
        await self.run("COMMIT")

    async def notified(self) -> AsyncIterator[str]:
        """Yield the payload of each notification on this link's channels, until the connection breaks."""
        with contextlib.suppress(psycopg.Error):
            async for each in self._connection.notifies():
                yield each.payload

    def still_there(self) -> bool:
        """Check, without asking the server, whether it has closed the idle connection."""
        try:
            self._connection.pgconn.consume_input()
        except psycopg.OperationalError:
            return False
        return self.idle and self._connection.pgconn.status == ConnStatus.OK

    async def close(self) -> None:
        await self._connection.close()

    def _note(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        self.warnings += diagnostic.severity_nonlocalized == "WARNING"

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        # Cancelling is no option: psycopg then asks the server to cancel, and waits for a hung server.
        timer = asyncio.get_running_loop().call_later(self._patience, self._hang_up)
        try:
            yield
        finally:
            timer.cancel()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self._connection.pgconn.socket)) as line:
            line.shutdown(socket.SHUT_RDWR)


class Connections:
    """A pool of at most `limit` links, opened on demand and reused. Used in one event loop."""

    def __init__(self, dsn: str, schema: str, limit: int, statement_timeout: Millis) -> None:
        self._session = _session(schema, statement_timeout)
        self._patience = (statement_timeout + MARGIN) / 1000
        given = conninfo_to_dict(dsn)
        hosts = _hosts_of(given)
        turn = max(LEAST_TURN, int(self._patience / hosts))
        if hosts > 1:
            # The first may be dead without a word, and the next ones are to have their turn all the same.
            given["connect_timeout"] = _no_longer(given, turn)
        self._connect_patience = max(self._patience, hosts * turn)
        self._conninfo = make_conninfo("", **_with_defaults(given, statement_timeout))
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[Link] = []

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[Link]:
        """A link for the length of a block. Raises StoreUnavailableError if there is none, in which case nothing was sent."""
        try:
            async with asyncio.timeout(self._patience):
                await self._slots.acquire()
        except TimeoutError:
            raise StoreUnavailableError("all connections to the PostgreSQL server are busy") from None
        try:
            link = await self._known() or await self.connect()
            try:
                yield link
            finally:
                if link.idle:
                    self._idle.append(link)
                else:
                    await link.close()
        finally:
            self._slots.release()

    async def connect(self) -> Link:
        """Open a link beyond the limit, for the caller to close. Raises StoreUnavailableError."""
        try:
            async with asyncio.timeout(self._connect_patience):
                connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True, prepare_threshold=0)
        except (psycopg.Error, TimeoutError, OSError) as error:
            raise StoreUnavailableError(f"the PostgreSQL server cannot be reached: {str(error) or 'time-out'}") from error
        link = Link(connection, self._patience)
        try:
            await link.execute(_SET, [list(self._session), list(self._session.values())])
            rows = await link.execute("SELECT current_setting('fsync'), current_setting('full_page_writes')")
        except psycopg.Error as error:
            await link.close()
            raise StoreUnavailableError(f"the PostgreSQL server refused the session: {error}") from error
        if rows != [("on", "on")]:
            await link.close()
            raise StoreUnavailableError("PostgreSQL runs with fsync or full_page_writes off, so its commits are not durable; turn both on")
        return link

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    async def _known(self) -> Link | None:
        while self._idle:
            link = self._idle.pop()
            if link.still_there():
                return link
            await link.close()
        return None


def _hosts_of(given: Mapping[str, Any]) -> int:
    """The number of hosts that the driver tries in turn."""
    return max(len(str(given.get(name) or "").split(",")) for name in ("host", "hostaddr"))


def _no_longer(given: Mapping[str, Any], turn: int) -> int | str:
    """The time for each host as given, but no longer than its turn. The driver refuses what is no number."""
    wanted: int | str = given.get("connect_timeout") or turn
    with contextlib.suppress(ValueError):
        # 0, or less, is no limit.
        return min(int(wanted), turn) if int(wanted) > 0 else turn
    return wanted


def _with_defaults(given: Mapping[str, Any], statement_timeout: Millis) -> dict[str, Any]:
    """Add defaults for unset parameters. `read-write`, since a standby among several hosts cannot be written to."""
    return {
        "target_session_attrs": "read-write",
        "application_name": "sluiceway",
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": statement_timeout,
        **given,
    }
