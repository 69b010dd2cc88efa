"""A private Kafka broker, and Java programs from the Java registry (Linux)."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.session import find_java_home

VERSION = "4.4.0"
FETCH_TIMEOUT = 600.0
"""Seconds to fetch a program, which usually takes half a minute."""
PATIENCE = 120.0
"""Seconds within which the broker must start, and end."""

SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    # A topic created by mistake would lack its required settings.
    "auto.create.topics.enable": "false",
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    # A killed server can return once its session with the controller, which is in the same process, is over.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.enable": "false",
    "num.network.threads": "2",
    "num.io.threads": "2",
    "background.threads": "2",
}

SMALL = ("-Xms128m", "-Xmx320m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Java flags for a broker that starts fast and has little to do."""

LOGGING = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="WARN">
  <Appenders><Console name="out"><PatternLayout pattern="%d %p %c: %m%n"/></Console></Appenders>
  <Loggers><Root level="WARN"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
"""


class NotFoundError(Exception):
    """The program is not on this machine, and cannot be fetched."""


def java() -> Path:
    """Return the path of Java. Raises NotFoundError."""
    try:
        return find_java_home() / "bin" / "java"
    except SluicewayError as error:
        raise NotFoundError(str(error)) from error


def fetch(organisation: str, module: str, version: str, cache: Path) -> Path:
    """Return the directory with the module's jars and dependencies under `cache`, where the first caller puts it, once for all processes.

    Uses the client for the Java registry that PySpark carries. Raises NotFoundError.
    """
    place = cache / f"{module}-{version}"
    if place.exists():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            _fetch(organisation, module, version, place)
    return place


def _fetch(organisation: str, module: str, version: str, place: Path) -> None:
    package = importlib.util.find_spec("pyspark")
    clients = sorted((Path(package.origin).parent / "jars").glob("ivy-*.jar")) if package and package.origin else []
    if not clients:
        raise NotFoundError("PySpark, which has a client for the Java registry, is not installed")
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=place.parent) as directory:
        found = Path(directory) / "jars"
        command = [str(java()), "-jar", str(clients[-1]), "-dependency", organisation, module, version]
        # Some dependencies have the type bundle.
        command += ["-confs", "default", "-types", "jar", "bundle", "-cache", f"{directory}/cache"]
        command += ["-retrieve", f"{found}/[artifact]-[revision](-[classifier]).[ext]"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            raise NotFoundError(f"the Java registry did not give {module} {version} within {FETCH_TIMEOUT:.0f} s") from None
        failed = answer.returncode or "UNRESOLVED DEPENDENCIES" in answer.stdout or "FAILED DOWNLOADS" in answer.stdout
        if failed or not (found / f"{module}-{version}.jar").exists():
            raise NotFoundError(f"the Java registry did not give {module} {version}: {(answer.stdout + answer.stderr)[-1_000:]}")
        found.rename(place)


class Broker:
    """A broker, running for the duration of the block. `program`: directory of its jars."""

    def __init__(self, program: Path, settings: Mapping[str, str] = SETTINGS, flags: Sequence[str] = SMALL) -> None:
        self._program = program
        self._settings = settings
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="sluiceway-kafka-"))
        try:
            self.port, controller = _free_port(), _free_port()
            own = {
                "controller.quorum.voters": f"1@127.0.0.1:{controller}",
                "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
                "log.dirs": str(self._directory / "data"),
            }
            self._properties = self._directory / "server.properties"
            self._properties.write_text("".join(f"{name}={value}\n" for name, value in {**self._settings, **own}.items()))
            (self._directory / "log4j2.xml").write_text(LOGGING)
            cluster = ["-t", "c2x1aWNld2F5LXRlc3RzLQ", "-c", str(self._properties)]
            if self._spawn("kafka.tools.StorageTool", "format", *cluster).wait(PATIENCE):
                raise RuntimeError(f"formatting failed:\n{self.log()}")
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the broker; returns when it is ready, after some 4 seconds."""
        self._process = self._spawn("kafka.Kafka", str(self._properties))
        deadline = time.monotonic() + PATIENCE
        while not self.ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the Kafka server ended with {self._process.returncode}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the Kafka server did not start within {PATIENCE:.0f} s:\n{self.log()}")
            time.sleep(0.05)

    def ready(self) -> bool:
        """Whether it accepts connections. Clients must still wait until it takes part in the cluster."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE)

    def stop(self) -> None:
        """Stop it gracefully."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(PATIENCE)

    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-4_000:]

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        flags = [*self._flags, "-XX:-UsePerfData"]
        flags += [f"-Dlog4j2.configurationFile={self._directory / 'log4j2.xml'}", "-cp", f"{self._program}/*"]
        with (self._directory / "log").open("ab") as log:
            return subprocess.Popen(
                [str(java()), *flags, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"},
                start_new_session=True,
            )

    def _remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # It is not needed again.
            self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
