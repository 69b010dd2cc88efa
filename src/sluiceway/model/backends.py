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


COMMIT_WINDOW: Millis = 10
"""Much shorter than a write to a bucket, and long enough for those who wait for the one before to take part in the next."""


class BucketBackend(BackendSettings, frozen=True, kw_only=True):
    """A bucket of an object store, or a part of one."""

    bucket: Annotated[str, Meta(min_length=1), key("name of the bucket, which must exist", restart=True)]
    prefix: Annotated[
        str, Meta(pattern="^[A-Za-z0-9_./-]*$"), key("folder in the bucket; give each server or cluster its own", restart=True)
    ] = "sluiceway"
    commit_window: Annotated[
        Millis,
        Meta(le=10_000),
        key("how long each write to the bucket waits for further commits, to take them along", "duration", restart=True),
    ] = COMMIT_WINDOW


class S3Backend(BucketBackend, frozen=True, kw_only=True, tag="s3"):
    """A bucket of Amazon S3, or of a server with its interface. Keys that are not set come from the environment, as for AWS's tools."""

    region: Annotated[str, key("AWS region; empty: from the environment", restart=True)] = ""
    endpoint: Annotated[str, key("URL of another server with the interface of S3; empty: AWS", restart=True)] = ""
    access_key_id: Annotated[str, key("access key; empty: from the environment or the machine's role", restart=True)] = ""
    secret_access_key: Annotated[str, key("secret of the access key", "credential", restart=True)] = ""


class GcsBackend(BucketBackend, frozen=True, kw_only=True, tag="gcs"):
    """A bucket of Google Cloud Storage."""

    service_account: Annotated[
        str, key("file with a service account's key; empty: from the environment or the machine", "path", restart=True)
    ] = ""


class AzureBackend(BucketBackend, frozen=True, kw_only=True, tag="azure"):
    """A container of Azure Blob Storage."""

    account: Annotated[str, Meta(min_length=1), key("name of the storage account", restart=True)]
    access_key: Annotated[str, key("access key; empty: from the environment or the machine's identity", "credential", restart=True)] = ""
    endpoint: Annotated[str, key("the account's URL in another Azure cloud or in an emulator; empty: public Azure", restart=True)] = ""


class MemoryBackend(BackendSettings, frozen=True, tag="memory"):
    """Memory of the process: nothing is durable."""


_ALL: tuple[type[BackendSettings], ...] = (SqliteBackend, PostgresBackend, S3Backend, GcsBackend, AzureBackend, MemoryBackend)
KINDS: dict[str, type[BackendSettings]] = {str(table.__struct_config__.tag): table for table in _ALL}

DEFAULT_BACKENDS: dict[str, BackendSettings] = {"default": SqliteBackend()}
"""Backends of a server without configuration."""


def kind_of(settings: BackendSettings) -> str:
    """Return the backend's kind, a key of KINDS."""
    return next(kind for kind, table in KINDS.items() if type(settings) is table)
