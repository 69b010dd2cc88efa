"""A quiet key beside a flood: how long its items wait, with and without it, while the same consumers work."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pyarrow as pa

from sluiceway.client import AsyncClient, Item
from tests.server.server_process import ServerProcess

QUEUE = "tenants"
CONSUMERS = 4
ITEMS = 200
"""Items of the quiet key in each part."""
PAUSE = 0.03
"""Seconds between them."""
HANDLES = 0.002
"""Seconds for which a consumer handles a lease."""


class QuietRun:
    """`idle` and `flooded`: seconds from when each item was stored until a consumer had it."""

    def __init__(self, folder: Path, flood: int) -> None:
        self._folder = folder
        self.flood = flood
        self.idle: list[float] = []
        self.flooded: list[float] = []
        self._sent: dict[bytes, float] = {}
        self._waits: list[float] = []
        self._is_over = False
        self._all_came = asyncio.Event()

    async def run(self) -> None:
        with ServerProcess(self._folder / "data") as server:
            async with AsyncClient(server.url) as client:
                await client.create_queue(QUEUE, requested_partitions=4, fair="key")
                consumers = [asyncio.create_task(self._consume(server.url)) for _ in range(CONSUMERS)]
                self.idle = await self._part(client, "idle")
                rows = pa.RecordBatch.from_arrays(
                    [pa.array([b"x"] * 10_000, pa.binary()), pa.array(["flood"] * 10_000)], ["payload", "key"]
                )
                for _ in range(self.flood // 10_000):
                    await client.produce_arrow(QUEUE, rows)
                self.flooded = await self._part(client, "flooded")
                self._is_over = True
                await asyncio.gather(*consumers)

    async def _part(self, client: AsyncClient, name: str) -> list[float]:
        self._waits = []
        for number in range(ITEMS):
            payload = f"{name}{number}".encode()
            self._sent[payload] = time.monotonic()
            await client.produce(QUEUE, [Item(payload, key="quiet")])
            await asyncio.sleep(PAUSE)
        self._all_came = asyncio.Event()
        self._note()
        await self._all_came.wait()
        return self._waits

    def _note(self) -> None:
        if len(self._waits) >= ITEMS:
            self._all_came.set()

    async def _consume(self, url: str) -> None:
        async with AsyncClient(url) as client:
            while not self._is_over:
                leased = await client.lease(QUEUE, batch_size=10, request_timeout="1s", max_partitions=4)
                now = time.monotonic()
                self._waits += [now - self._sent[item.payload] for item in leased if item.payload in self._sent]
                self._note()
                await asyncio.sleep(HANDLES)
                if items := [item.id for item in leased]:
                    await client.complete(QUEUE, items)
