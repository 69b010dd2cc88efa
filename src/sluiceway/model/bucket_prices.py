"""Prices of requests to object stores: list prices, for estimates."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

BucketRequest = Literal["get", "get_range", "create", "replace", "list", "delete"]
"""The kinds of requests, as ObjectStore has them."""

_READS: Final = ("get", "get_range")
_FREE: Final = "delete"


class BucketPrices(NamedTuple):
    """A class of storage, and its prices in US dollars: `write` and `read` for a million requests, and for a GiB of them where bytes cost,
    too. Every store lists at the price of a write, and deletes for nothing. Storage and traffic come on top."""

    name: str
    write: float
    read: float
    gib_written: float = 0.0
    gib_read: float = 0.0

    def of(self, request: BucketRequest) -> float:
        """Dollars of one request."""
        if request == _FREE:
            return 0.0
        return (self.read if request in _READS else self.write) / 1e6


S3_STANDARD: Final = BucketPrices("S3 Standard", write=5.0, read=0.4)
S3_EXPRESS: Final = BucketPrices("S3 Express", write=1.13, read=0.03, gib_written=0.0032, gib_read=0.0006)
_GCS_STANDARD: Final = BucketPrices("GCS Standard, one region", write=5.0, read=0.4)
_AZURE_HOT: Final = BucketPrices("Azure hot, LRS", write=5.0, read=0.4)

_DIRECTORY_BUCKET: Final = "--x-s3"
"""End of the name of every directory bucket of S3 Express, and of no other bucket."""


def prices_of(kind: str, bucket: str) -> BucketPrices:
    """The prices for a bucket of that kind of backend (`s3`, `gcs`, `azure`). Other servers with the interface of S3 are estimated at the
    prices of S3."""
    if kind == "s3":
        return S3_EXPRESS if bucket.endswith(_DIRECTORY_BUCKET) else S3_STANDARD
    return {"gcs": _GCS_STANDARD, "azure": _AZURE_HOT}[kind]
