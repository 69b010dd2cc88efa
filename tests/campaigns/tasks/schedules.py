"""Simulated fault schedules of the tasks' protocol, by both cores; and what happens to them without each of its rules."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, NamedTuple

from simulation.bugs_tasks import ABLATIONS
from simulation.planting import Bug, planted
from simulation.task_world import run_tasks
from tests.campaigns.kit.report import Report

PROCESSES = 2
LAST_LINE = re.compile(r"tasks: (?P<done>\d+) of \d+ seeds, (?P<failed>\d+) failed; (?P<events>[\d,]+) events")
PROMISE = re.compile(r"\b[SL]\d{1,2}\b")
ABLATED_SEEDS = 600


class Ran(NamedTuple):
    seeds: int
    failed: int
    events: int


def run_schedules(report: Report, folder: Path, seeds: int, first: int) -> None:
    """All of them must be clean; and without each rule of the protocol some must not be."""
    begun = time.monotonic()
    clean = _simulate(report, folder, seeds, first)
    if clean is not None:
        seconds = time.monotonic() - begun
        report.figure(f"{clean.seeds:,} schedules with {clean.events:,} events, {clean.failed} broken, {seconds:.0f} s")
        if clean.seeds != seeds:
            report.fail(f"{clean.seeds} of {seeds} schedules were lived")
    for ablation in ABLATIONS:
        _ablate(report, ablation)


def _simulate(report: Report, folder: Path, seeds: int, first: int) -> Ran | None:
    """By processes of their own; each seed is lived once."""
    share = -(-seeds // PROCESSES)
    parts = [(first + at, min(share, seeds - at)) for at in range(0, seeds, share)]
    children: list[tuple[subprocess.Popen[bytes], Path, IO[bytes]]] = []
    try:
        for begin, count in parts:
            path = folder / f"seeds-{begin}.log"
            log: IO[bytes] = path.open("wb")
            command = [sys.executable, "-m", "simulation", "--tasks", "--seeds", str(count), "--first", str(begin)]
            children.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), path, log))
        ran = [_judged(report, child, path) for child, path, _ in children]
    finally:
        for child, _, log in children:
            if child.poll() is None:
                child.kill()
                child.wait()
            log.close()
    whole = [each for each in ran if each is not None]
    return Ran(*map(sum, zip(*whole, strict=True))) if len(whole) == len(ran) else None


def _judged(report: Report, child: subprocess.Popen[bytes], path: Path) -> Ran | None:
    code = child.wait()
    text = path.read_text(errors="replace")
    lines = LAST_LINE.findall(text)
    broken = re.findall(r"(?m)^seed \d+: .*\n.*$", text)
    for line in broken[:10]:
        report.fail(" ".join(line.split()))
    if code not in (0, 1) or not lines:
        report.fail(f"the simulator ended with {code}: {text[-500:]!r}, see {path}")
        return None
    done, failed, events = lines[-1]
    return Ran(int(done), int(failed), int(events.replace(",", "")))


def _ablate(report: Report, ablation: Bug) -> None:
    """Without the rule. That no schedule shows it would mean that the simulator proves nothing, or the rule is not needed."""
    broken = 0
    promises: dict[str, int] = {}
    earliest = 0
    with planted(ablation):
        for number, seed in enumerate(range(ABLATED_SEEDS), 1):
            try:
                run_tasks(seed)
            except Exception as error:
                broken += 1
                earliest = earliest or number
                found = PROMISE.search(str(error))
                name = found[0] if found else type(error).__name__
                promises[name] = promises.get(name, 0) + 1
    name = ablation.name.replace("_", " ")
    if not broken:
        report.fail(f"{name}: none of {ABLATED_SEEDS} schedules shows it")
        return
    kinds = ", ".join(f"{name} {count}×" for name, count in sorted(promises.items()))
    report.figure(f"{name}: {broken} of {ABLATED_SEEDS} broken ({kinds}), the first was number {earliest}")
