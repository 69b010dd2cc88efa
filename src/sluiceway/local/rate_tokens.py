"""Rate tokens: changes the record of a queue's rate in the meta store, as `core.queue.queue_rate` decides."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from sluiceway.adapters import system
from sluiceway.core.queue.queue_rate import RateRecord, Taken, take
from sluiceway.core.queue.tickets import TakeTokens
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.meta import Entry, Stamp
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

RATES: Final = "rates/"
"""Prefix of the records, each under its queue's incarnation. It is deleted with the queue."""
MAX_TRIES: Final = 10
"""Times that a change is decided anew because another instance has changed the record meanwhile."""


class RateTokens:
    """The record of one queue's rate."""

    def __init__(self, meta: MetaStore, queue_name: str, incarnation: str) -> None:
        self._meta = meta
        self._key, self._queue = RATES + incarnation, QUEUE + queue_name
        self._incarnation = incarnation
        self._seen: Entry | None = None
        """The record as last written here. If another instance has changed it since, the next change conflicts."""

    async def take(self, effect: TakeTokens, name: str) -> None:
        """Take tokens for the instance of that name, durably, and report them to the effect's `rate`."""
        try:
            taken = await self._take(effect, name)
        except (MetaUnknownError, StoreUnavailableError) as error:
            log.info("tokens of a queue's rate could not be taken, will retry: %s", error)
            taken = None
        if taken is None:
            self._seen = None
            effect.rate.failed(system.now())
        else:
            effect.rate.taken(taken.record, taken.tokens, name, system.now())

    async def _take(self, effect: TakeTokens, name: str) -> Taken | None:
        checks: dict[str, Stamp | None] = {}
        for _ in range(MAX_TRIES):
            if self._seen is None:
                view = await self._meta.read([self._key, self._queue])
                self._seen = view.entries.get(self._key)
                queue = view.entries.get(self._queue)
                if queue is None or decode_queue(queue.value).incarnation != self._incarnation:
                    # Deleted: nothing may be written that no deletion would remove.
                    return None
                # An existing record is deleted together with the queue.
                checks = {} if self._seen is not None else {self._queue: queue.stamp}
            record = None if self._seen is None else msgspec.json.decode(self._seen.value, type=RateRecord)
            rate = effect.rate
            taken = take(record, rate.rate, rate.version, name, effect.want, effect.until, system.now())
            if taken is None or taken.tokens is None:
                return taken
            value = msgspec.json.encode(taken.record)
            checks[self._key] = None if self._seen is None else self._seen.stamp
            try:
                self._seen = Entry(value, await self._meta.commit(checks, puts={self._key: value}))
            except ConflictError:
                self._seen = None
            else:
                return taken
        return None


def deleted_with(record: QueueRecord) -> list[str]:
    """The keys that the queue has for its rate."""
    return [RATES + record.incarnation]
