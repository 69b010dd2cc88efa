"""JSON codec of the calls on bundles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import pyarrow as pa
from msgspec import Meta

from sluiceway.contract.bundle_answers import BundleId, BundleInfo, BundlePage, FollowUpInfo
from sluiceway.contract.fields import ONE_PAYLOAD, QueueName, time_field
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_ITEMS_JSON
from sluiceway.model.bundle_records import BundleRecord, FollowUp
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import BundleCount
from sluiceway.model.small_batch import SmallBatch
from sluiceway.wire.decoding import Call, JsonDecoder
from sluiceway.wire.json_items import Item
from sluiceway.wire.stored_items import fields_of, rows_of, stored_item

_MOST = 10**18
"""More than any count."""


class FollowUpCall(msgspec.Struct, forbid_unknown_fields=True):
    """The item that is produced when the bundle is over."""

    queue_name: QueueName
    item: Annotated[Item, ONE_PAYLOAD]


class CreateBundleCall(Call):
    follow_up: FollowUpCall | None = None
    items: Annotated[int, Meta(ge=0, le=_MOST)] | None = None

    def record(self, id: str, queue: QueueRecord, now: Millis) -> BundleRecord:
        """The bundle to create. Raises `invalid_request`."""
        follow_up = None
        if self.follow_up is not None:
            own = _headers(id, BundleCount(_MOST, _MOST, _MOST, _MOST))
            follow_up = FollowUp(self.follow_up.queue_name, stored_item(self.follow_up.item, own, "bundle", "follow_up.item"))
        return BundleRecord(
            id=id,
            queue_name=queue.queue_name,
            queue_incarnation=queue.incarnation,
            follow_up=follow_up,
            items=self.items,
            created_at=now,
        )


class BundleCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call on one bundle."""

    id: BundleId


class ListBundlesCall(msgspec.Struct, forbid_unknown_fields=True):
    """List bundles by id. `pivot`: the id of the previous page's last one."""

    pivot: BundleId | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_JSON)] = 100
    queue_name: QueueName | None = None


decode_create = JsonDecoder(CreateBundleCall)
decode_bundle = JsonDecoder(BundleCall)
decode_list = JsonDecoder(ListBundlesCall)


def _headers(id: str, count: BundleCount) -> dict[str, str]:
    """The headers of a follow-up, which say what has become of the items."""
    return {
        "bundle": id,
        "bundle_stored": str(count.stored),
        "bundle_completed": str(count.completed),
        "bundle_dead": str(count.dead),
        "bundle_dropped": str(count.dropped),
    }


def follow_up_for(record: BundleRecord, count: BundleCount) -> SmallBatch | pa.RecordBatch:
    """The follow-up to produce. Always the same for the same arguments."""
    assert record.follow_up is not None, "it has one"
    return rows_of(record.follow_up.item, _headers(record.id, count), 0)


# ---- answers --------------------------------------------------------------------------------------------------


def info(record: BundleRecord, count: BundleCount | None, problem: str | None) -> BundleInfo:
    follow_up = record.follow_up
    stored, completed, dead, dropped = (None,) * 4 if count is None else count
    return BundleInfo(
        id=record.id,
        queue_name=record.queue_name,
        state=record.state,
        items=record.items,
        stored=stored,
        completed=completed,
        dead=dead,
        dropped=dropped,
        left=None if count is None else count.left,
        follow_up=None
        if follow_up is None
        else FollowUpInfo(queue_name=follow_up.queue_name, item=fields_of(follow_up.item), id=record.follow_up_id or None),
        problem=problem,
        created_at=time_field(record.created_at),
        closed_at=time_field(record.closed_at),
        ended_at=time_field(record.ended_at),
    )


encode_info = msgspec.json.Encoder().encode


def page(infos: Sequence[BundleInfo], following: str | None) -> bytes:
    return msgspec.json.encode(BundlePage(items=list(infos), next=following))
