"""Encoders of the calls on items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

from sluiceway.client import answers
from sluiceway.client.payloads import encoded
from sluiceway.client.protocol import (
    ARROW,
    DEFAULT_REQUEST_TIMEOUT,
    About,
    Call,
    Duration,
    call,
    decoder,
    duration_text,
    given,
    listed,
    millis,
    time_text,
)
from sluiceway.kernel.limits import GENERATED_KEY

State = Literal["ready", "leased", "scheduled"]


@dataclass(frozen=True, slots=True)
class Item:
    """One item to produce. It is not served before `enqueue_at` (with a time zone).

    `key` names what the item belongs to, such as a customer, in 1 to 256 bytes. It is not an idempotency key.
    `priority` is from 0, the lowest, to 9. An item without one counts as of 4. It matters in a queue with the setting `priority`.
    In a queue with `unique`, an item is not stored while there is one with its `unique_key` and `key`. `Produced.duplicates` says so.

    A payload of text is sent as UTF-8. One that is neither bytes nor text is sent as JSON, with the `encoding` `application/json`: a dict,
    a list, a dataclass, a msgspec struct, a Pydantic model, and whatever else msgspec can encode.
    """

    payload: Any
    kind: str | None = None
    encoding: str | None = None
    reference: str | None = None
    headers: Mapping[str, str] | None = None
    enqueue_at: datetime | None = None
    key: str | None = None
    priority: int | None = None
    unique_key: str | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """An item to put back at `retry_at` or after `retry_after` (`0s`: at once), or to send to the dead queue (`dead`) with a `reason`.

    With none of these it waits as the queue's `retry_backoff` says. `trace` (of an exception, 4,096 bytes), `host` and `handler_time` (how
    long the handler ran) are kept with the `reason`, to show why the item failed.
    """

    id: str
    retry_at: datetime | None = None
    retry_after: Duration | None = None
    dead: bool = False
    reason: str | None = None
    trace: str | None = None
    host: str | None = None
    handler_time: Duration | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a leased item. It takes effect when the lease is completed."""

    id: str
    outcome: Literal["done", "retry", "dead"]
    retry_after: Duration | None = None
    reason: str | None = None


class Outcomes(NamedTuple):
    """Outcomes as an Arrow stream, with the incarnation of their items (None: the queue's present one), and their partitions."""

    incarnation: str | None
    partitions: Sequence[int]
    stream: bytes


def wire_item(item: object) -> dict[str, object]:
    """The fields of an `Item`, or of one that has only this payload. Raises `invalid_request`."""
    if not isinstance(item, Item):
        item = Item(item)
    payload, encoding = encoded(item.payload, item.encoding, "items")
    fields: dict[str, object] = {"utf8": payload} if isinstance(payload, str) else {"bytes": payload}
    texts = (item.kind, encoding, item.reference, item.key, item.unique_key)
    if item.headers or item.enqueue_at or item.priority is not None or any(text is not None for text in texts):
        fields |= given(
            kind=item.kind,
            encoding=encoding,
            reference=item.reference,
            key=item.key,
            priority=item.priority,
            unique_key=item.unique_key,
            headers=dict(item.headers) if item.headers else None,
            enqueue_at=time_text(item.enqueue_at, "enqueue_at"),
        )
    return fields


class Key(NamedTuple):
    """The idempotency key of a produce, with the API's fields."""

    key: str | None = None
    group: str | None = None
    sequence: int | None = None
    window: Duration | None = None

    @property
    def is_generated(self) -> bool:
        """Whether the client generated the key for one call, which may replace it."""
        return self.group is None and self.key is not None and self.key.startswith(GENERATED_KEY)

    def fields(self) -> dict[str, object]:
        return given(
            idempotency_key=self.key,
            idempotency_group=self.group,
            idempotency_sequence=self.sequence,
            idempotency_window=duration_text(self.window),
        )


def produce(
    queue_name: str,
    items: Iterable[object],
    request_timeout: Duration | None,
    key: Key,
    bundle: str | None = None,
) -> Call[answers.Produced]:
    those = listed(items, "items")
    fields = {"queue_name": queue_name, "items": [wire_item(item) for item in those], **key.fields(), **given(bundle=bundle)}
    made = call("/v1/queue.produce", answers.Produced, fields, repeatable=key.key is not None, request_timeout=request_timeout)
    if key.is_generated:
        return replace(made, rekey=lambda other: produce(queue_name, those, request_timeout, key._replace(key=other), bundle))
    return made


def produce_stream(
    queue_name: str,
    stream: bytes,
    request_timeout: Duration | None,
    key: Key,
    bundle: str | None = None,
) -> Call[answers.Produced]:
    """A produce whose rows are already an Arrow stream."""
    wait = DEFAULT_REQUEST_TIMEOUT if request_timeout is None else millis(request_timeout, "request_timeout")
    query = given(queue_name=queue_name, request_timeout=duration_text(request_timeout), bundle=bundle) | key.fields()
    path = f"/v1/queue.produce?{urlencode(query)}"
    made = Call(path, stream, decoder(answers.Produced).decode, key.key is not None, wait, ARROW)
    if key.is_generated:
        return replace(made, rekey=lambda other: produce_stream(queue_name, stream, request_timeout, key._replace(key=other), bundle))
    return made


def lease(
    queue_name: str,
    client_id: str,
    batch_size: int,
    request_timeout: Duration,
    lease_timeout: Duration | None,
    max_partitions: int | None,
    lease_key: str | None,
    partition: int | None = None,
    after_lease: str | None = None,
    complete_ids: Iterable[str] = (),
    complete_lease_ids: Iterable[str] = (),
    *,
    runs: bool = False,
    payload: bool = True,
) -> Call[answers.Leased]:
    ids, lease_ids = listed(complete_ids, "complete_ids"), listed(complete_lease_ids, "complete_lease_ids")
    fields = given(
        queue_name=queue_name,
        client_id=client_id,
        batch_size=batch_size,
        lease_timeout=duration_text(lease_timeout),
        max_partitions=max_partitions,
        lease_key=lease_key,
        partition=partition,
        after_lease=after_lease,
        runs=runs or None,
        payload=None if payload else False,
        complete=given(ids=ids or None, lease_ids=lease_ids or None) or None,
    )
    # Without a key, a repeat would lease other items, and the first ones would stay leased until their lease runs out.
    about = About(queue_name, takes=True) if partition is None else About(queue_name, numbers=[partition])
    return call("/v1/queue.lease", answers.Leased, fields, repeatable=lease_key is not None, request_timeout=request_timeout, about=about)


class Check(NamedTuple):
    """Optional checks of a call on leased items: the client that must own the leases, and whether an ignored id is an error."""

    client_id: str | None = None
    strict: bool = False

    def fields(self) -> dict[str, object]:
        return given(client_id=self.client_id, strict=self.strict or None)


def _chosen(queue_name: str, ids: Iterable[str], lease_ids: Iterable[str], check: Check) -> tuple[dict[str, object], About]:
    items, leases = listed(ids, "ids"), listed(lease_ids, "lease_ids")
    fields = given(queue_name=queue_name, ids=items or None, lease_ids=leases or None)
    return fields | check.fields(), About(queue_name, items + leases)


# Complete, retry, release: repeatable, because an id is good for one life of the item. A second call finds it settled.


def complete(
    queue_name: str,
    ids: Iterable[str],
    lease_ids: Iterable[str],
    request_timeout: Duration | None,
    check: Check,
    handler_times: Sequence[tuple[int, int]] = (),
) -> Call[answers.Completed]:
    """`handler_times`: pairs of milliseconds and number of items."""
    fields, about = _chosen(queue_name, ids, lease_ids, check)
    if handler_times:
        fields["handler_times"] = [{"handler_time": f"{millis}ms", "items": items} for millis, items in handler_times]
    return call("/v1/queue.complete", answers.Completed, fields, request_timeout=request_timeout, about=about)


def release(
    queue_name: str, ids: Iterable[str], lease_ids: Iterable[str], request_timeout: Duration | None, check: Check
) -> Call[answers.Released]:
    fields, about = _chosen(queue_name, ids, lease_ids, check)
    return call("/v1/queue.release", answers.Released, fields, request_timeout=request_timeout, about=about)


def delete_items(queue_name: str, ids: Iterable[str], request_timeout: Duration | None) -> Call[answers.Deleted]:
    # Repeatable: ids of removed items are ignored.
    fields = {"queue_name": queue_name, "ids": listed(ids, "ids")}
    return call("/v1/storage/items.delete", answers.Deleted, fields, request_timeout=request_timeout)


def run_now(queue_name: str, ids: Iterable[str], request_timeout: Duration | None) -> Call[answers.MadeReady]:
    # Repeatable: an item that was made ready has another id.
    fields = {"queue_name": queue_name, "ids": listed(ids, "ids")}
    return call("/v1/storage/items.run_now", answers.MadeReady, fields, request_timeout=request_timeout)


def move_items(queue_name: str, ids: Iterable[str], target: str | None, request_timeout: Duration | None) -> Call[answers.MovedItems]:
    # Repeatable: items that were moved are ignored.
    fields = given(queue_name=queue_name, ids=listed(ids, "ids"), target=target)
    return call("/v1/storage/items.move", answers.MovedItems, fields, request_timeout=request_timeout)


def _wire_retry(item: Retry | str) -> dict[str, object]:
    if isinstance(item, str):
        return {"id": item}
    return given(
        id=item.id,
        retry_at=time_text(item.retry_at, "retry_at"),
        retry_after=duration_text(item.retry_after),
        dead=item.dead or None,
        reason=item.reason,
        trace=item.trace,
        host=item.host,
        handler_time=duration_text(item.handler_time),
    )


def retry(queue_name: str, items: Iterable[Retry | str], request_timeout: Duration | None, check: Check) -> Call[answers.Retried]:
    wanted = listed(items, "items")
    fields = {"queue_name": queue_name, "items": [_wire_retry(item) for item in wanted], **check.fields()}
    about = About(queue_name, [item if isinstance(item, str) else item.id for item in wanted])
    return call("/v1/queue.retry", answers.Retried, fields, request_timeout=request_timeout, about=about)


def extend(
    queue_name: str,
    lease_ids: Iterable[str],
    ids: Iterable[str],
    lease_timeout: Duration | None,
    request_timeout: Duration | None,
    check: Check,
) -> Call[answers.Extended]:
    fields, about = _chosen(queue_name, ids, lease_ids, check)
    fields |= given(lease_timeout=duration_text(lease_timeout))
    return call("/v1/queue.extend", answers.Extended, fields, request_timeout=request_timeout, about=about)


def settle(queue_name: str, verdicts: Iterable[Verdict], request_timeout: Duration | None) -> Call[answers.Staged]:
    wanted = list(verdicts)
    items = [
        given(id=verdict.id, outcome=verdict.outcome, retry_after=duration_text(verdict.retry_after), reason=verdict.reason)
        for verdict in wanted
    ]
    fields, about = {"queue_name": queue_name, "items": items}, About(queue_name, [verdict.id for verdict in wanted])
    return call("/v1/queue.settle", answers.Staged, fields, request_timeout=request_timeout, about=about)


def settle_stream(queue_name: str, incarnation: str, outcomes: Outcomes, request_timeout: Duration | None) -> Call[answers.Staged]:
    """A settle whose rows are already an Arrow stream."""
    wait = DEFAULT_REQUEST_TIMEOUT if request_timeout is None else millis(request_timeout, "request_timeout")
    query = given(queue_name=queue_name, incarnation=incarnation, request_timeout=duration_text(request_timeout))
    about = About(queue_name, numbers=outcomes.partitions)
    return Call(f"/v1/queue.settle?{urlencode(query)}", outcomes.stream, decoder(answers.Staged).decode, True, wait, ARROW, about=about)


def peek(queue_name: str, limit: int, partition: int | None, lease_id: str | None, start: int | None) -> Call[answers.Peeked]:
    fields = given(queue_name=queue_name, limit=limit, partition=partition, lease_id=lease_id, start=start)
    ids, numbers = [] if lease_id is None else [lease_id], [] if partition is None else [partition]
    about = About(queue_name, ids, numbers) if ids or numbers else None
    return call("/v1/queue.peek", answers.Peeked, fields, about=about)


def browse(
    queue_name: str, partition: int, states: Iterable[State] | None, cursor: str | None, limit: int | None, payload: bool
) -> Call[answers.Browsed]:
    wanted = None if states is None else listed(states, "states")
    fields = given(queue_name=queue_name, partition=partition, states=wanted, cursor=cursor, limit=limit)
    about = About(queue_name, numbers=[partition])
    return call("/v1/queue.browse", answers.Browsed, fields | ({} if payload else {"payload": False}), about=about)


def search(
    queue_name: str,
    item_filter: Mapping[str, object],
    states: Iterable[State] | None,
    following: str | None,
    limit: int | None,
    payload: bool,
    request_timeout: Duration | None,
) -> Call[answers.Searched]:
    wanted = None if states is None else listed(states, "states")
    fields = given(queue_name=queue_name, **item_filter, states=wanted, next=following, limit=limit)
    return call("/v1/queue.search", answers.Searched, fields | ({} if payload else {"payload": False}), request_timeout=request_timeout)


def reasons(queue_name: str) -> Call[answers.Reasons]:
    return call("/v1/queue.reasons", answers.Reasons, {"queue_name": queue_name})


def explain(queue_name: str, item_id: str) -> Call[answers.Explanation]:
    return call("/v1/queue.explain", answers.Explanation, {"queue_name": queue_name, "id": item_id}, about=About(queue_name, [item_id]))


def explain_partition(queue_name: str, partition: int) -> Call[answers.PartitionExplanation]:
    return call("/v1/queue.explain", answers.PartitionExplanation, {"queue_name": queue_name, "partition": partition})
