"""Alternating measurement: each slice of work runs in its own process, and a round has one slice of each system.

A peer does the same work in every form of ours, so it is measured once a round and compared with each form.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from sluiceway.bench import systems
from sluiceway.bench.servers import family_cpu
from sluiceway.bench.work import Form, Served, Work

OURS = "sluiceway"
ON_POSTGRES = "sluiceway-postgres"
FORMS: dict[str, tuple[Form, ...]] = {
    OURS: ("arrow", "json", "protobuf"),
    "sluiceway-client": ("arrow", "json"),
    ON_POSTGRES: ("arrow", "json"),
    "sluiceway-workers-2": ("arrow",),
    "in-memory": ("arrow",),
    "in-process": ("arrow",),
}
"""Batch forms in which a system of ours is measured. Any other system has its own protocol, and does one work for all forms."""
GATHERING = "sluiceway-consumer"
"""Does single items only, whatever the form. It has no calls of its own whose latency could be measured."""
OVERTIME = 60.0
"""Seconds that a slice may take beyond its duration, including its setup."""


class FailedError(Exception):
    """A system failed in a slice."""


@dataclass(frozen=True)
class Slice:
    """Measurement by a client's process. `server`, `client`: processor seconds; `seconds`: of the clock; `latencies`: of single calls;
    `figures`: what else the load measured."""

    items: int
    seconds: float
    server: float
    client: float
    latencies: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.items / self.seconds


@contextmanager
def started(names: Iterable[str], tell: Callable[[str], None]) -> Iterator[dict[str, Served]]:
    """Start the named systems that this machine has. `tell` gets the reason for each one that is left out."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="sluiceway-bench-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # A server that refuses to run as root runs as another user, who must be able to reach its folder.
        folder.chmod(0o711)
        running: dict[str, Served] = {}
        for name in names:
            if reason := systems.found(name):
                tell(f"NOT MEASURED, {name}: {reason}")
                continue
            place = folder / name
            place.mkdir()
            try:
                running[name] = stack.enter_context(systems.module(name).serve(name, place))
            except Exception as error:
                tell(f"NOT MEASURED, {name}: it does not start: {type(error).__name__}: {error}")
        yield running


def slice_of(name: str, served: Served, work: Work, seconds: float) -> Slice:
    """Run one slice in its own process. Raises FailedError."""
    return slice_by("sluiceway.bench.slice_process", served, seconds, name, served.address, work.name, str(seconds))


def slice_by(module: str, served: Served, seconds: float, *arguments: str) -> Slice:
    """Run one slice in its own process, by a module that reports as `slice_process` does. Raises FailedError."""
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        timer = threading.Timer(seconds + OVERTIME, process.kill)
        timer.start()
        try:
            measured = _read(process.stdout, served)
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
        if process.returncode or measured is None:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            raise FailedError(f"exit code {process.returncode}: {lines[-1] if lines else 'it said nothing'}")
    if not measured.items:
        raise FailedError("not one item went the whole way")
    return measured


def _read(lines: IO[str], served: Served) -> Slice | None:
    """Read the output of a client's process (`slice_process.py`); None if it ended early."""
    client = {"begin": 0.0, "end": 0.0}
    server = {"begin": family_cpu(*served.pids), "end": 0.0}
    for line in lines:
        told: dict[str, Any] = json.loads(line)
        moment = next(iter(told))
        if moment in client:
            server[moment] = family_cpu(*served.pids)
            client[moment] = told[moment]
            continue
        used = server["end"] - server["begin"], client["end"] - client["begin"]
        return Slice(told["items"], told["seconds"], *used, told["latencies"] or {}, told["figures"])
    return None


def measure(
    group: Sequence[Work], running: dict[str, Served], rounds: int, seconds: float, tell: Callable[[str], None]
) -> dict[Work, dict[str, list[Slice]]]:
    """Measure each work of a group (`groups`), by system. A system that fails is left out of that work, and `tell` gets the reason."""
    slices: dict[Work, dict[str, list[Slice]]] = {work: {} for work in group}
    cycles = [(name, same) for name in running for same in _cycles(name, group)]
    for number in range(rounds):
        for name, same in list(cycles):
            try:
                one = slice_of(name, running[name], same[0], seconds)
            except FailedError as error:
                cycles.remove((name, same))
                tell(f"LEFT OUT of {same[0].name}, {name}: {error}")
                for work in same:
                    slices[work].pop(name, None)
                continue
            for work in same:
                slices[work].setdefault(name, []).append(one)
            tell(f"{same[0].name} {number + 1}/{rounds} {name}: {one.rate:,.0f} items/s")
    return slices


def _cycles(name: str, group: Sequence[Work]) -> list[list[Work]]:
    """Slices of one system in a round: each of the works that are the same to it."""
    if name == GATHERING:
        return [[work] for work in group if work.batch == 1 and work.form == "json" and work.kind != "latency"]
    if name not in FORMS:
        return [list(group)]
    return [[work] for work in group if work.batch == 1 or work.form in FORMS[name]]


def groups(works: Iterable[Work]) -> dict[Work, list[Work]]:
    """Group works that differ only in their form; the key is the one with the form Arrow."""
    found: dict[Work, list[Work]] = {}
    for work in works:
        found.setdefault(replace(work, form="arrow"), []).append(work)
    return found


def case_of(slices: dict[str, list[Slice]]) -> dict[str, dict[str, Any]]:
    """Figures of one case, by system."""
    return {name: _figures(each) for name, each in slices.items() if each}


def _figures(slices: list[Slice]) -> dict[str, Any]:
    rates = [one.rate for one in slices]
    items = sum(one.items for one in slices)
    figures: dict[str, Any] = {
        "items_per_s": _short(statistics.median(rates)),
        "min": _short(min(rates)),
        "max": _short(max(rates)),
        "server_us_per_item": _short(sum(one.server for one in slices) / items * 1e6),
        "client_us_per_item": _short(sum(one.client for one in slices) / items * 1e6),
    }
    for call in slices[0].latencies:
        times = sorted(seconds for one in slices for seconds in one.latencies[call])
        figures[f"{call}_ms"] = {
            name: _short(_quantile(times, part) * 1e3) for name, part in (("p50", 0.5), ("p99", 0.99), ("p99_9", 0.999))
        }
    return figures


def ratios_of(slices: dict[str, list[Slice]], of: str = OURS) -> dict[str, float]:
    """Median over the rounds of the system's ratio to each other one: of items per second; in a `latency` case of the cycle's p99, where
    less is better."""
    ours = slices.get(of, [])
    ratios = {}
    for name, theirs in slices.items():
        pairs = list(zip(ours, theirs, strict=False))
        if name != of and pairs:
            ratios[name] = _short(statistics.median(_told(one) / _told(other) for one, other in pairs))
    return ratios


def _told(one: Slice) -> float:
    return _quantile(sorted(one.latencies["cycle"]), 0.99) if one.latencies else one.rate


def _quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def _short(value: float) -> float:
    """Round to four significant digits."""
    return round(value) if value >= 1_000 else float(f"{value:.4g}")
