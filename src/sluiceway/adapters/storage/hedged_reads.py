"""Hedged reads: a read that takes much longer than usual is sent a second time, and the first answer counts. One that fails is repeated.

Opening a partition reads many objects at once, and waits for the slowest. Object stores answer one request in a hundred several times as
late as the others, but rarely the same request twice (Dean and Barroso, "The Tail at Scale", 2013).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sluiceway.adapters import system
from sluiceway.ports.object_store import Object, ObjectStore
from sluiceway.ports.partition_store import StoreUnavailableError

T = TypeVar("T")

FACTOR = 2.0
"""Times the usual duration of a read, after which it is sent again: about one in twenty."""
FIRST = 0.1
"""Seconds that a read is taken to last before any was measured."""
LEAST = 0.005
"""Seconds that a second read waits at least: below that it would cost more than it saves."""
PAUSES = (0.05, 0.2, 0.5)
"""Seconds before a read that has failed is repeated. Object stores fail now and then, and expect to be asked again."""


class HedgedReads:
    """An ObjectStore whose reads are hedged and repeated. Writes and deletions go through as they are: their caller has to know of each."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._usual = FIRST
        self.create = objects.create
        self.replace = objects.replace
        self.delete = objects.delete
        self.close = objects.close

    async def get(self, name: str) -> Object | None:
        return await self._hedged(lambda: self._objects.get(name))

    async def get_range(self, name: str, start: int, length: int) -> bytes | None:
        return await self._hedged(lambda: self._objects.get_range(name, start, length))

    async def list(self, prefix: str, after: str) -> Sequence[str]:
        return await self._hedged(lambda: self._objects.list(prefix, after))

    async def sizes(self, prefix: str) -> Mapping[str, int]:
        return await self._hedged(lambda: self._objects.sizes(prefix))

    async def _hedged(self, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        for pause in PAUSES:
            try:
                return await self._once(read)
            except StoreUnavailableError:
                await asyncio.sleep(pause)
        return await self._once(read)

    async def _once(self, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        began = system.stopwatch()
        first = asyncio.ensure_future(read())
        both = {first}
        try:
            done, _ = await asyncio.wait(both, timeout=max(LEAST, FACTOR * self._usual))
            if not done:
                both.add(asyncio.ensure_future(read()))
                done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if all(each.exception() is not None for each in done):
                    # The other may be luckier.
                    await asyncio.wait(both)
            answered = [each for each in both if each.done() and each.exception() is None]
            if not answered:
                return first.result() if first.done() else next(iter(done)).result()
            # The average of the quicker ones is near the median, which is what the factor is meant for.
            self._usual += 0.05 * (min(system.stopwatch() - began, 2 * FACTOR * self._usual) - self._usual)
            return answered[0].result()
        finally:
            for each in both:
                each.cancel()
