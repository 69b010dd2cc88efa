"""The instance: which queues there are, and who serves them. What the HTTP server stands on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.adapters.disk import make_directory
from sluiceway.adapters.lock import DirectoryLock
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.core.placement import interleave, place
from sluiceway.core.tickets import Transfer
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_PARTITIONS
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.backends import DEFAULT_BACKENDS, BackendSettings, MemoryBackend, SqliteBackend
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
from sluiceway.node.backends import Backend
from sluiceway.node.blobs import BlobCache
from sluiceway.node.burial import dead_rows, redriven_rows
from sluiceway.node.configuration import check_backends, directory_of, open_store
from sluiceway.node.driver import QueueDriver
from sluiceway.node.identity import check_identity
from sluiceway.node.redrive import redrive
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import PartitionRef, PartitionStore, StoreUnavailableError

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
        open_store: Callable[[str, BackendSettings, Path], PartitionStore] = open_store,
    ) -> None:
        check_backends(backends)
        self._data = data
        self._settings = backends
        self._open_store = open_store
        self._backends: dict[str, Backend] = {}
        self._meta: MetaStore | None = None
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
        keeps_nothing = any(isinstance(each, MemoryBackend) for each in self._settings.values())
        self._meta = MemoryMetaStore() if keeps_nothing else SqliteMetaStore(self._data / "meta.sqlite")
        for name, settings in self._settings.items():
            self._backends[name] = await self._open_backend(name, settings)
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
        await asyncio.gather(*(backend.close() for backend in self._backends.values()))
        await self.meta.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def meta(self) -> MetaStore:
        assert self._meta is not None, "the service is not started"
        return self._meta

    async def _open_backend(self, name: str, settings: BackendSettings) -> Backend:
        problem = None
        if isinstance(settings, SqliteBackend):
            problem = await check_identity(name, directory_of(name, settings, self._data), self.meta)
        if problem is not None:
            log.error("backend %s is not served: %s", name, problem)
            return Backend(name, None, 0, problem)
        return Backend(name, self._open_store(name, settings, self._data), settings.write_timeout)

    def _backend(self, name: str) -> Backend:
        """That of the name; if none is configured, one that never serves."""
        return self._backends.setdefault(name, Backend(name, None, 0))

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
        backends = {each.backend: self._backend(each.backend) for each in record.partitions}
        driver = self._drivers[record.queue_name] = QueueDriver(record, backends, self._cache, self._grant, self._bury)
        return driver

    # ---- queues -----------------------------------------------------------------------------------------------

    async def create_queue(self, spec: QueueSpec) -> QueueRecord:
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
                self._placed(spec.requested_partitions),
                max_lease_timeout=spec.max_lease_timeout,
                expire_timeout=spec.expire_timeout,
                retry_backoff=spec.retry_backoff,
                idempotency_window=spec.idempotency_window,
                write_timeout=spec.write_timeout,
            )
            key = QUEUE + record.queue_name
            try:
                await self._commit_meta({key: None}, {key: encode_queue(record)}, ())
            except SluicewayError:
                await self._adopt(key)
                raise
            await self._add(record).start()
        log.info("queue %s created with %d partitions", record.queue_name, len(record.partitions))
        return record

    def _placed(self, requested: int) -> tuple[PartitionRecord, ...]:
        counts = place(requested, {name: settings.partition_affinity for name, settings in self._settings.items()})
        return tuple(PartitionRecord(number, backend) for number, backend in enumerate(interleave(counts)))

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

    async def update_queue(self, queue_name: str, patch: QueuePatch) -> QueueRecord:
        """Change these settings and no others, durably and at once. Raises queue_not_found, version_conflict, invalid_request."""
        async with self._changing:
            return await self._change(queue_name, patch)

    async def pause(self, queue_name: str, verbs: Sequence[Verb], paused: bool) -> QueueRecord:
        """Let the queue take (`produce`) or give out (`lease`) nothing, or do so again, durably. Other verbs stay as they are."""
        async with self._changing:
            before = set(self._driver(queue_name).record.paused)
            after = before | set(verbs) if paused else before - set(verbs)
            return await self._change(queue_name, QueuePatch({"paused": tuple(sorted(after))}))

    async def _change(self, queue_name: str, patch: QueuePatch) -> QueueRecord:
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
        try:
            await self.meta.commit({key: entry.stamp}, puts={key: encode_queue(changed)})
        except ConflictError:
            raise SluicewayError("version_conflict", f"another process has just changed queue {queue_name!r}", "version") from None
        except MetaUnknownError as error:
            await self._adopt(key)
            raise SluicewayError("outcome_unknown", f"the meta store did not say whether it took the change: {error}") from error
        driver.configure(changed)
        log.info("queue %s changed: %s", queue_name, ", ".join(patch.settings))
        return changed

    def _check_no_chain(self, queue_name: str) -> None:
        for other in self._drivers.values():
            if other.record.dead_queue == queue_name:
                raise invalid("dead_queue", f"queue {queue_name!r} is itself the dead queue of {other.record.queue_name!r}")

    async def delete_queue(self, queue_name: str, force: bool) -> None:
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
            try:
                await self._commit_meta({}, {dropping: msgspec.json.encode(partitions)}, (QUEUE + queue_name,))
            except SluicewayError:
                # It serves again if it is surely still there; one that may be deleted must not take anything.
                driver.closing = not await self._is_recorded(QUEUE + queue_name)
                raise
            del self._drivers[queue_name]
            await driver.stop()
            await self._drop(dropping, partitions)
        log.info("queue %s deleted", queue_name)

    async def _is_recorded(self, key: str) -> bool:
        try:
            return key in (await self.meta.read([key])).entries
        except StoreUnavailableError:
            return False

    def _check_deletable(self, driver: QueueDriver, force: bool) -> None:
        queue_name = driver.record.queue_name
        for other in self._drivers.values():
            if other.record.dead_queue == queue_name:
                raise SluicewayError("queue_in_use", f"queue {other.record.queue_name!r} sends its dead items there", "queue_name")
        stats = driver.stats()
        left = sum(each.total + each.transferring for each in stats.partitions) + stats.produce_waiting
        if force:
            return
        for other in self._drivers.values():
            if other is not driver and other.may_send_to(queue_name):
                detail = f"items of queue {other.record.queue_name!r} are, or may be, on their way there; delete with force to lose them"
                raise SluicewayError("queue_in_use", detail, "force")
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
                await self._backend(each.backend).drop(PartitionRef(key.removeprefix(DROPPING), each.partition))
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

    async def clear(self, queue_name: str, request: Clear) -> Cleared:
        return cast(Cleared, await self._driver(queue_name).ask(request))

    async def redrive(self, queue_name: str, request: Redrive) -> Redriven:
        return await redrive(self._driver(queue_name), request, self._drivers.__contains__)

    async def explain(self, queue_name: str, partition: int, offset: int) -> Explanation:
        return self._driver(queue_name).explain(partition, offset)

    async def peek(self, queue_name: str, request: Peek) -> list[pa.RecordBatch]:
        return await self._driver(queue_name).peek(request)

    def stats(self, queue_name: str) -> QueueStats:
        return self._driver(queue_name).stats()

    def problems(self) -> list[str]:
        """Why the instance is not fully ready; empty when it is."""
        backends = [backend.problem for backend in self._backends.values() if backend.problem is not None]
        return backends + [problem for driver in self._drivers.values() for problem in driver.problems()]

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


def _dropped(entry: bytes) -> tuple[PartitionRecord, ...]:
    """The partitions of a deleted queue, which were once only counted."""
    found = msgspec.json.decode(entry, type=int | tuple[PartitionRecord, ...])
    return tuple(map(PartitionRecord, range(found))) if isinstance(found, int) else found
