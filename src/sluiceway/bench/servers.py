"""Servers in their own processes, and a process's resource usage (Linux)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

SLUICEWAY = "sluiceway.server.run"


class Server(NamedTuple):
    """A running server process."""

    url: str
    pid: int
    start: float
    """Seconds from the start of the process until it took requests."""


@contextmanager
def server(module: str, data: Path, *arguments: str, python: str | Path = sys.executable) -> Iterator[Server]:
    """Run a server in its own process for the duration of the block, by that interpreter. Raises RuntimeError if it does not start."""
    began = time.perf_counter()
    command = [str(python), "-m", module, "--data", str(data), *arguments]
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
    """Arguments that make SLUICEWAY serve with `number` processes; their configuration is written into the folder."""
    config = folder / f"workers-{number}.toml"
    config.write_text(f"[server]\nworkers = {number}\n")
    return ("--config", str(config))


def resident(pid: int) -> int:
    """Resident memory of the process, in bytes."""
    return _status(pid, "VmRSS") * 1_024


def peak(pid: int) -> int:
    """Peak resident memory of the process, in bytes, since its start or `forget_peak`."""
    return _status(pid, "VmHWM") * 1_024


def forget_peak() -> None:
    """Reset this process's `peak`."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def handles(pid: int) -> int:
    """Number of open file handles."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def cpu_seconds(pid: int) -> float:
    """Processor seconds used by the process so far, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family_cpu(*pids: int) -> float:
    """Processor seconds used so far by the processes and their descendants; of ended ones, as far as their parents know.

    A process that ends after its parent is missing from then on: for such families there is `FamilyMeter`.
    """
    return FamilyMeter(*pids).seconds()


class _Process(NamedTuple):
    """A process, as observed. `own`, `reaped`: ticks of its own, and of its ended children that were waited for."""

    pid: int
    began: int
    parent: int
    own: int
    reaped: int


class FamilyMeter:
    """Processor time of processes and their descendants, including unreaped ones; never decreases.

    A process that ends passes its time on to its parent if that waits for it. Otherwise its last observed time is kept, so call `seconds`
    often; used as a context manager, the meter does so itself, every `interval` seconds, in a thread.
    """

    def __init__(self, *pids: int, interval: float = 0.2) -> None:
        self._roots = pids
        self._interval = interval
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._family: dict[tuple[int, int], _Process] = {}
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="family-meter", daemon=True)

    def seconds(self) -> float:
        """Processor seconds used so far by all of them, since the start of each."""
        with self._lock:
            self._look()
            ticks = self._lost + sum(each.own + each.reaped for each in self._family.values())
        return ticks / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self.seconds()

    def _look(self) -> None:
        before, self._family = self._family, self._members(_processes())
        ended: dict[tuple[int, int] | None, int] = {}
        pids = {key[0]: key for key in before}
        for key, process in before.items():
            if key not in self._family:
                heir = pids.get(process.parent)
                # An ended parent has passed its time on to its own parent, if that waited for it.
                while heir is not None and heir not in self._family:
                    heir = pids.get(before[heir].parent)
                ended[heir] = ended.get(heir, 0) + process.own + process.reaped
        for heir, ticks in ended.items():
            inherited = 0 if heir is None else self._family[heir].reaped - before[heir].reaped
            self._lost += max(0, ticks - inherited)

    def _members(self, found: dict[int, _Process]) -> dict[tuple[int, int], _Process]:
        """Find the family: the roots, their descendants, and earlier members, whatever their parents are now."""
        children: dict[int, list[int]] = {}
        for process in found.values():
            children.setdefault(process.parent, []).append(process.pid)
        members: dict[tuple[int, int], _Process] = {}
        waiting = [*self._roots, *(pid for pid, began in self._family if pid in found and found[pid].began == began)]
        while waiting:
            pid = waiting.pop()
            member = found.get(pid)
            if member is not None and (pid, member.began) not in members:
                members[pid, member.began] = member
                waiting += children.get(pid, [])
        return members


def _processes() -> dict[int, _Process]:
    """List all processes of this machine. Repeats until two looks agree, so that a process that ends in between counts once."""
    found = _processes_once()
    for _ in range(5):
        again = _processes_once()
        if again.keys() == found.keys():
            return again
        found = again
    return found


def _processes_once() -> dict[int, _Process]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                # The process has ended meanwhile.
                continue
            own, reaped = (sum(map(int, fields[first : first + 2])) for first in (11, 13))
            found[int(entry.name)] = _Process(int(entry.name), int(fields[19]), int(fields[1]), own, reaped)
    return found


def written_bytes() -> int:
    """Bytes that this process has caused to be written to disk so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
