"""The instance: which queues there are, and who serves them. What the HTTP server stands on."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import cast

import msgspec
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.adapters.disk import make_directory
from sluiceway.adapters.lock import DirectoryLock
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.core.tickets import Transfer
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_PARTITIONS
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.queue import PartitionRecord, QueueRecord, decode_queue, encode_queue
from sluiceway.model.requests import (
    TRANSFER_GROUP,
    Extend,
    Extended,
    Lease,
    Leased,
    Peek,
    Produce,
    Produced,
    ProduceKey,
    QueueSpec,
    QueueStats,
    Settle,
    Settled,
)
from sluiceway.node.blobs import BlobCache
from sluiceway.node.burial import dead_rows
from sluiceway.node.driver import QueueDriver
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import PartitionRef, PartitionStore, StoreUnavailableError

log = logging.getLogger(__name__)

QUEUE = "queue/"
DROPPING = "dropping/"
GRANT = "grant"
BURIAL_TIMEOUT = 30_000


class Service:
    """All queues of one data directory, served by this process alone. `start` before use, `stop` after."""

    def __init__(self, data: Path, store: PartitionStore | None = None, meta: MetaStore | None = None) -> None:
        self._data = data
        self._store = store
        self._meta = meta
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
        self._meta = self._meta or SqliteMetaStore(self._data / "meta.sqlite")
        self._store = self._store or SqlitePartitionStore(self._data / "partitions")
        await self._take_grant()
        view = await self.meta.read(prefixes=[QUEUE, DROPPING])
        for key, entry in view.prefix(DROPPING).items():
            await self._drop(key, msgspec.json.decode(entry.value, type=int))
        records = [decode_queue(entry.value) for entry in view.prefix(QUEUE).values()]
        await asyncio.gather(*(self._open(record) for record in records))

    async def stop(self) -> None:
        """Finish what is in flight and release the directory. Waiting leases are answered empty."""
        await asyncio.gather(*(driver.stop() for driver in self._drivers.values()))
        self._drivers.clear()
        await self.store.close()
        await self.meta.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def meta(self) -> MetaStore:
        assert self._meta is not None, "the service is not started"
        return self._meta

    @property
    def store(self) -> PartitionStore:
        assert self._store is not None, "the service is not started"
        return self._store

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

    async def _open(self, record: QueueRecord) -> None:
        driver = QueueDriver(record, self.store, self._cache, self._grant, self._bury)
        await driver.start()
        self._drivers[record.queue_name] = driver

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
                tuple(PartitionRecord(number) for number in range(spec.requested_partitions)),
            )
            key = QUEUE + record.queue_name
            try:
                await self._commit_meta({key: None}, {key: encode_queue(record)}, ())
            except SluicewayError:
                await self._adopt(key)
                raise
            await self._open(record)
        log.info("queue %s created with %d partitions", record.queue_name, len(record.partitions))
        return record

    async def _adopt(self, key: str) -> None:
        """Serve the queue if it is recorded: its creation, now or earlier, ended unknown, and it could be neither used nor deleted."""
        try:
            entry = (await self.meta.read([key])).entries.get(key)
        except StoreUnavailableError as error:
            log.warning("not known whether %s is recorded: %s", key, error)
            return
        if entry is not None:
            await self._open(decode_queue(entry.value))

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
            count = len(driver.record.partitions)
            await self._commit_meta({}, {dropping: msgspec.json.encode(count)}, (QUEUE + queue_name,))
            del self._drivers[queue_name]
            await driver.stop()
            await self._drop(dropping, count)
        log.info("queue %s deleted", queue_name)

    def _check_deletable(self, driver: QueueDriver, force: bool) -> None:
        queue_name = driver.record.queue_name
        for other in self._drivers.values():
            if other.record.dead_queue == queue_name:
                raise SluicewayError("queue_in_use", f"queue {other.record.queue_name!r} sends its dead items there", "queue_name")
        stats = driver.stats()
        left = sum(each.total + each.transferring for each in stats.partitions) + stats.produce_waiting
        if force:
            return
        if left:
            raise SluicewayError("queue_not_empty", f"queue {queue_name!r} still has {left} items; delete with force to lose them", "force")
        closed = [each.partition for each in stats.partitions if each.state != "available"]
        if closed:
            detail = f"partition {closed[0]} of queue {queue_name!r} is not open, so nobody knows what it has; delete with force to lose it"
            raise SluicewayError("queue_not_empty", detail, "force")

    async def _drop(self, key: str, partitions: int) -> None:
        """Remove the data of a queue that is deleted already. Cut off or failing, it is done again at the next start."""
        try:
            for number in range(partitions):
                await self.store.drop(PartitionRef(key.removeprefix(DROPPING), number))
        except StoreUnavailableError as error:
            log.warning("data of a deleted queue stays until the next start: %s", error)
            return
        await self._commit_meta({}, {}, (key,))

    async def _commit_meta(self, checks: dict[str, None], puts: dict[str, bytes], deletes: tuple[str, ...]) -> None:
        try:
            await self.meta.commit(checks=checks, puts=puts, deletes=deletes)
        except ConflictError:
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

    async def peek(self, queue_name: str, request: Peek) -> list[pa.RecordBatch]:
        return await self._driver(queue_name).peek(request)

    def stats(self, queue_name: str) -> QueueStats:
        return self._driver(queue_name).stats()

    def problems(self) -> list[str]:
        """Why the instance is not fully ready; empty when it is."""
        return [problem for driver in self._drivers.values() for problem in driver.problems()]

    async def _bury(self, source: QueueRecord, partition: int, transfer: Transfer, rows: list[pa.RecordBatch]) -> None:
        """Produce dead items into the dead queue, once: the key is the transfer, and transfers of a partition come in order."""
        assert source.dead_queue is not None
        group = f"{TRANSFER_GROUP}{source.incarnation}.{partition}"
        key = ProduceKey(f"{group}/{transfer.number}", group, transfer.number)
        batch = dead_rows(source, transfer.reason, rows)
        await self.produce(source.dead_queue, Produce(batch, BURIAL_TIMEOUT, key))
