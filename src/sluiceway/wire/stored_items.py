"""Items that the server keeps and produces itself: those of schedules, and follow-ups of bundles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_STORED_ITEM
from sluiceway.model.small_batch import SmallBatch
from sluiceway.wire.item_limits import check_batch
from sluiceway.wire.json_items import Item, batch_of, to_small_batch

_item = msgspec.json.Decoder(Item).decode
fields_of = msgspec.json.Decoder(dict[str, Any]).decode
"""The fields of a stored item."""


def stored_item(item: Item, own: Mapping[str, str], timer: str, field: str = "item") -> msgspec.Raw:
    """The item as it is stored: the fields that are given. `own`: headers that the server adds, with the longest values. `timer`: what says
    when it is served, in place of `enqueue_at`. Raises `invalid_request`, which names `field`, for one that could not be produced."""
    if item.enqueue_at is not None:
        raise invalid(f"{field}.enqueue_at", f"the {timer} says when; leave it out")
    for header in own:
        if header in (item.headers or ()):
            raise invalid(f"{field}.headers", f"the header {header} is set by the server")
    given = {
        name: value for name, value in zip(item.__struct_encode_fields__, msgspec.structs.astuple(item), strict=True) if value is not None
    }
    stored = msgspec.json.encode(given)
    if len(stored) > MAX_STORED_ITEM:
        raise invalid(field, f"larger than {MAX_STORED_ITEM:,} bytes as JSON")
    try:
        rows_of(stored, own, 0)
    except SluicewayError as error:
        # The codec of a produce counts the items.
        name, _, what = error.detail.removeprefix("items[0].").partition(": ")
        raise invalid(f"{field}.{name}", what) from None
    return msgspec.Raw(stored)


def rows_of(stored: bytes, headers: Mapping[str, str], now: Millis) -> SmallBatch | pa.RecordBatch:
    """The row to produce: the item with these headers added. Always the same for the same arguments."""
    item = _item(stored)
    item.headers = {**(item.headers or {}), **headers}
    few = to_small_batch([item])
    if few is not None:
        return few
    batch = batch_of([item])
    check_batch(batch, now)
    return batch
