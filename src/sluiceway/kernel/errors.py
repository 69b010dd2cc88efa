"""User-facing errors: stable codes, HTTP statuses, and whether repeating the call can help.

Source of the pages under `docs/errors` and at the server's `/docs/errors`, of the OpenAPI document, and of the client's exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the table. `retryable` promises that the same call, repeated, is safe and may succeed.

    `title` is the meaning of the code, `when` the circumstances and what was done, `advice` the next step. The last two appear only in the
    documentation; a client has none of them for a code that only a newer server knows.
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
        "A field of the request is missing, unknown or out of range",
        "A field is misspelt, missing, of the wrong type or beyond a limit, or two fields do not go together. Nothing was done.",
        "Read `detail` and `field`: they name the field and what was expected. Correct the request; the same one will always be refused.",
    ),
    "invalid_body": ErrorKind(
        400,
        False,
        "The body is not what its content type says",
        "The body is empty, cut off, no JSON object or no sound Arrow stream, or it took too long to arrive. Nothing was done.",
        "Check what your client sends, and that the content type is that of the body. Send Arrow uncompressed, and send a large body "
        "in smaller calls.",
    ),
    "too_many_items": ErrorKind(
        400,
        False,
        "The request has more items than one call may carry",
        "The call carries more items or ids than its limit, which `detail` names. Nothing was done.",
        "Send them in several calls, or as Arrow where the call takes it.",
    ),
    "unauthenticated": ErrorKind(
        401,
        False,
        "The request has no API key, or one that is unknown, expired or revoked",
        "The server asks for API keys, and the request had none that it knows. The body was not read.",
        "Send `Authorization: Bearer slw_…`; clients take the key from SLUICEWAY_API_KEY. If the key was revoked or has expired, ask "
        "an administrator for another.",
    ),
    "forbidden": ErrorKind(
        403,
        False,
        "The API key has no scope for this",
        "The key is good, but none of its scopes is for this action on this queue. Whether there is such a queue is not said.",
        "Use a key with the scope that `detail` names, or ask an administrator for one: scopes are given when a key is created.",
    ),
    "not_found": ErrorKind(
        404,
        False,
        "There is no such endpoint",
        "The path is not one of the API's, or not one of the listener's that was asked.",
        "Check the path: `/docs` lists them all. Administration may be on another port (`admin_listen`).",
    ),
    "queue_not_found": ErrorKind(
        404,
        False,
        "There is no queue of that name",
        "No queue has that name (any more), or the queue that items are to be sent to is missing.",
        "Check the name with `queues.list`, or create the queue.",
    ),
    "lease_not_found": ErrorKind(
        404,
        False,
        "The lease is closed, has expired, or never existed",
        "The lease was completed or released, ran out, or belongs to another queue.",
        "Lease again: what was left in it is served under other ids. If leases run out in mid-work, extend them, or ask for a longer "
        "`lease_timeout`.",
    ),
    "key_not_found": ErrorKind(
        404,
        False,
        "There is no API key of that id",
        "The id is that of no API key; it may have been revoked already.",
        "Look for it with `keys.list`. The id is the part between the first and the second underscore of the key.",
    ),
    "rebalance_not_found": ErrorKind(
        404,
        False,
        "There is no rebalance of that id",
        "The id is that of no rebalance, or of one that ended so long ago that it is not kept any more.",
        "Look for it with `rebalances.list`. `audit.list` may know longer what became of it.",
    ),
    "capture_not_found": ErrorKind(
        404,
        False,
        "There is no capture of that name",
        "No capture of that name was ever begun in the meta store of the server that was asked, or it was forgotten.",
        "Look for it with `tasks.list`. A server knows those whose `--meta` is its own meta store; of any other one `sluiceway tasks list "
        "--meta URL` shows them.",
    ),
    "method_not_allowed": ErrorKind(
        405,
        False,
        "The endpoint takes another HTTP method",
        "A call was not a `POST`, or a page not a `GET`.",
        "Use the method in the answer's `Allow` header.",
    ),
    "snapshot_gone": ErrorKind(
        409,
        False,
        "The snapshot that is being read is not there any more",
        "A page of `queue.browse` was asked for too long after the one before it, or an hour after the first; or the partition was opened "
        "anew, or went to another instance.",
        "Begin anew without a `cursor`, and drop what was read of that partition: it may be different now.",
    ),
    "queue_exists": ErrorKind(
        409,
        False,
        "There is a queue of that name already",
        "`queues.create` names a queue that is there.",
        "Choose another name, or change the queue that is there with `queues.update`.",
    ),
    "queue_not_empty": ErrorKind(
        409,
        False,
        "The queue still has items",
        "`queues.delete` without `force`, while items are left or a partition is closed, so that nobody knows. Nothing was deleted.",
        "Drain or clear the queue first. With `force` it is deleted, and its items are lost.",
    ),
    "queue_in_use": ErrorKind(
        409,
        False,
        "Another queue names this one as its dead queue, or has items on their way to it",
        "`queues.delete` on the dead queue of another queue, or on one to which items are on their way. Nothing was deleted.",
        "Give the other queue another `dead_queue`, or null; or wait until the items have arrived. `detail` says which it is.",
    ),
    "key_conflict": ErrorKind(
        409,
        False,
        "The idempotency key was used for another body",
        "A produce had been made with this idempotency key and other items. Nothing was added.",
        "Take a new key for new items. If the items should have been the same, find out why they are not: the key is kept for its window.",
    ),
    "version_conflict": ErrorKind(
        409,
        False,
        "The queue's settings were changed in the meantime",
        "The `version` of the call is not the queue's, or another process changed the queue at the same moment. Nothing was changed.",
        "Read the queue with `queues.info`, decide again, and repeat with its version.",
    ),
    "rebalance_open": ErrorKind(
        409,
        False,
        "The queue is being rebalanced already",
        "A queue has one rebalance at a time, and this one's, which `detail` names, has not ended; or a rebalance has just made the "
        "partition that the call names, or is about to remove it. Nothing was changed.",
        "Follow it with `rebalances.get`. Wait until it has ended, or cancel it with `rebalances.cancel`.",
    ),
    "plan_changed": ErrorKind(
        409,
        False,
        "The plan of the rebalance is another one now",
        "The `plan_id` of the call is not that of what a rebalance would do now: partitions, backends or affinities have changed since it "
        "was shown. Nothing was changed.",
        "Have it shown again with `rebalances.plan`, and repeat with its `plan_id`.",
    ),
    "nothing_to_rebalance": ErrorKind(
        409,
        False,
        "The queue's partitions are as they are wanted already",
        "It has as many as the call asks for, divided among the backends as their affinities say. Nothing was changed.",
        "There is nothing to do. If another division was expected, look at `partition_affinity` of the backends with `backends.list`.",
    ),
    "not_cancellable": ErrorKind(
        409,
        False,
        "The rebalance cannot be cancelled any more",
        "It has ended, is being cancelled, has removed a partition, or is of a queue that keeps its order and uses its new partition. "
        "`detail` says which. It goes on as it was.",
        "Let it end. Then another rebalance can bring back what is wanted.",
    ),
    "stale_ids": ErrorKind(
        409,
        False,
        "Some of the ids are not leased (any more), or not by this client",
        "A `strict` call named ids that were settled before, whose lease ran out, or that another client has. All others are settled.",
        "Look at `ignored`: it says what is known of each. What ran out is served again under another id, so its work may be done twice.",
    ),
    "stale_sequence": ErrorKind(
        409,
        False,
        "The idempotency group has moved on to a later sequence",
        "A produce came with a lower `idempotency_sequence` than its group has had. Nothing was added.",
        "Another writer of that group has moved on, or the order was lost. Let one writer at a time use a group, and let its "
        "sequence never fall.",
    ),
    "restart_required": ErrorKind(
        409,
        False,
        "The configuration has changes that take effect only at a restart; nothing was applied",
        "A reload found changes that cannot be made while the server runs. Nothing was applied, also not the rest.",
        "Restart the server, or take back the changes that `detail` names and reload.",
    ),
    "body_too_large": ErrorKind(
        413,
        False,
        "The body is larger than the server takes",
        "The body is larger than this call may have. It was not read to its end, and the connection is closed.",
        "Send less in one call. Put payloads over 8 MiB into an object store, and a reference into the queue.",
    ),
    "unsupported_media_type": ErrorKind(
        415,
        False,
        "The endpoint does not take that content type",
        "The content type is missing or not one that the call takes, or the body is compressed.",
        "Send `Content-Type: application/json`, or one of those that `detail` names, and no `Content-Encoding`.",
    ),
    "not_here": ErrorKind(
        421,
        True,
        "Another instance has that partition; nothing was done",
        "Instances of a cluster tell it each other while partitions move between them. The one that was asked does not have a partition "
        "that the request names, and did nothing; the one that asked looks for its owner anew. Clients are not told it.",
        "Repeat it. If a client is told it again and again, ask `/readyz` of each instance what it serves, and report it.",
    ),
    "too_many_requests": ErrorKind(
        429,
        True,
        "A limit is reached for now",
        "The server holds as many requests, bodies or keys as it may. Nothing was done.",
        "Wait, longer each time, and repeat. If it goes on, use fewer connections, or more partitions.",
    ),
    "rate_limited": ErrorKind(
        429,
        True,
        "The API key has used up its rate; the answer's Retry-After says how long to wait",
        "The key's requests or bytes per second are used up. Nothing was done.",
        "Wait for the seconds in `Retry-After`, and repeat. If it goes on, ask for a higher rate for the key.",
    ),
    "internal": ErrorKind(
        500,
        False,
        "The server made a mistake",
        "A mistake of ours. Whether the call took effect is not known.",
        "Look into the server's log for the `request_id`, and report it. If a produce must be repeated, keep its idempotency key.",
    ),
    "unavailable": ErrorKind(
        503,
        True,
        "Nothing was done: no partition could take the request in time",
        "Every partition that could take it is closed or busy until `request_timeout`, or the server stops. Nothing was done.",
        "Repeat it, longer apart each time. `/readyz` says what does not serve; look at the disk or the database that it names.",
    ),
    "storage_full": ErrorKind(
        503,
        True,
        "The disk is full: nothing may be added",
        "The disk of every partition that could take the items has less room left than is kept for settling, clearing and deleting. "
        "Nothing was added.",
        "Complete, clear or delete items, or make room on the disk, and repeat it. `/readyz` says how much is left; `disk_reserve` in "
        "the configuration is what is kept.",
    ),
    "queue_paused": ErrorKind(
        503,
        True,
        "The queue is paused for this verb",
        "Someone has paused the queue for this. Nothing was done.",
        "Wait until it is resumed (`queue.resume`), and repeat.",
    ),
    "partition_damaged": ErrorKind(
        503,
        False,
        "Stored data of a partition failed its checksum; the partition is stopped",
        "What is stored for the partition is not what was written. It serves no more, so that nothing wrong is given out; other "
        "partitions go on.",
        "Look at the disk and at the server's log, and restore the partition from a copy. Repeating does not help.",
    ),
    "outcome_unknown": ErrorKind(
        504,
        True,
        "The request may or may not have taken effect",
        "The time was up, or the storage did not answer, while the change was being written.",
        "Repeat it. Completing, retrying, releasing and extending are safe to repeat; a produce is with the same idempotency key, a "
        "lease with the same `lease_key`.",
    ),
}


class SluicewayError(Exception):
    """An operation that was *refused* or ended *unknown*, with advice.

    `code` is a key of `KINDS`; `field` names the offending field of the request, if there is one.
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
    """The key's rate is exceeded; the same request is accepted after `retry_after` milliseconds."""

    def __init__(self, detail: str, retry_after: int) -> None:
        super().__init__("rate_limited", detail)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.detail, self.retry_after))


class OtherQueueError(SluicewayError):
    """Refused because of another queue than the one named in the request. `detail` is `text` with that queue's name for `{other}`.

    A caller that may not read that queue gets `anonymous` instead.
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
    """The most common refusal: `field` is wrong, and `detail` says what was expected."""
    return SluicewayError("invalid_request", f"{field}: {detail}", field)
