"""A real server in a child process, for tests that need one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

COMMAND = [sys.executable, "-m", "sluiceway.cli.main"]


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
    """Poll until the condition holds; fail by name when it does not in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"


class ServerProcess:
    """`sluiceway serve` on a data directory; `url` says where. Leaving the context kills it."""

    def __init__(self, data: Path, listen: str = "127.0.0.1:0") -> None:
        self._log = data.with_name(f"{data.name}.log").open("ab")
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--data", str(data), "--listen", listen], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("sluiceway listening on http://"), f"{line!r}; see {self._log.name}"
        self.url = line.split()[-1]

    @property
    def address(self) -> str:
        """HOST:PORT, to start another one in its place."""
        return self.url.removeprefix("http://")

    def kill(self) -> None:
        """As a power cut would: no chance to tidy up."""
        self.process.kill()
        self._reap()

    def interrupt(self) -> int:
        """Ask it to stop; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self._reap()

    def _reap(self) -> int:
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.kill()
