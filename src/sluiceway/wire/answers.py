"""Encoders of the answers: JSON for all of them, JSON or Arrow for leased items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from typing import Any

import msgspec
import pyarrow as pa

from sluiceway.contract import item_answers as items
from sluiceway.contract.fields import time_field
from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.contract.queue_settings import Partition, QueueInfo, QueuePage
from sluiceway.contract.rebalances import OpenRebalance
from sluiceway.core.queue.routing import Peer
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId, LeaseId
from sluiceway.model.items import OPTIONAL
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Rebalance
from sluiceway.model.requests import (
    Cleared,
    Explanation,
    Extended,
    Leased,
    LeaseInfo,
    Produced,
    ProducedByKey,
    Redriven,
    Settled,
)
from sluiceway.model.small_batch import Served, in_columns
from sluiceway.wire.arrow_codec import encode_leased
from sluiceway.wire.shapes import Problem

encode = msgspec.json.encode
Body = bytes | memoryview
Owner = Callable[[QueueRecord, int], Peer | None]
"""Looks up the instance that owns a partition of a queue. None: the partition has no owner at the moment."""
_NAMED = 3
"""Maximum number of ignored ids in an error's text."""
_LISTED = 1_000
"""Maximum number of ignored ids in a problem's `ignored` field."""
_Deadlines = Mapping[tuple[int, int], datetime]
"""Lease deadlines by (partition, lease number)."""
ERRORS_PAGE = "/docs/errors"
"""The server's page of error codes. A problem's `type` links to it on the same server."""

FOREIGN = Explanation("unknown", "this queue never assigned the id; it belongs to another queue, or to a deleted queue of the same name")
"""The explanation of an id whose incarnation is not the queue's. It needs no lookup in the queue."""


class StaleIdsError(SluicewayError):
    """A `strict` call ignored some of its ids. The other ids are settled durably.

    `ignored` has (id, reason) pairs. The text names the first `_NAMED` of them.
    """

    def __init__(self, ignored: Sequence[tuple[str, IgnoredReason]]) -> None:
        first = ", ".join(f"{text} ({reason})" for text, reason in ignored[:_NAMED])
        more = ", …" if len(ignored) > _NAMED else ""
        super().__init__("stale_ids", f"{len(ignored):,} ignored: {first}{more}; the call took effect for the others")
        self.ignored = ignored


def queue_info(record: QueueRecord, owner: Owner, rebalance: OpenRebalance | None = None) -> QueueInfo:
    """The queue's settings, state and partitions with their owners. `rebalance` is the queue's open rebalance, if it has one."""
    return QueueInfo(
        queue_name=record.queue_name,
        incarnation=record.incarnation,
        created_at=time_field(record.created_at),
        updated_at=time_field(record.updated_at),
        version=record.version,
        **record.settings_text(),
        paused=list(record.paused),
        requested_partitions=kept_partitions(record),
        partitions=[_partition(each, owner(record, each.partition)) for each in record.partitions],
        rebalance=rebalance,
    )


def kept_partitions(record: QueueRecord) -> int:
    """The number of the queue's partitions that are not draining."""
    return sum(each.state != "draining" for each in record.partitions)


def _partition(record: PartitionRecord, owner: Peer | None) -> Partition:
    name, address = (None, None) if owner is None else (owner.name, owner.address or None)
    return Partition(
        partition=record.partition, backend=record.backend, state=record.state, parents=list(record.parents), owner=name, address=address
    )


def open_rebalance(rebalance: Rebalance, items_left: int | None = None) -> OpenRebalance:
    """The rebalance's summary in a queue's answer. `items_left`: the items not yet drained; None: unknown."""
    return OpenRebalance(id=rebalance.id, state=rebalance.state, step=rebalance.step, items_left=items_left)


def queue_page(records: Iterable[QueueRecord], owner: Owner, following: str | None, rebalances: Mapping[str, Rebalance]) -> bytes:
    """One page of queues as JSON. `following`: the pivot of the next page; None: this is the last. `rebalances`: the open ones by id."""
    items = [queue_info(record, owner, _open(record, rebalances)) for record in records]
    return encode(QueuePage(items=items, next=following))


def _open(record: QueueRecord, rebalances: Mapping[str, Rebalance]) -> OpenRebalance | None:
    found = rebalances.get(record.rebalance or "")
    return None if found is None else open_rebalance(found)


def produced(record: QueueRecord, answer: Produced) -> bytes:
    """The answer of `queue.produce` as JSON: the partition, the first id and the number of items, and all offsets if they have gaps."""
    first_id = str(ItemId(record.incarnation, answer.partition, answer.first_offset))
    divided = answer if isinstance(answer, ProducedByKey) else None
    return encode(
        items.Produced(
            queue_name=record.queue_name,
            partition=answer.partition,
            first_id=first_id,
            count=answer.items,
            deduplicated=answer.deduplicated,
            offsets=None if divided is None else divided.offsets,
            partitions=None if divided is None else divided.partitions,
            duplicates=[row for row, _ in answer.duplicates],
        )
    )


def leased(record: QueueRecord, answer: Leased, settled: Settled | None = None, *, arrow: bool) -> Body:
    """The leases and their items, as JSON or as an Arrow stream. `answer.batches` is empty if the call did not ask for items.

    `settled`: what the call completed; None if it named nothing, or that is not confirmed.
    """
    done = None if settled is None else items.Completed(completed=settled.completed, ignored=_ignored(settled.ignored))
    partition, leases = answer.leases[0].partition if answer.leases else None, _leases(record, answer.leases)
    if arrow:
        about: dict[str, Any] = {
            "queue_name": record.queue_name,
            "partition": partition,
            "leases": leases,
            "incarnation": record.incarnation,
        }
        if done is not None:
            about["completed"] = done
        return encode_leased([in_columns(batch) for batch in answer.batches], about)
    deadlines = {(lease.partition, lease.number): time_field(lease.lease_deadline) for lease in answer.leases}
    return encode(
        items.Leased(
            queue_name=record.queue_name,
            partition=partition,
            leases=leases,
            items=_items(record, answer.batches, deadlines),
            completed=done,
        )
    )


def peeked(record: QueueRecord, batches: Sequence[pa.RecordBatch], *, arrow: bool) -> Body:
    """The items of a peek, as JSON or as an Arrow stream."""
    if arrow:
        return encode_leased(batches, {"queue_name": record.queue_name, "incarnation": record.incarnation})
    return encode(items.Peeked(queue_name=record.queue_name, items=_items(record, batches, {})))


def _leases(record: QueueRecord, leases: Iterable[LeaseInfo]) -> list[items.Lease]:
    return [
        items.Lease(
            lease_id=str(LeaseId(record.incarnation, lease.partition, lease.number)),
            partition=lease.partition,
            count=lease.items,
            lease_deadline=time_field(lease.lease_deadline),
        )
        for lease in leases
    ]


def _items(record: QueueRecord, batches: Iterable[pa.RecordBatch | Served], deadlines: _Deadlines) -> list[items.LeasedItem]:
    served: list[items.LeasedItem] = []
    for batch in batches:
        served.extend((_served if isinstance(batch, Served) else _rows)(record.incarnation, batch, deadlines))
    return served


def _served(incarnation: str, served: Served, deadlines: _Deadlines) -> Iterable[items.LeasedItem]:
    """The items of a slice. Values that its rows share are built once."""
    partition, lease, piece, few = served.partition, served.lease, served.piece, served.few()
    enqueued_at, lease_id = time_field(piece.enqueued_at), str(LeaseId(incarnation, partition, lease)) if lease else None
    deadline, place = deadlines.get((partition, lease)), f"{incarnation}.{partition}"
    absent = [None] * few.num_rows
    others = [few.others.get(field.name, absent) for field in OPTIONAL] if few.others else [absent] * len(OPTIONAL)
    rows = zip(piece.offsets.tolist(), (piece.rows + piece.blob).tolist(), few.payloads, *others, strict=True)
    for offset, first, payload, kind, encoding, reference, headers, origin, key, priority, unique_key in rows:
        yield items.LeasedItem(
            f"{place}.{offset}",
            origin or f"{place}.{first}",
            partition,
            lease_id,
            deadline,
            piece.attempts,
            enqueued_at,
            kind,
            encoding,
            reference,
            key,
            priority,
            unique_key,
            headers,
            payload,
        )


def _rows(incarnation: str, batch: pa.RecordBatch, deadlines: _Deadlines) -> Iterable[items.LeasedItem]:
    """The items of a batch, column by column: a loop in Python that names each field costs twice as much."""
    names = batch.schema.names

    def column(name: str) -> Iterable[Any]:
        return batch.column(name).to_pylist() if name in names else repeat(None, batch.num_rows)

    partitions, offsets, first_offsets = column("partition"), column("offset"), column("origin_offset")
    ids = [f"{incarnation}.{partition}.{offset}" for partition, offset in zip(partitions, offsets, strict=True)]
    origins = ids
    if first_offsets != offsets:
        origins = [f"{incarnation}.{partition}.{first}" for partition, first in zip(partitions, first_offsets, strict=True)]
    if "origin" in names:
        origins = [elsewhere or here for elsewhere, here in zip(column("origin"), origins, strict=True)]
    leases = list(zip(partitions, column("lease"), strict=True))
    lease_ids = {each: str(LeaseId(incarnation, *each)) for each in set(leases) if each[1]}
    enqueued = batch.column("enqueued_at").cast(pa.int64()).to_pylist()
    times = {each: time_field(each) for each in set(enqueued)}
    return map(
        items.LeasedItem,
        ids,
        origins,
        partitions,
        map(lease_ids.get, leases),
        map(deadlines.get, leases),
        column("attempts"),
        map(times.get, enqueued),
        column("kind"),
        column("encoding"),
        column("reference"),
        column("key"),
        column("priority"),
        column("unique_key"),
        [None if headers is None else dict(headers) for headers in column("headers")],
        column("payload"),
    )


def _ignored(pairs: Sequence[tuple[str, IgnoredReason]], strict: bool = False) -> list[items.Ignored]:
    if strict and pairs:
        raise StaleIdsError(pairs)
    return [items.Ignored(id=text, reason=reason) for text, reason in pairs]


def completed(answer: Settled, strict: bool) -> bytes:
    """The answer of `queue.complete` as JSON. Raises StaleIdsError if `strict` and an id was ignored."""
    return encode(items.Completed(completed=answer.completed, ignored=_ignored(answer.ignored, strict)))


def retried(answer: Settled, strict: bool) -> bytes:
    """The answer of `queue.retry` as JSON. Raises StaleIdsError as `completed` does."""
    return encode(items.Retried(retried=answer.retried, dead=answer.dead, ignored=_ignored(answer.ignored, strict)))


def released(answer: Settled, strict: bool) -> bytes:
    """The answer of `queue.release` as JSON. Raises StaleIdsError as `completed` does."""
    return encode(items.Released(released=answer.released, ignored=_ignored(answer.ignored, strict)))


def staged(answer: Settled) -> bytes:
    """The answer of `queue.settle` as JSON: the number of staged items and the ignored ids."""
    return encode(items.Staged(staged=answer.total, ignored=_ignored(answer.ignored)))


def extended(record: QueueRecord, answer: Extended, strict: bool) -> bytes:
    """The answer of `queue.extend` as JSON: the leases with their new deadlines. Raises StaleIdsError as `completed` does."""
    return encode(items.Extended(leases=_leases(record, answer.leases), ignored=_ignored(answer.ignored, strict)))


def cleared(answer: Cleared) -> bytes:
    """The answer of `queue.clear` as JSON: the numbers of dropped ready and scheduled items."""
    return encode(items.Cleared(ready=answer.ready, scheduled=answer.scheduled))


def redriven(answer: Redriven) -> bytes:
    """The answer of `queue.redrive` as JSON: the numbers of matched and redriven items, and of items per target queue."""
    return encode(items.Redriven(matched=answer.matched, redriven=answer.redriven, targets=answer.targets))


def explained(item: ItemId, answer: Explanation) -> bytes:
    """The state of an item as JSON. Fields that do not apply to the state are left out."""
    return encode(
        items.Explanation(
            id=str(item),
            state=answer.state,
            reason=answer.reason,
            ahead=answer.ahead,
            attempts=answer.attempts,
            due_at=time_field(answer.due_at),
            expires_at=time_field(answer.expires_at),
            lease_id=None if answer.lease is None else str(LeaseId(item.incarnation, item.partition, answer.lease)),
            client_id=answer.client_id,
            lease_deadline=time_field(answer.lease_deadline),
            failures=[each.shown() for each in answer.failures],
            key=answer.key,
            unique_key=answer.unique_key,
        )
    )


def problem(error: SluicewayError, request_id: str) -> bytes:
    """The error as `application/problem+json`. `message` repeats `detail` because Querator's clients read that name."""
    kind = error.kind
    return encode(
        Problem(
            type=f"{ERRORS_PAGE}#{error.code}",
            title=kind.title,
            status=kind.status,
            detail=error.detail,
            code=error.code,
            retryable=kind.retryable,
            request_id=request_id,
            message=error.detail,
            field=error.field,
            ignored=_ignored(error.ignored[:_LISTED]) if isinstance(error, StaleIdsError) else None,
        )
    )
