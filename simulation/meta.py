"""A meta store that many simulated processes share, each over a way of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from simulation.network_link import Link, NoAnswerError, NotSentError
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import MetaUnknownError, Stamp, View
from sluiceway.ports.partition_store import StoreUnavailableError

PATIENCE: Millis = 2_000
"""How long a process waits for an answer."""


class _Subscriber(NamedTuple):
    prefix: str
    link: Link
    bell: asyncio.Event


class SharedMeta:
    """What is really stored."""

    def __init__(self) -> None:
        self.store = MemoryMetaStore()
        self.subscribers: list[_Subscriber] = []
        self.without_hints: Link | None = None
        """The way of a process that is told of no commit: it sees one when it reads the next time."""
        self.view = View(0, {})
        """All of it."""
        self.followers: list[Callable[[View, View], None]] = []
        """Are told of each commit: what there was before it, and what there is."""

    async def commit(
        self, checks: Mapping[str, Stamp | None], unchanged: Mapping[str, Stamp], puts: Mapping[str, bytes], deletes: Sequence[str]
    ) -> Stamp:
        stamp = await self.store.commit(checks, unchanged, puts, deletes)
        before, self.view = self.view, await self.store.read(prefixes=[""])
        for follow in self.followers:
            follow(before, self.view)
        for subscriber in self.subscribers:
            if subscriber.link is not self.without_hints and any(key.startswith(subscriber.prefix) for key in (*puts, *deletes)):
                subscriber.link.hint(subscriber.bell.set)
        return stamp


class SimMetaStore:
    """A process's MetaStore. Hints are as bad as the way: late, or lost."""

    def __init__(self, shared: SharedMeta, link: Link) -> None:
        self._shared = shared
        self._link = link

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        try:
            view = await self._link.call(lambda: self._shared.store.read(keys, prefixes), PATIENCE)
        except (NotSentError, NoAnswerError) as error:
            raise StoreUnavailableError("meta store: no answer") from error
        # Sorted, as a real one has them: in the order of writing they may follow from the order of some set.
        return View(view.stamp, dict(sorted(view.entries.items())))

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
    ) -> Stamp:
        # As they are now: it may land when the caller has gone on.
        what = dict(checks or {}), dict(unchanged or {}), dict(puts or {}), tuple(deletes)
        try:
            return await self._link.call(lambda: self._shared.commit(*what), PATIENCE)
        except (NotSentError, NoAnswerError) as error:
            raise MetaUnknownError("meta store: no answer") from error

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        subscriber = _Subscriber(prefix, self._link, asyncio.Event())
        self._shared.subscribers.append(subscriber)
        return self._watch(subscriber)

    async def _watch(self, subscriber: _Subscriber) -> AsyncIterator[Stamp]:
        try:
            while True:
                await subscriber.bell.wait()
                subscriber.bell.clear()
                yield self._shared.view.stamp
        finally:
            self._shared.subscribers.remove(subscriber)

    async def close(self) -> None:
        """There is nothing to release."""
