"""What it costs to have several workers: CPU of the server per item, and items per second, against one worker's in the same run.

Slices of all of them alternate, so that a change in the machine's speed meets each; the median of the slices' ratios is the result.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx

from sluiceway.bench.servers import cpu_seconds
from sluiceway.bench.systems.sluiceway import lean
from sluiceway.bench.work import Work
from tests.campaigns.kit.fleet import WorkerFleet, started
from tests.campaigns.kit.report import Report

SIZES = (1, 2, 4)
QUEUE, PARTITIONS = "cost", 8
LOAD = Work("cycle", "arrow", batch=1_000, payload=100, clients=8)
CPU_AIM = 1.15
RATE_AIM = 1.0


class Slice(NamedTuple):
    items_per_s: float
    cpu_per_item: float
    """Seconds."""


def compare_workers(report: Report, folder: Path, rounds: int, seconds: float) -> None:
    slices: dict[int, list[Slice]] = {size: [] for size in SIZES}
    with ExitStack() as stack:
        fleets = {size: WorkerFleet(folder, size) for size in SIZES}
        for fleet in fleets.values():
            stack.enter_context(started(fleet))
            answer = httpx.post(
                f"{fleet.url(0)}/v1/queues.create", json={"queue_name": QUEUE, "requested_partitions": PARTITIONS}, timeout=60
            )
            assert answer.status_code == 200, answer.text
        for number in range(rounds + 1):
            for size, fleet in fleets.items():
                measured = _slice(fleet, seconds)
                if number:  # the first round warms up
                    slices[size].append(measured)
    for size in SIZES[1:]:
        pairs = list(zip(slices[size], slices[1], strict=True))
        cpu = statistics.median(ours.cpu_per_item / one.cpu_per_item for ours, one in pairs)
        rate = statistics.median(ours.items_per_s / one.items_per_s for ours, one in pairs)
        report.figure(f"{size} workers against 1: CPU per item ×{cpu:.2f}, items per second ×{rate:.2f}")
        report.aim(f"CPU per item of {size} workers", cpu, CPU_AIM)
        report.aim(f"slowness of {size} workers", 1 / rate, RATE_AIM)
    one = slices[1]
    report.say(
        f"1 worker: {statistics.median(each.items_per_s for each in one):,.0f} items/s, "
        f"{statistics.median(each.cpu_per_item for each in one) * 1e6:.1f} µs of CPU per item"
    )


def _slice(fleet: WorkerFleet, seconds: float) -> Slice:
    pids = [fleet.instances[0].pid, *fleet.workers()]
    cpu, begun = sum(map(cpu_seconds, pids)), time.monotonic()
    done = asyncio.run(lean(fleet.url(0), LOAD, seconds, QUEUE))
    rate = done.items / done.seconds
    used = sum(map(cpu_seconds, pids)) - cpu
    return Slice(rate, used / (rate * (time.monotonic() - begun)))
