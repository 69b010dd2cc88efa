"""Model answers into JSON, and leased items into either form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from sluiceway.kernel.clock import Millis, format_duration, format_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId, LeaseId
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import (
    Cleared,
    Explanation,
    Extended,
    IgnoredReason,
    Leased,
    LeaseInfo,
    PartitionStats,
    Produced,
    QueueStats,
    Redriven,
    Settled,
)
from sluiceway.wire.arrow_codec import encode_leased

encode = msgspec.json.encode
Body = bytes | memoryview
_NAMED = 3
"""Ignored ids in the text of an error."""
_LISTED = 1_000
"""Ignored ids beside it."""


FOREIGN = Explanation(
    "unknown", "this queue has never given such an id: it is another queue's, or one of an earlier queue of the same name"
)
"""Of an id that needs no look into the queue."""


class StaleIdsError(SluicewayError):
    """A `strict` call ignored something. What it did not ignore is done, durably."""

    def __init__(self, ignored: Sequence[tuple[str, IgnoredReason]]) -> None:
        first = ", ".join(f"{text} ({reason})" for text, reason in ignored[:_NAMED])
        more = ", …" if len(ignored) > _NAMED else ""
        super().__init__("stale_ids", f"{len(ignored):,} ignored: {first}{more}; the rest is done")
        self.ignored = ignored


class ItemOut(msgspec.Struct, gc=False):
    """An item as it is served. `lease_id` and `lease_deadline` are null where it is only looked at."""

    id: str
    origin: str
    partition: int
    lease_id: str | None
    lease_deadline: str | None
    attempts: int
    enqueued_at: str
    kind: str | None
    encoding: str | None
    reference: str | None
    headers: dict[str, str] | None
    payload: bytes = msgspec.field(name="bytes")


def queue_info(record: QueueRecord) -> dict[str, Any]:
    backoff = record.retry_backoff
    return {
        "queue_name": record.queue_name,
        "incarnation": record.incarnation,
        "created_at": format_time(record.created_at),
        "updated_at": format_time(record.updated_at),
        "version": record.version,
        "lease_timeout": format_duration(record.lease_timeout),
        "max_lease_timeout": format_duration(record.max_lease_timeout),
        "max_attempts": record.max_attempts,
        "dead_queue": record.dead_queue,
        "expire_timeout": format_duration(record.expire_timeout),
        "retry_backoff": backoff and {"first": format_duration(backoff.first), "most": format_duration(backoff.most)},
        "idempotency_window": format_duration(record.idempotency_window),
        "write_timeout": None if record.write_timeout is None else format_duration(record.write_timeout),
        "reference": record.reference,
        "paused": record.paused,
        "requested_partitions": len(record.partitions),
        "partitions": record.partitions,
    }


def produced(record: QueueRecord, answer: Produced) -> bytes:
    return encode(
        {
            "queue_name": record.queue_name,
            "partition": answer.partition,
            "first_id": str(ItemId(record.incarnation, answer.partition, answer.first_offset)),
            "count": answer.items,
            "deduplicated": answer.deduplicated,
        }
    )


def leased(record: QueueRecord, answer: Leased, *, arrow: bool) -> Body:
    """The leases, and their items unless they were not asked for."""
    about: dict[str, Any] = {
        "queue_name": record.queue_name,
        "partition": answer.leases[0].partition if answer.leases else None,
        "leases": _leases(record, answer.leases),
    }
    if arrow:
        return encode_leased(answer.batches, {**about, "incarnation": record.incarnation})
    deadlines = {(lease.partition, lease.number): format_time(lease.lease_deadline) for lease in answer.leases}
    about["items"] = _items(record, answer.batches, deadlines)
    return encode(about)


def peeked(record: QueueRecord, batches: Sequence[pa.RecordBatch], *, arrow: bool) -> Body:
    about: dict[str, Any] = {"queue_name": record.queue_name}
    if arrow:
        return encode_leased(batches, {**about, "incarnation": record.incarnation})
    return encode({**about, "items": _items(record, batches, {})})


def _leases(record: QueueRecord, leases: Iterable[LeaseInfo]) -> list[dict[str, Any]]:
    return [
        {
            "lease_id": str(LeaseId(record.incarnation, lease.partition, lease.number)),
            "partition": lease.partition,
            "count": lease.items,
            "lease_deadline": format_time(lease.lease_deadline),
        }
        for lease in leases
    ]


def _items(record: QueueRecord, batches: Iterable[pa.RecordBatch], deadlines: dict[tuple[int, int], str]) -> list[ItemOut]:
    items: list[ItemOut] = []
    for batch in batches:
        items.extend(_rows(record.incarnation, batch, deadlines))
    return items


def _rows(incarnation: str, batch: pa.RecordBatch, deadlines: dict[tuple[int, int], str]) -> Iterable[ItemOut]:
    names = batch.schema.names
    absent = [None] * batch.num_rows

    def column(name: str) -> list[Any]:
        return list(batch.column(name).to_pylist()) if name in names else absent

    times: dict[Millis, str] = {}
    lease_ids: dict[tuple[int, int], str] = {}
    rows = zip(
        column("partition"),
        column("lease"),
        column("offset"),
        column("origin_offset"),
        column("origin"),
        column("attempts"),
        batch.column("enqueued_at").cast(pa.int64()).to_pylist(),
        column("kind"),
        column("encoding"),
        column("reference"),
        column("headers"),
        column("payload"),
        strict=True,
    )
    for partition, lease, offset, origin_offset, origin, attempts, enqueued_at, kind, encoding, reference, headers, payload in rows:
        if enqueued_at not in times:
            times[enqueued_at] = format_time(enqueued_at)
        if lease and (partition, lease) not in lease_ids:
            lease_ids[partition, lease] = str(LeaseId(incarnation, partition, lease))
        yield ItemOut(
            f"{incarnation}.{partition}.{offset}",
            origin or f"{incarnation}.{partition}.{origin_offset}",
            partition,
            lease_ids.get((partition, lease)),
            deadlines.get((partition, lease)),
            attempts,
            times[enqueued_at],
            kind,
            encoding,
            reference,
            None if headers is None else dict(headers),
            payload,
        )


def _ignored(pairs: Sequence[tuple[str, IgnoredReason]], strict: bool = False) -> list[dict[str, str]]:
    if strict and pairs:
        raise StaleIdsError(pairs)
    return [{"id": text, "reason": reason} for text, reason in pairs]


def completed(answer: Settled, strict: bool) -> bytes:
    """As the other answers of calls that may be strict: raises StaleIdsError."""
    return encode({"completed": answer.completed, "ignored": _ignored(answer.ignored, strict)})


def retried(answer: Settled, strict: bool) -> bytes:
    return encode({"retried": answer.retried, "dead": answer.dead, "ignored": _ignored(answer.ignored, strict)})


def released(answer: Settled, strict: bool) -> bytes:
    return encode({"released": answer.released, "ignored": _ignored(answer.ignored, strict)})


def staged(answer: Settled) -> bytes:
    return encode({"staged": answer.total, "ignored": _ignored(answer.ignored)})


def extended(record: QueueRecord, answer: Extended, strict: bool) -> bytes:
    return encode({"leases": _leases(record, answer.leases), "ignored": _ignored(answer.ignored, strict)})


def cleared(answer: Cleared) -> bytes:
    return encode({"ready": answer.ready, "scheduled": answer.scheduled})


def redriven(answer: Redriven) -> bytes:
    return encode({"matched": answer.matched, "redriven": answer.redriven, "targets": answer.targets})


def explained(item: ItemId, answer: Explanation) -> bytes:
    """What is known of the item; fields that do not apply are left out."""
    fields = {
        "id": str(item),
        "state": answer.state,
        "reason": answer.reason,
        "ahead": answer.ahead,
        "attempts": answer.attempts,
        "due_at": _time(answer.due_at),
        "expires_at": _time(answer.expires_at),
        "lease_id": None if answer.lease is None else str(LeaseId(item.incarnation, item.partition, answer.lease)),
        "client_id": answer.client_id,
        "lease_deadline": _time(answer.lease_deadline),
    }
    return encode({name: value for name, value in fields.items() if value is not None})


def _time(at: Millis | None) -> str | None:
    return None if at is None else format_time(at)


def stats(queue_name: str, answer: QueueStats) -> bytes:
    logical_queue = {
        "produce_waiting": answer.produce_waiting,
        "lease_waiting": answer.lease_waiting,
        "complete_waiting": answer.complete_waiting,
        "in_flight": answer.in_flight,
        "partitions": [_partition_stats(partition) for partition in answer.partitions],
    }
    return encode({"queue_name": queue_name, "logical_queues": [logical_queue]})


def _partition_stats(stats: PartitionStats) -> dict[str, Any]:
    return {
        "partition": stats.partition,
        "backend": stats.backend,
        "state": stats.state,
        "commit_time_ms": round(stats.commit_time, 3),
        "degraded": stats.degraded,
        "total": stats.total,
        "ready": stats.ready,
        "total_leased": stats.leased_now,
        "scheduled": stats.scheduled,
        "transferring": stats.transferring,
        "leases": stats.leases,
        "failures": stats.failures,
        "produced": stats.produced,
        "deduplicated": stats.deduplicated,
        "leased": stats.leased,
        "completed": stats.completed,
        "retried": stats.retried,
        "expired": stats.expired,
        "dead": stats.dead,
        "released": stats.released,
        "cleared": stats.cleared,
        "redriven": stats.redriven,
    }


def problem(error: SluicewayError, request_id: str) -> bytes:
    """The error as `application/problem+json`. `message` repeats the detail under the name that Querator's clients read."""
    kind = error.kind
    members: dict[str, Any] = {
        "type": f"urn:sluiceway:problem:{error.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": error.detail,
        "code": error.code,
        "retryable": kind.retryable,
        "request_id": request_id,
        "message": error.detail,
    }
    if error.field is not None:
        members["field"] = error.field
    if isinstance(error, StaleIdsError):
        members["ignored"] = _ignored(error.ignored[:_LISTED])
    return encode(members)
