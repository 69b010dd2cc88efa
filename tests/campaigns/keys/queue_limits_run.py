"""Limits of a whole queue, whose partitions several processes own: consumers at all of them, kills, and a count outside of the servers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

from sluiceway.client import AsyncClient
from sluiceway.contract.queue_settings import Rate
from sluiceway.kernel.errors import SluicewayError
from tests.campaigns.kit.fleet import WorkerFleet

WORKERS = 3
CONSUMERS = 12
RATE = Rate(200, burst=20)
LIMIT = 10
HOLDS = 0.2
"""Seconds for which a consumer holds an item."""
LATE = 0.5
"""Seconds for which a token may be used later than it came."""
WARM_UP = 2.0
"""Seconds that do not count for what is used."""


def most_ahead(leases: list[tuple[float, float]], per_second: float) -> float:
    """Of items leased between two moments each, surely: by how many they are ahead of that rate at most, over all spans of time."""
    ends = sorted(heard for _, heard in leases)
    worst = 0.0
    for begin in sorted({sent for sent, _ in leases}):
        inside = sorted(heard for sent, heard in leases if sent >= begin and heard <= begin + 10)
        for count, heard in enumerate(inside, 1):
            worst = max(worst, count - per_second * (heard - begin))
    assert ends, "nothing was leased"
    return worst


class QueueLimitsRun:
    """`used`: the share of what each setting allows, without kills. With kills, too: `ahead`, how far the leases were ahead of the rate,
    and `most`, that were held at once."""

    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        self._folder = folder
        self._seconds = seconds
        self._chance = random.Random(seed)
        self.wrong: list[str] = []
        self.used: dict[str, float] = {}
        self.ahead = 0.0
        self.most = 0
        self.kills = 0

    async def run(self) -> None:
        fleet = WorkerFleet(self._folder, WORKERS)
        fleet.start()
        try:
            url = fleet.url(0)
            async with AsyncClient(url) as client:
                await client.create_queue("rated", requested_partitions=6, rate=RATE)
                await client.create_queue("limited", requested_partitions=6, concurrency=LIMIT)
                for _ in range(int(4 * self._seconds * RATE.per_second / 500) + 1):
                    await client.produce("rated", [b"x"] * 500)
                for _ in range(int(3 * self._seconds * LIMIT / HOLDS / 50)):
                    await client.produce("limited", [b"x"] * 50)
            self.used["concurrency"] = await self._hold(url)
            calm = await self._consume(url)
            whole = self._seconds - WARM_UP
            self.used["rate"] = sum(1 for sent, heard in calm if sent >= calm[0][0] + WARM_UP) / (whole * RATE.per_second)
            killing = asyncio.create_task(self._kill(fleet))
            stormy = await self._consume(url)
            await killing
            killing = asyncio.create_task(self._kill(fleet))
            await self._hold(url)
            await killing
        finally:
            fleet.end()
        self.ahead = max(most_ahead(calm, RATE.per_second), most_ahead(stormy, RATE.per_second))
        if self.ahead > RATE.burst + LATE * RATE.per_second:
            self.wrong.append(f"{self.ahead:.0f} items more than {RATE.per_second:g} a second were leased in a span of time")

    async def _consume(self, url: str) -> list[tuple[float, float]]:
        """When each item was asked for and heard of, by the time when it was asked for."""
        found: list[tuple[float, float]] = []
        ends = time.monotonic() + self._seconds

        async def consume(name: int) -> None:
            async with AsyncClient(url, client_id=f"rated{name}", retry_for="1s") as mine:
                while time.monotonic() < ends:
                    with contextlib.suppress(SluicewayError):
                        sent = time.monotonic()
                        leased = await mine.lease("rated", batch_size=10, request_timeout="1s", max_partitions=6)
                        found.extend([(sent, time.monotonic())] * len(leased))
                        if leased:
                            await mine.complete("rated", [item.id for item in leased])

        await asyncio.gather(*map(consume, range(CONSUMERS)))
        return sorted(found)

    async def _hold(self, url: str) -> float:
        """Hold items of the queue with a limit, and count them from when they are heard of until their completion is sent. Returns the
        share of the limit that the server had leased."""
        held, looks = 0, []
        begins = time.monotonic()
        ends = begins + self._seconds

        async def consume(name: int) -> None:
            nonlocal held
            async with AsyncClient(url, client_id=f"limited{name}", retry_for="1s") as mine:
                while time.monotonic() < ends:
                    leased: list[str] = []
                    with contextlib.suppress(SluicewayError):
                        items = await mine.lease("limited", batch_size=1, request_timeout="1s", lease_timeout="10s")
                        leased = [item.id for item in items]
                    held += len(leased)
                    self.most = max(self.most, held)
                    if held > LIMIT:
                        self.wrong.append(f"{held} items are leased at once, of {LIMIT}")
                    await asyncio.sleep(HOLDS if leased else 0)
                    held -= len(leased)
                    with contextlib.suppress(SluicewayError):
                        if leased:
                            await mine.complete("limited", leased)

        async def look() -> None:
            async with AsyncClient(url) as client:
                while time.monotonic() < ends - 0.5:
                    with contextlib.suppress(SluicewayError):
                        stats = await client.stats("limited")
                        if time.monotonic() > begins + WARM_UP:
                            looks.append(sum(each.total_leased for each in stats.partitions) / LIMIT)
                    await asyncio.sleep(0.05)

        await asyncio.gather(look(), *map(consume, range(2 * LIMIT)))
        return sum(looks) / len(looks)

    async def _kill(self, fleet: WorkerFleet) -> None:
        ends = time.monotonic() + self._seconds - 3
        while time.monotonic() < ends:
            await asyncio.sleep(3)
            fleet.strike(self._chance)
            self.kills += 1
