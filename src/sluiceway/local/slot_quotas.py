"""Slot quotas: changes the record of a queue's concurrency in the meta store, as `core.queue.queue_slots` decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from sluiceway.adapters import system
from sluiceway.core.group.group_records import Token, Writes
from sluiceway.core.queue.queue_slots import QueueSlots, SlotRecord, decide
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.meta import Stamp
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

SLOTS: Final = "slots/"
"""Prefix of the records, each under its queue's incarnation. It is there exactly while the queue has a `concurrency`."""
MAX_TRIES: Final = 10
"""Times that a change is decided anew because another instance has changed the record meanwhile."""


class SlotQuotas:
    """The record of one queue's concurrency."""

    def __init__(self, meta: MetaStore, queue_name: str, incarnation: str) -> None:
        self._meta = meta
        self._key, self._queue = SLOTS + incarnation, QUEUE + queue_name
        self._incarnation = incarnation
        self._is_unsure = False
        """Whether a change may still land whose outcome is not known."""

    async def adjust(self, slots: QueueSlots, record: Callable[[], QueueRecord], tokens: Callable[[], Mapping[int, Token]]) -> None:
        """Look at the record, change it if need be, durably, and report to `slots`."""
        try:
            for _ in range(MAX_TRIES):
                if await self._adjust(slots, record, tokens):
                    return
        except MetaUnknownError as error:
            self._is_unsure = True
            log.info("it is not known whether the quotas of a queue were changed, will retry: %s", error)
        except StoreUnavailableError as error:
            log.info("the quotas of a queue could not be read, will retry: %s", error)
        slots.failed(system.now())

    async def _adjust(self, slots: QueueSlots, record: Callable[[], QueueRecord], tokens: Callable[[], Mapping[int, Token]]) -> bool:
        """Returns whether it was done; not if another instance was first, or what was read is older than what this one has heard."""
        known_record = record()
        view = await self._meta.read([self._key, self._queue])
        entry = view.entries.get(self._key)
        queue = view.entries.get(self._queue)
        there = None if queue is None else decode_queue(queue.value)
        if there is not None and there.incarnation == self._incarnation and there.version < record().version:
            # Its quotas may be those of a higher limit, which has just been lowered.
            return False
        checks: dict[str, Stamp | None] = {self._key: None if entry is None else entry.stamp}
        before = SlotRecord(0) if entry is None else msgspec.json.decode(entry.value, type=SlotRecord)
        if entry is None and queue is not None and there is not None and there.incarnation == self._incarnation and there.concurrency:
            # The queue comes from elsewhere, as in an adoption: what its partitions have leased is not known.
            before, checks[self._queue] = new_record(there), queue.stamp
        known = before.shares.keys() | set(before.unclaimed)
        gone = {number for number in known if number < known_record.given and known_record.partition(number) is None}
        decided = decide(before, slots.held(tokens(), system.now()), gone, system.now())
        slots.begin(before, decided, tokens())
        if before.limit and (self._is_unsure or entry is None or decided.record != before):
            try:
                await self._meta.commit(checks, puts={self._key: msgspec.json.encode(decided.record)})
            except ConflictError:
                return False
        # Without a limit the setting was turned off, or the queue is gone: this instance is about to hear of it, and leases nothing.
        self._is_unsure = False
        slots.done(decided, tokens(), system.now())
        return True


def new_record(record: QueueRecord) -> SlotRecord:
    """The record of a limit for partitions that may have items leased already."""
    return SlotRecord(record.concurrency, tuple(each.partition for each in record.partitions))


async def written_with(meta: MetaStore, before: QueueRecord | None, after: QueueRecord) -> Writes:
    """The writes that go with a change of the queue's record: of a new limit, whose partitions may have items leased already, of a changed
    one, or of none. `before` None: the queue is new. Raises StoreUnavailableError."""
    key, writes = SLOTS + after.incarnation, Writes()
    had = 0 if before is None else before.concurrency
    if after.concurrency == had:
        return writes
    if not after.concurrency:
        writes.deletes.append(key)
    elif not had:
        writes.put(key, SlotRecord(after.concurrency) if before is None else new_record(after))
    else:
        entry = (await meta.read([key])).entries.get(key)
        writes.checks[key] = None if entry is None else entry.stamp
        changed = new_record(after) if entry is None else msgspec.json.decode(entry.value, type=SlotRecord)
        writes.put(key, msgspec.structs.replace(changed, limit=after.concurrency))
    return writes
