"""JSON codec of the calls on a queue's stored items: list, import, delete, reload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Annotated

import msgspec
import pyarrow as pa
from msgspec import Meta

from sluiceway.contract.fields import SOME_JSON, Duration, ItemIdText, ItemKey, LeaseIdText, Priority, QueueName, ShortText, TimeText
from sluiceway.contract.item_answers import Deleted, Left, LeftReason, MadeReady, MovedItems
from sluiceway.kernel.clock import Millis, format_time
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.ids import ItemId, LeaseId, parse_item_id
from sluiceway.kernel.limits import MAX_ITEMS_JSON, MAX_PAGE, MAX_PAYLOAD_BYTES
from sluiceway.model import inspection
from sluiceway.model.inspection import DeleteItems, ListItems, MoveItems, RunNow, Standing
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import DONE, Offsets, Produce, Produced, ProducedByKey
from sluiceway.wire.decoding import Call, JsonDecoder, PartitionNumber, given_queue, request_timeout
from sluiceway.wire.item_limits import check_batch, check_count
from sluiceway.wire.json_items import Item, batch_of, refuse_many_objects
from sluiceway.wire.outcome_selection import check_partition, group_items
from sluiceway.wire.shapes import Shape


class ListedItem(Shape):
    """A stored item. `attempts` includes its current lease. A scheduled item is listed under the id under which it was produced."""

    id: ItemIdText
    origin: ItemIdText
    is_leased: bool
    lease_id: LeaseIdText | None
    lease_deadline: TimeText | None
    expire_deadline: TimeText | None
    created_at: TimeText
    enqueue_at: TimeText | None
    attempts: int
    max_attempts: int
    kind: str | None
    encoding: str | None
    reference: str | None
    key: str | None
    priority: int | None
    unique_key: str | None
    headers: dict[str, str] | None
    payload: bytes


class ListedItems(Shape):
    """A page of items in the order of their offsets. `next`: the pivot of the next page."""

    items: list[ListedItem]
    next: ItemIdText | None


class Imported(msgspec.Struct):
    """The answer of `storage/items.import` before it becomes protobuf: the ids of all items, and the items that are still stored."""

    ids: list[str]
    items: list[ListedItem]


class ListItemsCall(Call):
    partition: PartitionNumber = 0
    pivot: ItemIdText | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 100

    def request(self, record: QueueRecord, scheduled: bool) -> ListItems:
        """The listing to run, of waiting and leased items or of `scheduled` ones. Raises `invalid_request`."""
        check_partition(self.partition, record)
        start = 0
        if self.pivot:
            pivot = parse_item_id(self.pivot, "pivot")
            if pivot[:2] != (record.incarnation, self.partition):
                raise invalid("pivot", f"{self.pivot!r} is not an item of partition {self.partition} of this queue")
            start = pivot.offset + 1
        return ListItems(self.partition, start, self.limit, scheduled)


class ImportItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """An item in the form of a listing. Its former id, lease, deadlines, attempts and time are accepted and ignored."""

    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)] = b""
    kind: ShortText | None = None
    encoding: ShortText | None = None
    reference: ShortText | None = None
    key: ItemKey | None = None
    priority: Priority | None = None
    unique_key: ItemKey | None = None
    headers: dict[str, str] | None = None
    enqueue_at: TimeText | None = None
    id: str | None = None
    origin: str | None = None
    is_leased: bool = False
    lease_id: str | None = None
    lease_deadline: str | None = None
    expire_deadline: str | None = None
    created_at: str | None = None
    attempts: int = 0
    max_attempts: int = 0

    def item(self) -> Item:
        texts = self.kind, self.encoding, self.reference, self.key
        return Item(self.payload, None, *texts, self.priority, self.unique_key, self.headers, self.enqueue_at)


class ImportCall(Call):
    items: Annotated[list[ImportItem], SOME_JSON]
    partition: PartitionNumber = 0
    request_timeout: Duration = "30s"

    def request(self, record: QueueRecord, now: Millis) -> Produce:
        """The produce to run. Raises as `check_count` and `check_batch` do."""
        check_partition(self.partition, record)
        check_count(self.items, "items", MAX_ITEMS_JSON)
        batch = batch_of([item.item() for item in self.items])
        check_batch(batch, now)
        return Produce(batch, request_timeout(self.request_timeout), partition=self.partition)


def _by_partition(ids: list[str], record: QueueRecord, only_partition: int | None = None) -> tuple[dict[int, Offsets], list[str]]:
    """The offsets by partition, and the ids of other queues. Raises `invalid_request` and `too_many_items`."""
    check_count(ids, "ids", MAX_ITEMS_JSON)
    # These calls have no disposition. Grouping needs one, so any will do.
    grouped = group_items(ids, repeat(DONE), record, "ids[{}]".format, only_partition)
    return {partition: chosen.offsets for partition, (chosen,) in grouped.selections.items() if chosen.offsets is not None}, grouped.foreign


class DeleteItemsCall(Call):
    ids: Annotated[list[ItemIdText], SOME_JSON]
    partition: PartitionNumber | None = None
    request_timeout: Duration = "30s"

    def request(self, record: QueueRecord) -> DeleteItems:
        """The deletion to run. Raises as `_by_partition` does."""
        check_partition(self.partition, record, removed=True)
        offsets, foreign = _by_partition(self.ids, record, self.partition)
        return DeleteItems(offsets, request_timeout(self.request_timeout), foreign)


class RunNowCall(Call):
    ids: Annotated[list[ItemIdText], SOME_JSON]
    request_timeout: Duration = "30s"

    def request(self, record: QueueRecord) -> RunNow:
        """The call to run. Raises as `_by_partition` does."""
        offsets, foreign = _by_partition(self.ids, record)
        return RunNow(offsets, request_timeout(self.request_timeout), foreign)


class MoveItemsCall(Call):
    ids: Annotated[list[ItemIdText], SOME_JSON]
    target: QueueName | None = None
    request_timeout: Duration = "30s"

    def request(self, record: QueueRecord) -> MoveItems:
        """The move to run. Raises as `_by_partition` does."""
        target = given_queue(self.target, "target")
        if target == self.queue_name:
            raise invalid("target", "must differ from the queue that the items come from")
        offsets, foreign = _by_partition(self.ids, record)
        return MoveItems(offsets, request_timeout(self.request_timeout), foreign, target)


class ReloadCall(Call):
    request_timeout: Duration = "30s"


_decode_import = JsonDecoder(ImportCall)


def decode_import(body: bytes) -> ImportCall:
    """Decode an import. Raises as JsonDecoder and `refuse_many_objects` do."""
    refuse_many_objects(body)
    return _decode_import(body)


decode_list_items = JsonDecoder(ListItemsCall)
decode_delete_items = JsonDecoder(DeleteItemsCall)
decode_run_now = JsonDecoder(RunNowCall)
decode_move_items = JsonDecoder(MoveItemsCall)
decode_reload = JsonDecoder(ReloadCall)


def listed(record: QueueRecord, partition: int, page: inspection.ItemsPage) -> bytes:
    """One page of a partition's items as JSON."""
    items = [item for batch, standing in page.rows for item in _items(record, batch, standing)]
    following = None if page.last is None else str(ItemId(record.incarnation, partition, page.last))
    return msgspec.json.encode(ListedItems(items, following))


def imported(record: QueueRecord, produced: Produced, page: inspection.ItemsPage) -> bytes:
    """`Imported` as JSON. `page` has the imported items that are still stored."""
    items = [item for batch, standing in page.rows for item in _items(record, batch, standing)]
    places = [(produced.partition, produced.first_offset + at) for at in range(produced.items)]
    if isinstance(produced, ProducedByKey):
        places = [*produced.places]
    return msgspec.json.encode(Imported([str(ItemId(record.incarnation, *place)) for place in places], items))


def deleted(answer: inspection.Deleted) -> bytes:
    """The answer of `storage/items.delete` as JSON: the number of deleted items, and the ignored ids with their reasons."""
    return msgspec.json.encode(Deleted(deleted=answer.deleted, ignored=_left(answer.ignored)))


def made_ready(answer: inspection.MadeReady) -> bytes:
    """The answer of `storage/items.run_now` as JSON."""
    return msgspec.json.encode(MadeReady(ready=answer.ready, ignored=_left(answer.ignored)))


def moved(answer: inspection.MovedAway) -> bytes:
    """The answer of `storage/items.move` as JSON."""
    ignored = _left(answer.ignored)
    return msgspec.json.encode(MovedItems(matched=answer.matched, moved=answer.moved, targets=answer.targets, ignored=ignored))


def _left(ignored: Iterable[tuple[str, LeftReason]]) -> list[Left]:
    return [Left(id=text, reason=reason) for text, reason in ignored]


def _items(record: QueueRecord, batch: pa.RecordBatch, standing: Standing) -> Iterator[ListedItem]:
    lease_deadline, expires_at, due_at = (None if at is None else format_time(at) for at in standing)
    for row in batch.to_pylist():
        lease, place = row["lease"], (record.incarnation, row["partition"])
        headers = row.get("headers")
        yield ListedItem(
            str(ItemId(*place, row["offset"])),
            row.get("origin") or str(ItemId(*place, row["origin_offset"])),
            lease != 0,
            str(LeaseId(*place, lease)) if lease else None,
            lease_deadline,
            expires_at,
            row["enqueued_at"].isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            due_at,
            row["attempts"],
            record.max_attempts,
            row.get("kind"),
            row.get("encoding"),
            row.get("reference"),
            row.get("key"),
            row.get("priority"),
            row.get("unique_key"),
            None if headers is None else dict(headers),
            row["payload"],
        )
