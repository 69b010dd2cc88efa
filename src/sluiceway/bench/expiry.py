"""Very many leased items whose leases run out at one moment: what is written, and how long one turn holds up the others."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa

from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.bench.figures import Figure, progress
from sluiceway.bench.servers import written_bytes
from sluiceway.core.logical_queue import LogicalQueue
from sluiceway.core.tickets import Effect
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import DONE, Extend, Lease, LeaseInfo, PartitionStats, Produce, QueueSpec, Selection, Settle
from sluiceway.node.service import Service
from sluiceway.ports.partition_store import Changes, Fence, PartitionRef

PAYLOAD = 1_000
PRODUCED = 10_000
"""Items of one produce."""
LONG = 3_600_000
SOON = 3_000
"""Milliseconds to the common deadline."""
ROUNDS = 3


class Case(NamedTuple):
    partitions: int
    leased: int
    """Items of one lease."""
    gaps: bool = False
    """Every other item of a lease has been completed before it runs out."""

    def about(self, items: int) -> str:
        gaps = ", every other one completed before" if self.gaps else ""
        return f"{items:,} leased items of {PAYLOAD} B expire together: leases of {self.leased:,}, {self.partitions} partition(s){gaps}"


CASES = (Case(1, 10_000), Case(4, 10_000), Case(1, 10_000, gaps=True), Case(1, 1_000), Case(4, 1_000), Case(1, 100), Case(4, 100))


class Commits:
    """How many commits there were, and how many bytes were put into the stores by them."""

    def __init__(self) -> None:
        self.count = 0
        self.put = 0
        self._apply = SqlitePartitionStore.apply

    def apply(self, store: SqlitePartitionStore, ref: PartitionRef, changes: Changes, fence: Fence) -> Coroutine[Any, Any, Outcome]:
        self.put += len(changes.header) + sum(map(len, changes.blobs.values()))
        self.put += sum(len(key) + len(value) for (_, key), value in changes.puts.items())
        self.count += 1
        return self._apply(store, ref, changes, fence)


class Turns:
    """The longest turn of a logical queue, in seconds of the clock and of its own work (without waiting for a core)."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.most_work = 0.0
        self._turn = LogicalQueue.turn

    def reset(self) -> None:
        self.longest = self.most_work = 0.0

    def turn(self, queue: LogicalQueue, now: int) -> list[Effect]:
        began, worked = time.perf_counter(), time.thread_time()
        effects = self._turn(queue, now)
        self.longest = max(self.longest, time.perf_counter() - began)
        self.most_work = max(self.most_work, time.thread_time() - worked)
        return effects


class Seen(NamedTuple):
    put: int
    written: int
    commits: int
    longest: float
    most_work: float
    held: float
    """Seconds for which the event loop did nothing else, at the longest."""
    took: float
    """Seconds from the deadline until the last item was ready again."""


def measure(folder: Path, items: int, case: Case) -> list[Figure]:
    about = case.about(items)
    progress(about)
    seen = [asyncio.run(_run(folder / f"{number}", items, case)) for number in range(ROUNDS)]
    payload = items * PAYLOAD / (2 if case.gaps else 1)

    def median(name: str) -> float:
        return float(np.median([getattr(each, name) for each in seen]))

    return [
        Figure(about, "put into the store, of the payload that came back", median("put") / payload * 100, "%", 1.0),
        Figure(about, "written to the disk, of the payload that came back", median("written") / payload * 100, "%", 1.0),
        Figure(about, "longest turn, its own work", median("most_work") * 1e3, "ms", 50),
        Figure(about, "longest turn, by the clock", median("longest") * 1e3, "ms"),
        Figure(about, "longest time in which the event loop did nothing else", median("held") * 1e3, "ms"),
        Figure(about, "commits", median("commits"), ""),
        Figure(about, "until all were ready again", median("took") * 1e3, "ms"),
    ]


async def _run(folder: Path, items: int, case: Case) -> Seen:
    turns, commits = Turns(), Commits()
    with (
        mock.patch.object(LogicalQueue, "turn", lambda queue, now: turns.turn(queue, now)),
        mock.patch.object(SqlitePartitionStore, "apply", lambda *arguments: commits.apply(*arguments)),
    ):
        service = Service(folder)
        await service.start()
        await service.create_queue(QueueSpec("q", case.partitions))
        await _produce(service, items)
        leases = await _lease(service, items, case)
        if case.gaps:
            await _complete_every_other(service, leases)
        seen = await _expire(service, leases, turns, commits)
        await service.delete_queue("q", force=True)
        await service.stop()
    return seen


async def _produce(service: Service, items: int) -> None:
    batch: pa.RecordBatch = batch_from_rows([{"payload": b"p" * PAYLOAD}] * PRODUCED)
    for _ in range(items // PRODUCED):
        await service.produce("q", Produce(batch, LONG))


async def _lease(service: Service, items: int, case: Case) -> list[LeaseInfo]:
    leases: list[LeaseInfo] = []
    request = Lease("bench", case.leased, 0, LONG)
    while _total(service, "leased_now") < items:
        for leased in await asyncio.gather(*(service.lease("q", request, payload=False) for _ in range(64))):
            leases += leased.leases
    return leases


async def _complete_every_other(service: Service, leases: list[LeaseInfo]) -> None:
    """The leases of a fresh line cover it from its beginning."""
    ends: dict[int, int] = {}
    for lease in leases:
        ends[lease.partition] = ends.get(lease.partition, 0) + lease.items
    selections = {number: [Selection(DONE, offsets=np.arange(0, end, 2))] for number, end in ends.items()}
    await service.settle("q", Settle(selections, LONG))


async def _expire(service: Service, leases: list[LeaseInfo], turns: Turns, commits: Commits) -> Seen:
    leased = _total(service, "leased_now")
    # One call, so that all of them have the same deadline.
    await service.extend("q", Extend([(lease.partition, lease.number) for lease in leases], LONG, SOON))
    deadline = time.perf_counter() + SOON / 1_000
    gc.collect()
    # What the preparations have left to be written.
    await asyncio.sleep(0.5)
    turns.reset()
    put, written, count = commits.put, written_bytes(), commits.count
    held = 0.0
    last = time.perf_counter()
    while _total(service, "ready") < leased or _total(service, "leased_now"):
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        held, last = max(held, now - last), now
    took = time.perf_counter() - deadline
    # The commits of the last turns, and the checkpoints after them.
    await asyncio.sleep(0.5)
    return Seen(commits.put - put, written_bytes() - written, commits.count - count, turns.longest, turns.most_work, held, took)


def _total(service: Service, name: str) -> int:
    partitions: list[PartitionStats] = service.stats("q").partitions
    return sum(getattr(each, name) for each in partitions)
