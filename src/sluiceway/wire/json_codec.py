"""JSON requests into model requests: one decode a request, every limit enforced, every refusal naming its field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
from msgspec import Meta

from sluiceway.kernel.clock import Millis, format_duration, parse_duration, parse_time
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.ids import parse_lease_id
from sluiceway.kernel.limits import (
    KEY_WINDOW,
    MAX_ITEMS_ARROW,
    MAX_ITEMS_JSON,
    MAX_PARTITIONS,
    MAX_PAYLOAD_BYTES,
    MAX_SCHEDULE,
)
from sluiceway.kernel.names import check_queue_name, check_text
from sluiceway.model.items import ENQUEUE_AT, OPTIONAL, PAYLOAD
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import DONE, TRANSFER_GROUP, Extend, Fate, Lease, Peek, Produce, ProduceKey, QueueSpec, Settle
from sluiceway.wire.checks import check_batch, check_count
from sluiceway.wire.decoding import JsonDecoder, given_text, lease_timeout, request_timeout, retry_after
from sluiceway.wire.settling import complete_leases, group_items, group_leases, has_partition

_LAST = (1 << 63) - 1
_ATTEMPTS = 1_000_000_000
_OPTIONAL = {field.name: field for field in OPTIONAL}

_EASY_BYTES = 1 << 20
_MOST_OBJECTS = 1 + 2 * MAX_ITEMS_JSON
"""The request, and for each item itself and its headers."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""A JSON string, or what begins as one. It matches at every quote, so it never goes over the same bytes twice."""

Natural = Annotated[int, Meta(ge=0, le=_LAST)]
PartitionNumber = Annotated[int, Meta(ge=0, lt=1_000_000_000)]


class _Call(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    queue_name: str


class ProduceFields(_Call):
    """What a produce says beside its items: fields in JSON, the query string with Arrow."""

    request_timeout: str = "30s"
    idempotency_key: str | None = None
    idempotency_group: str | None = None
    idempotency_sequence: Natural | None = None
    idempotency_window: str | None = None

    def key(self) -> ProduceKey | None:
        key = given_text(self.idempotency_key, "idempotency_key")
        group = given_text(self.idempotency_group, "idempotency_group")
        if group is not None and group.startswith(TRANSFER_GROUP):
            raise invalid("idempotency_group", f"groups that begin with {TRANSFER_GROUP} are the server's own")
        if group is None and self.idempotency_sequence is not None:
            raise invalid("idempotency_sequence", "is only meant together with idempotency_group")
        if key is None:
            if group is not None:
                raise invalid("idempotency_key", "required together with idempotency_group")
            return None
        if group is not None and self.idempotency_window is not None:
            raise invalid("idempotency_window", "the keys of an idempotency_group have no window")
        window = KEY_WINDOW if self.idempotency_window is None else parse_duration(self.idempotency_window, "idempotency_window")
        if not 0 < window <= KEY_WINDOW:
            raise invalid("idempotency_window", f"expected more than 0s and at most {format_duration(KEY_WINDOW)}")
        return ProduceKey(key, group, self.idempotency_sequence or 0, window)


class Item(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)] | None = msgspec.field(default=None, name="bytes")
    utf8: str | None = None
    kind: str | None = None
    encoding: str | None = None
    reference: str | None = None
    headers: dict[str, str] | None = None
    enqueue_at: str | None = None


class ProduceCall(ProduceFields, kw_only=True):
    items: list[Item]

    def request(self, now: Millis) -> Produce:
        check_queue_name(self.queue_name)
        check_count(self.items, "items", MAX_ITEMS_JSON)
        batch = batch_of(self.items)
        check_batch(batch, now)
        return Produce(batch, request_timeout(self.request_timeout), self.key())


def batch_of(items: Sequence[Item]) -> pa.RecordBatch:
    """The items as one batch of `payload` and those columns in which any item has a value."""
    fields = [PAYLOAD]
    columns = [pa.array([_payload(item, at) for at, item in enumerate(items)], PAYLOAD.type)]
    for name in ("kind", "encoding", "reference"):
        texts: list[str | None] = [getattr(item, name) for item in items]
        if _any_given(texts):
            fields.append(_OPTIONAL[name])
            columns.append(pa.array(texts, _OPTIONAL[name].type))
    headers = [item.headers for item in items]
    if _any_given(headers):
        fields.append(_OPTIONAL["headers"])
        columns.append(pa.array([None if pairs is None else list(pairs.items()) for pairs in headers], _OPTIONAL["headers"].type))
    times = [item.enqueue_at for item in items]
    if _any_given(times):
        fields.append(ENQUEUE_AT)
        moments = [None if text is None else parse_time(text, f"items[{at}].enqueue_at") for at, text in enumerate(times)]
        columns.append(pa.array(moments, ENQUEUE_AT.type))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _any_given(values: list[Any]) -> bool:
    return values.count(None) < len(values)


def _payload(item: Item, at: int) -> bytes:
    if item.payload is not None:
        if item.utf8 is not None:
            raise invalid(f"items[{at}].utf8", "an item has bytes or utf8, not both")
        return item.payload
    if item.utf8 is None:
        raise invalid(f"items[{at}].bytes", "an item needs bytes (base64) or utf8")
    payload = item.utf8.encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise invalid(f"items[{at}].utf8", f"larger than {MAX_PAYLOAD_BYTES} bytes")
    return payload


class LeaseCall(_Call):
    client_id: str
    batch_size: Annotated[int, Meta(ge=1, le=MAX_ITEMS_ARROW)] = 1
    request_timeout: str = "0s"
    lease_timeout: str | None = None
    max_partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = 1
    lease_key: str | None = None
    payload: bool = True

    def request(self) -> Lease:
        check_queue_name(self.queue_name)
        if not self.client_id:
            raise invalid("client_id", "must not be empty")
        return Lease(
            check_text(self.client_id, "client_id"),
            self.batch_size,
            request_timeout(self.request_timeout),
            None if self.lease_timeout is None else lease_timeout(self.lease_timeout),
            self.max_partitions,
            given_text(self.lease_key, "lease_key"),
        )


class CompleteCall(_Call):
    ids: list[str] | None = None
    lease_ids: list[str] | None = None
    request_timeout: str = "30s"
    partition: PartitionNumber | None = None

    def request(self, record: QueueRecord) -> Settle:
        if not self.ids and not self.lease_ids:
            raise invalid("ids", "at least one of ids and lease_ids must name something")
        ids, lease_ids = self.ids or [], self.lease_ids or []
        check_count(ids, "ids", MAX_ITEMS_JSON, least=0)
        check_count(lease_ids, "lease_ids", MAX_ITEMS_JSON, least=0)
        _check_partition(self.partition, record)
        grouped = group_items(ids, repeat(DONE), record, "ids[{}]".format, self.partition)
        leases, foreign = group_leases(lease_ids, record, self.partition)
        complete_leases(grouped, leases)
        return Settle(grouped.selections, request_timeout(self.request_timeout), foreign=grouped.foreign + foreign)


class RetryItem(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: str
    retry_at: str | None = None
    retry_after: str | None = None
    dead: bool = False
    reason: str | None = None

    def fate(self, at: int, now: Millis) -> Fate:
        path = f"items[{at}]"
        reason = "" if self.reason is None else check_text(self.reason, f"{path}.reason")
        if self.dead:
            if self.retry_at is not None or self.retry_after is not None:
                raise invalid(f"{path}.dead", "a dead item is not retried: leave out retry_at and retry_after")
            return Fate("dead", reason=reason)
        if self.retry_at is not None:
            if self.retry_after is not None:
                raise invalid(f"{path}.retry_after", "an item has retry_at or retry_after, not both")
            moment = parse_time(self.retry_at, f"{path}.retry_at")
            if moment > now + MAX_SCHEDULE:
                raise invalid(f"{path}.retry_at", f"more than {MAX_SCHEDULE // 86_400_000} days ahead")
            return Fate("retry", retry_at=moment, reason=reason)
        return Fate("retry", retry_after=_delay(self.retry_after, path), reason=reason)


class RetryCall(_Call):
    items: list[RetryItem]
    request_timeout: str = "30s"
    partition: PartitionNumber | None = None

    def request(self, record: QueueRecord, now: Millis) -> Settle:
        check_count(self.items, "items", MAX_ITEMS_JSON)
        _check_partition(self.partition, record)
        fates = [item.fate(at, now) for at, item in enumerate(self.items)]
        grouped = group_items([item.id for item in self.items], fates, record, "items[{}].id".format, self.partition)
        return Settle(grouped.selections, request_timeout(self.request_timeout), foreign=grouped.foreign)


class SettleItem(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: str
    outcome: Literal["done", "retry", "dead"]
    retry_after: str | None = None
    reason: str | None = None

    def fate(self, at: int) -> Fate:
        path = f"items[{at}]"
        if self.retry_after is not None and self.outcome != "retry":
            raise invalid(f"{path}.retry_after", "is only meant with the outcome retry")
        reason = "" if self.reason is None else check_text(self.reason, f"{path}.reason")
        return Fate(self.outcome, retry_after=_delay(self.retry_after, path), reason=reason)


class SettleFields(_Call):
    request_timeout: str = "30s"


class SettleCall(SettleFields, kw_only=True):
    items: list[SettleItem]

    def request(self, record: QueueRecord) -> Settle:
        check_count(self.items, "items", MAX_ITEMS_ARROW)
        fates = [item.fate(at) for at, item in enumerate(self.items)]
        grouped = group_items([item.id for item in self.items], fates, record, "items[{}].id".format)
        return Settle(grouped.selections, request_timeout(self.request_timeout), stage=True, foreign=grouped.foreign)


class SettleQuery(SettleFields, kw_only=True):
    """The query string of an Arrow settle."""

    incarnation: str


class ExtendCall(_Call):
    lease_ids: list[str]
    lease_timeout: str | None = None
    request_timeout: str = "30s"

    def request(self, record: QueueRecord) -> Extend:
        check_count(self.lease_ids, "lease_ids", MAX_ITEMS_JSON)
        leases, foreign = group_leases(self.lease_ids, record)
        until = None if self.lease_timeout is None else lease_timeout(self.lease_timeout)
        return Extend(leases, request_timeout(self.request_timeout), until, foreign)


class PeekCall(_Call):
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_ARROW)] = 10
    lease_id: str | None = None
    start: Natural | None = None
    partition: PartitionNumber | None = None

    def request(self, record: QueueRecord) -> Peek:
        """Raises `lease_not_found` for a lease of another incarnation of the queue."""
        if self.lease_id is None:
            if self.start is not None:
                raise invalid("start", "is only meant together with lease_id")
            _check_partition(self.partition, record)
            return Peek(self.limit, self.partition)
        if self.partition is not None:
            raise invalid("partition", "a lease names its partition: give lease_id or partition, not both")
        lease = parse_lease_id(self.lease_id, "lease_id")
        if lease.incarnation != record.incarnation or not has_partition(record, lease.partition):
            raise SluicewayError("lease_not_found", f"{self.lease_id} is no lease of this queue", "lease_id")
        return Peek(self.limit, lease.partition, lease.number, self.start or 0)


class CreateCall(_Call):
    requested_partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = 1
    lease_timeout: str = "1m"
    max_attempts: Annotated[int, Meta(ge=0, le=_ATTEMPTS)] = 0
    dead_queue: str | None = None
    reference: str = ""

    def spec(self) -> QueueSpec:
        return QueueSpec(
            check_queue_name(self.queue_name),
            self.requested_partitions,
            lease_timeout(self.lease_timeout),
            self.max_attempts,
            None if self.dead_queue is None else check_queue_name(self.dead_queue, "dead_queue"),
            check_text(self.reference, "reference"),
        )


class ListCall(msgspec.Struct, forbid_unknown_fields=True):
    pivot: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_JSON)] = 100


class QueueCall(_Call):
    """`queues.info` and `queue.stats`: the name alone."""


class DeleteCall(_Call):
    force: bool = False


def _delay(text: str | None, path: str) -> Millis | None:
    # "0s" means at once, as leaving the field out does; one form keeps such items in one selection.
    return None if text is None else retry_after(text, f"{path}.retry_after", MAX_SCHEDULE) or None


def _check_partition(partition: int | None, record: QueueRecord) -> None:
    if partition is not None and not has_partition(record, partition):
        raise invalid("partition", f"the queue {record.queue_name!r} has no partition {partition}")


_decode_produce = JsonDecoder(ProduceCall)


def decode_produce(body: bytes) -> ProduceCall:
    """Raises as a JsonDecoder does; `too_many_items` for a body of so many that decoding them would take the memory of the process."""
    if len(body) > _EASY_BYTES and body.count(b"{") > _MOST_OBJECTS and _STRING.sub(b"", body).count(b"{") > _MOST_OBJECTS:
        raise SluicewayError("too_many_items", f"items: more than {MAX_ITEMS_JSON:,}, which is what one call carries at most", "items")
    return _decode_produce(body)


decode_lease = JsonDecoder(LeaseCall)
decode_complete = JsonDecoder(CompleteCall)
decode_retry = JsonDecoder(RetryCall)
decode_settle = JsonDecoder(SettleCall)
decode_extend = JsonDecoder(ExtendCall)
decode_peek = JsonDecoder(PeekCall)
decode_create = JsonDecoder(CreateCall)
decode_list = JsonDecoder(ListCall)
decode_queue_call = JsonDecoder(QueueCall)
decode_delete = JsonDecoder(DeleteCall)
