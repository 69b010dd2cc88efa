"""Buckets by URL: `s3://BUCKET/FOLDER`, `gs://BUCKET/FOLDER`, `az://CONTAINER/FOLDER`, with options in the query."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from sluiceway.kernel.errors import invalid
from sluiceway.model.bucket_prices import BucketPrices, prices_of
from sluiceway.ports.object_store import ObjectStore


class _Kind(NamedTuple):
    """A kind of backend with such a URL, and what the URL's query may have."""

    name: str
    options: tuple[str, ...] = ()


_KINDS: Final = {
    "s3": _Kind("s3", ("region", "endpoint", "access_key_id", "secret_access_key")),
    "gs": _Kind("gcs"),
    "az": _Kind("azure", ("account", "access_key", "endpoint")),
}
"""By scheme. Options that are missing come from the environment or the machine's role, as for a backend."""


class BucketAt(NamedTuple):
    """An opened bucket. `name`: its URL without the query, which may have a key."""

    name: str
    objects: ObjectStore
    prices: BucketPrices


def open_bucket(url: str, field: str) -> BucketAt:
    """Open the objects of the bucket at that URL. No request is made. Raises `invalid_request` that names the field, and no key."""
    parts = urlsplit(url)
    kind = _KINDS.get(parts.scheme)
    if kind is None:
        raise invalid(field, "expected s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER")
    folder, given = parts.path.strip("/"), dict(parse_qsl(parts.query))
    if not (parts.netloc and folder) or given.keys() - {*kind.options}:
        known = f"of options only {', '.join(kind.options)}" if kind.options else "no options"
        raise invalid(field, f"expected {parts.scheme}://BUCKET/FOLDER, and {known}")
    objects = _objects(kind.name, parts.netloc, folder, {name: given.get(name, "") for name in kind.options}, field)
    return BucketAt(f"{parts.scheme}://{parts.netloc}/{folder}", objects, prices_of(kind.name, parts.netloc))


def _objects(kind: str, bucket: str, folder: str, options: dict[str, str], field: str) -> ObjectStore:
    try:
        from sluiceway.adapters.storage import bucket_objects
    except ImportError:
        raise invalid(field, "a bucket needs obstore; install it with: pip install 'sluiceway[s3]'") from None
    try:
        if kind == "gcs":
            return bucket_objects.in_gcs(bucket, folder, service_account="")
        if kind == "azure":
            return bucket_objects.in_azure(bucket, folder, **options)
        return bucket_objects.in_s3(bucket, folder, **options)
    except ValueError:
        # The library's message may quote the URL, and so a key.
        raise invalid(field, "the bucket cannot be used; is the URL right?") from None
