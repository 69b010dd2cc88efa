"""One partition: a segment log of extents over immutable blobs, leases, transfers, idempotency keys."""

from __future__ import annotations
