"""Hints that say what has changed, and the watches of a MetaStore that must look for changes itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import Stamp

MAX_HINT = 4_000
"""Bytes of a hint; a notification of PostgreSQL has up to twice as many."""


def hint_of(changed: Iterable[str]) -> str:
    """What a hint says: prefixes of the keys that have changed, as JSON; empty: there are too many."""
    hint = json.dumps(sorted({"/".join(key.split("/")[:2]) for key in changed}))
    return hint if len(hint) <= MAX_HINT else ""


def changed_by(hint: str) -> list[str]:
    """The prefixes that a hint names; of one that is not by this code, all."""
    with contextlib.suppress(ValueError):
        found = json.loads(hint)
        if isinstance(found, list) and all(isinstance(each, str) for each in found):
            return found
    return [""]


def concerns(prefix: str, changed: Collection[str]) -> bool:
    """Whether a change of these keys, or of something under these prefixes, may be one under the prefix."""
    return any(prefix.startswith(each) or each.startswith(prefix) for each in changed)


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
            if concerns(prefix, changed):
                woken.set()

    def close(self) -> None:
        self.closed = True
        self.wake()
