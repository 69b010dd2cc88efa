"""The JSON call on a queue's history, and its answer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluiceway.contract.fields import QueueName, TimeText
from sluiceway.kernel.clock import format_time
from sluiceway.model.queue_minutes import MAX_MINUTES, MINUTE, History
from sluiceway.wire.decoding import Call, JsonDecoder
from sluiceway.wire.shapes import Shape

Series = list[int | None]


class HistorySeries(Shape):
    """One number a minute, the first minute first; null: nobody looked then."""

    ready: Series
    total_leased: Series
    scheduled: Series
    oldest_s: Series
    produced: Series
    leased: Series
    completed: Series
    retried: Series
    expired: Series
    dead: Series
    released: Series
    cleared: Series
    redriven: Series
    failures: Series


class QueueHistory(Shape):
    """A queue's last minutes that have ended, the first of which begins at `from`."""

    queue_name: QueueName
    every: Literal["1m"]
    first_at: TimeText = msgspec.field(name="from")
    series: HistorySeries


class HistoryCall(Call):
    minutes: Annotated[int, Meta(ge=1, le=MAX_MINUTES)] = 60


decode_history = JsonDecoder(HistoryCall)


def history(queue_name: str, found: History) -> bytes:
    series = HistorySeries(**{name: list(column) for name, column in found.series.items()})
    return msgspec.json.encode(QueueHistory(queue_name, "1m", format_time(found.first * MINUTE), series))
