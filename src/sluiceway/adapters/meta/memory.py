"""In-memory MetaStore, for tests, and for a single instance without durability."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from sluiceway.adapters.meta.commit import HISTORY, check_commit, forgotten
from sluiceway.adapters.meta.watches import Watches
from sluiceway.ports.meta_store import ConflictError, Entry, Stamp, View


class MemoryMetaStore:
    """A MetaStore that lives as long as the object. Use from one event loop. A deleted key leaves a trace for HISTORY commits."""

    def __init__(self) -> None:
        self._stamp: Stamp = 0
        self._entries: dict[str, Entry] = {}
        self._deleted: dict[str, Stamp] = {}
        """Stamp of each key's last delete. A key put again may stay here: its entry has the later stamp."""
        self._traces: deque[tuple[Stamp, str]] = deque()
        self._watches = Watches(self._changed_since, None)

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        found = {key: self._entries[key] for key in keys if key in self._entries}
        for prefix in prefixes:
            found.update((key, entry) for key, entry in self._entries.items() if key.startswith(prefix))
        return View(self._stamp, found)

    async def refresh(self, view: View, prefix: str) -> View:
        """Read again: nothing is copied."""
        return await self.read(prefixes=[prefix])

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        puts = puts or {}
        check_commit(puts, deletes)
        for key, stamp in (checks or {}).items():
            entry = self._entries.get(key)
            if (entry and entry.stamp) != stamp:
                raise ConflictError(f"{key} has changed")
        for prefix, since in (unchanged or {}).items():
            if self._changed(prefix, since):
                raise ConflictError(f"something under {prefix} has changed")
        self._stamp += 1
        for key, value in puts.items():
            self._entries[key] = Entry(value, self._stamp)
        for key in deletes:
            if self._entries.pop(key, None) is not None:
                self._deleted[key] = self._stamp
                self._traces.append((self._stamp, key))
        self._forget()
        if hint:
            self._watches.wake([*puts, *deletes])
        return self._stamp

    def _changed(self, prefix: str, since: Stamp) -> bool:
        return forgotten(since, self._stamp) or any(stamp > since for stamp in self._stamps(prefix))

    def _stamps(self, prefix: str) -> Iterator[Stamp]:
        yield from (entry.stamp for key, entry in self._entries.items() if key.startswith(prefix))
        yield from (stamp for key, stamp in self._deleted.items() if key.startswith(prefix))

    def _forget(self) -> None:
        while self._traces and self._traces[0][0] <= self._stamp - HISTORY:
            stamp, key = self._traces.popleft()
            if self._deleted.get(key) == stamp:
                del self._deleted[key]

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        """Yields for every change after this call. The first hint may be about an earlier one."""
        return self._watches.watch(prefix, self._stamp)

    async def _changed_since(self, prefix: str, since: Stamp) -> tuple[bool, Stamp]:
        return self._changed(prefix, since), self._stamp

    async def close(self) -> None:
        self._watches.close()
