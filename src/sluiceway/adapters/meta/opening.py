"""Opening of a MetaStore by URL."""

from __future__ import annotations

from pathlib import Path

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.kernel.errors import invalid
from sluiceway.ports.meta_store import MetaStore


def open_meta_store(url: str) -> MetaStore:
    """Open `sqlite:PATH` (shared by the processes of one machine), `postgresql://…` or `etcd://…` (shared across machines), or `memory:`
    (this process alone).

    Raises `invalid_request` for another URL, StoreUnavailableError if it cannot be opened.
    """
    kind, _, rest = url.partition(":")
    if kind == "sqlite" and rest:
        return SqliteMetaStore(Path(rest))
    if kind in ("postgresql", "postgres") and rest.startswith("//"):
        return _open_postgres(url)
    if kind in ("etcd", "etcds"):
        # Imported on demand, since it loads an HTTP client.
        from sluiceway.adapters.meta.etcd import EtcdMetaStore

        return EtcdMetaStore(url)
    if url == "memory:":
        return MemoryMetaStore()
    raise invalid("meta", "expected sqlite:PATH, postgresql://…, etcd://… or memory:")


def _open_postgres(url: str) -> MetaStore:
    try:
        from sluiceway.adapters.meta.postgres import PostgresMetaStore
    except ImportError:
        raise invalid("meta", "PostgreSQL needs psycopg; install it with: pip install 'sluiceway[postgres]'") from None
    try:
        return PostgresMetaStore(url)
    except Exception:
        # The driver's message may quote the URL, and so a password.
        raise invalid("meta", "neither a PostgreSQL URL nor a connection string") from None
