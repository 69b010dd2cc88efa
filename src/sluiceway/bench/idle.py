"""Very many partitions with which nobody does anything: what they hold, and what they cost."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import weakref
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from typing import TypeVarTuple

from sluiceway.bench.figures import Figure, progress
from sluiceway.bench.load import Connection
from sluiceway.bench.servers import SLUICEWAY, cpu_seconds, handles, resident, server, threads
from sluiceway.node.service import Service

Arguments = TypeVarTuple("Arguments")

QUEUE_PARTITIONS = 100
REST = 10.0
"""Seconds for which an idle server is watched."""
SETTLE = 2.0
"""Seconds that it gets before."""
STARTS = 3


def measure(folder: Path, partitions: int) -> list[Figure]:
    queues = partitions // QUEUE_PARTITIONS
    about = f"{queues * QUEUE_PARTITIONS:,} idle partitions ({queues} queues)"
    progress(about)
    full, empty = folder / "full", folder / "empty"
    with server(SLUICEWAY, empty):
        pass
    with server(SLUICEWAY, full) as made:
        began = time.perf_counter()
        asyncio.run(_create(made.url, queues))
        creation = time.perf_counter() - began
    starts, bare = [], 0
    for _ in range(STARTS):
        with server(SLUICEWAY, empty) as without:
            bare = max(bare, resident(without.pid))
        with server(SLUICEWAY, full) as started:
            starts.append(started.start)
            memory, open_handles, running = resident(started.pid), handles(started.pid), threads(started.pid)
    share = _rest(full)
    return [
        Figure(about, "open file handles", open_handles, ""),
        Figure(about, "memory, each", (memory - bare) / partitions / 1e3, "KB"),
        Figure(about, "memory of the server", memory / 1e6, "MB"),
        Figure(about, "memory of an empty server", bare / 1e6, "MB"),
        Figure(about, "threads", running, ""),
        Figure(about, "timers of the event loop", _timers(full), ""),
        Figure(about, f"CPU while idle, of one core, over {REST:.0f} s", share * 100, "%"),
        Figure(about, "start-up with them", statistics.median(starts), "s"),
        Figure(about, "creation of one queue", creation / queues, "s"),
    ]


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that knows its timers."""

    def __init__(self) -> None:
        super().__init__()
        self._timers: weakref.WeakSet[asyncio.TimerHandle] = weakref.WeakSet()

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        self._timers.add(timer)
        return timer

    def timers(self) -> int:
        return sum(not timer.cancelled() and timer.when() > self.time() for timer in self._timers)


def _timers(data: Path) -> int:
    """Those that wait when an instance has been started on the data, in this process."""

    loop = CountingLoop()

    async def count() -> int:
        service = Service(data)
        await service.start()
        timers = loop.timers()
        await service.stop()
        return timers

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(count())


def _rest(data: Path) -> float:
    """The share of a core that an idle server uses."""
    with server(SLUICEWAY, data) as idle:
        time.sleep(SETTLE)
        used, began = cpu_seconds(idle.pid), time.perf_counter()
        time.sleep(REST)
        return (cpu_seconds(idle.pid) - used) / (time.perf_counter() - began)


async def _create(url: str, queues: int) -> None:
    connection = Connection(url)
    await connection.open()
    for number in range(queues):
        body = {"queue_name": f"q{number}", "requested_partitions": QUEUE_PARTITIONS}
        await connection.post("/v1/queues.create", json.dumps(body).encode())
    await connection.close()
