"""A real server, and children that are killed, for the Spark tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluiceway.spark import options
from sluiceway.spark.server_calls import Client

PATIENCE = 200.0
"""Seconds after which something that does not happen is a failure. Spark starts slowly on a busy machine."""


def until(what: str, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Poll until the condition holds; fail after `seconds`, saying what was waited for."""
    deadline = time.monotonic() + seconds
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        tick.wait(0.02)


class Server:
    """`sluiceway serve` in a process of its own, which can be killed and started again on the same data and port. `config`: its file."""

    def __init__(self, folder: Path, config: Path | None = None) -> None:
        self._folder = folder
        self._config = ["--config", str(config)] if config else []
        self._port = 0
        self.url = ""
        self.start()

    def start(self) -> None:
        told = self._folder / "url"
        told.unlink(missing_ok=True)
        command = [sys.executable, "-m", "sluiceway.server.run", "--data", str(self._folder / "data"), "--port", str(self._port)]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self._config, "--url-file", str(told)], stdout=log, stderr=log)
        until("the server listens", lambda: told.exists() or self._process.poll() is not None)
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        self.url = told.read_text().strip()
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def call(self, path: str, **body: object) -> dict[str, Any]:
        client = Client(options.Server(self.url, "", 60_000))
        try:
            return client.call(path, body)
        finally:
            client.close()

    def create(self, queue: str, partitions: int = 2, **more: object) -> str:
        self.call("/v1/queues.create", queue_name=queue, requested_partitions=partitions, **more)
        return queue

    def produce(self, queue: str, texts: list[str]) -> None:
        self.call("/v1/queue.produce", queue_name=queue, items=[{"utf8": text} for text in texts])

    def count(self, queue: str, name: str) -> int:
        """A counter of `queue.stats`, summed over the partitions."""
        stats = self.call("/v1/queue.stats", queue_name=queue)
        return sum(partition[name] for logical in stats["logical_queues"] for partition in logical["partitions"])


@contextmanager
def server(folder: Path, config: Path | None = None) -> Iterator[Server]:
    running = Server(folder, config)
    try:
        yield running
    finally:
        running.kill()


def start_child(script: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A Python program in a process group of its own, so that its JVM can be killed with it."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_group(child: subprocess.Popen[str]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
