"""Servers in processes of their own, and what the system knows of a process (Linux)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SLUICEWAY = "sluiceway.server.run"


class Server(NamedTuple):
    url: str
    pid: int
    start: float
    """Seconds from the start of the process until it took requests."""


@contextmanager
def server(module: str, data: Path, *arguments: str) -> Iterator[Server]:
    """A server of its own process, stopped at the end."""
    began = time.perf_counter()
    command = [sys.executable, "-m", module, "--data", str(data), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "http://" not in line:
            raise RuntimeError(f"{module} did not start: {line!r}")
        yield Server(line.split()[-1], process.pid, time.perf_counter() - began)
    finally:
        process.terminate()
        process.wait(60)


def workers(number: int, folder: Path) -> tuple[str, ...]:
    """The arguments with which SLUICEWAY serves by so many processes; it writes their configuration into the folder."""
    config = folder / f"workers-{number}.toml"
    config.write_text(f"[server]\nworkers = {number}\n")
    return ("--config", str(config))


def resident(pid: int) -> int:
    """Bytes of memory that the process has at this moment."""
    return _status(pid, "VmRSS") * 1_024


def peak(pid: int) -> int:
    """The most bytes of memory that the process had at any moment since it began, or since `forget_peak`."""
    return _status(pid, "VmHWM") * 1_024


def forget_peak() -> None:
    """From now on this process's `peak` is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def handles(pid: int) -> int:
    """Open file handles."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def cpu_seconds(pid: int) -> float:
    """What the process has used so far, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family_cpu(*pids: int) -> float:
    """Seconds that the processes, their children and theirs have used so far; of those that have ended, what their parents know."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                # It has ended meanwhile.
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            used[int(entry.name)] = sum(int(field) for field in fields[11:15])
    total, waiting = 0, list(pids)
    while waiting:
        each = waiting.pop()
        # Each counts once.
        total += used.pop(each, 0)
        waiting += children.pop(each, [])
    return total / os.sysconf("SC_CLK_TCK")


def written_bytes() -> int:
    """What this process has caused to be written to the disk so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
