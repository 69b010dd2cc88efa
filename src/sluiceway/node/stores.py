"""The stores that configured backends ask for."""

from __future__ import annotations

from pathlib import Path

from sluiceway.adapters.storage.memory import MemoryPartitionStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.kernel.errors import invalid
from sluiceway.model.backends import BackendSettings, PostgresBackend, SqliteBackend
from sluiceway.ports.partition_store import PartitionStore


def open_store(name: str, settings: BackendSettings, data: Path, *, shared: bool = False) -> PartitionStore:
    """The store of that backend; `shared` with the other processes of a cluster. Raises `invalid_request` for settings it cannot use, and
    what the store's constructor does."""
    if isinstance(settings, PostgresBackend):
        return _open_postgres(name, settings)
    if isinstance(settings, SqliteBackend):
        return SqlitePartitionStore(directory_of(name, settings, data), shared=shared)
    return MemoryPartitionStore()


def directory_of(name: str, settings: SqliteBackend, data: Path) -> Path:
    """Where the database files of that backend lie."""
    own = data / "partitions" if name == "default" else data / "backends" / name
    return own if settings.path is None else Path(settings.path)


def _open_postgres(name: str, settings: PostgresBackend) -> PartitionStore:
    try:
        from sluiceway.adapters.storage.postgres import PostgresPartitionStore
        from sluiceway.adapters.storage.postgres_connections import MARGIN
    except ImportError:
        raise invalid(f"backends.{name}", "PostgreSQL needs psycopg; install it with: pip install 'sluiceway[postgres]'") from None
    # So that the server says in time that a statement took too long: then it surely did not happen, which a time-out here cannot know.
    statement_timeout = max(1, settings.write_timeout // 2, settings.write_timeout - MARGIN)
    try:
        return PostgresPartitionStore(settings.url, schema=settings.schema, statement_timeout=statement_timeout)
    except Exception:
        # What the driver says may quote the URL.
        raise invalid(f"backends.{name}.url", "neither a PostgreSQL URL nor a connection string") from None
