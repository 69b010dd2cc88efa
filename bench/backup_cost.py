"""`python -m bench backup_cost`: what backups of a server cost its clients, at half of its throughput and at all of it, in turns.

A cycle is: produce 100 items of 1 kB, lease 100, complete them; eight clients, Arrow, a backlog of 100,000 items. In a slice with backups,
`sluiceway backup create` runs again and again into the same folder, each after the end of the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from sluiceway.bench.figures import Figure, progress, table
from sluiceway.bench.servers import SLUICEWAY, server
from sluiceway.client import AsyncClient

QUEUE = "orders"
CLIENTS, BATCH, BACKLOG = 8, 100, 100_000
ROUNDS, SECONDS = 5, 6.0
AIM = 1 / 0.9
"""Throughput without backups, compared with that beside them: at most a tenth is lost."""


@dataclass
class Slice:
    """Cycles of a slice, in seconds, and its length; backups that ended in it."""

    seconds: float
    cycles: list[float] = field(default_factory=list)
    backups: int = 0

    @property
    def rate(self) -> float:
        return len(self.cycles) * BATCH / self.seconds

    @property
    def p99(self) -> float:
        return sorted(self.cycles)[int(0.99 * len(self.cycles))] * 1_000


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench backup_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each slice")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    figures = asyncio.run(_measure(given.rounds, given.seconds))
    print(json.dumps([figure.document() for figure in figures], indent=2) if given.json else table(figures))
    return any(figure.missed for figure in figures)


async def _measure(rounds: int, seconds: float) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="sluiceway-backup-") as folder, server(SLUICEWAY, Path(folder) / "data") as started:
        async with AsyncClient(started.url) as client:
            await client.create_queue(QUEUE, requested_partitions=4, dead_queue=None)
            for _ in range(BACKLOG // 1_000):
                await client.produce_arrow(QUEUE, _rows(1_000))
        backups = Path(folder) / "backups"
        await _slice(started.url, 2.0, None)
        most = (await _slice(started.url, seconds, None)).rate
        figures = [Figure("throughput", "items a second without backups", most, "1/s")]
        for about, pace in (("at half of the throughput", most / 2), ("at all of it", None)):
            without, beside = [], []
            for number in range(rounds):
                progress(f"{about}: round {number + 1} of {rounds}")
                without.append(await _slice(started.url, seconds, pace))
                beside.append(await _slice(started.url, seconds, pace, backups))
            figures += _compared(about, without, beside)
        return figures


def _compared(about: str, without: Sequence[Slice], beside: Sequence[Slice]) -> list[Figure]:
    lost = statistics.median(one.rate / other.rate for one, other in zip(without, beside, strict=True))
    return [
        Figure(about, "throughput without backups, compared with that beside them", lost, "×", AIM if "half" in about else None),
        Figure(about, "p99 of a cycle without backups, median", statistics.median(each.p99 for each in without), "ms"),
        Figure(about, "p99 of a cycle beside backups, median", statistics.median(each.p99 for each in beside), "ms"),
        Figure(about, "backups", sum(each.backups for each in beside), ""),
    ]


async def _slice(url: str, seconds: float, pace: float | None, backups: Path | None = None) -> Slice:
    """One slice; `pace`: items a second that the clients try for together; None: as many as they can."""
    found = Slice(seconds)
    until = time.perf_counter() + seconds
    every = 0.0 if pace is None else CLIENTS * BATCH / pace
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(_client(url, until, every, every * number / CLIENTS, found))
        if backups is not None:
            group.create_task(_back_up(url, until, backups, found))
    return found


async def _client(url: str, until: float, every: float, first: float, found: Slice) -> None:
    rows = _rows(BATCH)
    due = time.perf_counter() + first
    async with AsyncClient(url) as client:
        while (now := time.perf_counter()) < until:
            if every and due > now:
                await asyncio.sleep(due - now)
            # From when it was due: a server that stands still makes the next ones late, too.
            began = due if every else now
            await client.produce_arrow(QUEUE, rows)
            leased = await client.lease_arrow(QUEUE, batch_size=BATCH, max_partitions=4)
            await client.complete(QUEUE, lease_ids=leased.lease_ids)
            if (ended := time.perf_counter()) < until:
                found.cycles.append(ended - began)
            due += every


async def _back_up(url: str, until: float, folder: Path, found: Slice) -> None:
    command = [sys.executable, "-m", "sluiceway.cli.main", "backup", "create", str(folder), "--url", url]
    while time.perf_counter() < until:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        if await process.wait():
            raise RuntimeError(f"the backup ended with {process.returncode}")
        found.backups += 1


def _rows(count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([b"x" * 1_000] * count, pa.binary())], ["payload"])
