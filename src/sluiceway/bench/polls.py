"""A thousand consumers that wait for items: what they cost, and whether they delay a produce."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path

from sluiceway.bench.figures import Figure, progress
from sluiceway.bench.load import Connection
from sluiceway.bench.servers import SLUICEWAY, cpu_seconds, server

REST = 10.0
"""Seconds for which the server is watched."""
CALLS = 400


def measure(folder: Path, consumers: int) -> list[Figure]:
    about = f"{consumers:,} idle long polls"
    progress(about)
    with server(SLUICEWAY, folder / "data") as running:
        share, before, beside = asyncio.run(_run(running.url, running.pid, consumers))
    return [
        Figure(about, f"CPU, of one core, over {REST:.0f} s", share * 100, "%", 1),
        Figure(about, "produce to another queue, median, against without them", beside / before, "x", 1.5),
        Figure(about, "the same without them", before * 1e3, "ms"),
    ]


async def _run(url: str, pid: int, consumers: int) -> tuple[float, float, float]:
    connection = Connection(url)
    await connection.open()
    for name in ("polled", "other"):
        await connection.post("/v1/queues.create", json.dumps({"queue_name": name, "requested_partitions": 4}).encode())
    await _produce(connection)
    before = await _produce(connection)
    polls = [asyncio.create_task(_poll(url, number)) for number in range(consumers)]
    while await _waiting(connection) < consumers:
        pass
    used, began = cpu_seconds(pid), time.perf_counter()
    await asyncio.sleep(REST)
    share = (cpu_seconds(pid) - used) / (time.perf_counter() - began)
    beside = await _produce(connection)
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    await connection.close()
    return share, before, beside


async def _waiting(connection: Connection) -> int:
    answer = json.loads(await connection.post("/v1/queue.stats", json.dumps({"queue_name": "polled"}).encode()))
    return int(answer["logical_queues"][0]["lease_waiting"])


async def _poll(url: str, number: int) -> None:
    connection = Connection(url)
    await connection.open()
    body = {"queue_name": "polled", "client_id": f"c{number}", "request_timeout": "15m"}
    await connection.post("/v1/queue.lease", json.dumps(body).encode())


async def _produce(connection: Connection) -> float:
    """Seconds of one call, median."""
    body, times = json.dumps({"queue_name": "other", "items": [{"utf8": "x"}]}).encode(), []
    for _ in range(CALLS):
        began = time.perf_counter()
        await connection.post("/v1/queue.produce", body)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
