"""Ours: a queue with `order = "key"` in four partitions on SQLite, by the hand-written client, in Arrow.

A lease takes `runs` from all partitions, and completes the one before by its ids in the same call. It waits in the server.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from bench.by_key.keyed_load import PATIENCE, SIZE, KeyedClient, KeyedWork
from sluiceway.bench.load import ARROW, Connection
from sluiceway.bench.systems.sluiceway import PARTITIONS, found, version

__all__ = ["ORDER", "clients", "found", "version"]

ORDER = (
    "An item of a key is delivered when all before it are settled, also after a lost lease. "
    "Other keys go on, and any number of consumers shares the keys."
)


@asynccontextmanager
async def clients(name: str, url: str, work: KeyedWork) -> AsyncIterator[list[KeyedClient]]:
    queue = f"keyed-{secrets.token_hex(4)}"
    settings = {"queue_name": queue, "requested_partitions": PARTITIONS, "order": "key"}
    connections = [Connection(url) for _ in range(2 * work.clients)]
    for each in connections:
        await each.open()
    await connections[0].post("/v1/queues.create", json.dumps(settings).encode())
    yield [Ordered(queue, work, number, *connections[2 * number : 2 * number + 2]) for number in range(work.clients)]
    await connections[0].post("/v1/queues.delete", json.dumps({"queue_name": queue, "force": True}).encode())
    for each in connections:
        await each.close()


class Ordered(KeyedClient):
    def __init__(self, queue: str, work: KeyedWork, number: int, producing: Connection, leasing: Connection) -> None:
        self._producing, self._leasing, self._queue = producing, leasing, queue
        self._keys = pa.array(work.keys_of(number))
        self._starts = pa.py_buffer(np.arange(work.batch + 1, dtype=np.int32) * SIZE)
        self._request = {
            "queue_name": queue,
            "client_id": f"client-{number}",
            "batch_size": work.batch,
            "max_partitions": PARTITIONS,
            "runs": True,
            "request_timeout": f"{PATIENCE * 1e3:.0f}ms",
        }

    async def produce(self, payloads: bytes) -> None:
        column = pa.BinaryArray.from_buffers(pa.binary(), len(self._keys), [None, self._starts, pa.py_buffer(payloads)])
        rows = pa.RecordBatch.from_arrays([column, self._keys], ["payload", "key"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_batch(rows)
        await self._producing.post(f"/v1/queue.produce?queue_name={self._queue}", sink.getvalue().to_pybytes(), ARROW)

    async def lease(self) -> tuple[bytes, Any]:
        return await self._lease({})

    async def complete_and_lease(self, leased: Any) -> tuple[bytes, Any]:
        return await self._lease({"complete": {"lease_ids": leased}})

    async def _lease(self, fields: dict[str, Any]) -> tuple[bytes, Any]:
        answer = await self._leasing.post("/v1/queue.lease", json.dumps(self._request | fields).encode(), accept=ARROW)
        stream = pa.ipc.open_stream(answer)
        about = json.loads(stream.schema.metadata[b"sluiceway"])
        column = stream.schema.get_field_index("payload")
        return b"".join(_joined(batch.column(column)) for batch in stream), [lease["lease_id"] for lease in about["leases"]]

    async def complete(self, leased: Sequence[str]) -> None:
        await self._leasing.post("/v1/queue.complete", json.dumps({"queue_name": self._queue, "lease_ids": leased}).encode())


def _joined(column: pa.BinaryArray) -> bytes:
    """The payloads of a column without nulls."""
    _, starts, data = column.buffers()
    ends = memoryview(starts).cast("i")[column.offset : column.offset + len(column) + 1]
    joined: bytes = data.to_pybytes() if data is not None and ends[-1] - ends[0] == data.size else data[ends[0] : ends[-1]].to_pybytes()
    return joined
