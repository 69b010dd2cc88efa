"""Limits and rates of keys: consumers that hold items for a while, and a count of what each key has in flight, outside of the server."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path

from sluiceway.client import AsyncClient, Item
from sluiceway.contract.queue_settings import KeyRate
from tests.server.server_process import ServerProcess

KEYS = 50
LIMIT = 4
RATE = KeyRate(20, burst=10)
HOLDS = 0.2
"""Seconds for which a consumer holds an item."""
TOLERANCE = 0.02
"""Seconds between the server's decision and when its answer is heard, beyond what others take."""


class LimitsRun:
    """`used`: the share of what the setting allows; `most`: the most items of a key that were in flight, or leased within a second."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds
        self.wrong: list[str] = []
        self.used: dict[str, float] = {}
        self.most: dict[str, int] = {}

    async def run(self) -> None:
        with ServerProcess(self._folder / "data") as server:
            await self._limited(server.url)
            await self._rated(server.url)

    async def _limited(self, url: str) -> None:
        async with AsyncClient(url) as client:
            await client.create_queue("limited", requested_partitions=4, key_concurrency=LIMIT)
            await self._fill(client, "limited", int(self._seconds / HOLDS * LIMIT))
            held: defaultdict[str, int] = defaultdict(int)
            most = 0
            ends = time.monotonic() + self._seconds

            async def consume(name: int) -> None:
                nonlocal most
                async with AsyncClient(url, client_id=f"limited{name}") as mine:
                    while time.monotonic() < ends:
                        leased = await mine.lease("limited", batch_size=50, request_timeout="1s", max_partitions=4)
                        for item in leased:
                            assert item.key is not None
                            held[item.key] += 1
                            most = max(most, held[item.key])
                            if held[item.key] > LIMIT:
                                self.wrong.append(f"{held[item.key]} items of {item.key} are leased at once")
                        await asyncio.sleep(HOLDS)
                        for item in leased:
                            # From when it is sent the server may lease the next.
                            held[item.key or ""] -= 1
                        if ids := [item.id for item in leased]:
                            await mine.complete("limited", ids)

            busy = asyncio.create_task(self._in_flight(url, ends))
            await asyncio.gather(*map(consume, range(16)))
            self.used["limit"] = await busy
            self.most["limit"] = most

    async def _in_flight(self, url: str, ends: float) -> float:
        """The share of the allowed leases that the server has given out, looked at again and again."""
        looks = []
        async with AsyncClient(url) as client:
            await asyncio.sleep(1)
            while time.monotonic() < ends - 0.5:
                stats = await client.stats("limited")
                looks.append(sum(each.total_leased for each in stats.partitions) / (KEYS * LIMIT))
                await asyncio.sleep(0.05)
        return sum(looks) / len(looks)

    async def _rated(self, url: str) -> None:
        async with AsyncClient(url) as client:
            await client.create_queue("rated", requested_partitions=4, key_rate=RATE)
            await self._fill(client, "rated", int(2 * self._seconds * RATE.per_second) + RATE.burst)
            times: defaultdict[str, list[float]] = defaultdict(list)
            begins = time.monotonic() + 1.0
            while time.monotonic() < begins + self._seconds:
                leased = await client.lease("rated", batch_size=500, request_timeout="1s", max_partitions=4)
                now = time.monotonic()
                for item in leased:
                    times[item.key or ""].append(now)
                if ids := [item.id for item in leased]:
                    await client.complete("rated", ids)
            for key, those in times.items():
                for earlier, later in zip(those, those[RATE.burst + int(RATE.per_second) :], strict=False):
                    if later - earlier < 1 - TOLERANCE:
                        self.wrong.append(f"{key}: {RATE.burst + int(RATE.per_second) + 1} items within {later - earlier:.3f} s")
                        break
            inside = sum(begins <= each <= begins + self._seconds for those in times.values() for each in those)
            self.used["rate"] = inside / (KEYS * RATE.per_second * self._seconds)
            self.most["rate"] = max(
                sum(1 for each in those[at : at + 100] if each < first + 1) for those in times.values() for at, first in enumerate(those)
            )

    async def _fill(self, client: AsyncClient, queue: str, each: int) -> None:
        for start in range(0, each, 20):
            await client.produce(queue, [Item(b"x", key=f"k{key}") for key in range(KEYS) for _ in range(min(20, each - start))])
