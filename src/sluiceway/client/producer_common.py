"""The code that both producers share: checks of options and items, and the call of a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sluiceway.client import answers, item_calls
from sluiceway.client.batching import Batch, BatchLimits
from sluiceway.client.errors import CallError
from sluiceway.client.http_exchange import generated_key, seconds
from sluiceway.client.item_calls import Item
from sluiceway.client.payloads import encoded
from sluiceway.client.protocol import Call, Duration, millis, time_text
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_HEADER_BYTES, MAX_ITEMS_JSON, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES, MAX_PRIORITY, MAX_TEXT_BYTES

MAX_BATCH_BYTES = 16 << 20
"""Maximum payload bytes of a batch. base64 adds a third, and with all other fields the body stays below its limit."""

_ITEM = re.compile(r"items\[(\d+)\]")


def limits(linger: Duration, max_batch: int, max_bytes: int, max_in_flight: int, max_buffered: int) -> BatchLimits:
    """The checked limits of a producer. Raises `invalid_request`, which names the option."""
    for name, value, most in (
        ("max_batch", max_batch, MAX_ITEMS_JSON),
        ("max_bytes", max_bytes, MAX_BATCH_BYTES),
        ("max_in_flight", max_in_flight, 100),
        ("max_buffered", max_buffered, None),
    ):
        if value < 1 or (most is not None and value > most):
            raise invalid(name, f"expected 1 to {most}" if most is not None else "expected at least 1")
    return BatchLimits(millis(linger, "linger"), max_batch, max_bytes, max_in_flight, max_buffered)


def checked_item(
    payload: object,
    kind: str | None,
    encoding: str | None,
    reference: str | None,
    headers: Mapping[str, str] | None,
    enqueue_at: datetime | None,
    key: str | None,
    priority: int | None,
    unique_key: str | None,
) -> tuple[Item, int]:
    """The item and its size in bytes. Raises `invalid_request` for an item that the server would refuse, before it joins a batch."""
    payload, encoding = encoded(payload, encoding)
    data = payload.encode() if isinstance(payload, str) else payload
    if len(data) > MAX_PAYLOAD_BYTES:
        raise invalid("payload", f"larger than {MAX_PAYLOAD_BYTES} bytes; store it elsewhere, and send a reference to it")
    size = len(data)
    for name, text in (("kind", kind), ("encoding", encoding), ("reference", reference)):
        if text is not None:
            size += _measured(name, len(text.encode()), MAX_TEXT_BYTES)
    for name, text in (("key", key), ("unique_key", unique_key)):
        if text is not None:
            if not text:
                raise invalid(name, "must not be empty; leave it out, or pass None")
            size += _measured(name, len(text.encode()), MAX_KEY_BYTES)
    if priority is not None and not 0 <= priority <= MAX_PRIORITY:
        raise invalid("priority", f"{priority} is not between 0 and {MAX_PRIORITY}")
    if headers:
        size += _measured("headers", sum(len(name.encode()) + len(value.encode()) for name, value in headers.items()), MAX_HEADER_BYTES)
    time_text(enqueue_at, "enqueue_at")
    return Item(data, kind, encoding, reference, headers, enqueue_at, key, priority, unique_key), size


def _measured(name: str, size: int, most: int) -> int:
    if size > most:
        raise invalid(name, f"larger than {most} bytes")
    return size


class Posting:
    """Builds the calls of a producer's batches, and decides what follows a failed one."""

    def __init__(self, queue_name: str, request_timeout: Duration | None, retry_for: float, bundle: str | None = None) -> None:
        self._queue_name = queue_name
        self._bundle = bundle
        self._request_timeout = request_timeout
        self.retry_for = retry_for

    def call(self, batch: Batch[Any]) -> Call[answers.Produced]:
        """The produce call of a batch, with its own key so that it can be repeated."""
        key = generated_key(self.retry_for, self._request_timeout)
        return item_calls.produce(self._queue_name, batch.left, self._request_timeout, key, self._bundle)

    def failed(self, batch: Batch[Any], error: Exception) -> bool:
        """The batch's call failed. Returns whether to send the batch again, without the item that the server refused."""
        if isinstance(error, CallError) and error.code == "invalid_request":
            # This refusal depends only on the item, so no earlier attempt has stored the batch.
            found = _ITEM.match(error.field or "")
            if found is not None and int(found[1]) < len(batch.left):
                return batch.refuse(int(found[1]), error)
        batch.error = error
        return False


def cut_off() -> SluicewayError:
    return SluicewayError("outcome_unknown", "the producer was cancelled while it sent this item; it may or may not be stored")


def of_the_parent() -> SluicewayError:
    return SluicewayError("outcome_unknown", "the process that this one was forked off sends this item; it may or may not be stored")


def closed() -> SluicewayError:
    return SluicewayError("unavailable", "the producer is closed; create another one")


DELIVERY_RETRIES = 4
"""A producer repeats its calls this many times as long as a client. A client's `retry_for` equals the duration of one attempt, so a batch
in flight when a backend hangs would get no second attempt."""


def patience(retry_for: Duration | None, default: float) -> float:
    return default if retry_for is None else seconds(retry_for, "retry_for")
