"""Processes by their ids, as /proc has them: what belongs to one, and how it is killed or made to stand still."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

PATIENCE = 30.0
"""Seconds until a process has to stand still."""


def kill(pid: int) -> None:
    """If it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def is_alive(pid: int) -> bool:
    return bool(_stat(pid)) and _stat(pid)[0] not in "ZX"


def parent(pid: int) -> int:
    """0 if there is no such process any more."""
    found = _stat(pid)
    return int(found[1]) if found else 0


def _stat(pid: int) -> list[str]:
    """The fields of proc_pid_stat(5) from the state on. The name before it may have anything in it but for its last bracket."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


class CpuTime(NamedTuple):
    """Seconds that a process's first thread, which is the one of the event loop, has computed, and waited for a CPU, since its start."""

    computing: float = 0.0
    waiting: float = 0.0


def cpu_time(pid: int) -> CpuTime:
    """Zeros if there is no such process."""
    with contextlib.suppress(OSError):
        computing, waiting, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        return CpuTime(int(computing) / 1e9, int(waiting) / 1e9)
    return CpuTime()


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def children(pid: int) -> list[int]:
    """The processes that it has started and that are there."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """All processes below that one."""
    found = children(pid)
    for below in found:
        found += children(below)
    return found


def stop(pid: int) -> None:
    """Nothing of the process does anything until SIGCONT. Returns when that is so.

    That the signal was sent says little: on a busy machine the other threads of a large process go on for a while.
    """
    os.kill(pid, signal.SIGSTOP)
    late = time.monotonic() + PATIENCE
    while not all(state in "TtZX" for state in states(pid)):
        if time.monotonic() > late:
            raise AssertionError(f"process {pid} does not stand still")
        time.sleep(0.001)


def states(pid: int) -> list[str]:
    """Of its threads, a letter each as in proc_pid_stat(5); none if there is no such process."""
    found = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        # Threads come and go, and so may the process.
        with contextlib.suppress(OSError):
            found.append(stat.read_text().rpartition(")")[2].split()[0])
    return found


def freeze(pid: int, store: Path) -> None:
    """The process stands still, between two transactions on that SQLite file.

    In the middle of one it would keep everybody else out of the file, which docs/project/tasks.md says, and is not what is tested. It never
    stands still for so long that it would have lost something by that before.
    """
    while True:
        stop(pid)
        with contextlib.closing(sqlite3.connect(store, timeout=0.1, isolation_level=None)) as look:
            try:
                look.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                thaw(pid)
            else:
                look.execute("ROLLBACK")
                return
