"""Shares: tenants with weights, all of which have items waiting, and consumers that take what they are given."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa

from sluiceway.client import AsyncClient
from tests.server.server_process import ServerProcess

QUEUE = "tenants"
TENANTS = 1_000
PARTITIONS = 4
CONSUMERS, PRODUCERS = 8, 8
LEASE = 100
"""Items of a lease."""
BATCH = 1_000
SPARE = 2.0
"""Items that wait, by those that are leased, so that of each tenant some are left in each partition. With 1.4 one tenant in a hundred had
none left in one of its partitions before the end, and so less than its share."""


class SharesRun:
    """`worst`: the largest distance of a tenant's part of the leased items from its share, as a part of that share."""

    def __init__(self, folder: Path, leases: int, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self.weights = {f"tenant-{number}": self._random.randint(1, 10) for number in range(TENANTS)}
        self.leases = leases
        self._left = leases
        self._served: Counter[str] = Counter()
        self.worst = 0.0

    @property
    def items(self) -> int:
        return self._served.total()

    async def run(self) -> None:
        with ServerProcess(self._folder / "data") as server:
            async with AsyncClient(server.url) as client:
                await client.create_queue(QUEUE, requested_partitions=PARTITIONS, fair="key", key_weights=self.weights, dead_queue=None)
                batches = self._batches()
                await asyncio.gather(*(self._produce(client, batches[number::PRODUCERS]) for number in range(PRODUCERS)))
                await asyncio.gather(*(self._consume(server.url) for _ in range(CONSUMERS)))
        total = sum(self.weights.values())
        shares = {key: self.items * weight / total for key, weight in self.weights.items()}
        self.worst = max(abs(self._served[key] / share - 1) for key, share in shares.items())

    def _batches(self) -> list[pa.RecordBatch]:
        """All tenants in the proportion of their weights, shuffled, so that each partition gets its part of each."""
        rounds = -(-int(SPARE * self.leases * LEASE) // sum(self.weights.values()))
        keys = [key for key, weight in self.weights.items() for _ in range(weight * rounds)]
        self._random.shuffle(keys)
        return [
            pa.RecordBatch.from_arrays([pa.array([b"x"] * len(some), pa.binary()), pa.array(some)], ["payload", "key"])
            for some in (keys[at : at + BATCH] for at in range(0, len(keys), BATCH))
        ]

    async def _produce(self, client: AsyncClient, batches: list[pa.RecordBatch]) -> None:
        for batch in batches:
            await client.produce_arrow(QUEUE, batch)

    async def _consume(self, url: str) -> None:
        async with AsyncClient(url) as client:
            while self._left > 0:
                self._left -= 1
                leased = await client.lease_arrow(QUEUE, batch_size=LEASE, request_timeout="10s")
                self._served.update(leased.table.column("key").to_pylist())
                await client.complete(QUEUE, lease_ids=leased.lease_ids)
