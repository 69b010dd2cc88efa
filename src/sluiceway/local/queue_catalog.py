"""Queue catalog: the queues recorded in the meta store, and changes to these records by concurrent processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from sluiceway.core.group.group_records import Writes
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.meta import Stamp, View
from sluiceway.model.queue import QueueRecord, decode_queue, encode_queue
from sluiceway.ports.meta_store import NOTHING, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

QUEUE = "queue/"


class Known(NamedTuple):
    record: QueueRecord
    stamp: Stamp


class Learns(Protocol):
    """Observer of the catalog: notified, in order, of each new or changed queue, and of each deleted one."""

    def learnt(self, record: QueueRecord) -> None: ...

    def forgotten(self, record: QueueRecord) -> None: ...


class Catalog:
    """All queues as of `stamp`. Other processes may have changed them since: `follow` catches up, and no commit here overlooks such a
    change."""

    def __init__(self, meta: MetaStore, learns: Learns) -> None:
        self._meta = meta
        self._learns = learns
        self._known: dict[str, Known] = {}
        self._names: dict[str, str] = {}
        self._view = NOTHING
        """The last view of the records."""
        self.stamp: Stamp = 0

    def __contains__(self, queue_name: str) -> bool:
        return queue_name in self._known

    def __iter__(self) -> Iterator[QueueRecord]:
        """The records, by name."""
        return (self._known[name].record for name in sorted(self._known))

    def get(self, queue_name: str) -> QueueRecord:
        """The record of that name. Raises queue_not_found."""
        known = self._known.get(queue_name)
        if known is None:
            raise SluicewayError("queue_not_found", f"there is no queue {queue_name[:64]!r}", "queue_name")
        return known.record

    def find(self, queue_name: str) -> QueueRecord | None:
        """The record of that name, or None."""
        known = self._known.get(queue_name)
        return None if known is None else known.record

    def of(self, incarnation: str) -> QueueRecord | None:
        """The queue of that incarnation, or None."""
        name = self._names.get(incarnation)
        return None if name is None else self._known[name].record

    async def follow(self, at_least: Stamp = 0) -> None:
        """Read what has changed, unless the records of that stamp have been read already. Raises `unavailable`."""
        if at_least and self.stamp >= at_least:
            return
        try:
            self._view = view = await self._meta.refresh(self._view, QUEUE)
            self._take(view)
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error

    async def look_up(self, queue_name: str) -> QueueRecord:
        """The record, even of a queue that another process has just created. Raises queue_not_found, `unavailable`."""
        if queue_name not in self._known:
            try:
                found = QUEUE + queue_name in (await self._meta.read([QUEUE + queue_name])).entries
            except StoreUnavailableError as error:
                raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
            if found:
                await self.follow()
        return self.get(queue_name)

    def _take(self, view: View) -> None:
        if view.stamp < self.stamp:
            # A newer view has overtaken it.
            return
        self.stamp = view.stamp
        entries = view.prefix(QUEUE)
        for name in [name for name in self._known if QUEUE + name not in entries]:
            self._forget(name)
        for key, entry in entries.items():
            known = self._known.get(key.removeprefix(QUEUE))
            if known is None or known.stamp != entry.stamp:
                self._learn(decode_queue(entry.value), entry.stamp)

    def _learn(self, record: QueueRecord, stamp: Stamp) -> None:
        before = self._known.get(record.queue_name)
        if before is not None and before.record.incarnation != record.incarnation:
            self._forget(record.queue_name)
        self._known[record.queue_name] = Known(record, stamp)
        self._names[record.incarnation] = record.queue_name
        self._learns.learnt(record)

    def _forget(self, queue_name: str) -> None:
        gone = self._known.pop(queue_name).record
        del self._names[gone.incarnation]
        self._learns.forgotten(gone)

    async def put(self, record: QueueRecord, also: Mapping[str, bytes], writes: Writes | None = None, *others: QueueRecord) -> Stamp:
        """Record the queue, and others, as new or changed, with further writes in the same commit.

        Raises ConflictError if another process has changed any queue since `stamp`: then follow, and decide again. `outcome_unknown`.
        """
        writes = writes or Writes()
        for each in (record, *others):
            key, known = QUEUE + each.queue_name, self._known.get(each.queue_name)
            writes.checks[key] = None if known is None else known.stamp
            writes.puts[key] = encode_queue(each)
        writes.puts |= also
        stamp = await self._commit(writes)
        if stamp > self.stamp:
            for each in (record, *others):
                self._learn(each, stamp)
            self.stamp = stamp
        return stamp

    async def delete(self, record: QueueRecord, also: Mapping[str, bytes], writes: Writes | None = None) -> Stamp:
        """Record the queue's deletion, with further writes in the same commit. Raises as `put`."""
        key = QUEUE + record.queue_name
        writes = writes or Writes()
        writes.checks[key] = self._known[record.queue_name].stamp
        writes.puts |= also
        writes.deletes.append(key)
        stamp = await self._commit(writes)
        if stamp > self.stamp:
            self._forget(record.queue_name)
            self.stamp = stamp
        return stamp

    async def _commit(self, writes: Writes) -> Stamp:
        """Commit, provided no queue has changed since `stamp`. On return, `stamp` may already be the new one, or a later one."""
        try:
            return await self._meta.commit(writes.checks, {**writes.unchanged, QUEUE: self.stamp}, writes.puts, writes.deletes)
        except MetaUnknownError as error:
            raise SluicewayError("outcome_unknown", f"the meta store did not confirm the change: {error}") from error
