"""MetaStore: small, transactional, versionstamped. Holds everything that is not an item: queues, partitions, grants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from sluiceway.model.meta import MAX_COMMIT_BYTES, MAX_COMMIT_KEYS, NOTHING, Entry, Stamp, View

__all__ = ["MAX_COMMIT_BYTES", "MAX_COMMIT_KEYS", "NOTHING", "ConflictError", "Entry", "MetaStore", "MetaUnknownError", "Stamp", "View"]


class ConflictError(Exception):
    """A check of the commit failed: nothing was written. Read and decide again."""


class MetaUnknownError(Exception):
    """The commit may or may not have happened."""


class MetaStore(Protocol):
    """Optimistic transactions over sorted string keys. Several processes may share one store."""

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        """Return those keys, and all keys under those prefixes, as of one moment. Includes every commit that returned before the call."""
        ...

    async def refresh(self, view: View, prefix: str) -> View:
        """Return what `read` of this prefix would. `view`: what an earlier `refresh` or `read` of exactly this prefix at the same store
        returned; NOTHING: there was none.

        Where it pays, only what has changed since is fetched. A store that no longer knows that reads everything.
        """
        ...

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        """Write all or nothing, durably, and return the commit's stamp.

        `checks`: the key's entry must have exactly this stamp (None: the key must be absent). `unchanged`: no key under the prefix may have
        been put or deleted by a commit later than the stamp, so that a set of keys once read still holds. Without `hint`, watchers need not
        be told. Raises ConflictError (nothing written), MetaUnknownError, ValueError over MAX_COMMIT_KEYS or MAX_COMMIT_BYTES.
        """
        ...

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        """Yield a stamp after something under the prefix may have changed. A hint that may be late, doubled or merged: poll as well."""
        ...

    async def close(self) -> None: ...
