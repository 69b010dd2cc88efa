"""How much memory processes take over time, and whether that is flat."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.pids import descendants

EVERY = 1.0
"""Seconds between two samples."""
FEWEST = 30
"""Samples from which it can be said whether a curve is flat."""

_AFTER_GC = re.compile(r"\[([0-9.]+)s\].* GC\(\d+\) Pause .*->(\d+)M\((\d+)M\)")


@dataclass
class Curve:
    """MiB over seconds."""

    seconds: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def add(self, seconds: float, mib: float) -> None:
        self.seconds.append(seconds)
        self.mib.append(mib)

    @property
    def most(self) -> float:
        return max(self.mib, default=0.0)

    def since(self, seconds: float) -> Curve:
        """What came later."""
        pairs = [(at, mib) for at, mib in zip(self.seconds, self.mib, strict=True) if at >= seconds]
        return Curve([at for at, _ in pairs], [mib for _, mib in pairs])

    def growth(self, of: Callable[[Sequence[float]], float] = statistics.median) -> float | None:
        """By how many MiB the last third lies above the middle third, by their medians or what `of` says; None: too few samples to tell."""
        if len(self.mib) < FEWEST:
            return None
        third = len(self.mib) // 3
        return of(self.mib[2 * third :]) - of(self.mib[third : 2 * third])


class Watch:
    """Samples, in a thread, the memory of the server, and of a job that of its JVM and of the Python processes below it.

    These share much of it, as they are forked from one; what they share is counted once.
    """

    def __init__(self, server: int, job: int) -> None:
        self.curves = {name: Curve() for name in ("server", "jvm", "workers")}
        self._server, self._job = server, job
        self._over = threading.Event()
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            now = time.monotonic() - self._begun
            below = descendants(self._job)
            machines = [pid for pid in below if _name(pid) == "java"]
            self.curves["server"].add(now, resident(self._server))
            # Before Spark is there, nothing is there to be measured.
            if machines:
                self.curves["jvm"].add(now, sum(map(resident, machines)))
                workers = {pid for machine in machines for pid in descendants(machine)}
                self.curves["workers"].add(now, sum(map(proportional, workers)))


def after_collections(log: Path) -> Curve:
    """What a JVM's garbage collections left, by its log (`-Xlog:gc`)."""
    curve = Curve()
    for found in _AFTER_GC.finditer(log.read_text()):
        curve.add(float(found[1]), float(found[2]))
    return curve


def resident(pid: int) -> float:
    """MiB; 0 if there is no such process any more."""
    return _measured(Path(f"/proc/{pid}/status"), "VmRSS")


def proportional(pid: int) -> float:
    """MiB, of what is shared with others a part only; 0 if there is no such process any more."""
    return _measured(Path(f"/proc/{pid}/smaps_rollup"), "Pss")


def _measured(path: Path, name: str) -> float:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
