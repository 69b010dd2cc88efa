"""The watches of a MetaStore that must look for changes itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import Stamp


class Watches:
    """Look for changes whenever they are woken, and each `poll_interval` ms (None: only then).

    `changed_since` takes a prefix and a stamp. It returns whether something under the prefix has a later stamp, and the newest stamp.
    """

    def __init__(self, changed_since: Callable[[str, Stamp], Awaitable[tuple[bool, Stamp]]], poll_interval: Millis | None) -> None:
        self._changed_since = changed_since
        self._poll_interval = poll_interval
        self._woken: set[asyncio.Event] = set()
        self.closed = False

    async def watch(self, prefix: str, since: Stamp) -> AsyncIterator[Stamp]:
        """Yield the newest stamp after each change later than `since`, until `close`."""
        woken = asyncio.Event()
        self._woken.add(woken)
        try:
            while not self.closed:
                woken.clear()
                changed, since = await self._changed_since(prefix, since)
                if changed:
                    yield since
                    continue
                await system.wait(woken, self._poll_interval)
        finally:
            self._woken.discard(woken)

    def wake(self) -> None:
        for woken in self._woken:
            woken.set()

    def close(self) -> None:
        self.closed = True
        self.wake()
