"""The servers of task queues, as durable as they can be. They can be killed, and started again on the same data and port."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.processes import PATIENCE, free_port, kill_family, listening, output_of, program
from bench.systems import postgres_rows
from sluiceway import __version__


class Broker(ABC):
    """A server with its data in `folder`."""

    url: str
    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()

    @staticmethod
    @abstractmethod
    def found() -> str | None:
        """Return why the server cannot run on this machine; None if it can."""

    @staticmethod
    @abstractmethod
    def version() -> str:
        """Return the server's name and version."""

    @abstractmethod
    def start(self) -> None:
        """Start it, also after `kill`, and wait until it accepts connections."""

    def kill(self) -> None:
        """Kill all of its processes."""
        kill_family(self.process.pid)
        self.process.wait(PATIENCE)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


class Redis(Broker):
    """Redis whose append-only file is synced before it answers (`appendfsync always`); no snapshots."""

    policy = "always"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"redis://127.0.0.1:{self.port}/0"

    @staticmethod
    def found() -> str | None:
        return None if program("redis-server") else "no redis-server is installed (on Debian: apt-get install redis-server)"

    @staticmethod
    def version() -> str:
        return output_of("redis-server", "--version").partition(" sha")[0]

    def start(self) -> None:
        durable = ["--appendonly", "yes", "--appendfsync", self.policy, "--save", ""]
        command = [str(program("redis-server")), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), *durable]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        listening(self.port, self.process)


class RedisEverysec(Redis):
    """Redis with its default for append-only files: synced once a second, so a crash of the machine loses up to that."""

    policy = "everysec"


class Postgres(Broker):
    """PostgreSQL with fsync=on and synchronous_commit=on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._cluster = postgres_rows.initialize(folder)
        self.url = self._cluster.dsn

    @staticmethod
    def found() -> str | None:
        return postgres_rows.found()

    @staticmethod
    def version() -> str:
        return postgres_rows.version()

    def start(self) -> None:
        self.process = postgres_rows.start(self._cluster)

    def stop(self) -> None:
        postgres_rows.stop(self.process)


class Sluiceway(Broker):
    """`sluiceway serve` with its defaults: one process, SQLite with synchronous=FULL."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"http://127.0.0.1:{self.port}"

    @staticmethod
    def found() -> str | None:
        return None

    @staticmethod
    def version() -> str:
        return f"Sluiceway {__version__}"

    def start(self) -> None:
        command = [sys.executable, "-m", "sluiceway.cli.main", "serve", "--data", str(self.folder / "data")]
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen([*command, "--listen", f"127.0.0.1:{self.port}"], stdout=output, stderr=output)
        listening(self.port, self.process)


@contextmanager
def running(kind: type[Broker], folder: Path) -> Iterator[Broker]:
    broker = kind(folder)
    try:
        broker.start()
        yield broker
    finally:
        if hasattr(broker, "process"):
            broker.stop()
