"""The tasks of a capture, in processes of their own that are killed, frozen and started again.

`PlainTasks` runs `sluiceway.capture.run_member` in processes that this one looks after. `SparkTasks` runs
`sluiceway spark capture --resident`: then the tasks are Python workers of a Spark job, and Spark starts them again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from tests.server.server_process import COMMAND, PATIENCE
from tests.servers.pids import children, command_line, descendants, is_alive, kill, parent

Config = Mapping[str, object]
"""The fields of a CaptureConfig."""


class Tasks(Protocol):
    """What stands in for one task after another."""

    @property
    def kind(self) -> str: ...

    def start(self) -> None: ...

    def workers(self) -> list[int]:
        """The processes in which tasks run now. Each is a member at most."""
        ...

    def stop(self) -> None:
        """All of them, in order if they can. Nothing of them runs any more."""
        ...

    def check_logs(self) -> list[str]:
        """What no log should have."""
        ...


@contextlib.contextmanager
def running(tasks: Tasks) -> Iterator[None]:
    tasks.start()
    try:
        yield
    finally:
        tasks.stop()


class PlainTasks:
    """A task that ends is started again at once, under a new name, as Spark does it."""

    kind = "plain processes"

    def __init__(self, folder: Path, config: Config, count: int, environment: Mapping[str, str], module: str = "member") -> None:
        """`module`: what runs a member, given the configuration and a name."""
        self._folder, self._count, self._module = folder, count, module
        self._config = folder / "capture.json"
        self._config.write_text(json.dumps(dict(config)))
        self._environment = {**os.environ, **environment}
        self._mutex = threading.Lock()
        self._slots: list[subprocess.Popen[bytes]] = []
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper of tasks")
        self.starts = 0

    def start(self) -> None:
        self._slots = [self._launch(number) for number in range(self._count)]
        self._keeper.start()

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        self.starts += 1
        command = [sys.executable, "-m", f"tests.campaigns.tasks.{self._module}", str(self._config), f"task{number}"]
        with (self._folder / f"task{number}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)

    def _keep(self) -> None:
        while not self._stopping.wait(0.2):
            with self._mutex:
                for number, each in enumerate(self._slots):
                    if each.poll() is not None and not self._stopping.is_set():
                        self._slots[number] = self._launch(number)

    def workers(self) -> list[int]:
        with self._mutex:
            return [each.pid for each in self._slots if each.poll() is None]

    def stop(self) -> None:
        self._stopping.set()
        if self._keeper.is_alive():
            self._keeper.join(PATIENCE)
        for each in self._slots:
            each.send_signal(signal.SIGCONT)
            each.terminate()
        for each in self._slots:
            try:
                each.wait(PATIENCE / 2)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()

    def check_logs(self) -> list[str]:
        return [f"{path}: {line}" for path in sorted(self._folder.glob("task*.log")) for line in mistakes(path)]


class SparkTasks:
    """A driver with the workers of one job."""

    kind = "Spark"

    def __init__(self, folder: Path, config: Config, count: int, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        self._command = self._commanded(config, count)
        self._driver: subprocess.Popen[bytes] | None = None
        self._orphans: list[int] = []
        """Were below a driver that was killed alone."""
        self.starts = 0

    def _commanded(self, config: Config, count: int) -> list[str]:
        return [*COMMAND, *spark_arguments(config, count)]

    def start(self) -> None:
        self.starts += 1
        with (self._folder / "driver.out").open("ab") as out, (self._folder / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(self._command, stdout=out, stderr=log, env=self._environment, start_new_session=True)

    @property
    def driver(self) -> int:
        assert self._driver is not None
        return self._driver.pid

    def workers(self) -> list[int]:
        """The forks of PySpark's daemons: its Python processes that have no children."""
        below = descendants(self.driver)
        return [pid for pid in below if _is_daemon(pid) and _is_daemon(parent(pid)) and not children(pid) and is_alive(pid)]

    def kill_driver(self, alone: bool) -> None:
        """With all that belongs to it, as when a machine loses its power; or alone: then its tasks find out by themselves."""
        assert self._driver is not None
        below = descendants(self.driver)
        kill(self.driver)
        self._driver.wait(PATIENCE)
        if alone:
            self._orphans += below
        else:
            for pid in below:
                kill(pid)

    def stop(self) -> None:
        if self._driver is not None and self._driver.poll() is None:
            self._stop_driver(self._driver)
        # Their numbers may be somebody else's by now.
        for pid in self.orphans():
            kill(pid)

    def orphans(self) -> list[int]:
        """Those that still live, of drivers that were killed alone."""
        return [pid for pid in self._orphans if "pyspark" in command_line(pid)]

    def _stop_driver(self, driver: subprocess.Popen[bytes]) -> None:
        below = descendants(driver.pid)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        driver.terminate()
        try:
            driver.wait(PATIENCE / 2)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
        for pid in below:
            kill(pid)

    def check_logs(self) -> list[str]:
        path = self._folder / "driver.log"
        return [f"{path}: {line}" for line in mistakes(path)]


class BatchTasks(SparkTasks):
    """A streaming query, which reads the capture by micro-batches; one member beside the driver."""

    kind = "Spark's micro-batches"

    def _commanded(self, config: Config, count: int) -> list[str]:
        path = self._folder / "capture.json"
        path.write_text(json.dumps(dict(config)))
        return [sys.executable, "-m", "tests.campaigns.tasks.batches", str(path), str(self._folder / "checkpoint")]


def spark_arguments(config: Config, count: int) -> list[str]:
    """`sluiceway spark capture` with that configuration."""
    options = config.get("options", {})
    assert isinstance(options, Mapping)
    flags = {"--stream": "stream", "--to": "url", "--queue": "queue", "--meta": "meta", "--log": "log", "--limit": "limit"}
    given = [part for flag, field in flags.items() if field in config for part in (flag, str(config[field]))]
    given += [part for name, value in options.items() for part in ("--option", f"{name}={value}")]
    return ["spark", "capture", str(config["name"]), *given, "--resident", "--tasks", str(count), "--json"]


def _is_daemon(pid: int) -> bool:
    """Of PySpark, or a fork of one; a daemon itself has another parent."""
    return "pyspark.daemon" in command_line(pid)


def mistakes(path: Path) -> list[str]:
    """Where the log tells of a mistake in the code. It tells of staged trouble in a line, but for that of Spark's own Python.

    A process of Spark's that outlives its driver for a moment ends with a traceback in which no frame is ours.
    """
    if not path.exists():
        return []
    found = []
    lines = path.read_text(errors="replace").splitlines()
    for at, line in enumerate(lines):
        if line.startswith("Traceback"):
            frames = [
                each for each in itertools.takewhile(lambda each: each.startswith(" "), lines[at + 1 :]) if each.startswith("  File ")
            ]
            if not frames or not all("/pyspark/" in frame or "pyspark.zip" in frame for frame in frames):
                found.append(" / ".join(lines[at : at + 12])[-400:])
    return found[:3]
