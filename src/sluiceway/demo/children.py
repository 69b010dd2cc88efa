"""Child processes that end with this one, however it ends, together with all processes they started.

A child leads its own session, so a Ctrl-C in the terminal reaches only this process, which then stops the children in order.
Spark puts its Python workers into their own process groups, but they stay in the session.
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
        """Exit code; None while it runs, minus the signal's number if a signal ended it."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill it with all the processes it started (SIGKILL); returns when they are gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._sweep()

    def stop(self, grace: float = 10.0) -> None:
        """Terminate it (SIGTERM), and `kill` it if it has not ended after `grace` seconds."""
        if self.exit_code is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _sweep(self) -> None:
        """Kill the rest of its session: workers that have not noticed yet that their parent is gone."""
        wait_until(lambda: not self._kill_session(), 10.0)

    def _kill_session(self) -> bool:
        members = list(session_members(self.pid))
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(members)


def session_members(session: int) -> Iterator[int]:
    """Process ids of the session; none where there is no /proc."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The second field is the command's name in brackets, with arbitrary text; state, parent, group and session follow.
            state, _, _, member_of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(member_of) == session and state != "Z":
            yield int(entry.name)


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait until `condition` holds. Returns whether it did within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _become(parent: int, module: str, arguments: Sequence[str]) -> None:
    """Become the wanted process, and die with the parent. Linux only: elsewhere the process outlives a killed parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
