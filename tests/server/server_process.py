"""A real server in a child process, for tests that need one."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, ClassVar, Self

COMMAND = [sys.executable, "-m", "sluiceway.cli.main"]
PATIENCE = 120.0
"""Seconds a test waits for something that must happen. Only what hangs takes so long, on the slowest machine too."""


def wait_until(condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
    """Poll until the condition holds; fail by name when it does not in time."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        pause.wait(0.01)


def line_of(output: IO[str], patience: float = PATIENCE) -> str:
    """The next line that a process prints; empty if it ends, or prints none within `patience` seconds. Nothing may be in the buffer of
    `output`."""
    # Not `select`, which knows only the first 1,024 descriptors of a process.
    poll = select.poll()
    poll.register(output, select.POLLIN)
    return output.readline() if poll.poll(patience * 1_000) else ""


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of the loopback address on which nobody listens, nor can as long as the block lasts."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


class ServerProcess:
    """`sluiceway serve` on a data directory; `url` says where. Leaving the context kills it."""

    command: ClassVar[Sequence[str]] = COMMAND

    def __init__(self, data: Path, listen: str = "127.0.0.1:0", config: Path | None = None) -> None:
        self._log = data.with_name(f"{data.name}.log").open("ab")
        flags = [] if config is None else ["--config", str(config)]
        self.process = subprocess.Popen(
            [*self.command, "serve", "--data", str(data), "--listen", listen, *flags], stdout=subprocess.PIPE, stderr=self._log, text=True
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
        code = self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.kill()
