"""Long backlog in one partition: produce it, and lease from it."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import pyarrow as pa

from sluiceway.bench.figures import progress
from sluiceway.bench.load import ARROW, Connection, arrow_body

BATCH = 1_000
PAYLOAD = 100
WARM_UP = 20


async def fill(url: str, items: int) -> None:
    """Create a queue `q` of one partition with `items` items, at least one batch."""
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
    """Duration of a lease of BATCH items, and of its completion, in seconds."""

    lease: float
    complete: float


async def cycles(urls: list[str], rounds: int) -> list[list[Cycle]]:
    """Run cycles at each server in turn, after a warm-up. Completed items are produced again, so that the backlogs keep their length."""
    connections = [Connection(url) for url in urls]
    for connection in connections:
        await connection.open()
    body = arrow_body(BATCH, PAYLOAD)
    lease = json.dumps({"queue_name": "q", "client_id": "bench", "batch_size": BATCH}).encode()
    done: list[list[Cycle]] = [[] for _ in urls]
    for number in range(rounds + WARM_UP):
        for connection, each in zip(connections, done, strict=True):
            began = time.perf_counter()
            answer = await connection.post("/v1/queue.lease", lease, accept=ARROW)
            leased = time.perf_counter()
            complete = _complete(answer)
            completes = time.perf_counter()
            await connection.post("/v1/queue.complete", complete)
            completed = time.perf_counter()
            await connection.post("/v1/queue.produce?queue_name=q", body, ARROW)
            if number >= WARM_UP:
                each.append(Cycle(leased - began, completed - completes))
    for connection in connections:
        await connection.close()
    return done


def _complete(answer: bytes) -> bytes:
    """Request that completes the leased items."""
    about = json.loads(pa.ipc.open_stream(answer).schema.metadata[b"sluiceway"])
    if sum(lease["count"] for lease in about["leases"]) != BATCH:
        raise RuntimeError(f"not {BATCH} items in {about['leases']}")
    return json.dumps({"queue_name": "q", "lease_ids": [lease["lease_id"] for lease in about["leases"]]}).encode()
