"""Rules shared by the MetaStores: commit limits, and how long a delete is remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluiceway.ports.meta_store import MAX_COMMIT_BYTES, MAX_COMMIT_KEYS, NOTHING, Stamp, View

HISTORY = 10_000
"""Commits for which a deleted key leaves a trace. Questions about older stamps get the safe answer *it has changed*."""


def check_commit(puts: Mapping[str, bytes], deletes: Sequence[str]) -> None:
    """Raise ValueError if the writes are over the port's limits (checks do not count), or write a key twice."""
    keys = len(puts) + len(deletes)
    if keys > MAX_COMMIT_KEYS:
        raise ValueError(f"a commit of {keys} keys; the limit is {MAX_COMMIT_KEYS}")
    size = sum(len(key.encode()) + len(value) for key, value in puts.items()) + sum(len(key.encode()) for key in deletes)
    if size > MAX_COMMIT_BYTES:
        raise ValueError(f"a commit of {size} bytes; the limit is {MAX_COMMIT_BYTES}")
    if len(puts.keys() | set(deletes)) < keys:
        raise ValueError("a commit that writes a key twice")


def forgotten(since: Stamp, now: Stamp) -> bool:
    """Whether deletes later than `since` may have lost their trace by the stamp `now`."""
    return since < now - HISTORY


def known_at(view: View, now: Stamp) -> View:
    """The view, if a store whose stamp is `now` still has all changes since; otherwise NOTHING, since when all that it holds has changed.

    A stamp that is ahead of the store's is of before it was restored from a backup.
    """
    return NOTHING if view.stamp > now or forgotten(view.stamp, now) else view
