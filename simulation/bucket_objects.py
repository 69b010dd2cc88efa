"""Simulated bucket: objects that several processes share, over links that lose, delay and reorder requests and answers.

A request that has left lands whatever becomes of its sender, and perhaps long after its sender has given up. A tag is a hash of the bytes,
as with S3, so equal bytes have equal tags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import TypeVar

from simulation.loop import Loop, Process
from sluiceway.kernel.clock import Millis
from sluiceway.ports.object_store import Object, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError

T = TypeVar("T")

PATIENCE: Millis = 1_000
"""How long a process waits for an answer, in milliseconds."""


@dataclass
class BucketWeather:
    """Faults of a history: probabilities of each request, and milliseconds."""

    lost: float = 0.0
    """The request does not arrive."""
    unheard: float = 0.0
    """It arrives, and its answer does not."""
    late: float = 0.0
    """It arrives after its sender has given up."""
    throttled: float = 0.0
    """It is refused, and surely not carried out."""
    usual: Millis = 60
    longest: Millis = 200
    sleep: float = 0.0
    """The sender stands still for a while before it sends a write."""


class Bucket:
    """The shared objects."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get(self, name: str) -> Object | None:
        data = self.objects.get(name)
        return None if data is None else Object(data, tag_of(data))

    def create(self, name: str, data: bytes) -> bool:
        if name in self.objects:
            return False
        self.objects[name] = data
        return True

    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        before = self.objects.get(name)
        if before is None or tag_of(before) != tag:
            return None
        self.objects[name] = data
        return tag_of(data)

    def list(self, prefix: str, after: str) -> list[str]:
        return sorted(name for name in self.objects if name.startswith(prefix) and name > after)

    def sizes(self, prefix: str) -> dict[str, int]:
        return {name: len(self.objects[name]) for name in self.list(prefix, "")}

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.pop(name, None)


def tag_of(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


class SimObjects:
    """ObjectStore port of one process."""

    def __init__(self, bucket: Bucket, weather: Callable[[], BucketWeather], loop: Loop, process: Process, random: Random) -> None:
        self._bucket = bucket
        self._weather = weather
        self._loop = loop
        self._process = process
        self._random = random

    async def get(self, name: str) -> Object | None:
        return await self._call(lambda: self._bucket.get(name))

    async def get_range(self, name: str, start: int, length: int) -> bytes | None:
        found = await self._call(lambda: self._bucket.get(name))
        return None if found is None else found.data[start : start + length]

    async def create(self, name: str, data: bytes) -> bool:
        return await self._call(lambda: self._bucket.create(name, data), writes=True)

    async def replace(self, name: str, data: bytes, tag: str) -> str | None:
        return await self._call(lambda: self._bucket.replace(name, data, tag), writes=True)

    async def list(self, prefix: str, after: str) -> Sequence[str]:
        return await self._call(lambda: self._bucket.list(prefix, after))

    async def sizes(self, prefix: str) -> Mapping[str, int]:
        return await self._call(lambda: self._bucket.sizes(prefix))

    async def delete(self, names: Sequence[str]) -> None:
        # Each lands by itself: a collection may be half done.
        await asyncio.gather(*(self._call(lambda name=name: self._bucket.delete([name])) for name in names))  # type: ignore[misc]

    async def close(self) -> None:
        """No-op: nothing to release."""

    async def _call(self, act: Callable[[], T], *, writes: bool = False) -> T:
        weather, chance = self._weather(), self._random.random
        if writes and chance() < weather.sleep:
            await asyncio.sleep(self._random.choice([0.3, 4.0, 15.0]))
        if chance() < weather.throttled:
            await asyncio.sleep(self._some(weather) / 1000)
            raise StoreUnavailableError("slow down")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        lost, late, unheard = chance() < weather.lost, chance() < weather.late, chance() < weather.unheard
        delay = PATIENCE * self._random.choice([1, 2, 5]) if late else self._some(weather)

        def lands() -> None:
            result = act()
            if not unheard:
                self._loop.after(self._some(weather), lambda: self._tell(answer, result))

        if not lost:
            self._loop.after(delay, lands)
        try:
            async with asyncio.timeout(PATIENCE / 1000):
                return await answer
        except TimeoutError:
            raise (UnknownWriteError("no answer") if writes else StoreUnavailableError("no answer")) from None

    def _some(self, weather: BucketWeather) -> float:
        most = weather.longest if self._random.random() < 0.1 else weather.usual
        return self._random.uniform(most / 4, most)

    def _tell(self, answer: asyncio.Future[T], result: T) -> None:
        if self._process.dead:
            return

        def set_result() -> None:
            if not answer.done():
                answer.set_result(result)

        # In the process's own context: a frozen one hears it when it thaws.
        self._loop.call_soon(set_result, context=self._process.context)
