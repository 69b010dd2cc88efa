"""A long line in one partition: what it costs to start with it, to hold it, and to lease from it."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from sluiceway.bench.figures import Figure, progress
from sluiceway.bench.load import ARROW, Connection, arrow_body
from sluiceway.bench.servers import SLUICEWAY, resident, server

BATCH = 1_000
PAYLOAD = 100
SHORT = 10_000
"""Waiting items of the line with which the long one is compared."""
STARTS = 5
LEASES = 300
WARM_UP = 20


def measure(folder: Path, items: int) -> list[Figure]:
    """`items` waiting items of PAYLOAD bytes, produced over HTTP in batches of BATCH, each of them a blob of its own."""
    long, short, empty = folder / "long", folder / "short", folder / "empty"
    about = f"{items:,} waiting items of {PAYLOAD} B in one partition"
    progress(about)
    with server(SLUICEWAY, empty):
        pass
    with server(SLUICEWAY, short) as small:
        asyncio.run(fill(small.url, SHORT))
    with server(SLUICEWAY, long) as filled:
        began = time.perf_counter()
        asyncio.run(fill(filled.url, items))
        rate = items / (time.perf_counter() - began)
        after_filling = resident(filled.pid)
    starts, memory = _starts(long, empty)
    figures = [
        Figure(about, "start-up with it", statistics.median(starts[long]), "s", 2.0),
        Figure(about, "start-up of an empty server", statistics.median(starts[empty]), "s"),
        Figure(about, "memory of the idle server, after its start", memory[long] / 1e6, "MB", 300),
        Figure(about, "memory of the idle server that has taken them in", after_filling / 1e6, "MB", 300),
        Figure(about, "memory of an empty server", memory[empty] / 1e6, "MB"),
        Figure(about, "produced, one client", rate, "/s"),
        Figure(about, "on disk", sum(file.stat().st_size for file in long.rglob("*")) / 1e6, "MB"),
    ]
    for payload in (True, False):
        progress(f"leasing {'with' if payload else 'without'} payloads")
        with server(SLUICEWAY, long) as one, server(SLUICEWAY, short) as other:
            times = asyncio.run(cycles([one.url, other.url], LEASES, payload))
        medians = [statistics.median(cycle.lease for cycle in each) for each in times]
        words = f"lease of {BATCH:,}" + ("" if payload else " without payloads")
        figures += [
            Figure(about, f"{words}, against the same at {SHORT:,} waiting", medians[0] / medians[1], "×", 1.5),
            Figure(about, f"{words}, median", medians[0] * 1e3, "ms"),
            Figure(about, f"{words}, median at {SHORT:,} waiting", medians[1] * 1e3, "ms"),
        ]
    return figures


def _starts(long: Path, empty: Path) -> tuple[dict[Path, list[float]], dict[Path, int]]:
    """Seconds of each start, and the most memory after one. The two alternate, so that the machine's moods meet both."""
    seconds: dict[Path, list[float]] = {long: [], empty: []}
    memory = {long: 0, empty: 0}
    for _ in range(STARTS):
        for data, each in seconds.items():
            with server(SLUICEWAY, data) as started:
                each.append(started.start)
                memory[data] = max(memory[data], resident(started.pid))
    return seconds, memory


async def fill(url: str, items: int) -> None:
    """A queue `q` of one partition with so many items, at least one batch."""
    connection = Connection(url)
    await connection.open()
    await connection.post("/v1/queues.create", json.dumps({"queue_name": "q", "requested_partitions": 1}).encode())
    body = arrow_body(BATCH, PAYLOAD)
    for number in range(max(1, items // BATCH)):
        await connection.post("/v1/queue.produce?queue_name=q", body, ARROW)
        if number % 1_000 == 999:
            progress(f"{(number + 1) * BATCH:,} produced")
    await connection.close()


class Cycle(NamedTuple):
    """Seconds of a lease of BATCH items, and of its completion."""

    lease: float
    complete: float


async def cycles(urls: list[str], rounds: int, payload: bool = True) -> list[list[Cycle]]:
    """Those at each server, in turn, after some that warm up. What was leased is produced again, so that the lines stay as long."""
    connections = [Connection(url) for url in urls]
    for connection in connections:
        await connection.open()
    body = arrow_body(BATCH, PAYLOAD)
    lease = json.dumps({"queue_name": "q", "client_id": "bench", "batch_size": BATCH, "payload": payload}).encode()
    done: list[list[Cycle]] = [[] for _ in urls]
    for number in range(rounds + WARM_UP):
        for connection, each in zip(connections, done, strict=True):
            began = time.perf_counter()
            answer = await connection.post("/v1/queue.lease", lease, accept=ARROW if payload else "application/json")
            leased = time.perf_counter()
            complete = _complete(answer, payload)
            completes = time.perf_counter()
            await connection.post("/v1/queue.complete", complete)
            completed = time.perf_counter()
            await connection.post("/v1/queue.produce?queue_name=q", body, ARROW)
            if number >= WARM_UP:
                each.append(Cycle(leased - began, completed - completes))
    for connection in connections:
        await connection.close()
    return done


def _complete(answer: bytes, payload: bool) -> bytes:
    """The request that completes what was leased."""
    about = json.loads(pa.ipc.open_stream(answer).schema.metadata[b"sluiceway"] if payload else answer)
    if sum(lease["count"] for lease in about["leases"]) != BATCH:
        raise RuntimeError(f"not {BATCH} items in {about['leases']}")
    return json.dumps({"queue_name": "q", "lease_ids": [lease["lease_id"] for lease in about["leases"]]}).encode()
