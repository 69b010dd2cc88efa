"""A real Kafka server of the tests' own, on loopback, in a directory that goes with it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from postgres_server import PATIENCE, free_port, signal_one, wait_until
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.session import find_java_home

VERSION = "4.1.0"
FETCH_TIMEOUT = 600.0
"""Seconds to fetch the server; it takes half a minute."""
CACHE = Path(__file__).resolve().parent.parent / ".tools"

SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    # A topic that is made by mistake would have none of the settings that it must have.
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
    # A killed server may come back when its session with the controller, which is in the same process, is over.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.enable": "false",
    "num.network.threads": "2",
    "num.io.threads": "2",
    "background.threads": "2",
}

LOGGING = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="WARN">
  <Appenders><Console name="out"><PatternLayout pattern="%d %p %c: %m%n"/></Console></Appenders>
  <Loggers><Root level="WARN"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
"""


class NoServerError(Exception):
    """This machine has no Kafka server, and none can be fetched."""


@functools.cache
def java() -> Path:
    """Raises NoServerError."""
    try:
        return find_java_home() / "bin" / "java"
    except SluicewayError as error:
        raise NoServerError(str(error)) from error


_failed: list[NoServerError] = []


def jars() -> Path:
    """The directory with the server's program: SLUICEWAY_TEST_KAFKA if that is set, otherwise under `.tools`, where the first who asks puts
    it, once for all processes. Raises NoServerError.
    """
    if chosen := os.environ.get("SLUICEWAY_TEST_KAFKA"):
        return Path(chosen).absolute()
    place = CACHE / f"kafka-{VERSION}"
    if not place.exists():
        if _failed:
            raise _failed[0]
        CACHE.mkdir(exist_ok=True)
        with (CACHE / "kafka.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                try:
                    _fetch(place)
                except NoServerError as error:
                    _failed.append(error)
                    raise
    return place


def _fetch(place: Path) -> None:
    """From the Java registry, by the client for it that PySpark carries. Whole, or not at all."""
    package = importlib.util.find_spec("pyspark")
    clients = sorted((Path(package.origin).parent / "jars").glob("ivy-*.jar")) if package and package.origin else []
    if not clients:
        raise NoServerError("PySpark, which has a client for the Java registry, is not installed")
    with tempfile.TemporaryDirectory(prefix="kafka-", dir=place.parent) as directory:
        found = Path(directory) / "jars"
        command = [str(java()), "-jar", str(clients[-1]), "-dependency", "org.apache.kafka", "kafka_2.13", VERSION]
        # Some of what it needs calls itself a bundle.
        command += ["-confs", "default", "-types", "jar", "bundle", "-cache", f"{directory}/cache"]
        command += ["-retrieve", f"{found}/[artifact]-[revision](-[classifier]).[ext]"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            raise NoServerError(f"the Java registry did not give it within {FETCH_TIMEOUT:.0f} s") from None
        needed = [f"kafka_2.13-{VERSION}.jar", f"kafka-clients-{VERSION}.jar"]
        if answer.returncode or not all((found / name).exists() for name in needed) or not list(found.glob("scala-logging*.jar")):
            raise NoServerError(f"the Java registry did not give it: {(answer.stdout + answer.stderr)[-1_000:]}")
        found.rename(place)


class KafkaServer:
    """Started by entering the block, stopped by leaving it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> KafkaServer:
        self._program = jars()
        self._directory = Path(tempfile.mkdtemp(prefix="sluiceway-kafka-"))
        try:
            self.port, controller = free_port(), free_port()
            own = {
                "controller.quorum.voters": f"1@127.0.0.1:{controller}",
                "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
                "log.dirs": str(self._directory / "data"),
            }
            self._properties = self._directory / "server.properties"
            self._properties.write_text("".join(f"{name}={value}\n" for name, value in {**SETTINGS, **own}.items()))
            (self._directory / "log4j2.xml").write_text(LOGGING)
            cluster = ["-t", "c2x1aWNld2F5LXRlc3RzLQ", "-c", str(self._properties)]
            formatting = self._spawn("kafka.tools.StorageTool", "format", *cluster)
            if formatting.wait(PATIENCE):
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

    def start(self) -> None:
        """Returns when the server takes requests; some 4 seconds."""
        self._process = self._spawn("kafka.Kafka", str(self._properties))
        wait_until(self._answers, "the start of the Kafka server")

    def kill(self) -> None:
        """By SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE)

    def stop(self) -> None:
        """In good order."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(PATIENCE)

    def pause(self) -> None:
        """It does nothing until `resume`."""
        assert self._process is not None
        signal_one(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        signal_one(self._process.pid, signal.SIGCONT)

    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-4_000:]

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        flags = ["-Xms128m", "-Xmx320m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData"]
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

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the Kafka server ended with {self._process.returncode}:\n{self.log()}")
        # In a thread of its own, since whoever waits may be in an event loop.
        answers: list[bool] = []
        asking = threading.Thread(target=lambda: answers.append(asyncio.run(_has_server(self.bootstrap))))
        asking.start()
        asking.join()
        return answers == [True]

    def _remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # It is not needed again.
            self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


async def _has_server(bootstrap: str) -> bool:
    """Whether one is there that takes part in the cluster."""
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=2_000)
    logger = logging.getLogger("aiokafka")
    level = logger.level
    # That it is not there yet is no news.
    logger.setLevel(logging.CRITICAL)
    try:
        await client.start()
        return bool((await client.describe_cluster())["brokers"])
    except (KafkaError, OSError, TimeoutError):
        return False
    finally:
        logger.setLevel(level)
        await client.close()


@contextlib.contextmanager
def server_or_skip() -> Iterator[KafkaServer]:
    """For a fixture: a server for the length of a block, or a skip that cannot be overlooked."""
    try:
        jars()
    except NoServerError as error:
        warnings.warn(f"NOTHING IS TESTED ON KAFKA: {error}", stacklevel=2)
        pytest.skip(f"NOTHING IS TESTED ON KAFKA: {error}")
    with KafkaServer() as server:
        yield server
