"""Configuration of storage backends."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sluiceway.kernel.clock import Millis
from sluiceway.model.settings import Settings, key

WRITE_TIMEOUT: Millis = 10_000
"""Ten times the longest pause of disks and servers in normal operation, and short enough that clients still wait."""


class BackendSettings(Settings, frozen=True, tag_field="kind"):
    """Settings common to all kinds of backends."""

    partition_affinity: Annotated[
        float, Meta(ge=0, le=1), key("relative weight in the placement of a new queue's partitions; 0: none are placed here")
    ] = 1.0
    write_timeout: Annotated[Millis, key("maximum duration of a commit; a longer one has an unknown outcome", "duration")] = WRITE_TIMEOUT


class SqliteBackend(BackendSettings, frozen=True, tag="sqlite"):
    """SQLite files in a directory of this machine."""

    path: Annotated[str | None, key("folder of the partition files; not set: a folder in the data directory", "path", restart=True)] = None


class PostgresBackend(BackendSettings, frozen=True, kw_only=True, tag="postgres"):
    """A schema of a PostgreSQL database."""

    url: Annotated[str, key("URL or connection string; may contain a password", "credential", restart=True)]
    schema: Annotated[
        str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,62}$"), key("schema of the tables, created by the server", restart=True)
    ] = "sluiceway"


class MemoryBackend(BackendSettings, frozen=True, tag="memory"):
    """Memory of the process: nothing is durable."""


KINDS: dict[str, type[SqliteBackend] | type[PostgresBackend] | type[MemoryBackend]] = {
    "sqlite": SqliteBackend,
    "postgres": PostgresBackend,
    "memory": MemoryBackend,
}

DEFAULT_BACKENDS: dict[str, BackendSettings] = {"default": SqliteBackend()}
"""Backends of a server without configuration."""


def kind_of(settings: BackendSettings) -> str:
    """Return the backend's kind: `sqlite`, `postgres` or `memory`."""
    return next(kind for kind, table in KINDS.items() if isinstance(settings, table))
