"""The watches of a MetaStore that must look for changes itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

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
        self._woken: dict[asyncio.Event, str] = {}
        """What wakes each watch, with its prefix."""
        self.closed = False

    async def watch(self, prefix: str, since: Stamp) -> AsyncIterator[Stamp]:
        """Yield the newest stamp after each change later than `since`, until `close`."""
        woken = asyncio.Event()
        self._woken[woken] = prefix
        try:
            while not self.closed:
                woken.clear()
                changed, since = await self._changed_since(prefix, since)
                if changed:
                    yield since
                    continue
                await system.wait(woken, self._poll_interval)
        finally:
            del self._woken[woken]

    def wake(self, changed: Collection[str] = ("",)) -> None:
        """Wake the watches that the change of these keys, or of something under these prefixes, may concern; all, if none are given."""
        for woken, prefix in self._woken.items():
            if any(prefix.startswith(each) or each.startswith(prefix) for each in changed):
                woken.set()

    def close(self) -> None:
        self.closed = True
        self.wake()
