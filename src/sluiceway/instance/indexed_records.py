"""Records in the meta store that every instance holds in memory, such as schedules: by name, with an index of what has changed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.record_index import RecordIndex
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError, View
from sluiceway.ports.partition_store import StoreUnavailableError

R = TypeVar("R", bound=msgspec.Struct)

_index = msgspec.json.Decoder(RecordIndex).decode


class IndexedRecords(Generic[R]):
    """All records of a kind, as of the last `follow`. They are under `prefix` and their name, their index is under `index`.

    `beside`: prefixes of what else there is about each, which is read and removed with it. `heard` is called with the name of each record
    that is new, changed or gone.
    """

    def __init__(self, meta: MetaStore, kind: type[R], prefix: str, index: str, beside: Sequence[str] = ()) -> None:
        self._meta = meta
        self._record = msgspec.json.Decoder(kind).decode
        self._prefix, self._index, self._beside = prefix, index, tuple(beside)
        self._lock = asyncio.Lock()
        """Held by a change of this process, which would conflict with another one, and by `follow`, which would read what was before it."""
        self._records: dict[str, R] = {}
        self._names: list[str] | None = []
        """All names in order; None: to be sorted again."""
        self._version = -1
        self.heard: Callable[[str], None] = lambda _: None

    # ---- reading ----------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Take over what other processes have changed. Cheap if nothing has. Raises `unavailable`."""
        async with self._lock:
            await self._follow()

    async def _follow(self) -> None:
        index = index_of(await self._read([self._index]), self._index)
        behind = index.version - self._version
        if behind == 0:
            return
        if self._version >= 0 and 0 < behind <= len(index.recent):
            names = dict.fromkeys(index.recent[-behind:])
            view = await self._read([each + name for name in names for each in (self._prefix, *self._beside)])
            for name in names:
                self._take(name, view)
        else:
            # Of one moment, the index included.
            view = await self._read([self._index], [self._prefix, *self._beside])
            index = index_of(view, self._index)
            found = [key.removeprefix(self._prefix) for key in view.entries if key.startswith(self._prefix)]
            for name in {*found, *self._records}:
                self._take(name, view)
        self._version = index.version

    def _take(self, name: str, view: View) -> None:
        entry = view.entries.get(self._prefix + name)
        record = None if entry is None else self._record(entry.value)
        if record != self._records.get(name):
            self._note(name, record)

    def _note(self, name: str, record: R | None) -> None:
        if (record is None) != (name not in self._records):
            self._names = None
        if record is None:
            self._records.pop(name, None)
        else:
            self._records[name] = record
        self.heard(name)

    def find(self, name: str) -> R | None:
        return self._records.get(name)

    async def get(self, name: str) -> R | None:
        """The record, even if another instance has just created it; None: there is none. Raises `unavailable`."""
        if name not in self._records:
            await self.follow()
        return self._records.get(name)

    def names(self, pivot: str = "") -> Iterator[str]:
        """The names in order, after that one."""
        if self._names is None:
            self._names = sorted(self._records)
        return itertools.islice(self._names, bisect_right(self._names, pivot), None)

    # ---- changes ----------------------------------------------------------------------------------------------

    async def _change(
        self, name: str, decide: Callable[[R | None], R | None], note: Callable[[R], Mapping[str, bytes]], most: int, too_many: str
    ) -> R | None:
        """Commit what `decide` makes of the record, None: nothing of it, and return that. The same record: commit nothing.

        `note` makes other entries of the same commit from the new record, or the deleted one. Raises what `decide` raises, `unavailable`,
        `outcome_unknown`, and `invalid_request` with `too_many` if there were more than `most`.
        """
        where = self._prefix + name
        async with self._lock:
            while True:
                view = await self._read([self._index, where])
                entry, listed = view.entries.get(where), view.entries.get(self._index)
                before = None if entry is None else self._record(entry.value)
                after = decide(before)
                known = before if after is None else after
                if after is before or known is None:
                    return after
                index = index_of(view, self._index).changed(name, (after is not None) - (before is not None))
                if index.count > most:
                    raise SluicewayError("invalid_request", too_many)
                puts = {self._index: msgspec.json.encode(index), **note(known)}
                if after is not None:
                    puts[where] = msgspec.json.encode(after)
                checks = {where: entry and entry.stamp, self._index: listed and listed.stamp}
                deletes = [each + name for each in (self._prefix, *self._beside)] if after is None else ()
                if await self._commit(checks, puts, deletes):
                    break
            self._note(name, after)
            if index.version == self._version + 1:
                # Otherwise `follow` reads the changes of others first.
                self._version = index.version
            return after

    async def _commit(self, checks: Mapping[str, int | None], puts: Mapping[str, bytes], deletes: Sequence[str]) -> bool:
        """Returns False after a conflict with another process."""
        try:
            await self._meta.commit(checks, puts=puts, deletes=deletes)
        except ConflictError:
            return False
        except MetaUnknownError as error:
            # It may have landed. A single server has nobody else to follow, and would go by the former record until its restart.
            with contextlib.suppress(SluicewayError):
                await self._follow()
            detail = f"the meta store did not confirm the change: {error}; {self._index}.get shows it"
            raise SluicewayError("outcome_unknown", detail) from error
        except StoreUnavailableError as error:
            raise unreadable(error) from error
        return True

    async def _read(self, keys: Sequence[str], prefixes: Sequence[str] = ()) -> View:
        try:
            return await self._meta.read(keys, prefixes)
        except StoreUnavailableError as error:
            raise unreadable(error) from error


def index_of(view: View, index: str) -> RecordIndex:
    """The index of a view that has it, if there is one."""
    entry = view.entries.get(index)
    return RecordIndex() if entry is None else _index(entry.value)


def unreadable(error: Exception) -> SluicewayError:
    """The error for a meta store that does not answer."""
    return SluicewayError("unavailable", f"the meta store does not answer: {error}")
