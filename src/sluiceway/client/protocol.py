"""The calls of the HTTP API without any I/O: how each is written, how its answer is read, and when it may be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Generic, Literal, NamedTuple, TypeVar, cast
from urllib.parse import urlencode

import msgspec

from sluiceway.client import answers
from sluiceway.client.errors import CallError
from sluiceway.kernel.clock import Millis, format_duration, parse_duration
from sluiceway.kernel.errors import KINDS, ErrorKind, invalid

T = TypeVar("T")
S = TypeVar("S")
Duration = str | timedelta
"""`500ms`, `30s`, `1h30m`, or a timedelta."""

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
DEFAULT_REQUEST_TIMEOUT: Millis = 30_000
"""What the server waits when a request does not say; the client's own patience follows it."""

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0


@dataclass(frozen=True, slots=True)
class Item:
    """One item to produce. A payload of text is sent as UTF-8. It is not served before `enqueue_at` (with a time zone)."""

    payload: bytes | str
    kind: str | None = None
    encoding: str | None = None
    reference: str | None = None
    headers: Mapping[str, str] | None = None
    enqueue_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """An item to put back: at once, at `retry_at`, after `retry_after`, or (`dead`) into the dead queue with a `reason`."""

    id: str
    retry_at: datetime | None = None
    retry_after: Duration | None = None
    dead: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The stated outcome of a leased item, which takes effect when its lease is closed."""

    id: str
    outcome: Literal["done", "retry", "dead"]
    retry_after: Duration | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how to read its answer.

    `repeatable` promises that sending it twice has the effect of sending it once. `request_timeout` is how long the server may take.
    """

    path: str
    body: bytes
    read: Callable[[bytes], T]
    repeatable: bool
    request_timeout: Millis = DEFAULT_REQUEST_TIMEOUT
    content_type: str = JSON
    accept: str = JSON

    def as_arrow(self, read: Callable[[bytes], S]) -> Call[S]:
        """The same request, answered as an Arrow stream."""
        return Call(self.path, self.body, read, self.repeatable, self.request_timeout, self.content_type, ARROW)


class Repeats:
    """Decides whether a failed attempt of one call is followed by another, and after which pause.

    A refusal that may pass (nothing was done) is repeated for every call, an unknown outcome for repeatable calls only.
    """

    def __init__(self, call: Call[T], retry_for: float, started: float) -> None:
        self._repeatable = call.repeatable
        self._give_up_at = started + retry_for
        self._failures = 0
        self._in_doubt = False

    def pause(self, error: CallError, now: float, roll: float) -> float:
        """Seconds until the next attempt, growing and jittered by `roll` (0 to 1). Raises the error that ends the call."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**self._failures) * (0.5 + roll / 2)
        self._failures += 1
        may_repeat = error.retryable and (self._repeatable or not error.outcome_unknown)
        if not may_repeat or now + pause >= self._give_up_at:
            raise self._verdict(error) from error.__cause__
        self._in_doubt = self._in_doubt or error.outcome_unknown
        return pause

    def _verdict(self, error: CallError) -> CallError:
        # A last attempt that surely did nothing says nothing about an earlier one that may have been carried out.
        if not self._in_doubt or error.outcome_unknown:
            return error
        detail = f"{error.detail}; an earlier attempt of this call may have taken effect"
        if error.retryable:
            return CallError("outcome_unknown", detail, None, error.request_id)
        return CallError(error.code, detail, error.field, error.request_id, error.kind)


class _Problem(msgspec.Struct):
    code: str
    title: str = ""
    detail: str = ""
    retryable: bool = False
    field: str | None = None
    request_id: str | None = None


def read_problem(status: int, body: bytes) -> CallError:
    """The error that an answer of that status stands for; an answer that is not a problem document came from something in between."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if status in (502, 503, 504):
            return CallError(
                "outcome_unknown", f"the answer is HTTP {status} and not from a Sluiceway server: something in between gave up"
            )
        return CallError("not_found", f"the answer is HTTP {status} and not from a Sluiceway server: is the URL right?")
    kind = ErrorKind(status, problem.retryable, problem.title)
    return CallError(problem.code, problem.detail or problem.title, problem.field, problem.request_id, kind)


def unreadable(reason: Exception) -> CallError:
    """A success that cannot be read: what was asked for may be done, but not by a server that this client knows."""
    kind = ErrorKind(200, False, KINDS["outcome_unknown"].title)
    return CallError("outcome_unknown", f"the answer cannot be read ({reason}): is the URL that of a Sluiceway server?", kind=kind)


# -- how fields are written -------------------------------------------------------------------------------------------


def millis(duration: Duration, field: str) -> Millis:
    if isinstance(duration, timedelta):
        return round(duration.total_seconds() * 1000)
    return parse_duration(duration, field)


def _duration(duration: Duration | None) -> str | None:
    return format_duration(millis(duration, "duration")) if isinstance(duration, timedelta) else duration


def _time(at: datetime | None, field: str) -> str | None:
    if at is None:
        return None
    if at.tzinfo is None:
        raise invalid(field, "the time has no time zone; use datetime.now(UTC) or .astimezone()")
    return at.isoformat()


def _set(**fields: object) -> dict[str, object]:
    """The fields that were given: an absent field leaves the default to the server."""
    return {name: value for name, value in fields.items() if value is not None}


def _list(values: Iterable[T], field: str) -> list[T]:
    if isinstance(values, str | bytes):
        raise invalid(field, "expected a list, not one text")
    return list(values)


def _call(
    path: str,
    answer: type[T],
    fields: Mapping[str, object],
    *,
    repeatable: bool = True,
    request_timeout: Duration | None = None,
) -> Call[T]:
    body = dict(fields)
    wait = DEFAULT_REQUEST_TIMEOUT
    if request_timeout is not None:
        wait = millis(request_timeout, "request_timeout")
        body["request_timeout"] = _duration(request_timeout)
    decoder = _decoder(answer)
    return Call(path, msgspec.json.encode(body), decoder.decode, repeatable, wait)


_decoders: dict[type, object] = {}


def _decoder(answer: type[T]) -> msgspec.json.Decoder[T]:
    if answer not in _decoders:
        _decoders[answer] = msgspec.json.Decoder(answer)
    return cast("msgspec.json.Decoder[T]", _decoders[answer])


# -- queues -----------------------------------------------------------------------------------------------------------


def create_queue(
    queue_name: str,
    requested_partitions: int | None,
    lease_timeout: Duration | None,
    max_attempts: int | None,
    dead_queue: str | None,
    reference: str | None,
) -> Call[answers.QueueInfo]:
    fields = _set(
        queue_name=queue_name,
        requested_partitions=requested_partitions,
        lease_timeout=_duration(lease_timeout),
        max_attempts=max_attempts,
        dead_queue=dead_queue,
        reference=reference,
    )
    # Repeated after it took effect, it would find its own queue and call that a conflict.
    return _call("/v1/queues.create", answers.QueueInfo, fields, repeatable=False)


def list_queues(pivot: str | None, limit: int | None) -> Call[answers.QueuePage]:
    return _call("/v1/queues.list", answers.QueuePage, _set(pivot=pivot, limit=limit))


def queue_info(queue_name: str) -> Call[answers.QueueInfo]:
    return _call("/v1/queues.info", answers.QueueInfo, {"queue_name": queue_name})


def delete_queue(queue_name: str, force: bool) -> Call[dict[str, object]]:
    # Repeated after it took effect, it could delete a newer queue of the same name.
    return _call("/v1/queues.delete", dict[str, object], {"queue_name": queue_name, "force": force}, repeatable=False)


# -- items ------------------------------------------------------------------------------------------------------------


def _wire_item(item: Item | bytes | str) -> dict[str, object]:
    if isinstance(item, str):
        return {"utf8": item}
    if isinstance(item, bytes):
        return {"bytes": item}
    fields = _wire_item(item.payload)
    if item.kind is not None or item.encoding is not None or item.reference is not None or item.headers or item.enqueue_at:
        fields |= _set(
            kind=item.kind,
            encoding=item.encoding,
            reference=item.reference,
            headers=dict(item.headers) if item.headers else None,
            enqueue_at=_time(item.enqueue_at, "enqueue_at"),
        )
    return fields


class Key(NamedTuple):
    """What makes a produce repeatable, as the API names it."""

    key: str | None = None
    group: str | None = None
    sequence: int | None = None
    window: Duration | None = None

    def fields(self) -> dict[str, object]:
        return _set(
            idempotency_key=self.key,
            idempotency_group=self.group,
            idempotency_sequence=self.sequence,
            idempotency_window=_duration(self.window),
        )


def produce(
    queue_name: str,
    items: Iterable[Item | bytes | str],
    request_timeout: Duration | None,
    key: Key,
) -> Call[answers.Produced]:
    fields = {"queue_name": queue_name, "items": [_wire_item(item) for item in _list(items, "items")], **key.fields()}
    return _call("/v1/queue.produce", answers.Produced, fields, repeatable=key.key is not None, request_timeout=request_timeout)


def produce_stream(
    queue_name: str,
    stream: bytes,
    request_timeout: Duration | None,
    key: Key,
) -> Call[answers.Produced]:
    """A produce whose rows are an Arrow stream already."""
    wait = DEFAULT_REQUEST_TIMEOUT if request_timeout is None else millis(request_timeout, "request_timeout")
    query = _set(queue_name=queue_name, request_timeout=_duration(request_timeout)) | key.fields()
    path = f"/v1/queue.produce?{urlencode(query)}"
    return Call(path, stream, _decoder(answers.Produced).decode, key.key is not None, wait, ARROW)


def lease(
    queue_name: str,
    client_id: str,
    batch_size: int,
    request_timeout: Duration,
    lease_timeout: Duration | None,
    max_partitions: int | None,
    lease_key: str | None,
) -> Call[answers.Leased]:
    fields = _set(
        queue_name=queue_name,
        client_id=client_id,
        batch_size=batch_size,
        lease_timeout=_duration(lease_timeout),
        max_partitions=max_partitions,
        lease_key=lease_key,
    )
    # Without a key a repetition would take other items and leave the first ones to wait for their lease to expire.
    return _call("/v1/queue.lease", answers.Leased, fields, repeatable=lease_key is not None, request_timeout=request_timeout)


def complete(queue_name: str, ids: Iterable[str], lease_ids: Iterable[str], request_timeout: Duration | None) -> Call[answers.Completed]:
    fields = _set(queue_name=queue_name, ids=_list(ids, "ids") or None, lease_ids=_list(lease_ids, "lease_ids") or None)
    return _call("/v1/queue.complete", answers.Completed, fields, request_timeout=request_timeout)


def _wire_retry(item: Retry | str) -> dict[str, object]:
    if isinstance(item, str):
        return {"id": item}
    return _set(
        id=item.id,
        retry_at=_time(item.retry_at, "retry_at"),
        retry_after=_duration(item.retry_after),
        dead=item.dead or None,
        reason=item.reason,
    )


def retry(queue_name: str, items: Iterable[Retry | str], request_timeout: Duration | None) -> Call[answers.Retried]:
    # Repeatable, because an id is good for one life of the item: the second call finds it settled.
    fields = {"queue_name": queue_name, "items": [_wire_retry(item) for item in _list(items, "items")]}
    return _call("/v1/queue.retry", answers.Retried, fields, request_timeout=request_timeout)


def extend(
    queue_name: str, lease_ids: Iterable[str], lease_timeout: Duration | None, request_timeout: Duration | None
) -> Call[answers.Extended]:
    fields = _set(queue_name=queue_name, lease_ids=_list(lease_ids, "lease_ids"), lease_timeout=_duration(lease_timeout))
    return _call("/v1/queue.extend", answers.Extended, fields, request_timeout=request_timeout)


def settle(queue_name: str, verdicts: Iterable[Verdict], request_timeout: Duration | None) -> Call[answers.Staged]:
    items = [
        _set(id=verdict.id, outcome=verdict.outcome, retry_after=_duration(verdict.retry_after), reason=verdict.reason)
        for verdict in verdicts
    ]
    return _call("/v1/queue.settle", answers.Staged, {"queue_name": queue_name, "items": items}, request_timeout=request_timeout)


def peek(queue_name: str, limit: int, partition: int | None, lease_id: str | None, start: int | None) -> Call[answers.Peeked]:
    fields = _set(queue_name=queue_name, limit=limit, partition=partition, lease_id=lease_id, start=start)
    return _call("/v1/queue.peek", answers.Peeked, fields)


def stats(queue_name: str) -> Call[answers.QueueStats]:
    return _call("/v1/queue.stats", answers.QueueStats, {"queue_name": queue_name})
