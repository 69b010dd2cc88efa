"""`python -m bench hung`: throughput of the other partitions when one of four stops answering.

The store's partitions hang independently, as on several machines, so few calls share a transaction (ADR 30).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from sluiceway.bench.figures import Figure, progress, table
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.stores import open_store
from sluiceway.model.backends import BackendSettings
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import DONE, Lease, Produce, QueueSpec, Selection, Settle
from sluiceway.ports.partition_store import Changes, Fence, Least, PartitionRef, PartitionStore, Snapshot

PARTITIONS, PRODUCERS, CONSUMERS = 4, 16, 4
LONG = 60_000
WARM, TIME = 1.5, 6.0
"""Seconds of warm-up, and of the measurement."""
ROUNDS = 3


class Hanging:
    """A store whose last partition stops committing on demand."""

    def __init__(self, store: PartitionStore) -> None:
        self._store = store
        self.hangs = False
        self.answers = asyncio.Event()

    def at_once(self, ref: PartitionRef) -> bool:
        return False

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        if self.hangs and ref.partition == PARTITIONS - 1:
            await self.answers.wait()
        return await self._store.apply(ref, changes, fence)

    async def identify(self, new: str | None) -> str | None:
        return await self._store.identify(new)

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        return await self._store.open(ref, fence, least)

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        return await self._store.read(ref, blobs)

    async def browse(self, ref: PartitionRef) -> Snapshot:
        return await self._store.browse(ref)

    async def drop(self, ref: PartitionRef) -> None:
        await self._store.drop(ref)

    async def release(self, ref: PartitionRef) -> None:
        await self._store.release(ref)

    async def close(self) -> None:
        await self._store.close()


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if an aim was missed."""
    argparse.ArgumentParser(prog="python -m bench hung", description=__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="sluiceway-hung-") as folder:
        figures = measure(Path(folder))
    print(table(figures))
    return int(any(figure.missed for figure in figures))


def measure(folder: Path) -> list[Figure]:
    about = f"one of {PARTITIONS} partitions hangs, {PRODUCERS} producers and {CONSUMERS} consumers"
    progress(about)
    pairs = [[asyncio.run(_run(folder / f"{number}-{hangs}", hangs)) for hangs in (False, True)] for number in range(ROUNDS)]
    share = statistics.median(hung[0] / healthy[0] for healthy, hung in pairs)
    slower = statistics.median(hung[1] / healthy[1] for healthy, hung in pairs)
    return [
        Figure(about, "time for one produce, against all healthy (aim: 90 % of the throughput)", 1 / share, "x", 1 / 0.9),
        Figure(about, "p99 of a produce, against all healthy", slower, "x", 2),
    ]


async def _run(folder: Path, hangs: bool) -> tuple[float, float]:
    """Measure produces per second, and the 99th percentile of their duration."""
    stores: list[Hanging] = []

    def opened(name: str, settings: BackendSettings, data: Path) -> PartitionStore:
        stores.append(Hanging(open_store(name, settings, data)))
        return stores[-1]

    service = Service(folder, open_store=opened)
    await service.start()
    await service.create_queue(QueueSpec("q", PARTITIONS, write_timeout=LONG))
    times: list[float] = []
    going = asyncio.Event()
    workers = [asyncio.create_task(_producer(service, times, going)) for _ in range(PRODUCERS)]
    workers += [asyncio.create_task(_consumer(service, f"c{number}", going)) for number in range(CONSUMERS)]
    await asyncio.sleep(WARM)
    stores[0].hangs = hangs
    await asyncio.sleep(WARM)
    times.clear()
    began = time.perf_counter()
    await asyncio.sleep(TIME)
    # Producers that wait for the hanging commit are not counted: if all do, their wait is the whole measurement.
    slowest = statistics.quantiles(times, n=100)[98] if len(times) > 1 else TIME
    rate = max(1, len(times)) / (time.perf_counter() - began)
    going.set()
    stores[0].answers.set()
    await asyncio.gather(*workers)
    await service.stop()
    return rate, slowest


async def _producer(service: Service, times: list[float], going: asyncio.Event) -> None:
    batch: pa.RecordBatch = batch_from_rows([{"payload": b"p" * 100}] * 10)
    while not going.is_set():
        began = time.perf_counter()
        await service.produce("q", Produce(batch, LONG))
        times.append(time.perf_counter() - began)


async def _consumer(service: Service, name: str, going: asyncio.Event) -> None:
    while not going.is_set():
        try:
            leased = await service.lease("q", Lease(name, 100, 200))
        except SluicewayError:
            # Its lease was being written to the hanging partition: a consumer asks again.
            continue
        selections = {lease.partition: [Selection(DONE, lease=lease.number)] for lease in leased.leases}
        if selections:
            await service.settle("q", Settle(selections, LONG))
