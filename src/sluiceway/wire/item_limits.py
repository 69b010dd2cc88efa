"""Checks of the limits on items, shared by JSON and Arrow."""

from __future__ import annotations

from collections.abc import Sized

import numpy as np
import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_SCHEDULE
from sluiceway.model.items import check_sizes


def check_count(items: Sized, field: str, most: int, least: int = 1) -> None:
    """Raises `too_many_items` above `most` and `invalid_request` below `least`."""
    count = len(items)
    if count > most:
        raise too_many(field, count, most)
    if count < least:
        raise invalid(field, "must not be empty")


def too_many(field: str, count: int, most: int) -> SluicewayError:
    """The error `too_many_items` for a field with `count` entries where `most` are allowed."""
    return SluicewayError("too_many_items", f"{field}: {count:,} entries; one call may have at most {most:,}", field)


def check_batch(batch: pa.RecordBatch, now: Millis) -> None:
    """Check the sizes and due times of the items.

    Raises `invalid_request`. The error's field names the first bad value, such as `items[3].kind`.
    """
    try:
        check_sizes(batch)
    except SluicewayError as error:
        raise SluicewayError(error.code, error.detail, error.detail.partition(":")[0]) from None
    if "enqueue_at" in batch.schema.names:
        times = batch.column("enqueue_at").cast(pa.int64()).fill_null(0).to_numpy()
        wrong = (times < 0) | (times > now + MAX_SCHEDULE)
        if wrong.any():
            days = MAX_SCHEDULE // 86_400_000
            raise invalid(f"items[{int(np.argmax(wrong))}].enqueue_at", f"the time is before 1970, or more than {days} days ahead")
