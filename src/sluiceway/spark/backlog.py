"""Backlog of a streaming query's queues, for the query's progress in Spark."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.options import SourceOptions
from sluiceway.spark.server_calls import Client

log = logging.getLogger("sluiceway.spark")

READ_AGAIN = 10.0
"""Seconds between two readings: a query may have ten triggers a second."""

_PATIENCE: Millis = 2_000
"""How long a call of a reading is repeated."""


class Backlog:
    """What is in the queues. A thread reads it, so no trigger waits for that."""

    def __init__(self, options: SourceOptions) -> None:
        self._queues = options.queues
        self._server = replace(options.server, request_timeout=min(_PATIENCE, options.server.request_timeout))
        self._latest: dict[str, dict[str, int]] | None = None
        self._due = 0.0
        self._reading: threading.Thread | None = None

    def refresh(self) -> None:
        """Begin a reading, if it is time for one."""
        now = time.monotonic()
        if now < self._due or (self._reading is not None and self._reading.is_alive()):
            return
        self._due = now + READ_AGAIN
        self._reading = threading.Thread(target=self._read, name="sluiceway-backlog", daemon=True)
        self._reading.start()

    def latest(self) -> dict[str, dict[str, int]] | None:
        """The last reading by queue: items that are `ready`, `leased` (by any consumer) and `scheduled`, and `oldest_s`, the age in seconds
        of the next ready item when the last minute ended. Without `oldest_s` there was none, or no history yet. None: the server did not
        answer."""
        return self._latest

    def _read(self) -> None:
        client = Client(self._server)
        try:
            self._latest = {queue: self._of(client, queue) for queue in self._queues}
        except SluicewayError as error:
            self._latest = None
            log.info("the backlog is not known: %s", error)
        finally:
            client.close()

    @staticmethod
    def _of(client: Client, queue: str) -> dict[str, int]:
        stats = client.call("/v1/queue.stats", {"queue_name": queue})
        history = client.call("/v1/queue.history", {"queue_name": queue, "minutes": 1})
        return of_queue(stats, history)


def of_queue(stats: Mapping[str, Any], history: Mapping[str, Any]) -> dict[str, int]:
    """The backlog of a queue, from the answers of `queue.stats` and `queue.history`."""
    partitions = [each for logical in stats["logical_queues"] for each in logical["partitions"]]
    found = {shown: sum(each[name] for each in partitions) for shown, name in _LEVELS.items()}
    oldest = [age for age in history["series"].get("oldest_s", []) if age is not None]
    return found | ({"oldest_s": oldest[-1]} if oldest else {})


_LEVELS = {"ready": "ready", "leased": "total_leased", "scheduled": "scheduled"}
