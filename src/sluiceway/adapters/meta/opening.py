"""From a URL to a MetaStore."""

from __future__ import annotations

from pathlib import Path

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.kernel.errors import invalid
from sluiceway.ports.meta_store import MetaStore


def open_meta_store(url: str) -> MetaStore:
    """`sqlite:PATH` (the processes of one machine share the file) or `memory:` (this process alone).

    Raises `invalid_request` for another URL, StoreUnavailableError if it cannot be opened.
    """
    kind, _, rest = url.partition(":")
    if kind == "sqlite" and rest:
        return SqliteMetaStore(Path(rest))
    if url == "memory:":
        return MemoryMetaStore()
    raise invalid("meta", "expected sqlite:PATH or memory:")
