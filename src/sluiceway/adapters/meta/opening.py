"""Opening of a MetaStore by URL."""

from __future__ import annotations

from pathlib import Path

from sluiceway.adapters.meta.bucket import BucketMetaStore
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.bucket_requests import META, BucketRequests, CountedObjects
from sluiceway.adapters.storage.bucket_urls import open_bucket
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.kernel.errors import invalid
from sluiceway.ports.meta_store import MetaStore

_BUCKETS = ("s3", "gs")
"""Schemes of buckets that a meta store was tried in."""


def open_meta_store(url: str, requests: BucketRequests | None = None) -> MetaStore:
    """Open `sqlite:PATH` (shared by the processes of one machine), `postgresql://…`, `etcd://…`, `s3://BUCKET/FOLDER` or
    `gs://BUCKET/FOLDER` (shared across machines), or `memory:` (this process alone). `requests` counts those to a bucket.

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
    if is_bucket(url):
        _, objects, prices = open_bucket(url, "meta")
        counted = CountedObjects(objects, (requests or BucketRequests()).of(META, prices))
        return BucketMetaStore(HedgedReads(counted))
    if url == "memory:":
        return MemoryMetaStore()
    raise invalid("meta", "expected sqlite:PATH, postgresql://…, etcd://…, s3://…, gs://… or memory:")


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


def is_bucket(url: str) -> bool:
    """Whether that meta store is in a bucket."""
    kind, _, rest = url.partition(":")
    return kind in _BUCKETS and rest.startswith("//")
