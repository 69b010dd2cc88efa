"""Partition stores of the configured backends."""

from __future__ import annotations

import resource
from pathlib import Path

from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.bucket_requests import BucketRequests, CountedObjects
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.adapters.storage.memory import MemoryPartitionStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.kernel.errors import invalid
from sluiceway.model.backends import (
    AzureBackend,
    BackendSettings,
    BucketBackend,
    GcsBackend,
    MemoryBackend,
    PostgresBackend,
    S3Backend,
    SqliteBackend,
    kind_of,
)
from sluiceway.model.bucket_prices import BucketPrices, prices_of
from sluiceway.ports.object_store import ObjectStore
from sluiceway.ports.partition_store import PartitionStore

MAX_OPEN, MIN_OPEN = 256, 8
"""Open partitions of a SQLite store: more would not speed up commits, fewer would make each wait for an opening."""
OTHER_FILES = 48
"""Other files that a server has open: libraries, its log, listeners, the meta store."""


def open_store(
    name: str, settings: BackendSettings, data: Path, *, shared: bool = False, requests: BucketRequests | None = None
) -> PartitionStore:
    """Return that backend's store; `shared` with the other processes of a cluster. `requests` counts those to buckets. Raises
    `invalid_request` for settings it cannot use, and what the store's constructor does."""
    if isinstance(settings, PostgresBackend):
        return _open_postgres(name, settings)
    if isinstance(settings, BucketBackend):
        return _open_bucket(name, settings, requests or BucketRequests())
    if isinstance(settings, SqliteBackend):
        return SqlitePartitionStore(directory_of(name, settings, data), shared=shared, max_open=most_open(shared))
    if isinstance(settings, MemoryBackend):
        return MemoryPartitionStore()
    raise TypeError(f"there is no store for {type(settings).__name__}: add it here")


def most_open(shared: bool) -> int:
    """Maximum open partitions of a SQLite store, given the process's limit on files, half of which are for connections."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_OPEN
    return min(MAX_OPEN, max(MIN_OPEN, (files // 2 - OTHER_FILES) // (3 if shared else 2)))


def directory_of(name: str, settings: SqliteBackend, data: Path) -> Path:
    """The directory of that backend's database files."""
    own = data / "partitions" if name == "default" else data / "backends" / name
    return own if settings.path is None else Path(settings.path)


def _open_postgres(name: str, settings: PostgresBackend) -> PartitionStore:
    try:
        from sluiceway.adapters.storage.postgres import PostgresPartitionStore
        from sluiceway.adapters.storage.postgres_connections import MARGIN
    except ImportError:
        raise invalid(f"backends.{name}", "PostgreSQL needs psycopg; install it with: pip install 'sluiceway[postgres]'") from None
    # Let the server report slow statements in time: those surely did not happen, which a time-out here cannot know.
    statement_timeout = max(1, settings.write_timeout // 2, settings.write_timeout - MARGIN)
    try:
        return PostgresPartitionStore(settings.url, schema=settings.schema, statement_timeout=statement_timeout)
    except Exception:
        # The driver's message may quote the URL.
        raise invalid(f"backends.{name}.url", "neither a PostgreSQL URL nor a connection string") from None


def _open_bucket(name: str, settings: BucketBackend, requests: BucketRequests) -> PartitionStore:
    objects = CountedObjects(open_objects(name, settings), requests.of(name, bucket_prices(settings)))
    return BucketPartitionStore(HedgedReads(objects), settings.write_timeout, settings.commit_window)


def bucket_prices(settings: BucketBackend) -> BucketPrices:
    """The list prices of requests to that bucket."""
    return prices_of(kind_of(settings), settings.bucket)


def open_objects(name: str, settings: BucketBackend) -> ObjectStore:
    """Return the objects of that backend's bucket. Raises `invalid_request` for settings it cannot use."""
    try:
        from sluiceway.adapters.storage import bucket_objects
    except ImportError:
        raise invalid(f"backends.{name}", "a bucket needs obstore; install it with: pip install 'sluiceway[s3]'") from None
    try:
        if isinstance(settings, S3Backend):
            return bucket_objects.in_s3(
                settings.bucket,
                settings.prefix,
                region=settings.region,
                endpoint=settings.endpoint,
                access_key_id=settings.access_key_id,
                secret_access_key=settings.secret_access_key,
            )
        if isinstance(settings, GcsBackend):
            return bucket_objects.in_gcs(settings.bucket, settings.prefix, service_account=settings.service_account)
        if isinstance(settings, AzureBackend):
            return bucket_objects.in_azure(
                settings.bucket,
                settings.prefix,
                account=settings.account,
                access_key=settings.access_key,
                endpoint=settings.endpoint,
            )
        raise TypeError(f"there is no bucket for {type(settings).__name__}: add it here")
    except ValueError as error:
        raise invalid(f"backends.{name}", f"it cannot be used: {error}") from None
