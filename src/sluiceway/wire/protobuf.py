"""Translation of Querator's protobuf messages into this API's JSON calls, and of their answers back into messages.

`CALLS` has one entry per call. Fields that it does not mention are the same in both. These rules hold for every call:

* An empty, zero or false field counts as absent, because protobuf cannot tell the difference. The JSON call's default applies.
* A time at or before 1970 counts as absent, because clients send their language's zero time. Times are rounded up to milliseconds.
* A stored item's time that does not apply is Go's zero time, so that `AsTime().IsZero()` is true at the client.
* Durations in answers have the form of Go's `Duration.String`.
* An unknown field is an error, as in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from sluiceway.contract.item_answers import Deleted, LeasedItem
from sluiceway.contract.queue_settings import QUEUE_SETTINGS, QueueInfo, QueuePage
from sluiceway.contract.queue_stats import QueueStats
from sluiceway.kernel.clock import as_millis, format_duration, format_time, parse_duration, parse_time
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_JSON
from sluiceway.wire import json_inspection

# The runtime of protobuf is loaded by the first call that needs it: most servers never get one, and it is a tenth of a server's start.
if TYPE_CHECKING:
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import Message

CONTENT_TYPE: Final = b"application/protobuf"

OK: Final = 200
REFUSED: Final = 400
FAILED: Final = 453
RETRY: Final = 454
WRONG_CONTENT: Final = 455
NO_SUCH_CALL: Final = 501
_CODE_TEXTS: Final = {
    OK: "OK",
    REFUSED: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    429: "Too Many Requests",
    FAILED: "Request Failed",
    RETRY: "Retry Request",
    WRONG_CONTENT: "Client Content Error",
    500: "Internal Service Error",
    NO_SUCH_CALL: "Not Implemented",
}

_MOST_FIELDS: Final = MAX_ITEMS_JSON + 16
"""Maximum number of fields in a message, repeated ones counted each time: the most items of a call, and its other fields. Nested messages
have no repeated fields."""
_GROUP_BEGINS: Final = 3
_GROUP_ENDS: Final = 4
"""Wire types around the fields of a group. No message has one, so it is unknown; its fields count like the others."""
_MOST_UNKNOWN: Final = 4_096
"""Maximum bytes of unknown fields among which the first is looked for: each becomes an object."""
_NOTHING_TO_LEASE: Final = "request timeout; no items are in the queue, try again"
"""Querator's `MsgRequestTimeout`, verbatim. Its clients compare the message to tell an empty queue from a failure."""
_ZERO_TIME: Final = {"seconds": -62_135_596_800}
"""Go's zero time, 0001-01-01, which Querator sends for a time that does not apply. Clients would read an absent time as 1970."""
_PAGE: Final = 1_000
"""Querator's default page size."""
_INT32: Final = (1 << 31) - 1
_LAST_SECOND: Final = 253_402_300_799
"""The last second of the year 9999, the latest time that can be formatted."""
_NAME_CHARACTERS: Final = "-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
"""The characters of queue names, in sort order. A name never begins with either of the first two."""
_NAME_LENGTH: Final = 128


@cache
def _pool() -> DescriptorPool:
    """A separate pool, so that a process that also loads Querator's messages has no duplicate message types."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.timestamp_pb2 import DESCRIPTOR as TIMESTAMP

    pool = DescriptorPool()
    pool.AddSerializedFile(TIMESTAMP.serialized_pb)
    compiled = files("sluiceway.wire").joinpath("querator.binpb").read_bytes()
    for each in FileDescriptorSet.FromString(compiled).file:
        pool.AddSerializedFile(each.SerializeToString())
    return pool


@cache
def message_class(name: str) -> type[Any]:
    """The Python class of a message type in `querator.proto`."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(_pool().FindMessageTypeByName(f"sluiceway.querator.{name}"))


class Form(NamedTuple):
    """The translation of one call.

    `request` names the message type. `fields` maps a message to the JSON call's fields. `answer` maps the message and the JSON answer to
    the answer's message.
    """

    request: str
    fields: Callable[[Any], dict[str, Any]]
    answer: Callable[[Any, bytes], Message]

    def read(self, body: bytes) -> tuple[Message, bytes]:
        """Decode `body` into its message and the equivalent JSON body. Raises `invalid_body`, `invalid_request` and `too_many_items`."""
        from google.protobuf.message import DecodeError

        kind = message_class(self.request)
        _count_fields(body)
        try:
            message: Message = kind.FromString(body)
        except DecodeError:
            raise _undecodable(self.request) from None
        known = message.ByteSize()
        message.DiscardUnknownFields()
        unknown = known - message.ByteSize()
        if unknown > _MOST_UNKNOWN:
            detail = f"{unknown:,} bytes of the {self.request} are unknown fields; this server does not support them"
            raise SluicewayError("invalid_request", detail)
        if unknown:
            # The search for the unknown field visits every part, so it runs only if there is one.
            _refuse_unknown(kind.FromString(body), "")
        return message, msgspec.json.encode(self.fields(message))

    def write(self, message: Message, answer: bytes) -> tuple[int, bytes]:
        """The HTTP status and the body for `answer`, the JSON answer to `message`."""
        said: Any = self.answer(message, answer)
        status: int = said.code if said.DESCRIPTOR.name == "Reply" else OK
        return status, said.SerializeToString()


def refusal(error: SluicewayError, request_id: str) -> tuple[int, bytes]:
    """The HTTP status and the body of an error. Querator's clients attribute any status that they do not know to a proxy."""
    details = {"code": error.code, "request_id": request_id}
    if error.field is not None:
        details["field"] = error.field
    said = _reply(_status(error), error.detail, details)
    return said.code, said.SerializeToString()


def _status(error: SluicewayError) -> int:
    status = error.kind.status
    if error.code == "not_found":
        return NO_SUCH_CALL
    if status in (401, 403, 429, 500):
        return status
    if error.retryable:
        return RETRY
    if status == 415:
        return WRONG_CONTENT
    return REFUSED if status < 500 else FAILED


def _reply(code: int, message: str = "", details: dict[str, str] | None = None) -> Any:
    return message_class("Reply")(code=code, code_text=_CODE_TEXTS[code], message=message, details=details or {})


# ---- reading --------------------------------------------------------------------------------------------------


def _undecodable(name: str) -> SluicewayError:
    return SluicewayError("invalid_body", f"the body is not a {name} of querator.proto; check that the client sends this message")


def _count_fields(body: bytes) -> None:
    """Raises `too_many_items` for a message with so many fields that decoding it could exhaust the process's memory.

    A malformed message passes; the decoder refuses it.
    """
    at, count, end = 0, 0, len(body)
    while at < end:
        tag = body[at]
        wire = tag & 7
        if wire == 2 and tag < 0x80 and at + 1 < end and body[at + 1] < 0x80:
            # The common case: field number and length take one byte each.
            at += 2 + body[at + 1]
        else:
            _, at = _varint(body, at)
            if wire == 0:
                _, at = _varint(body, at)
            elif wire == 2:
                size, at = _varint(body, at)
                at += size
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            elif wire not in (_GROUP_BEGINS, _GROUP_ENDS):
                return
        count += 1
        if count > _MOST_FIELDS:
            raise SluicewayError("too_many_items", f"items: one call may have at most {MAX_ITEMS_JSON:,} entries", "items")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(body) and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at


def _refuse_unknown(message: Any, path: str) -> None:
    from google.protobuf.message import Message
    from google.protobuf.unknown_fields import UnknownFieldSet

    unknown = UnknownFieldSet(message)
    if len(unknown):
        name = f"{path}field {unknown[0].field_number}"
        raise invalid(name, f"unknown field of {message.DESCRIPTOR.name}; this server does not support it")
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if isinstance(value, Message):
            _refuse_unknown(value, f"{path}{field.name}.")
        else:
            for at, each in enumerate(value):
                _refuse_unknown(each, f"{path}{field.name}[{at}].")


def _given(message: Any, *names: str) -> dict[str, Any]:
    """The named fields that are neither empty nor zero."""
    return {name: value for name in names if (value := getattr(message, name))}


def _priority(item: Any) -> dict[str, int]:
    """0 is a priority, so its absence is told apart."""
    return {"priority": item.priority} if item.HasField("priority") else {}


def _time(message: Any, name: str, path: str) -> dict[str, str]:
    if not message.HasField(name):
        return {}
    moment = getattr(message, name)
    if not (moment.seconds < _LAST_SECOND and 0 <= moment.nanos < 1_000_000_000):
        raise invalid(f"{path}{name}", "expected a time before the year 10000")
    return {name: format_time(moment.seconds * 1_000 - (-moment.nanos // 1_000_000))} if moment.seconds > 0 else {}


def _on_queue(message: Any, *names: str) -> dict[str, Any]:
    return {"queue_name": message.queue_name, **_given(message, *names)}


def _produce(message: Any) -> dict[str, Any]:
    _check_count(message.items)
    items = []
    for at, item in enumerate(message.items):
        payload = item.bytes
        given = {"bytes": payload} if payload else {"utf8": item.utf8}
        if kind := item.kind:
            given["kind"] = kind
        if encoding := item.encoding:
            given["encoding"] = encoding
        if reference := item.reference:
            given["reference"] = reference
        if key := item.key:
            given["key"] = key
        if item.HasField("priority"):
            given["priority"] = item.priority
        if unique_key := item.unique_key:
            given["unique_key"] = unique_key
        if item.HasField("enqueue_at"):
            given |= _time(item, "enqueue_at", f"items[{at}].")
        items.append(given)
    return {**_on_queue(message, "request_timeout"), "items": items}


def _retry(message: Any) -> dict[str, Any]:
    _check_count(message.items)
    items = [
        # A dead item is not retried, so its time is dropped.
        {"id": item.id, **({"dead": True} if item.dead else _time(item, "retry_at", f"items[{at}]."))}
        for at, item in enumerate(message.items)
    ]
    return {**_on_queue(message, "partition"), "items": items}


def _check_count(items: Any) -> None:
    if len(items) > MAX_ITEMS_JSON:
        raise SluicewayError("too_many_items", f"items: {len(items):,} entries; one call may have at most {MAX_ITEMS_JSON:,}", "items")


def _create(message: Any) -> dict[str, Any]:
    """As in Querator, a setting that is not named is off, so what this API gives to new queues is declined."""
    _refuse_namespace(message)
    named = _on_queue(message, "lease_timeout", "expire_timeout", "max_attempts", "requested_partitions", "reference", "dead_queue")
    return {each.name: None for each in QUEUE_SETTINGS.values() if each.new is not None} | named


def _update(message: Any) -> dict[str, Any]:
    """As in Querator, an empty value of these three fields clears the setting. An absent time keeps it."""
    _refuse_namespace(message)
    replaced = {"max_attempts": message.max_attempts, "reference": message.reference, "dead_queue": message.dead_queue or None}
    return {**_on_queue(message, "lease_timeout", "expire_timeout", "requested_partitions"), **replaced}


def _refuse_namespace(message: Any) -> None:
    if message.namespace:
        raise invalid("namespace", "namespaces are not supported; leave it out")


def _clear(message: Any) -> dict[str, Any]:
    if message.destructive:
        raise invalid("destructive", "leased items are never dropped; leave it out, or delete the queue")
    if not message.queue and not message.scheduled:
        raise invalid("queue", "nothing to drop; set queue or scheduled to true")
    return {"queue_name": message.queue_name, "ready": message.queue, "scheduled": message.scheduled}


def _list_queues(message: Any) -> dict[str, Any]:
    """Querator's page begins with its pivot, this API's page after it."""
    _refuse_namespace(message)
    return {"pivot": _name_before(message.pivot), "limit": message.limit or _PAGE}


def _name_before(name: str) -> str | None:
    """The last of all names that come before that one; None if none does. What is no name stays as it is, to be refused."""
    if not name or len(name) > _NAME_LENGTH or not set(name) <= set(_NAME_CHARACTERS):
        return name
    body, at = name[:-1], _NAME_CHARACTERS.index(name[-1])
    if not body and at <= 2:
        return None
    return body + _NAME_CHARACTERS[at - 1] + _NAME_CHARACTERS[-1] * (_NAME_LENGTH - len(name)) if at else body


def _list_items(message: Any) -> dict[str, Any]:
    """Querator's page begins with its pivot, this API's page after it."""
    place, dot, offset = message.pivot.rpartition(".")
    pivot: str | None = message.pivot or None
    if dot and offset.isascii() and offset.isdigit() and len(offset) < 19:
        pivot = f"{place}.{int(offset) - 1}" if int(offset) else None
    return {**_on_queue(message, "partition"), "pivot": pivot, "limit": message.limit or _PAGE}


def _import(message: Any) -> dict[str, Any]:
    _check_count(message.items)
    items = [
        _given(item, "payload", "kind", "encoding", "reference", "key", "unique_key")
        | _priority(item)
        | _time(item, "enqueue_at", f"items[{at}].")
        for at, item in enumerate(message.items)
    ]
    return {**_on_queue(message, "partition"), "items": items}


# ---- answering ------------------------------------------------------------------------------------------------


def _done(message: Any, answer: bytes) -> Message:
    said: Message = _reply(OK)
    return said


class _Leased(msgspec.Struct, gc=False):
    queue_name: str
    partition: int | None
    items: list[LeasedItem]


_decode_leased = msgspec.json.Decoder(_Leased).decode
_decode_info = msgspec.json.Decoder(QueueInfo).decode
_decode_queues = msgspec.json.Decoder(QueuePage).decode
_decode_counts = msgspec.json.Decoder(QueueStats).decode
_decode_items = msgspec.json.Decoder(json_inspection.ListedItems).decode
_decode_imported = msgspec.json.Decoder(json_inspection.Imported).decode
_decode_deleted = msgspec.json.Decoder(Deleted).decode


def _leased(message: Any, answer: bytes) -> Message:
    """In Querator an empty lease is an error, so clients take the first item of any other answer without a check."""
    leased = _decode_leased(answer)
    said: Message
    if not leased.items:
        said = _reply(RETRY, _NOTHING_TO_LEASE, {"code": "nothing_to_lease"})
        return said
    said = message_class("LeaseAnswer")(queue_name=leased.queue_name, partition=leased.partition)
    _add_items(said, leased.items)
    return said


def _add_items(said: Any, items: Sequence[LeasedItem]) -> None:
    add, times = said.items.add, _Times()
    alike: dict[tuple[int, datetime | None], Any] = {}
    for item in items:
        each = add()
        like = alike.get((item.attempts, item.lease_deadline))
        if like is None:
            # Copying the shared values of items takes a third of the time of setting them on each.
            like = message_class("LeasedItem")(attempts=min(item.attempts, _INT32), lease_deadline=times.of(item.lease_deadline))
            alike[item.attempts, item.lease_deadline] = like
        each.CopyFrom(like)
        each.id, each.bytes = item.id, item.payload
        if item.kind:
            each.kind = item.kind
        if item.encoding:
            each.encoding = item.encoding
        if item.reference:
            each.reference = item.reference
        if item.key:
            each.key = item.key
        if item.priority is not None:
            each.priority = item.priority
        if item.unique_key:
            each.unique_key = item.unique_key


class _Times:
    """A cache of times converted to Timestamps, because many items of an answer share one."""

    def __init__(self) -> None:
        self._known: dict[str | datetime | None, dict[str, int] | None] = {None: None}

    def of(self, time: str | datetime | None) -> dict[str, int] | None:
        if time not in self._known:
            assert time is not None
            seconds, millis = divmod(as_millis(time) if isinstance(time, datetime) else parse_time(time, ""), 1_000)
            self._known[time] = {"seconds": seconds, "nanos": millis * 1_000_000}
        return self._known[time]


def _go_duration(text: str) -> str:
    """`1d`, `90s`, `1500ms`, `5ms` → `24h0m0s`, `1m30s`, `1.5s`, `5ms`: the form of Go's `Duration.String`."""
    millis = parse_duration(text, "")
    if millis < 1_000:
        return format_duration(millis)
    minutes, left = divmod(millis, 60_000)
    seconds = f"{left / 1_000:g}s"
    if not minutes:
        return seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"


def _queue_info(queue: QueueInfo) -> dict[str, Any]:
    times = _Times()
    return {
        "queue_name": queue.queue_name,
        "created_at": times.of(queue.created_at),
        "updated_at": times.of(queue.updated_at),
        "dead_queue": queue.dead_queue,
        "reference": queue.reference,
        "lease_timeout": _go_duration(queue.lease_timeout),
        "expire_timeout": _go_duration(queue.expire_timeout),
        "max_attempts": queue.max_attempts,
        "requested_partitions": queue.requested_partitions,
        "partitions": [{"partition": each.partition} for each in queue.partitions],
    }


def _info(message: Any, answer: bytes) -> Message:
    said: Message = message_class("QueueInfo")(**_queue_info(_decode_info(answer)))
    return said


def _queues(message: Any, answer: bytes) -> Message:
    said: Message = message_class("QueuesAnswer")(items=[_queue_info(queue) for queue in _decode_queues(answer).items])
    return said


def _stats(message: Any, answer: bytes) -> Message:
    """Counts are capped at the field's maximum. `total` excludes scheduled items. Average ages stay empty: they are not recorded."""
    counts = _decode_counts(answer)
    queues = [
        {
            **_counted(queue, "produce_waiting", "lease_waiting", "complete_waiting", "in_flight"),
            "partitions": [
                {
                    **_counted(each, "partition", "total_leased", "failures", "scheduled"),
                    "total": min(each.total - each.scheduled, _INT32),
                }
                for each in queue.partitions
            ],
        }
        for queue in counts.logical_queues
    ]
    said: Message = message_class("StatsAnswer")(queue_name=counts.queue_name, logical_queues=queues)
    return said


def _counted(counts: Any, *names: str) -> dict[str, int]:
    return {name: min(getattr(counts, name), _INT32) for name in names}


def _listed(message: Any, answer: bytes) -> Message:
    said: Message = message_class("ItemsAnswer")(items=list(_stored(_decode_items(answer).items)))
    return said


def _stored(items: Sequence[json_inspection.ListedItem]) -> Iterator[dict[str, Any]]:
    times = _Times()
    for item in items:
        # In Querator only an item that came from another queue has a source.
        moved = item.origin.rpartition(".")[0] != item.id.rpartition(".")[0]
        yield {
            "id": item.id,
            "source_id": item.origin if moved else None,
            "is_leased": item.is_leased,
            "lease_deadline": times.of(item.lease_deadline) or _ZERO_TIME,
            "expire_deadline": times.of(item.expire_deadline) or _ZERO_TIME,
            "created_at": times.of(item.created_at),
            "enqueue_at": times.of(item.enqueue_at),
            "attempts": min(item.attempts, _INT32),
            "max_attempts": item.max_attempts,
            "reference": item.reference,
            "key": item.key,
            "priority": item.priority,
            "unique_key": item.unique_key,
            "encoding": item.encoding,
            "kind": item.kind,
            "payload": item.payload,
        }


def _imported(message: Any, answer: bytes) -> Message:
    """The stored items under their new ids. An item that is no longer stored is answered from the request."""
    imported = _decode_imported(answer)
    stored = {item["id"]: item for item in _stored(imported.items)}
    said: Any = message_class("ImportAnswer")()
    for item_id, item in zip(imported.ids, message.items, strict=True):
        texts = ("reference", "key", "unique_key", "encoding", "kind", "payload")
        kept = {name: getattr(item, name) for name in texts} | _priority(item)
        said.items.add(**stored.get(item_id, {"id": item_id, **kept}))
    answered: Message = said
    return answered


def _deleted(message: Any, answer: bytes) -> Message:
    """Querator also deletes leased items. Sluiceway keeps them, so it answers with an error. Ids of absent items are ignored."""
    deleted = _decode_deleted(answer)
    leased = [left.id for left in deleted.ignored if left.reason == "leased"]
    if not leased:
        return _done(message, answer)
    said: Message = _reply(
        REFUSED, f"{len(leased)} items are leased and stay, the first is {leased[0]}; {deleted.deleted} were deleted", {"code": "leased"}
    )
    return said


CALLS: Final[dict[str, Form]] = {
    "/v1/queue.produce": Form("ProduceRequest", _produce, _done),
    "/v1/queue.lease": Form("LeaseRequest", lambda m: _on_queue(m, "client_id", "batch_size", "request_timeout", "runs"), _leased),
    "/v1/queue.complete": Form("CompleteRequest", lambda m: {**_on_queue(m, "partition", "request_timeout"), "ids": [*m.ids]}, _done),
    "/v1/queue.retry": Form("RetryRequest", _retry, _done),
    "/v1/queue.clear": Form("ClearRequest", _clear, _done),
    "/v1/queue.stats": Form("QueueRequest", _on_queue, _stats),
    "/v1/queue.reload": Form("QueueRequest", _on_queue, _done),
    "/v1/queues.create": Form("QueueInfo", _create, _done),
    "/v1/queues.update": Form("QueueInfo", _update, _done),
    "/v1/queues.info": Form("QueueRequest", _on_queue, _info),
    "/v1/queues.list": Form("QueuesRequest", _list_queues, _queues),
    "/v1/queues.delete": Form("DeleteRequest", lambda m: _on_queue(m, "force"), _done),
    "/v1/storage/items.list": Form("ItemsRequest", _list_items, _listed),
    "/v1/storage/scheduled.list": Form("ItemsRequest", _list_items, _listed),
    "/v1/storage/items.import": Form("ImportRequest", _import, _imported),
    "/v1/storage/items.delete": Form("DeleteItemsRequest", lambda m: {**_on_queue(m, "partition"), "ids": [*m.ids]}, _deleted),
}
