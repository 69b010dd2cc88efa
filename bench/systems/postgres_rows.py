"""PostgreSQL as a queue of rows, the pgmq way, and our PostgreSQL store on a server with the same settings.

`postgres` is one table. A batch is produced by one INSERT from an array, leased by one UPDATE of the oldest visible rows that are not
locked (SKIP LOCKED), and completed by one DELETE by ids; each is a prepared statement in its own transaction, with parameters and results
in binary form. The index on `visible_at` keeps a lease from walking past rows that are leased or due later; a table without it, in the
order of ids, takes a quarter less time while there are none such. Pages have room for new versions of their rows, and autovacuum runs
often. The client is psycopg's interface to libpq (`psycopg.pq`) on the event loop, with a connection for each client: psycopg's own cursors
would cost it several times as much.

`sluiceway-postgres` is one instance of ours with PARTITIONS partitions in that database; the time of both servers counts.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import secrets
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg import pq

from bench.processes import free_port, program
from sluiceway.bench.servers import SLUICEWAY, server
from sluiceway.bench.systems.sluiceway import lean
from sluiceway.bench.work import Client, Done, Served, Work, repeat, run

_SYNCED = "when its transaction is in the synced log of PostgreSQL (fsync=on, synchronous_commit=on); so are leases and completions."
GUARANTEES = {
    "postgres": f"An item is confirmed {_SYNCED}",
    "sluiceway-postgres": f"An item is confirmed {_SYNCED}",
}

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "wal_buffers": "16MB",
    "max_connections": "100",
    "autovacuum_naptime": "1s",
    "jit": "off",
}
PATIENCE = 60.0
"""Seconds within which the server must start, and end."""

CREATE = """
DROP TABLE IF EXISTS queue;
CREATE TABLE queue (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    attempts int NOT NULL DEFAULT 0,
    enqueued_at timestamptz NOT NULL DEFAULT now(),
    visible_at timestamptz NOT NULL DEFAULT now(),
    payload bytea NOT NULL
) WITH (
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_threshold = -1
);
CREATE INDEX ON queue (visible_at)"""
PRODUCE = b"INSERT INTO queue (payload) SELECT unnest($1::bytea[])"
LEASE = b"""
UPDATE queue SET visible_at = now() + interval '1 minute', attempts = attempts + 1
WHERE id = ANY (ARRAY (SELECT id FROM queue WHERE visible_at <= now() ORDER BY visible_at LIMIT $1 FOR UPDATE SKIP LOCKED))
RETURNING id, payload"""
COMPLETE = b"DELETE FROM queue WHERE id = ANY ($1::int8[])"
COMPLETE_AND_LEASE = b"WITH done AS (DELETE FROM queue WHERE id = ANY ($2::int8[]))" + LEASE
STATEMENTS = {b"produce": PRODUCE, b"lease": LEASE, b"complete": COMPLETE, b"next": COMPLETE_AND_LEASE}
_BYTEA, INT8, JSONB = 17, 20, 3802
"""Type numbers, as binary arrays name them."""


def found() -> str | None:
    if _programs() is None:
        return "no PostgreSQL server is installed (on Debian: apt-get install postgresql)"
    return None


def version() -> str:
    programs = _programs()
    assert programs is not None
    return subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def _programs() -> Path | None:
    """Directory of `postgres` and `initdb`: the one on PATH, else the machine's newest that the server's user can reach."""
    on_path = [Path(found).resolve().parent for found in [program("postgres")] if found]
    packaged = sorted(Path("/usr/lib/postgresql").glob("[0-9]*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    return next((each for each in [*on_path, *packaged] if (each / "postgres").exists() and (each / "initdb").exists()), None)


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    """Make the folder accessible to other users: as root, the server runs as `nobody`, since PostgreSQL refuses root."""
    with _postgres(folder) as (dsn, pid):
        if name == "postgres":
            yield Served(dsn, [pid])
            return
        configuration = folder / "sluiceway.toml"
        configuration.write_text(f'[backends.default]\nkind = "postgres"\nurl = "{dsn}"\n')
        with server(SLUICEWAY, folder / "sluiceway", "--config", str(configuration)) as ours:
            yield Served(ours.url, [ours.pid, pid])


class Cluster(NamedTuple):
    """A server's data, and how to start it on its port."""

    folder: Path
    port: int
    dsn: str
    programs: Path
    identity: dict[str, Any]
    """The user that the server runs as, as arguments of Popen."""


def initialize(folder: Path) -> Cluster:
    """Make the data. Makes the folder accessible to other users, for a server that must not run as root."""
    programs = _programs()
    assert programs is not None
    folder.chmod(0o711)
    data, secret, port = folder / "postgres", secrets.token_hex(16), free_port()
    data.mkdir(mode=0o700)
    # initdb needs a directory that its own user owns.
    password = folder / "password"
    password.write_text(secret)
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    if user is not None:
        os.chown(data, user.pw_uid, user.pw_gid)
        os.chown(password, user.pw_uid, user.pw_gid)
    password.chmod(0o400)
    identity: dict[str, Any] = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    cluster = Cluster(folder, port, f"postgresql://bench:{secret}@127.0.0.1:{port}/postgres", programs, identity)
    flags = ["--username=bench", "--auth=scram-sha-256", f"--pwfile={password}", "--no-locale", "--encoding=UTF8", "--no-sync"]
    if _run(cluster, "initdb", *flags).wait(PATIENCE):
        raise RuntimeError(f"initdb failed:\n{_tail(folder)}")
    return cluster


def start(cluster: Cluster) -> subprocess.Popen[bytes]:
    """Start the server, and wait until it accepts connections. Raises RuntimeError if it does not start."""
    options = [argument for name, value in SETTINGS.items() for argument in ("-c", f"{name}={value}")]
    process = _run(cluster, "postgres", "-p", str(cluster.port), *options)
    try:
        _wait_until_open(cluster.dsn, process, cluster.folder)
    except RuntimeError:
        stop(process)
        raise
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server without waiting for its clients."""
    process.send_signal(signal.SIGINT)
    process.wait(PATIENCE)


def _run(cluster: Cluster, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (cluster.folder / "output").open("ab") as output:
        return subprocess.Popen(
            [cluster.programs / name, "-D", cluster.folder / "postgres", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cluster.folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"},
            **cluster.identity,
        )


@contextmanager
def _postgres(folder: Path) -> Iterator[tuple[str, int]]:
    """Run PostgreSQL. Returns the URL of its database, and its process id."""
    cluster = initialize(folder)
    process = start(cluster)
    try:
        yield cluster.dsn, process.pid
    finally:
        stop(process)


def _wait_until_open(dsn: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            psycopg.connect(dsn, connect_timeout=2).close()
        except psycopg.OperationalError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"PostgreSQL did not start:\n{_tail(folder)}")


def _tail(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")[-2_000:]


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    if name == "postgres":
        return run(_drive(address, work, seconds))
    return run(lean(address, work, seconds))


async def _drive(dsn: str, work: Work, seconds: float) -> Done:
    with psycopg.connect(dsn, autocommit=True) as administrator:
        administrator.execute(CREATE)
    clients = [RowsClient(dsn, work) for _ in range(work.clients)]
    try:
        return await repeat(clients, work, seconds)
    finally:
        for client in clients:
            client.close()


class PreparedStatements:
    """A connection on the event loop that runs one prepared statement at a time, each in its own transaction, in binary form."""

    def __init__(self, dsn: str, statements: Mapping[bytes, bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[pq.abc.PGresult] = self._loop.create_future()
        self._result: pq.abc.PGresult | None = None
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._pg = self._connection.pgconn
        for name, statement in statements.items():
            _check(self._pg.prepare(name, statement))
        self._pg.nonblocking = 1
        self._loop.add_reader(self._pg.socket, self._on_readable)

    def close(self) -> None:
        self._loop.remove_reader(self._pg.socket)
        self._connection.close()

    def run(self, name: bytes, parameters: list[bytes]) -> asyncio.Future[pq.abc.PGresult]:
        """Run the statement of that name. The future has its result, or RuntimeError with the server's message."""
        self._answer = self._loop.create_future()
        self._pg.send_query_prepared(name, parameters, [pq.Format.BINARY] * len(parameters), pq.Format.BINARY)
        if self._pg.flush():
            self._loop.add_writer(self._pg.socket, self._on_writable)
        return self._answer

    def _on_writable(self) -> None:
        if not self._pg.flush():
            self._loop.remove_writer(self._pg.socket)

    def _on_readable(self) -> None:
        try:
            self._pg.consume_input()
            while not self._pg.is_busy():
                result = self._pg.get_result()
                if result is not None:
                    self._result = _check(result)
                elif self._result is None:
                    return
                else:
                    self._answer.set_result(self._result)
                    self._result = None
                    return
        except Exception as error:
            self._loop.remove_reader(self._pg.socket)
            self._answer.set_exception(error)


class RowsClient(PreparedStatements, Client):
    def __init__(self, dsn: str, work: Work) -> None:
        super().__init__(dsn, STATEMENTS)
        self._size = work.payload
        self._items = [binary_array(_BYTEA, [b"x" * work.payload] * work.batch)]
        self._count = [struct.pack(">q", work.batch)]

    async def produce(self) -> None:
        await self.run(b"produce", self._items)

    async def lease(self) -> tuple[int, Any]:
        return self._read(await self.run(b"lease", self._count))

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        # The statement's answer counts what it leased, not what it deleted. `complete` checks that at the end.
        return self._read(await self.run(b"next", [*self._count, binary_array(INT8, leased)]))

    def _read(self, result: pq.abc.PGresult) -> tuple[int, Any]:
        ids, size, value = [], 0, result.get_value
        for row in range(result.ntuples):
            ids.append(value(row, 0))
            size += len(value(row, 1) or b"")
        if size != len(ids) * self._size:
            raise RuntimeError(f"{size} bytes of payload leased with {len(ids)} items")
        return len(ids), ids

    async def complete(self, leased: Any) -> None:
        result = await self.run(b"complete", [binary_array(INT8, leased)])
        if result.command_tuples != len(leased):
            raise RuntimeError(f"{result.command_tuples} of {len(leased)} items completed")


def _check(result: pq.abc.PGresult) -> pq.abc.PGresult:
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise RuntimeError(result.get_error_message())
    return result


def binary_array(kind: int, values: list[bytes]) -> bytes:
    """One-dimensional array without NULL, in PostgreSQL's binary form; all values have the same length."""
    length = struct.pack(">i", len(values[0]))
    return struct.pack(">iiIii", 1, 0, kind, len(values), 1) + length + length.join(values)
