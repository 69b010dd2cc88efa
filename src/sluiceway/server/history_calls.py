"""The call on the history of a queue."""

from __future__ import annotations

from sluiceway.adapters.system import now
from sluiceway.contract.history_answers import QueueHistory
from sluiceway.instance import history_recorder
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_history


class HistoryCalls:
    """Return a queue's history, minute by minute."""

    def __init__(self, history: history_recorder.QueueHistory) -> None:
        self._history = history

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/queue.history",
                "read",
                self._read,
                json_history.HistoryCall,
                QueueHistory,
                "Show a queue's history: counts for each of the last minutes, up to a day",
                ("queue_not_found",),
            )
        ]

    async def _read(self, request: Request) -> Body:
        call = json_history.decode_history(request.body)
        queue_name = request.permit(call.queue_name)
        return json_history.history(queue_name, await self._history.read(queue_name, call.minutes, now()))
