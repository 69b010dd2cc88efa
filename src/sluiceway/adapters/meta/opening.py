"""Opening of a MetaStore by URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from sluiceway.adapters.meta.bucket import BucketMetaStore
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.bucket_requests import META, BucketRequests, CountedObjects
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.kernel.errors import invalid
from sluiceway.model.bucket_prices import BucketPrices, prices_of
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.object_store import ObjectStore

_BUCKETS = {"s3": "s3", "gs": "gcs"}
"""Schemes of buckets, and the kind of backend with the same prices."""


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
        objects, prices = open_objects(url)
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


_OPTIONS = {"region": "", "endpoint": "", "access_key_id": "", "secret_access_key": ""}
"""What the query of an s3 URL may have. Without keys, they come from the environment or the machine's role."""


def is_bucket(url: str) -> bool:
    """Whether that meta store is in a bucket."""
    kind, _, rest = url.partition(":")
    return kind in _BUCKETS and rest.startswith("//")


def open_objects(url: str) -> tuple[ObjectStore, BucketPrices]:
    """Return the objects of the bucket at that URL, and the list prices of requests to it. Raises `invalid_request`."""
    try:
        from sluiceway.adapters.storage import bucket_objects
    except ImportError:
        raise invalid("meta", "a bucket needs obstore; install it with: pip install 'sluiceway[s3]'") from None
    parts = urlsplit(url)
    folder, given = parts.path.strip("/"), dict(parse_qsl(parts.query))
    if not (parts.hostname and folder) or given.keys() - (_OPTIONS if parts.scheme == "s3" else {}):
        raise invalid("meta", f"expected {parts.scheme}://BUCKET/FOLDER, and of options only {', '.join(_OPTIONS)} (s3)")
    prices = prices_of(_BUCKETS[parts.scheme], parts.netloc)
    try:
        if parts.scheme == "gs":
            return bucket_objects.in_gcs(parts.netloc, folder, service_account=""), prices
        return bucket_objects.in_s3(parts.netloc, folder, **(_OPTIONS | given)), prices
    except ValueError:
        # The library's message may quote the URL, and so a key.
        raise invalid("meta", "the bucket cannot be used; is the URL right?") from None
