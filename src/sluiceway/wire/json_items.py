"""JSON codec of produce, lease, peek and explain. A body is decoded once, every limit is enforced, and every error names its field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from msgspec import Meta

from sluiceway.contract.bundle_answers import BundleId
from sluiceway.contract.fields import (
    ONE_PAYLOAD,
    SOME_JSON,
    Duration,
    ItemIdText,
    ItemKey,
    Label,
    LeaseIdText,
    Priority,
    ShortText,
    TimeText,
)
from sluiceway.kernel.clock import Millis, check_duration, parse_time
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.ids import ItemId, parse_item_id, parse_lease_id
from sluiceway.kernel.limits import (
    MAX_HEADER_BYTES,
    MAX_ITEMS_ARROW,
    MAX_ITEMS_JSON,
    MAX_ITEMS_UNREAD,
    MAX_KEY_BYTES,
    MAX_PARTITIONS,
    MAX_PAYLOAD_BYTES,
    MAX_TEXT_BYTES,
)
from sluiceway.kernel.names import check_text
from sluiceway.model.bundle_records import BUNDLE_GROUP
from sluiceway.model.items import ENQUEUE_AT, HEADERS, OPTIONAL, PAYLOAD
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import MOVE_GROUP, TRANSFER_GROUP, Lease, Peek, Produce, ProduceKey
from sluiceway.model.schedule_records import SCHEDULE_GROUP
from sluiceway.model.small_batch import MAX_BYTES as MAX_FEW_BYTES
from sluiceway.model.small_batch import MOST as MAX_FEW
from sluiceway.model.small_batch import SmallBatch
from sluiceway.wire.decoding import Call, JsonDecoder, Natural, PartitionNumber, given_text, lease_timeout, request_timeout
from sluiceway.wire.item_limits import check_batch, check_count
from sluiceway.wire.json_outcomes import Completion
from sluiceway.wire.outcome_selection import belongs, check_partition

_OFFSET_BYTES = 4
"""The size of a payload's offset in a column."""
_CHARACTER_BYTES = 4
"""Maximum size of a character in UTF-8."""

_EASY_BYTES = 1 << 20
"""Bodies up to this size are decoded without counting their objects."""
_MOST_OBJECTS = 1 + 2 * MAX_ITEMS_JSON
"""Maximum number of JSON objects in a request: its own, and two per item (the item and its headers)."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""A JSON string, terminated or not. It matches at every quote, so no byte is scanned twice."""


class ProduceFields(Call):
    """The fields of a produce other than its items. JSON has them in the body, Arrow in the query string."""

    request_timeout: Duration = "30s"
    idempotency_key: Label | None = None
    idempotency_group: Label | None = None
    idempotency_sequence: Natural | None = None
    idempotency_window: Duration | None = None
    bundle: BundleId | None = None

    def key(self, record: QueueRecord) -> ProduceKey | None:
        """The idempotency key; None: the call has none. Raises `invalid_request`."""
        if self.idempotency_key is None and self.idempotency_group is None and self.idempotency_sequence is None:
            return None
        key = given_text(self.idempotency_key, "idempotency_key")
        group = given_text(self.idempotency_group, "idempotency_group")
        for own in (TRANSFER_GROUP, MOVE_GROUP, SCHEDULE_GROUP, BUNDLE_GROUP):
            if group is not None and group.startswith(own):
                raise invalid("idempotency_group", f"names that begin with {own} are reserved for the server")
        if group is None and self.idempotency_sequence is not None:
            raise invalid("idempotency_sequence", "requires idempotency_group")
        if key is None:
            if group is not None:
                raise invalid("idempotency_key", "required with idempotency_group")
            return None
        if group is not None and self.idempotency_window is not None:
            raise invalid("idempotency_window", "cannot be combined with idempotency_group, whose keys have no window")
        window = record.idempotency_window
        if self.idempotency_window is not None:
            window = check_duration(self.idempotency_window, "idempotency_window", 1, window)
        return ProduceKey(key, group, self.idempotency_sequence or 0, window)


class Item(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)] | None = msgspec.field(default=None, name="bytes")
    utf8: str | None = None
    kind: ShortText | None = None
    encoding: ShortText | None = None
    reference: ShortText | None = None
    key: ItemKey | None = None
    priority: Priority | None = None
    unique_key: ItemKey | None = None
    headers: dict[str, str] | None = None
    enqueue_at: TimeText | None = None


_OTHERS = [name for name in Item.__struct_fields__ if name not in ("payload", "utf8")]
_others_of = attrgetter(*_OTHERS)
_TEXTS = [(name, attrgetter(name)) for name in ("kind", "encoding", "reference", "key", "unique_key")]
_NO_OTHERS = (None,) * len(_OTHERS)
_PAYLOAD_ONLY = pa.schema([PAYLOAD])
_KEYS = ("key", "unique_key")
_PRIORITY = attrgetter("priority")
_HEADERS = attrgetter("headers")


class ProduceCall(ProduceFields, kw_only=True):
    items: Annotated[list[Annotated[Item, ONE_PAYLOAD]], SOME_JSON]

    def request(self, record: QueueRecord, now: Millis) -> Produce:
        """The produce to run. `now` is in milliseconds. Raises `invalid_request` and `too_many_items`."""
        check_count(self.items, "items", MAX_ITEMS_JSON)
        batch = to_small_batch(self.items) if len(self.items) <= MAX_FEW else None
        if batch is None:
            batch = batch_of(self.items)
            check_batch(batch, now)
        return Produce(batch, request_timeout(self.request_timeout), self.key(record), bundle=self.bundle)


def to_small_batch(items: Sequence[Item]) -> SmallBatch | None:
    """The items as a small batch. None if they need `batch_of`: they are large, scheduled, or possibly over a limit.

    Raises `invalid_request` for an item without exactly one payload.
    """
    payloads: list[bytes] = []
    others: dict[str, list[Any]] = {}
    nbytes = 0
    for at, item in enumerate(items):
        payload = _payload(item, at)
        if item.enqueue_at is not None:
            return None
        payloads.append(payload)
        nbytes += len(payload) + _OFFSET_BYTES
    if _are_payloads_only(items):
        return SmallBatch(payloads, others, nbytes) if nbytes <= MAX_FEW_BYTES else None
    for name, value_of in _TEXTS:
        texts = [*map(value_of, items)]
        if _any_given(texts):
            size = sum(len(text or "") * _CHARACTER_BYTES for text in texts)
            if size > MAX_TEXT_BYTES or (name in _KEYS and not all(map(_is_surely_key, texts))):
                return None
            nbytes += size
            others[name] = texts
    priorities = [*map(_PRIORITY, items)]
    if _any_given(priorities):
        nbytes += len(priorities)
        others["priority"] = priorities
    headers = [*map(_HEADERS, items)]
    if _any_given(headers):
        size = sum((len(name) + len(value)) * _CHARACTER_BYTES for pairs in headers for name, value in (pairs or {}).items())
        if size > MAX_HEADER_BYTES:
            return None
        nbytes += size + 2 * _OFFSET_BYTES * sum(len(pairs or ()) for pairs in headers)
        others["headers"] = headers
    return SmallBatch(payloads, others, nbytes) if nbytes <= MAX_FEW_BYTES else None


def batch_of(items: Sequence[Item]) -> pa.RecordBatch:
    """The items as one record batch: `payload`, and each column in which an item has a value. Raises `invalid_request`."""
    columns = {PAYLOAD.name: pa.array([_payload(item, at) for at, item in enumerate(items)], PAYLOAD.type)}
    if _are_payloads_only(items):
        return pa.RecordBatch.from_arrays([columns[PAYLOAD.name]], schema=_PAYLOAD_ONLY)
    for name, value_of in _TEXTS:
        texts: list[str | None] = [*map(value_of, items)]
        if _any_given(texts):
            columns[name] = pa.array(texts, pa.utf8())
    priorities = [*map(_PRIORITY, items)]
    if _any_given(priorities):
        columns["priority"] = pa.array(priorities, pa.int8())
    headers = [item.headers for item in items]
    if _any_given(headers):
        columns["headers"] = pa.array([None if pairs is None else list(pairs.items()) for pairs in headers], HEADERS)
    times = [item.enqueue_at for item in items]
    if _any_given(times):
        moments = [None if text is None else parse_time(text, f"items[{at}].enqueue_at") for at, text in enumerate(times)]
        columns[ENQUEUE_AT.name] = pa.array(moments, ENQUEUE_AT.type)
    fields = [field for field in (PAYLOAD, *OPTIONAL, ENQUEUE_AT) if field.name in columns]
    return pa.RecordBatch.from_arrays([columns[field.name] for field in fields], schema=pa.schema(fields))


def _are_payloads_only(items: Sequence[Item]) -> bool:
    # One pass instead of one for each optional field: most items have none.
    return [*map(_others_of, items)].count(_NO_OTHERS) == len(items)


def _any_given(values: list[Any]) -> bool:
    return values.count(None) < len(values)


def _is_surely_key(text: str | None) -> bool:
    """Whether the text is absent, or within the limits of a key whatever its characters."""
    return text is None or 0 < len(text) <= MAX_KEY_BYTES // _CHARACTER_BYTES


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


class LeaseCall(Call):
    client_id: Label
    batch_size: Annotated[int, Meta(ge=1, le=MAX_ITEMS_UNREAD)] = 1
    request_timeout: Duration = "0s"
    lease_timeout: Duration | None = None
    max_partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = 1
    lease_key: Label | None = None
    payload: bool = True
    partition: PartitionNumber | None = None
    after_lease: LeaseIdText | None = None
    before_offsets: Annotated[dict[PartitionNumber, Natural], Meta(max_length=MAX_PARTITIONS)] | None = None
    runs: bool = False
    complete: Completion | None = None

    def request(self, record: QueueRecord) -> Lease:
        """The lease to run. Raises `invalid_request`.

        The partition is not checked against `record`, which may be outdated. The queue checks it.
        """
        if not self.client_id:
            raise invalid("client_id", "must not be empty")
        if self.payload and self.batch_size > MAX_ITEMS_ARROW:
            raise invalid("batch_size", f"expected at most {MAX_ITEMS_ARROW:,}, or with payload=false at most {MAX_ITEMS_UNREAD:,}")
        if self.partition is not None and self.max_partitions > 1:
            raise invalid("max_partitions", "cannot be combined with partition")
        wait = request_timeout(self.request_timeout)
        if wait and self.before_offsets is not None:
            raise invalid("request_timeout", "must be 0s with before_offsets, because later items are not before these offsets")
        return Lease(
            check_text(self.client_id, "client_id"),
            self.batch_size,
            wait,
            lease_timeout(self.lease_timeout, record),
            self.max_partitions,
            given_text(self.lease_key, "lease_key"),
            self.partition,
            self._after(record),
            self.before_offsets,
            self.runs,
        )

    def _after(self, record: QueueRecord) -> int | None:
        if self.after_lease is None:
            return None
        lease = parse_lease_id(self.after_lease, "after_lease")
        if lease.partition != self.partition or not belongs(lease, record):
            raise invalid("after_lease", "expected a lease of the call's partition")
        return lease.number


class PeekCall(Call):
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_ARROW)] = 10
    lease_id: LeaseIdText | None = None
    start: Natural | None = None
    partition: PartitionNumber | None = None

    def request(self, record: QueueRecord) -> Peek:
        """The peek to run. Raises `invalid_request`, and `lease_not_found` for a lease of another queue or incarnation."""
        if self.lease_id is None:
            if self.start is not None:
                raise invalid("start", "requires lease_id")
            check_partition(self.partition, record)
            return Peek(self.limit, self.partition)
        if self.partition is not None:
            raise invalid("partition", "a lease names its partition: give lease_id or partition, not both")
        lease = parse_lease_id(self.lease_id, "lease_id")
        if not belongs(lease, record):
            raise SluicewayError("lease_not_found", f"{self.lease_id} is not a lease of this queue", "lease_id")
        return Peek(self.limit, lease.partition, lease.number, self.start or 0)


class ExplainCall(Call):
    """Explain an item or a partition."""

    id: ItemIdText | None = None
    partition: PartitionNumber | None = None

    def item(self) -> ItemId | None:
        """The item's id; None: the call explains its partition. Raises `invalid_request`."""
        if self.id is None and self.partition is None:
            raise invalid("id", "id or partition is required")
        if self.id is not None and self.partition is not None:
            raise invalid("partition", "cannot be combined with id")
        return None if self.id is None else parse_item_id(self.id, "id")


_decode_produce = JsonDecoder(ProduceCall)


def refuse_many_objects(body: bytes) -> None:
    """Raises `too_many_items` for a body with so many items that decoding it could exhaust the process's memory."""
    if len(body) > _EASY_BYTES and body.count(b"{") > _MOST_OBJECTS and _STRING.sub(b"", body).count(b"{") > _MOST_OBJECTS:
        raise SluicewayError("too_many_items", f"items: one call may have at most {MAX_ITEMS_JSON:,} entries", "items")


def decode_produce(body: bytes) -> ProduceCall:
    """Decode a produce. Raises as JsonDecoder and `refuse_many_objects` do."""
    refuse_many_objects(body)
    return _decode_produce(body)


decode_lease = JsonDecoder(LeaseCall)
decode_peek = JsonDecoder(PeekCall)
decode_explain = JsonDecoder(ExplainCall)
