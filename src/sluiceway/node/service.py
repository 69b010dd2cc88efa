"""The instance: which queues there are, and who serves them. What the HTTP server stands on."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.adapters.disk import make_directory
from sluiceway.adapters.lock import DirectoryLock
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.core.tickets import Transfer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import OtherQueueError, SluicewayError, invalid
from sluiceway.kernel.limits import MAX_PARTITIONS
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.backends import DEFAULT_BACKENDS, BackendSettings
from sluiceway.model.configuration import Configuration
from sluiceway.model.health import Check
from sluiceway.model.inspection import Deleted, DeleteItems, ItemsPage, ListItems
from sluiceway.model.queue import PartitionRecord, QueueRecord, Verb, decode_queue, encode_queue
from sluiceway.model.requests import (
    TRANSFER_GROUP,
    Clear,
    Cleared,
    Explanation,
    Extend,
    Extended,
    Lease,
    Leased,
    Peek,
    Produce,
    Produced,
    ProduceKey,
    QueuePatch,
    QueueSpec,
    QueueStats,
    Redrive,
    Redriven,
    Settle,
    Settled,
)
from sluiceway.node.audit import AuditTrail, changes, settings_of
from sluiceway.node.backend_pool import BackendInfo, BackendPool, OpenStore
from sluiceway.node.blobs import BlobCache
from sluiceway.node.burial import dead_rows, redriven_rows
from sluiceway.node.driver import QueueDriver
from sluiceway.node.health import check_backends, check_meta, check_partitions
from sluiceway.node.inspection import Asked
from sluiceway.node.reconfigure import plan
from sluiceway.node.redrive import redrive
from sluiceway.node.stores import open_store
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import PartitionRef, StoreUnavailableError

log = logging.getLogger(__name__)

QUEUE = "queue/"
DROPPING = "dropping/"
GRANT = "grant"
BURIAL_TIMEOUT = 30_000


class Service:
    """All queues of one data directory, served by this process alone. `start` before use, `stop` after.

    Partitions lie on the configured `backends`; those of a queue whose backend is not among them are not served. With memory backends
    nothing outlives the process, the queues included.
    """

    def __init__(
        self,
        data: Path,
        backends: Mapping[str, BackendSettings] = DEFAULT_BACKENDS,
        *,
        open_store: OpenStore = open_store,
    ) -> None:
        self._data = data
        self._backends = BackendPool(data, backends, open_store)
        self._meta: MetaStore | None = None
        self._audit: AuditTrail | None = None
        self._lock: DirectoryLock | None = None
        self._cache = BlobCache()
        self._grant = 0
        self._drivers: dict[str, QueueDriver] = {}
        self._changing = asyncio.Lock()

    # ---- life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Own the data directory, take a new grant, finish deletions that were cut off, and open every queue."""
        make_directory(self._data)
        self._lock = DirectoryLock(self._data)
        self._meta = MemoryMetaStore() if self._backends.keeps_nothing else SqliteMetaStore(self._data / "meta.sqlite")
        self._audit = AuditTrail(self._meta)
        await self._backends.start(self._meta)
        await self._take_grant()
        view = await self.meta.read(prefixes=[QUEUE, DROPPING])
        for key, entry in view.prefix(DROPPING).items():
            await self._drop(key, _dropped(entry.value))
        # All of them are known before the first opens: it may have items on their way to another.
        drivers = [self._add(decode_queue(entry.value)) for entry in view.prefix(QUEUE).values()]
        await asyncio.gather(*(driver.start() for driver in drivers))

    async def stop(self) -> None:
        """Finish what is in flight and release the directory. Waiting leases are answered empty."""
        await asyncio.gather(*(driver.stop() for driver in self._drivers.values()))
        self._drivers.clear()
        await self._backends.close()
        await self.audit.close()
        await self.meta.close()
        if self._lock is not None:
            self._lock.release()

    async def catch_up(self) -> None:
        """Let all happen that is due, after the clock was moved ahead."""
        await asyncio.gather(*(driver.catch_up() for driver in self._drivers.values()))

    @property
    def meta(self) -> MetaStore:
        assert self._meta is not None, "the service is not started"
        return self._meta

    @property
    def audit(self) -> AuditTrail:
        assert self._audit is not None, "the service is not started"
        return self._audit

    async def _take_grant(self) -> None:
        """Each start is a new owner: its fence shuts out whatever an earlier process may have left in flight."""
        while True:
            view = await self.meta.read([GRANT])
            entry = view.entries.get(GRANT)
            grant = (int(entry.value) if entry else 0) + 1
            try:
                await self.meta.commit({GRANT: entry.stamp if entry else None}, puts={GRANT: str(grant).encode()})
            except ConflictError:
                continue
            self._grant = grant
            return

    def _add(self, record: QueueRecord) -> QueueDriver:
        backends = {each.backend: self._backends.get(each.backend) for each in record.partitions}
        driver = self._drivers[record.queue_name] = QueueDriver(record, backends, self._cache, self._grant, self._bury)
        return driver

    # ---- backends ---------------------------------------------------------------------------------------------

    def backends(self) -> list[BackendInfo]:
        """Where partitions lie or may lie, by name."""
        return self._backends.infos()

    async def reconfigure(self, old: Configuration, new: Configuration, also: Sequence[str] = (), by: Actor = SYSTEM) -> list[str]:
        """Change the backends from those of the one configuration to those of the other, whole or not at all.

        Returns the names of all keys that change, of other sections too, and `also`; they are audited, in one entry. Raises
        `restart_required`, `invalid_request`, `unavailable`, `outcome_unknown`; then nothing has changed.
        """
        async with self._changing:
            planned = plan(old, new, await self._holding())
            planned.check()
            changed = [*planned.changed, *also]
            if not changed:
                return []
            replacement = await self._backends.prepare(new.backends, self.meta)
            key, entry = self.audit.entry("config.reload", by, detail={"changed": changed})
            try:
                checks = dict.fromkeys(replacement.puts)
                await self.meta.commit(checks, puts={**replacement.puts, key: entry}, deletes=replacement.deletes)
            except MetaUnknownError as error:
                # What the entry says has happened must have.
                if not await self._is_recorded(key):
                    await replacement.discard()
                    raise SluicewayError("outcome_unknown", f"nothing was applied: the meta store did not answer: {error}") from error
            except BaseException:
                await replacement.discard()
                raise
            self._backends.switch(replacement)
        log.info("configuration changed: %s", ", ".join(changed))
        return changed

    async def _holding(self) -> Counter[str]:
        """How many partitions each backend holds, those of deleted queues included whose data is still there."""
        try:
            dropping = (await self.meta.read(prefixes=[DROPPING])).prefix(DROPPING).values()
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
        partitions = [each for record in self.queues() for each in record.partitions]
        partitions += [each for entry in dropping for each in _dropped(entry.value)]
        return Counter(each.backend for each in partitions)

    # ---- queues -----------------------------------------------------------------------------------------------

    async def create_queue(self, spec: QueueSpec, by: Actor = SYSTEM) -> QueueRecord:
        """Record a queue and open it. Raises queue_exists, invalid_request."""
        check_queue_name(spec.queue_name)
        if not 1 <= spec.requested_partitions <= MAX_PARTITIONS:
            raise invalid("requested_partitions", f"expected 1 to {MAX_PARTITIONS}")
        async with self._changing:
            if spec.queue_name in self._drivers:
                raise SluicewayError("queue_exists", f"there is a queue {spec.queue_name!r} already", "queue_name")
            if spec.dead_queue is not None:
                self._check_dead_queue(spec.queue_name, spec.dead_queue)
            now = system.now()
            record = QueueRecord(
                spec.queue_name,
                await self._new_incarnation(),
                now,
                now,
                spec.lease_timeout,
                spec.max_attempts,
                spec.dead_queue,
                spec.reference,
                self._backends.place(spec.requested_partitions),
                max_lease_timeout=spec.max_lease_timeout,
                expire_timeout=spec.expire_timeout,
                retry_backoff=spec.retry_backoff,
                idempotency_window=spec.idempotency_window,
                write_timeout=spec.write_timeout,
            )
            key = QUEUE + record.queue_name
            entry = self.audit.entry("queues.create", by, record.queue_name, settings_of(record))
            try:
                await self._commit_meta({key: None}, dict([(key, encode_queue(record)), entry]), ())
            except SluicewayError:
                await self._adopt(key)
                raise
            await self._add(record).start()
        log.info("queue %s created with %d partitions", record.queue_name, len(record.partitions), extra=_said(by))
        return record

    async def _adopt(self, key: str) -> None:
        """Follow what is recorded of the queue: a change of it ended unknown. A new one could otherwise be neither used nor deleted."""
        try:
            entry = (await self.meta.read([key])).entries.get(key)
        except StoreUnavailableError as error:
            log.warning("not known whether %s is recorded: %s", key, error)
            return
        if entry is None:
            return
        record = decode_queue(entry.value)
        if record.queue_name in self._drivers:
            self._drivers[record.queue_name].configure(record)
        else:
            await self._add(record).start()

    async def _new_incarnation(self) -> str:
        """One that no queue has, nor any deleted one whose data may still be there."""
        view = await self.meta.read(prefixes=[DROPPING])
        used = {record.incarnation for record in self.queues()} | {key.removeprefix(DROPPING) for key in view.entries}
        while (incarnation := system.new_incarnation()) in used:
            pass
        return incarnation

    def _check_dead_queue(self, queue_name: str, dead_queue: str) -> None:
        check_queue_name(dead_queue, "dead_queue")
        if dead_queue == queue_name:
            raise invalid("dead_queue", "a queue cannot be its own dead queue")
        if dead_queue not in self._drivers:
            raise invalid("dead_queue", f"there is no queue {dead_queue!r}; create it first")
        if self._drivers[dead_queue].record.dead_queue is not None:
            raise invalid("dead_queue", f"queue {dead_queue!r} has a dead queue itself; chains are not allowed")

    async def update_queue(self, queue_name: str, patch: QueuePatch, by: Actor = SYSTEM) -> QueueRecord:
        """Change these settings and no others, durably and at once. Raises queue_not_found, version_conflict, invalid_request."""
        async with self._changing:
            return await self._change(queue_name, patch, "queues.update", by)

    async def pause(self, queue_name: str, verbs: Sequence[Verb], paused: bool, by: Actor = SYSTEM) -> QueueRecord:
        """Let the queue take (`produce`) or give out (`lease`) nothing, or do so again, durably. Other verbs stay as they are."""
        async with self._changing:
            before = set(self._driver(queue_name).record.paused)
            after = before | set(verbs) if paused else before - set(verbs)
            action = "queue.pause" if paused else "queue.resume"
            return await self._change(queue_name, QueuePatch({"paused": tuple(sorted(after))}), action, by)

    async def _change(self, queue_name: str, patch: QueuePatch, action: str, by: Actor) -> QueueRecord:
        driver, key = self._driver(queue_name), QUEUE + queue_name
        try:
            entry = (await self.meta.read([key])).entries[key]
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
        record = decode_queue(entry.value)
        if patch.version not in (None, record.version):
            raise SluicewayError("version_conflict", f"queue {queue_name!r} is at version {record.version}, not {patch.version}", "version")
        if all(getattr(record, name) == value for name, value in patch.settings.items()):
            # It may have landed with its answer lost, and not have taken effect here.
            driver.configure(record)
            return record
        changed = msgspec.structs.replace(record, **patch.settings, version=record.version + 1, updated_at=system.now())
        if changed.lease_timeout > changed.max_lease_timeout:
            raise invalid("lease_timeout", "it is more than max_lease_timeout")
        if changed.dead_queue is not None and changed.dead_queue != record.dead_queue:
            self._check_dead_queue(queue_name, changed.dead_queue)
            self._check_no_chain(queue_name)
        audited = self.audit.entry(action, by, queue_name, changes(record, changed))
        try:
            await self.meta.commit({key: entry.stamp}, puts=dict([(key, encode_queue(changed)), audited]))
        except ConflictError:
            raise SluicewayError("version_conflict", f"another process has just changed queue {queue_name!r}", "version") from None
        except MetaUnknownError as error:
            await self._adopt(key)
            raise SluicewayError("outcome_unknown", f"the meta store did not say whether it took the change: {error}") from error
        driver.configure(changed)
        log.info("queue %s changed: %s", queue_name, ", ".join(patch.settings), extra=_said(by))
        return changed

    def _check_no_chain(self, queue_name: str) -> None:
        for other in self._drivers.values():
            if other.record.dead_queue == queue_name:
                text = f"dead_queue: queue {queue_name!r} is itself the dead queue of {{other}}"
                raise OtherQueueError("invalid_request", text, other.record.queue_name, "dead_queue")

    async def delete_queue(self, queue_name: str, force: bool, by: Actor = SYSTEM) -> None:
        """Delete a queue and its items. Raises queue_not_found, queue_in_use, queue_not_empty (unless `force`)."""
        async with self._changing:
            driver = self._driver(queue_name)
            # Whatever came in between the check and the deletion would be acknowledged and lost.
            driver.closing = True
            try:
                self._check_deletable(driver, force)
            except SluicewayError:
                driver.closing = False
                raise
            dropping = DROPPING + driver.record.incarnation
            partitions = driver.record.partitions
            puts = dict([(dropping, msgspec.json.encode(partitions)), self.audit.entry("queues.delete", by, queue_name, {"force": force})])
            try:
                await self._commit_meta({}, puts, (QUEUE + queue_name,))
            except SluicewayError:
                # It serves again if it is surely still there; one that may be deleted must not take anything.
                driver.closing = not await self._is_recorded(QUEUE + queue_name)
                raise
            del self._drivers[queue_name]
            await driver.stop()
            await self._drop(dropping, partitions)
        log.info("queue %s deleted", queue_name, extra=_said(by))

    async def _is_recorded(self, key: str) -> bool:
        try:
            return key in (await self.meta.read([key])).entries
        except StoreUnavailableError:
            return False

    def _check_deletable(self, driver: QueueDriver, force: bool) -> None:
        queue_name = driver.record.queue_name
        for other in self._drivers.values():
            if other.record.dead_queue == queue_name:
                text = "queue {other} sends its dead items there; give it another dead queue first"
                raise OtherQueueError("queue_in_use", text, other.record.queue_name, "queue_name")
        stats = driver.stats()
        left = sum(each.total + each.transferring for each in stats.partitions) + stats.produce_waiting
        if force:
            return
        for other in self._drivers.values():
            if other is not driver and other.may_send_to(queue_name):
                text = "items of queue {other} are, or may be, on their way there; delete with force to lose them"
                raise OtherQueueError("queue_in_use", text, other.record.queue_name, "force")
        if left:
            raise SluicewayError("queue_not_empty", f"queue {queue_name!r} still has {left} items; delete with force to lose them", "force")
        closed = [each.partition for each in stats.partitions if each.state != "available"]
        if closed:
            detail = f"partition {closed[0]} of queue {queue_name!r} is not open, so nobody knows what it has; delete with force to lose it"
            raise SluicewayError("queue_not_empty", detail, "force")

    async def _drop(self, key: str, partitions: tuple[PartitionRecord, ...]) -> None:
        """Remove the data of a queue that is deleted already. Cut off or failing, it is done again at the next start."""
        left = 0
        for each in partitions:
            try:
                await self._backends.get(each.backend).drop(PartitionRef(key.removeprefix(DROPPING), each.partition))
            except StoreUnavailableError as error:
                left += 1
                log.warning("data of a deleted queue stays until the next start: %s", error)
        if not left:
            await self._commit_meta({}, {}, (key,))

    async def _commit_meta(self, checks: dict[str, None], puts: dict[str, bytes], deletes: tuple[str, ...]) -> None:
        try:
            await self.meta.commit(checks=checks, puts=puts, deletes=deletes)
        except ConflictError:
            if any(checks.values()):
                raise SluicewayError("version_conflict", "another process has just changed that queue", "version") from None
            raise SluicewayError("queue_exists", "another process has just created that queue", "queue_name") from None
        except MetaUnknownError as error:
            raise SluicewayError("outcome_unknown", f"the meta store did not say whether it took the change: {error}") from error

    def queue(self, queue_name: str) -> QueueRecord:
        """The queue's record. Raises queue_not_found."""
        return self._driver(queue_name).record

    def queues(self) -> list[QueueRecord]:
        """All queues, by name."""
        return [self._drivers[name].record for name in sorted(self._drivers)]

    def _driver(self, queue_name: str) -> QueueDriver:
        driver = self._drivers.get(queue_name)
        if driver is None:
            raise SluicewayError("queue_not_found", f"there is no queue {queue_name[:64]!r}", "queue_name")
        return driver

    # ---- items ------------------------------------------------------------------------------------------------

    async def produce(self, queue_name: str, request: Produce) -> Produced:
        return cast(Produced, await self._driver(queue_name).ask(request))

    async def lease(self, queue_name: str, request: Lease, payload: bool = True) -> Leased:
        return cast(Leased, await self._driver(queue_name).ask(request, payload))

    async def settle(self, queue_name: str, request: Settle) -> Settled:
        return cast(Settled, await self._driver(queue_name).ask(request))

    async def extend(self, queue_name: str, request: Extend) -> Extended:
        return cast(Extended, await self._driver(queue_name).ask(request))

    async def clear(self, queue_name: str, request: Clear, by: Actor = SYSTEM) -> Cleared:
        work = self._driver(queue_name).ask(request)
        return cast(Cleared, await self.audit.recorded("queue.clear", by, queue_name, request, work))

    async def redrive(self, queue_name: str, request: Redrive, by: Actor = SYSTEM) -> Redriven:
        work = redrive(self._driver(queue_name), request, self._drivers.__contains__)
        return await (work if request.dry_run else self.audit.recorded("queue.redrive", by, queue_name, request, work))

    async def list_items(self, queue_name: str, request: ListItems) -> ItemsPage:
        return await self._driver(queue_name).list_items(request)

    async def import_items(self, queue_name: str, request: Produce, by: Actor = SYSTEM) -> Produced:
        asked = Asked(request.batch.num_rows)
        return await self.audit.recorded("storage/items.import", by, queue_name, asked, self.produce(queue_name, request))

    async def delete_items(self, queue_name: str, request: DeleteItems, by: Actor = SYSTEM) -> Deleted:
        asked = Asked(sum(map(len, request.offsets.values())) + len(request.foreign))
        work = self._driver(queue_name).ask(request)
        return cast(Deleted, await self.audit.recorded("storage/items.delete", by, queue_name, asked, work))

    async def reload(self, queue_name: str, timeout: Millis, by: Actor = SYSTEM) -> None:
        await self._driver(queue_name).reload(timeout)
        await self.audit.record("queue.reload", by, queue_name)

    async def explain(self, queue_name: str, partition: int, offset: int) -> Explanation:
        return self._driver(queue_name).explain(partition, offset)

    async def peek(self, queue_name: str, request: Peek) -> list[pa.RecordBatch]:
        return await self._driver(queue_name).peek(request)

    def stats(self, queue_name: str) -> QueueStats:
        return self._driver(queue_name).stats()

    def problems(self) -> list[str]:
        """Why the instance is not fully ready; empty when it is."""
        return self._backends.problems() + [problem for driver in self._drivers.values() for problem in driver.problems()]

    async def checks(self) -> list[Check]:
        """What the instance stands on, looked at now."""
        partitions = check_partitions(driver.stats() for driver in self._drivers.values())
        return [await check_meta(self.meta, GRANT), *check_backends(self.backends()), partitions]

    async def _bury(self, source: QueueRecord, partition: int, transfer: Transfer, rows: list[pa.RecordBatch]) -> None:
        """Produce a transfer's items into their queue, once: the key is the transfer, and transfers of a partition come in order."""
        target = transfer.target or source.dead_queue
        if transfer.reason and target not in self._drivers:
            # The dead queue of that time was deleted by force, which gave up what was on its way there: the present one takes it. What had
            # arrived unheard of, and was handled there before the deletion, is handled twice.
            target = source.dead_queue
        if target is None:
            # The queue has lost its dead queue in the meantime: what dies is dropped.
            return
        group = f"{TRANSFER_GROUP}{source.incarnation}.{partition}"
        key = ProduceKey(f"{group}/{transfer.number}", group, transfer.number)
        batch = dead_rows(source, transfer.reason, rows) if transfer.reason else redriven_rows(source, rows)
        await self.produce(target, Produce(batch, BURIAL_TIMEOUT, key))


def _said(by: Actor) -> dict[str, str]:
    """For a line of the log: whose change it was."""
    return {"caller": by.name, "request_id": by.request_id}


def _dropped(entry: bytes) -> tuple[PartitionRecord, ...]:
    """The partitions of a deleted queue, which were once only counted."""
    found = msgspec.json.decode(entry, type=int | tuple[PartitionRecord, ...])
    return tuple(map(PartitionRecord, range(found))) if isinstance(found, int) else found
