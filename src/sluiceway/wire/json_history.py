"""JSON codec of a queue's history."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sluiceway.contract.fields import time_field
from sluiceway.contract.history_answers import QueueHistory
from sluiceway.model.queue_minutes import COUNTS, LEVELS, MAX_MINUTES, MINUTE, OLDEST, History
from sluiceway.wire.decoding import Call, JsonDecoder


class HistoryCall(Call):
    minutes: Annotated[int, Meta(ge=1, le=MAX_MINUTES)] = 60


decode_history = JsonDecoder(HistoryCall)


def history(queue_name: str, found: History) -> bytes:
    """The history as JSON: one series per measure, with one value per minute."""
    series = {name: list(found.series[name]) for name in (*LEVELS, OLDEST, *COUNTS)}
    return msgspec.json.encode(QueueHistory(queue_name=queue_name, first_at=time_field(found.first * MINUTE), series=series))
