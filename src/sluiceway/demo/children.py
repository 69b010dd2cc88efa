"""Child processes that end with this one, whatever ends it, and that take along everything they started.

A child leads a session of its own, so a Ctrl-C in the terminal reaches only this process, which then stops them in order.
Spark puts its Python workers into process groups of their own, but they stay in the session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_POLL = 0.02
_PR_SET_PDEATHSIG = 1


class Child:
    """`python -m MODULE ARGUMENTS…`, with its output in a log file."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path, cwd: Path) -> None:
        command = [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number if one ended it."""
        return self._process.poll()

    def kill(self) -> None:
        """End it with all it started, at once (SIGKILL); returns when they are gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._sweep()

    def stop(self, grace: float = 10.0) -> None:
        """Ask it to end (SIGTERM), and `kill` it if it has not after `grace` seconds."""
        if self.exit_code is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _sweep(self) -> None:
        """What is left of its session: workers that have not noticed yet that nobody reads their answers."""
        wait_until(lambda: not self._kill_session(), 10.0)

    def _kill_session(self) -> bool:
        members = list(session_members(self.pid))
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(members)


def session_members(session: int) -> Iterator[int]:
    """Process ids of that session. None where there is no /proc."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The second field is a command's name in brackets, which may hold anything; state, parent, group and session follow.
            state, _, _, member_of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(member_of) == session and state != "Z":
            yield int(entry.name)


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Whether `condition` came true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _become(parent: int, module: str, arguments: Sequence[str]) -> None:
    """Turn this process into the wanted one, tied to its parent's life. Linux only: elsewhere a killed parent leaves it behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
