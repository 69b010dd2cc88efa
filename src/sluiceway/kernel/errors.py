"""User-facing errors: stable codes, HTTP statuses, and whether repeating the call can help.

Source of the pages under `docs/reference/errors` and at the server's `/docs/errors`, of the OpenAPI document, and of the
client's exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the table of errors. `retryable` promises that a repeat of the same call is safe and may succeed.

    `title` is the meaning of the code, `when` the cause and what was done, `advice` the next step. `when` and `advice` appear only in the
    documentation. A client that receives an unknown code from a newer server has neither.
    """

    status: int
    retryable: bool
    title: str
    when: str = ""
    advice: str = ""


KINDS: dict[str, ErrorKind] = {
    "invalid_request": ErrorKind(
        400,
        False,
        "A field of the request is missing, unknown or invalid",
        "A field is misspelt, missing, of the wrong type or out of range, or two fields exclude each other. Nothing was done.",
        "Read `field` and `detail`: they name the field and what was expected. Correct the request. The same request will always fail.",
    ),
    "invalid_body": ErrorKind(
        400,
        False,
        "The body does not match its content type",
        "The body is empty, cut off, not a JSON object or not a valid Arrow stream, or it took too long to arrive. Nothing was done.",
        "Check what your client sends, and that the content type matches the body. Send Arrow uncompressed. Split a large body into "
        "several calls.",
    ),
    "too_many_items": ErrorKind(
        400,
        False,
        "The request has more items than one call may carry",
        "The call has more items or ids than its limit, which `detail` names. Nothing was done.",
        "Split the items into several calls, or send Arrow if the call accepts it.",
    ),
    "unauthenticated": ErrorKind(
        401,
        False,
        "The request has no API key, or one that is unknown, expired or revoked",
        "Authentication is on, and the request has no valid API key. The body was not read.",
        "Send `Authorization: Bearer slw_…`. Clients read the key from SLUICEWAY_API_KEY. If the key has expired or was revoked, ask an "
        "administrator for a new one.",
    ),
    "forbidden": ErrorKind(
        403,
        False,
        "The API key has no scope for this call",
        "The API key is valid, but none of its scopes allows this action on this queue. The error does not say whether the queue exists.",
        "Use a key with the scope that `detail` names, or ask an administrator for one. The scopes of a key are set when it is created.",
    ),
    "not_found": ErrorKind(
        404,
        False,
        "The endpoint does not exist",
        "The path is not part of the API, or not served on this port.",
        "Check the path. `/docs` lists them all. Administration may be on another port (`admin_listen`).",
    ),
    "queue_not_found": ErrorKind(
        404,
        False,
        "The queue does not exist",
        "No queue has this name, or the queue was deleted, or the target queue of the items is missing.",
        "Check the name with `queues.list`, or create the queue.",
    ),
    "lease_not_found": ErrorKind(
        404,
        False,
        "The lease is closed, has run out, or never existed",
        "The lease was completed or released, ran out, or belongs to another queue.",
        "Lease again. Unsettled items of the lease are served again under new ids. If leases run out during the work, extend them, or set "
        "a longer `lease_timeout`.",
    ),
    "key_not_found": ErrorKind(
        404,
        False,
        "The API key does not exist",
        "No API key has this id. The key may already be revoked.",
        "Find the id with `keys.list`. It is the part of the key between the first and the second underscore.",
    ),
    "rebalance_not_found": ErrorKind(
        404,
        False,
        "The rebalance does not exist",
        "No rebalance has this id, or it ended so long ago that its record was removed.",
        "Find the id with `rebalances.list`. `audit.list` keeps the outcome for longer.",
    ),
    "schedule_not_found": ErrorKind(
        404,
        False,
        "The schedule does not exist",
        "No schedule has this name, or the API key may not use the queue of the schedule.",
        "Check the name with `schedules.list`. A key sees the schedules of the queues that it may read.",
    ),
    "bundle_not_found": ErrorKind(
        404,
        False,
        "The bundle does not exist",
        "No bundle of this queue has this id, or it ended more than a day ago, or the API key may not use its queue.",
        "Check the id with `bundles.list`. A bundle takes items of the queue for which it was created.",
    ),
    "capture_not_found": ErrorKind(
        404,
        False,
        "The capture does not exist",
        "The server's meta store has no capture of this name. It was never started there, or it was forgotten.",
        "Check the name with `tasks.list`. A server shows the captures in its own meta store. For another one, run `sluiceway tasks list "
        "--meta URL`.",
    ),
    "method_not_allowed": ErrorKind(
        405,
        False,
        "The endpoint requires another HTTP method",
        "A call was not a `POST`, or a page not a `GET`.",
        "Use the method in the answer's `Allow` header.",
    ),
    "snapshot_gone": ErrorKind(
        409,
        False,
        "The snapshot of this browse no longer exists",
        "The next page of `queue.browse` was requested too long after the last one, or an hour after the first. Or the partition was "
        "reopened or moved to another instance.",
        "Start again without a `cursor`. Discard the pages read so far: the partition may have changed.",
    ),
    "queue_exists": ErrorKind(
        409,
        False,
        "The queue already exists",
        "`queues.create` was called with the name of an existing queue. Nothing was changed.",
        "Choose another name, or change the existing queue with `queues.update`.",
    ),
    "schedule_exists": ErrorKind(
        409,
        False,
        "The schedule already exists",
        "`schedules.create` was called with the name of an existing schedule. Nothing was changed.",
        "Choose another name, or change the existing schedule with `schedules.update`.",
    ),
    "bundle_closed": ErrorKind(
        409,
        False,
        "The bundle takes no items any more",
        "A produce named a bundle that is closed, or over. Nothing was added. Or a bundle was to be closed that has ended without a "
        "follow-up, or to be cancelled when its follow-up was produced already.",
        "Close a bundle only when every produce that names it is answered. For more items, create another one.",
    ),
    "queue_not_empty": ErrorKind(
        409,
        False,
        "The queue still has items",
        "`queues.delete` was called without `force`, and the queue has items, or a partition is closed and its items cannot be counted. "
        "Nothing was deleted.",
        "Drain or clear the queue first. Or pass `force`: it deletes the queue and its items.",
    ),
    "queue_in_use": ErrorKind(
        409,
        False,
        "The queue is another queue's dead queue, or items are on their way to it",
        "`queues.delete` was called for another queue's dead queue, or for a queue that items are being moved to. Nothing was deleted.",
        "Read `detail` for the reason. Set the other queue's `dead_queue` to another queue or null, or wait until the items have arrived.",
    ),
    "key_conflict": ErrorKind(
        409,
        False,
        "The idempotency key was already used for other items",
        "An earlier produce used this idempotency key with other items. Nothing was added; but of a call that the queue's `order` or "
        "limits by key divide, items for other partitions may have been.",
        "Use a new key for new items. If the items should be the same, find out why they differ. The key is remembered for its window.",
    ),
    "version_conflict": ErrorKind(
        409,
        False,
        "The queue was changed in the meantime",
        "The call's `version` is not the queue's version, or another process changed the queue at the same moment. Nothing was changed.",
        "Read the queue with `queues.info`, decide again, and repeat with its version.",
    ),
    "rebalance_open": ErrorKind(
        409,
        False,
        "The queue already has an open rebalance",
        "A queue has one rebalance at a time. The one that `detail` names has not ended, or it creates or drains the call's partition. "
        "Nothing was changed.",
        "Follow the rebalance with `rebalances.get`. Wait until it ends, or cancel it with `rebalances.cancel`.",
    ),
    "plan_changed": ErrorKind(
        409,
        False,
        "The rebalance plan has changed",
        "The call's `plan_id` does not match the current plan. Partitions, backends or affinities have changed since the plan was shown. "
        "Nothing was changed.",
        "Get the new plan with `rebalances.plan`, and repeat with its `plan_id`.",
    ),
    "nothing_to_rebalance": ErrorKind(
        409,
        False,
        "The queue already has the requested partitions",
        "The queue has the requested number of partitions, placed on the backends according to their affinities. Nothing was changed.",
        "No action is needed. If you expected another placement, check `partition_affinity` with `backends.list`.",
    ),
    "not_cancellable": ErrorKind(
        409,
        False,
        "The rebalance can no longer be cancelled",
        "The rebalance has ended, is already being cancelled, has removed a partition, or belongs to an ordered queue that already uses "
        "its new partition. `detail` names the reason. The rebalance continues.",
        "Wait until it ends. Then start another rebalance to the partitions that you want.",
    ),
    "stale_ids": ErrorKind(
        409,
        False,
        "Some of the ids are not leased, or not leased by this client",
        "A `strict` call named items that are already settled, whose lease ran out, or that another client has leased. All other items "
        "are settled.",
        "Read `ignored` for the reason of each id. Items whose lease ran out are served again under new ids, so work may be repeated.",
    ),
    "stale_sequence": ErrorKind(
        409,
        False,
        "The idempotency group already has a later sequence",
        "The produce has a lower `idempotency_sequence` than its group. Nothing was added.",
        "Another writer uses the same group, or the writer lost its place. Let one writer at a time use a group, and never lower the "
        "sequence.",
    ),
    "restart_required": ErrorKind(
        409,
        False,
        "Some configuration changes need a restart; nothing was applied",
        "A reload found changes that cannot be applied to a running server. None of the changes was applied.",
        "Restart the server. Or revert the changes that `detail` names, and reload.",
    ),
    "body_too_large": ErrorKind(
        413,
        False,
        "The body is larger than the server accepts",
        "The body is larger than this call's limit. The server did not read all of it, and closed the connection.",
        "Send less in one call. Put payloads over 8 MiB into an object store, and send references to them.",
    ),
    "unsupported_media_type": ErrorKind(
        415,
        False,
        "The endpoint does not accept this content type",
        "The content type is missing or not accepted by this call, or the body is compressed.",
        "Send `Content-Type: application/json`, or a type that `detail` names, and no `Content-Encoding`.",
    ),
    "not_here": ErrorKind(
        421,
        True,
        "Another instance owns the partition; nothing was done",
        "The instances of a cluster send this error to each other while partitions move. The called instance does not own the partition. "
        "The calling one looks up the new owner. Clients do not receive this error.",
        "Repeat the call. If a client receives this error repeatedly, compare `/readyz` of all instances, and report a bug.",
    ),
    "too_many_requests": ErrorKind(
        429,
        True,
        "A limit of the server is reached for now",
        "The server holds its maximum of requests, bodies or keys. Nothing was done.",
        "Wait and repeat, with growing pauses. If the error persists, use fewer connections or more partitions.",
    ),
    "rate_limited": ErrorKind(
        429,
        True,
        "The API key has reached its rate limit; Retry-After says how long to wait",
        "The key's requests or bytes per second are used up. Nothing was done.",
        "Wait for the seconds in `Retry-After`, and repeat. If the error persists, ask an administrator for a key with a higher rate.",
    ),
    "internal": ErrorKind(
        500,
        False,
        "Internal error of the server",
        "The server has a bug. The call may or may not have taken effect.",
        "Search the server's log for the `request_id`, and report the bug. To repeat a produce, use the same idempotency key.",
    ),
    "unavailable": ErrorKind(
        503,
        True,
        "No partition could take the request in time; nothing was done",
        "Until `request_timeout`, every possible partition was closed or busy, or the server is stopping. Nothing was done.",
        "Repeat, with growing pauses. `/readyz` names what is not working. Check the disk or the database that it names.",
    ),
    "storage_full": ErrorKind(
        503,
        True,
        "The disk is full; nothing was added",
        "The disks of all possible partitions have less free space than the reserve, which is kept for settling, clearing and deleting "
        "items. Nothing was added.",
        "Complete, clear or delete items, or free disk space. Then repeat. `/readyz` shows the free space. The setting `disk_reserve` is "
        "the reserve.",
    ),
    "queue_paused": ErrorKind(
        503,
        True,
        "The queue is paused",
        "The queue, or the partition of the call, is paused for this verb. Nothing was done.",
        "Resume the queue (`queue.resume`) or wait until it is resumed. Then repeat.",
    ),
    "partition_damaged": ErrorKind(
        503,
        False,
        "Stored data of a partition failed its checksum; the partition is stopped",
        "The stored data of the partition is not what was written. The server stopped the partition so that it serves no wrong data. Other "
        "partitions are not affected.",
        "Check the disk and the server's log, and restore the partition from a backup. Repeating the call does not help.",
    ),
    "outcome_unknown": ErrorKind(
        504,
        True,
        "The request may or may not have taken effect",
        "The time was up, or the storage did not answer, while the change was being written.",
        "Repeat the call. Complete, retry, release and extend are safe to repeat. A produce is safe with the same idempotency key, a lease "
        "with the same `lease_key`.",
    ),
}


class SluicewayError(Exception):
    """An operation that was *refused* or whose outcome is *unknown*.

    `code` is a key of `KINDS`. `detail` says what happened and what to do. `field` names the invalid field of the request, if there is one.
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
    """The API key's rate limit is exceeded. The same request is accepted after `retry_after` milliseconds."""

    def __init__(self, detail: str, retry_after: int) -> None:
        super().__init__("rate_limited", detail)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.detail, self.retry_after))


class OtherQueueError(SluicewayError):
    """A request that was refused because of another queue than its own. `detail` is `text` with that queue's name for `{other}`.

    A caller whose key may not read that queue gets the error of `anonymous` instead.
    """

    def __init__(self, code: str, text: str, other: str, field: str) -> None:
        super().__init__(code, text.format(other=repr(other)), field)
        self.text = text
        self.other = other

    def anonymous(self) -> SluicewayError:
        return SluicewayError(self.code, self.text.format(other="(one that this key may not read)"), self.field)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, self.text, self.other, self.field))


def invalid(field: str, detail: str) -> SluicewayError:
    """The error `invalid_request` for the field `field`. `detail` says what was expected."""
    return SluicewayError("invalid_request", f"{field}: {detail}", field)
