"""What is put to the test: real servers on each kind of storage, behind lines that can be cut, and the processes that they are made of."""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.campaigns.blackbox.faulty_system import FaultySystem
from tests.campaigns.kit.lines import HOST, Line, Switchboard
from tests.server.server_process import COMMAND, line_of
from tests.servers import pids
from tests.servers.postgres_server import PostgresServer

STORAGES = ("sqlite", "postgresql", "cluster-sqlite", "cluster-postgresql", "bucket")
PATIENCE = 600.0
"""Seconds in which a server has to start, or to end. On a machine with a load of 30 one took more than two minutes."""
STOPPED = 120.0
"""Seconds on end for which a server may say that it has stopped a partition: it opens a damaged one only when it is told to."""
READY_POLL = 0.05
"""Seconds. Each poll is a line in the server's log."""
SIZE = 3
"""Members of a cluster."""


class Victim(Protocol):
    """A process that can be killed and made to stand still."""

    name: str

    def kill(self) -> None: ...
    def revive(self) -> None:
        """Returns when it takes calls again. Raises AssertionError if it does not."""

    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


class Way(Protocol):
    """How clients get to a member: by a port that leads to the one at which it listens."""

    target: int

    @property
    def port(self) -> int: ...


class StraightWay:
    """Nothing lies in between: a client has to ask for the port again when the member has started again."""

    target = 0

    @property
    def port(self) -> int:
        return self.target


class Links(NamedTuple):
    """The lines of a member. None: it has no such connection."""

    clients: Way
    meta: Line | None = None
    storage: Line | None = None
    peers: Line | None = None


class Member:
    """`sluiceway serve` on a data directory of its own. Clients reach it at `url`, wherever it listens at the moment."""

    def __init__(
        self,
        folder: Path,
        name: str,
        links: Links,
        config: Callable[[str], str],
        *,
        command: Sequence[str],
        flags: Sequence[str] = (),
        system: FaultySystem | None = None,
    ) -> None:
        self.name = name
        self.data = folder / name
        self.links = links
        self.command = command
        """What starts it, the next time."""
        self.system = system
        self._log = folder / f"{name}.log"
        self._config = config
        self._flags = flags
        self._starts = 0
        self._is_connected = False
        self._child: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.links.clients.port}"

    @property
    def config_file(self) -> Path:
        """Made anew at each start."""
        return self._log.with_suffix(".toml")

    @property
    def pid(self) -> int:
        assert self._child is not None, f"{self.name} does not run"
        return self._child.pid

    @property
    def runs(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def is_there(self) -> bool:
        """Whether clients reach it."""
        return self.runs and self._is_connected

    @property
    def processes(self) -> list[int]:
        """Of its processes. None, if it is down at the moment: another thread may be bringing it back."""
        child = self._child
        return [] if child is None else [child.pid, *pids.children(child.pid)]

    def launch(self) -> None:
        """Begin to start; returns at once."""
        self._starts += 1
        self._is_connected = False
        self.config_file.write_text(self._config(f"{self.name}.{self._starts}"))
        command = [
            *self.command,
            "serve",
            "--data",
            str(self.data),
            "--config",
            str(self.config_file),
            "--listen",
            f"{HOST}:0",
            *self._flags,
        ]
        more = {} if self.system is None else self.system.environment()
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **more})

    def listen(self) -> int:
        """The port at which it listens; not the one that clients use. Raises AssertionError if it does not."""
        assert self._child is not None
        assert self._child.stdout is not None
        line = line_of(self._child.stdout, PATIENCE)
        assert line.startswith("sluiceway listening on "), f"{self.name} did not start; the end of its log:\n{self.tail()}"
        return int(line.split()[-1].rpartition(":")[2])

    def attempt(self) -> int | None:
        """Start it where no client reaches it; the port at which it listens, or None if it refuses to start, and says why."""
        before = self.tracebacks()
        self.launch()
        try:
            return self.listen()
        except AssertionError:
            code = self._reap()
            assert code != 0, f"{self.name} ended with 0 in place of listening:\n{self.tail()}"
            assert self.tracebacks() == before, f"{self.name} did not start, and shows a traceback:\n{self.tail()}"
            return None

    def connect(self) -> None:
        """Let clients and other members reach it."""
        port = self.listen()
        self.links.clients.target = port
        if self.links.peers is not None:
            self.links.peers.target = port
        self._is_connected = True

    def await_ready(self) -> None:
        began = time.monotonic()
        stopped_at: float | None = None
        while problems := problems_of(self.links.clients.target):
            now = time.monotonic()
            is_stopped = any(": stopped: " in each for each in problems)
            stopped_at = (now if stopped_at is None else stopped_at) if is_stopped else None
            is_late = now - began >= PATIENCE or (stopped_at is not None and now - stopped_at >= STOPPED)
            assert not is_late, f"{self.name} does not become ready: {problems}; the end of its log:\n{self.tail()}"
            time.sleep(READY_POLL)

    def revive(self) -> None:
        self.launch()
        self.connect()
        self.await_ready()

    def kill(self) -> None:
        below = pids.descendants(self.pid)
        self._process.kill()
        for pid in below:
            pids.kill(pid)
        self._reap()

    def stop(self) -> int:
        """As a service manager does; its exit code."""
        self._process.terminate()
        return self._reap()

    def freeze(self) -> None:
        pids.stop(self.pid)

    def thaw(self) -> None:
        pids.thaw(self.pid)

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-2_000:]

    def tracebacks(self) -> int:
        """How often its log has what no log should have."""
        return self._log.read_text(errors="replace").count("Traceback") if self._log.exists() else 0

    @property
    def _process(self) -> subprocess.Popen[str]:
        assert self._child is not None, f"{self.name} does not run"
        return self._child

    def _reap(self) -> int:
        process, self._child = self._process, None
        code = process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()
        return code


class Worker:
    """A process of `serve --workers`. Its parent brings back who was killed."""

    def __init__(self, parent: Member, pid: int) -> None:
        self.name = f"worker {pid}"
        self._parent = parent
        self._pid = pid

    def kill(self) -> None:
        pids.kill(self._pid)

    def revive(self) -> None:
        self._parent.await_ready()

    def freeze(self) -> None:
        """Between two transactions of the meta store, in which it would keep all the others out of that file."""
        pids.freeze(self._pid, self._parent.data / "meta.sqlite")

    def thaw(self) -> None:
        pids.thaw(self._pid)


def problems_of(port: int) -> list[str]:
    """Why the server is not ready, in its words; empty if it is."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/readyz", timeout=5):
            return []
    except urllib.error.HTTPError as error:
        try:
            return [str(each) for each in json.load(error)["problems"]] or [str(error)]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return [str(error)]
    except (OSError, http.client.HTTPException) as error:
        return [str(error)]


@dataclass
class Target:
    """The members of one server or cluster, and what they stand on."""

    storage: str
    members: list[Member]
    workers: int = 0
    postgres: PostgresServer | None = None
    bucket: str = ""
    """The URL of the object store."""
    left_out: list[str] = field(default_factory=list)
    """What cannot be done on this machine, and why."""

    def start(self) -> None:
        for each in self.members:
            each.launch()
        for each in self.members:
            each.connect()
        self.await_ready()

    def end(self) -> None:
        for each in self.members:
            if each.runs:
                each.kill()

    def processes(self) -> list[int]:
        """Of all servers, and of the campaign itself."""
        return [os.getpid(), *(pid for each in self.members for pid in each.processes)]

    def victim(self, chance: random.Random) -> Victim:
        """Any process."""
        member = chance.choice(self.members)
        if self.workers:
            return Worker(member, chance.choice(pids.children(member.pid)))
        return member

    def await_ready(self) -> None:
        for each in self.members:
            each.await_ready()


@contextmanager
def target(storage: str, folder: Path, command: Sequence[str] = COMMAND) -> Iterator[Target]:
    """That kind of target, started, for the length of the block, in that folder, which is made."""
    folder.mkdir()
    with ExitStack() as stack:
        switchboard = stack.enter_context(Switchboard())
        made = _MAKERS[storage](folder, switchboard, command, stack)
        for each in made.members:
            try:
                each.system = FaultySystem(folder, each.name, each.data)
            except OSError as error:
                made.left_out.append(f"faults of disks and clocks: {error}")
        stack.callback(made.end)
        made.start()
        yield made


def _sqlite(folder: Path, switchboard: Switchboard, command: Sequence[str], _: ExitStack) -> Target:
    links = Links(switchboard.line(0))
    return Target("sqlite", [Member(folder, "server", links, lambda _: "", command=command)])


def _workers(folder: Path, switchboard: Switchboard, command: Sequence[str], _: ExitStack) -> Target:
    links = Links(switchboard.line(0))
    member = Member(folder, "server", links, lambda _: "", command=command, flags=["--workers", str(SIZE)])
    return Target("cluster-sqlite", [member], workers=SIZE)


def _postgresql(folder: Path, switchboard: Switchboard, command: Sequence[str], stack: ExitStack) -> Target:
    postgres = stack.enter_context(PostgresServer())
    links = Links(switchboard.line(0), storage=switchboard.line(postgres.port))

    def config(name: str) -> str:
        return _postgres_backend(postgres, links.storage, name)

    return Target("postgresql", [Member(folder, "server", links, config, command=command)], postgres=postgres)


def _postgres_cluster(folder: Path, switchboard: Switchboard, command: Sequence[str], stack: ExitStack) -> Target:
    postgres = stack.enter_context(PostgresServer())
    members = []
    for number in range(SIZE):
        links = Links(switchboard.line(0), switchboard.line(postgres.port), switchboard.line(postgres.port), switchboard.line(0))

        def config(name: str, links: Links = links) -> str:
            assert links.meta is not None
            parts = conninfo_to_dict(postgres.dsn(links.meta.port))
            meta = "postgresql://{user}:{password}@{host}:{port}/{dbname}".format(**parts)
            return _postgres_backend(postgres, links.storage, name) + _cluster(meta, links)

        members.append(Member(folder, f"i{number}", links, config, command=command))
    return Target("cluster-postgresql", members, postgres=postgres)


def _postgres_backend(postgres: PostgresServer, line: Line | None, name: str) -> str:
    assert line is not None
    url = make_conninfo(postgres.dsn(line.port), application_name=name)
    return f'[backends.default]\nkind = "postgres"\nurl = "{url}"\n'


def _bucket(folder: Path, switchboard: Switchboard, command: Sequence[str], stack: ExitStack) -> Target:
    """A cluster that has nothing but a bucket."""
    url = stack.enter_context(_object_store())
    port = int(url.rpartition(":")[2])
    members = []
    for number in range(SIZE):
        links = Links(switchboard.line(0), switchboard.line(port), switchboard.line(port), switchboard.line(0))

        def config(name: str, links: Links = links) -> str:
            assert links.meta is not None
            assert links.storage is not None
            meta = f"s3://tests/meta?region=none&endpoint=http://{HOST}:{links.meta.port}&access_key_id=tests&secret_access_key=tests"
            return (
                '[backends.default]\nkind = "s3"\nbucket = "tests"\nprefix = "items"\nregion = "none"\n'
                f'endpoint = "http://{HOST}:{links.storage.port}"\naccess_key_id = "tests"\nsecret_access_key = "tests"\n'
            ) + _cluster(meta, links)

        members.append(Member(folder, f"i{number}", links, config, command=command))
    return Target("bucket", members, bucket=url)


@contextmanager
def _object_store() -> Iterator[str]:
    """One in memory, as a process of its own; its URL."""
    process = subprocess.Popen([sys.executable, "-m", "bench.bucket_server"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _cluster(meta: str, links: Links) -> str:
    assert links.peers is not None
    return f'[cluster]\nmeta = "{meta}"\nadvertise = "http://{HOST}:{links.peers.port}"\n'


_MAKERS: Mapping[str, Callable[[Path, Switchboard, Sequence[str], ExitStack], Target]] = {
    "sqlite": _sqlite,
    "postgresql": _postgresql,
    "cluster-sqlite": _workers,
    "cluster-postgresql": _postgres_cluster,
    "bucket": _bucket,
}
