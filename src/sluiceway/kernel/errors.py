"""Every error that a user can meet: a stable code, its HTTP status, and whether repeating the call can help.

`docs/errors.md` and the client's exceptions come from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the table. `retryable` promises that the same call, repeated, is safe and may succeed."""

    status: int
    retryable: bool
    title: str


KINDS: dict[str, ErrorKind] = {
    "invalid_request": ErrorKind(400, False, "A field of the request is missing, unknown or out of range"),
    "invalid_body": ErrorKind(400, False, "The body is not what its content type says"),
    "too_many_items": ErrorKind(400, False, "The request has more items than one call may carry"),
    "unauthenticated": ErrorKind(401, False, "The request has no API key, or one that is unknown, expired or revoked"),
    "forbidden": ErrorKind(403, False, "The API key has no scope for this"),
    "not_found": ErrorKind(404, False, "There is no such endpoint"),
    "queue_not_found": ErrorKind(404, False, "There is no queue of that name"),
    "lease_not_found": ErrorKind(404, False, "The lease is closed, has expired, or never existed"),
    "key_not_found": ErrorKind(404, False, "There is no API key of that id"),
    "method_not_allowed": ErrorKind(405, False, "The endpoint takes another HTTP method"),
    "queue_exists": ErrorKind(409, False, "There is a queue of that name already"),
    "queue_not_empty": ErrorKind(409, False, "The queue still has items"),
    "queue_in_use": ErrorKind(409, False, "Another queue names this one as its dead queue, or has items on their way to it"),
    "key_conflict": ErrorKind(409, False, "The idempotency key was used for another body"),
    "version_conflict": ErrorKind(409, False, "The queue's settings were changed in the meantime"),
    "stale_ids": ErrorKind(409, False, "Some of the ids are not leased (any more), or not by this client"),
    "stale_sequence": ErrorKind(409, False, "The idempotency group has moved on to a later sequence"),
    "restart_required": ErrorKind(409, False, "The configuration has changes that take effect only at a restart; nothing was applied"),
    "body_too_large": ErrorKind(413, False, "The body is larger than the server takes"),
    "unsupported_media_type": ErrorKind(415, False, "The endpoint does not take that content type"),
    "too_many_requests": ErrorKind(429, True, "A limit is reached for now"),
    "rate_limited": ErrorKind(429, True, "The API key has used up its rate; the answer's Retry-After says how long to wait"),
    "internal": ErrorKind(500, False, "The server made a mistake"),
    "unavailable": ErrorKind(503, True, "Nothing was done: no partition could take the request in time"),
    "queue_paused": ErrorKind(503, True, "The queue is paused for this verb"),
    "partition_damaged": ErrorKind(503, False, "Stored data of a partition failed its checksum; the partition is stopped"),
    "outcome_unknown": ErrorKind(504, True, "The request may or may not have taken effect"),
}


class SluicewayError(Exception):
    """An operation that ended *refused* or *unknown*, with what to do about it.

    `code` is a key of `KINDS`; `field` names the field of the request that is at fault, if one is.
    """

    def __init__(self, code: str, detail: str, field: str | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.field = field

    @property
    def kind(self) -> ErrorKind:
        return KINDS[self.code]

    @property
    def retryable(self) -> bool:
        return self.kind.retryable

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark pickles exceptions between its processes.
        return (type(self), (self.code, self.detail, self.field))


class RateLimitedError(SluicewayError):
    """Too fast for the key's rate; after `retry_after` milliseconds the same request is taken."""

    def __init__(self, detail: str, retry_after: int) -> None:
        super().__init__("rate_limited", detail)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.detail, self.retry_after))


def invalid(field: str, detail: str) -> SluicewayError:
    """The commonest refusal: `field` is at fault, and `detail` says what was expected."""
    return SluicewayError("invalid_request", f"{field}: {detail}", field)
