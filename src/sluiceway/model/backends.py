"""How storage backends are configured."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sluiceway.kernel.clock import Millis

WRITE_TIMEOUT: Millis = 10_000
"""Ten times the longest pause that disks and servers make in normal work, and short enough that clients still wait."""


class BackendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every kind of backend has. `partition_affinity` is its relative weight when a queue's partitions are placed: 0 takes none.

    A commit that takes longer than `write_timeout` is taken to be unknown.
    """

    partition_affinity: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    write_timeout: Annotated[Millis, msgspec.Meta(ge=1)] = WRITE_TIMEOUT


class SqliteBackend(BackendSettings, frozen=True):
    """Database files in a directory of this machine; without a `path`, in the data directory."""

    path: str | None = None


class PostgresBackend(BackendSettings, frozen=True):
    """A schema of a PostgreSQL database. `url` may hold a password: it is never shown."""

    url: str
    schema: Annotated[str, msgspec.Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,62}$")] = "sluiceway"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schema={self.schema!r})"


class MemoryBackend(BackendSettings, frozen=True):
    """The memory of the process."""


DEFAULT_BACKENDS: dict[str, BackendSettings] = {"default": SqliteBackend()}
"""Those of a server that was not configured."""
