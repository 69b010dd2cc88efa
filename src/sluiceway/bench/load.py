"""A load that costs the client little, so that the server is what is measured: one keep-alive connection a client, bodies made once."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import pyarrow as pa

ARROW = "application/vnd.apache.arrow.stream"


class Connection:
    """HTTP/1.1 over one socket: as much of it as a benchmark against our own server needs."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def post(self, path: str, body: bytes, content: str = "application/json", accept: str = "application/json") -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content}\r\naccept: {accept}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode())
        self._writer.write(body)
        answer_head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in answer_head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = await self._reader.readexactly(length)
        if b" 200 " not in answer_head[:16]:
            raise RuntimeError(f"{path}: {answer_head[:64]!r} {answer[:300]!r}")
        return answer


@dataclass(frozen=True)
class Load:
    """Every client repeats: produce a batch, lease one, complete the lease."""

    clients: int
    batch: int
    payload: int

    @property
    def name(self) -> str:
        return f"arrow-{self.batch}x{self.payload}-c{self.clients}"


def arrow_body(items: int, payload: int) -> bytes:
    column = pa.array([bytes([65 + n % 26]) * payload for n in range(items)], pa.binary())
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([column], schema=pa.schema([pa.field("payload", pa.binary(), nullable=False)]))
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body


async def drive(url: str, queue: str, load: Load, seconds: float) -> float:
    """Run the load for that long; returns items per second through the whole cycle. Every item leased is counted and checked."""
    body = arrow_body(load.batch, load.payload)
    connections = [Connection(url) for _ in range(load.clients)]
    for connection in connections:
        await connection.open()
    start = time.perf_counter()
    done = await asyncio.gather(*(_cycle(each, queue, load, body, start + seconds) for each in connections))
    elapsed = time.perf_counter() - start
    for connection in connections:
        await connection.close()
    return sum(done) / elapsed


async def _cycle(connection: Connection, queue: str, load: Load, body: bytes, until: float) -> int:
    lease = json.dumps({"queue_name": queue, "client_id": "bench", "batch_size": load.batch}).encode()
    done = 0
    while time.perf_counter() < until:
        await connection.post(f"/v1/queue.produce?queue_name={queue}", body, ARROW)
        stream = pa.ipc.open_stream(await connection.post("/v1/queue.lease", lease, accept=ARROW))
        items = sum(batch.column("payload").nbytes // (load.payload + 4) for batch in stream)
        about = json.loads(stream.schema.metadata[b"sluiceway"])
        names = [each["lease_id"] for each in about["leases"]]
        if names:
            complete = json.dumps({"queue_name": queue, "lease_ids": names}).encode()
            answer = json.loads(await connection.post("/v1/queue.complete", complete))
            if answer["completed"] != items:
                raise RuntimeError(f"{answer['completed']} items completed of {items} leased")
        done += items
    return done
