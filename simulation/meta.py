"""Meta store shared by several simulated processes, each with its own link to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from simulation.network_link import Link, NoAnswerError, NotSentError
from simulation.promises import check
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import MetaUnknownError, Stamp, View
from sluiceway.ports.partition_store import StoreUnavailableError

PATIENCE: Millis = 2_000
"""How long a process waits for an answer, in milliseconds."""


class _Subscriber(NamedTuple):
    prefix: str
    link: Link
    bell: asyncio.Event


class SharedMeta:
    """The stored state, and its subscribers."""

    def __init__(self) -> None:
        self.store = MemoryMetaStore()
        self.subscribers: list[_Subscriber] = []
        self.without_hints: Link | None = None
        """Link of a process that gets no hints: it sees a commit only at its next read."""
        self.view = View(0, {})
        """The whole content."""
        self.followers: list[Callable[[View, View], None]] = []
        """Called at each commit with the view before it and the view after it."""
        self.touched: dict[str, Stamp] = {}
        """Stamp of the last commit that put or deleted each key."""

    async def commit(
        self,
        checks: Mapping[str, Stamp | None],
        unchanged: Mapping[str, Stamp],
        puts: Mapping[str, bytes],
        deletes: Sequence[str],
        hint: bool = True,
    ) -> Stamp:
        stamp = await self.store.commit(checks, unchanged, puts, deletes)
        self.touched.update(dict.fromkeys([*puts, *deletes], stamp))
        before, self.view = self.view, await self.store.read(prefixes=[""])
        for follow in self.followers:
            follow(before, self.view)
        for subscriber in self.subscribers if hint else ():
            if subscriber.link is not self.without_hints and any(key.startswith(subscriber.prefix) for key in (*puts, *deletes)):
                subscriber.link.hint(subscriber.bell.set)
        return stamp

    async def refresh(self, view: View, prefix: str) -> View:
        """Return the view as it is by now, from what has changed since. Raises BrokenPromiseError if that is not what is stored."""
        now = await self.store.read(prefixes=[prefix])
        changed = [key for key, stamp in self.touched.items() if stamp > view.stamp and key.startswith(prefix)]
        entries = [(key, now.entries.get(key)) for key in changed]
        fresh = view.after(now.stamp, [(key, entry and entry.value, entry.stamp if entry else now.stamp) for key, entry in entries])
        check(fresh == now, f"a refreshed view of {prefix} is not what is stored")
        return fresh


class SimMetaStore:
    """MetaStore port of one process. Its hints share the link's faults: they may be late or lost."""

    def __init__(self, shared: SharedMeta, link: Link) -> None:
        self._shared = shared
        self._link = link

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        try:
            view = await self._link.call(lambda: self._shared.store.read(keys, prefixes), PATIENCE)
        except (NotSentError, NoAnswerError) as error:
            raise StoreUnavailableError("meta store: no answer") from error
        # Sorted, as in a real store. The order of writing may depend on the iteration order of a set.
        return View(view.stamp, dict(sorted(view.entries.items())))

    async def refresh(self, view: View, prefix: str) -> View:
        try:
            fresh = await self._link.call(lambda: self._shared.refresh(view, prefix), PATIENCE)
        except (NotSentError, NoAnswerError) as error:
            raise StoreUnavailableError("meta store: no answer") from error
        return View(fresh.stamp, dict(sorted(fresh.entries.items())))

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        # Copied: the commit may land after the caller has changed its arguments.
        what = dict(checks or {}), dict(unchanged or {}), dict(puts or {}), tuple(deletes), hint
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
        """No-op: nothing to release."""
