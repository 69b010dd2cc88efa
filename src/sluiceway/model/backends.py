"""How storage backends are configured."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sluiceway.kernel.clock import Millis
from sluiceway.model.settings import Settings, key

WRITE_TIMEOUT: Millis = 10_000
"""Ten times the longest pause that disks and servers make in normal work, and short enough that clients still wait."""


class BackendSettings(Settings, frozen=True, tag_field="kind"):
    """What every kind of backend has."""

    partition_affinity: Annotated[
        float, Meta(ge=0, le=1), key("relative weight when the partitions of a new queue are placed; 0: it is given none")
    ] = 1.0
    write_timeout: Annotated[Millis, key("a commit that takes longer is taken to be unknown", "duration")] = WRITE_TIMEOUT


class SqliteBackend(BackendSettings, frozen=True, tag="sqlite"):
    """Database files in a directory of this machine."""

    path: Annotated[str | None, key("the folder of the files; without it, one in the data directory", "path", restart=True)] = None


class PostgresBackend(BackendSettings, frozen=True, kw_only=True, tag="postgres"):
    """A schema of a PostgreSQL database."""

    url: Annotated[str, key("a URL or connection string; it may hold a password", "credential", restart=True)]
    schema: Annotated[
        str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,62}$"), key("the schema of the tables, made by the server", restart=True)
    ] = "sluiceway"


class MemoryBackend(BackendSettings, frozen=True, tag="memory"):
    """The memory of the process: it keeps nothing."""


KINDS: dict[str, type[SqliteBackend] | type[PostgresBackend] | type[MemoryBackend]] = {
    "sqlite": SqliteBackend,
    "postgres": PostgresBackend,
    "memory": MemoryBackend,
}

DEFAULT_BACKENDS: dict[str, BackendSettings] = {"default": SqliteBackend()}
"""Those of a server that was not configured."""


def kind_of(settings: BackendSettings) -> str:
    """`sqlite`, `postgres` or `memory`."""
    return next(kind for kind, table in KINDS.items() if isinstance(settings, table))
