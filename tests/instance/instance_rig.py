"""A Service in a directory of its own, over stores that can be told to fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.model.backends import BackendSettings
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import DONE, Disposition, Lease, Leased, Produce, Produced, ProduceKey, QueueSpec, Selection, Settle, Settled
from sluiceway.model.schedule_records import ScheduleRecord
from sluiceway.model.small_batch import in_columns
from sluiceway.ports.partition_store import Changes, Fence, Least, PartitionRef, PartitionStore, Snapshot, StoreUnavailableError
from sluiceway.wire.json_schedules import decode_create

PATIENCE = 120.0
"""Seconds a test waits for something that must happen."""


class Store:
    """A real store, with a hook before each call: what a hook raises, or the outcome that it gives, is the answer.

    Like every store it carries a call that has begun to its end, whether its caller still waits or not.
    """

    def __init__(self, directory: Path, store: PartitionStore | None = None) -> None:
        self._store = store or SqlitePartitionStore(directory)
        self.fences: list[Fence] = []
        self.released: list[PartitionRef] = []
        self.found: set[PartitionRef] = set()
        """Partitions that were read ahead."""
        self.on_open: Callable[[PartitionRef], Awaitable[None]] = fine
        self.on_apply: Callable[[PartitionRef], Awaitable[Outcome | None]] = fine
        self.on_read: Callable[[PartitionRef], Awaitable[None]] = fine
        self.on_drop: Callable[[PartitionRef], Awaitable[None]] = fine
        self.on_applied: Callable[[PartitionRef], Awaitable[None]] = fine
        """After the commit, before its answer."""
        self.missing: set[int] = set()
        """Blobs that the store has lost."""

    def at_once(self, ref: PartitionRef) -> bool:
        return False

    async def identify(self, new: str | None) -> str | None:
        return await self._store.identify(new)

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        self.fences.append(fence)
        await self.on_open(ref)
        return await self._store.open(ref, fence, least)

    async def read_ahead(self, ref: PartitionRef) -> None:
        self.found.add(ref)

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        return await asyncio.shield(self._apply(ref, changes, fence))

    async def _apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        outcome = await self.on_apply(ref)
        if outcome is not None:
            return outcome
        outcome = await self._store.apply(ref, changes, fence)
        await self.on_applied(ref)
        return outcome

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        await self.on_read(ref)
        return await self._store.read(ref, [number for number in blobs if number not in self.missing])

    async def browse(self, ref: PartitionRef) -> Snapshot:
        return await self._store.browse(ref)

    async def drop(self, ref: PartitionRef) -> None:
        await self.on_drop(ref)
        await self._store.drop(ref)

    async def release(self, ref: PartitionRef) -> None:
        self.released.append(ref)
        await self._store.release(ref)

    async def close(self) -> None:
        await self._store.close()

    def die(self) -> None:
        """From here on nothing is written, and whoever asks is not told so: to the store's owner it is as if its process had died."""

        async def unknown(_: PartitionRef) -> Outcome | None:
            return Outcome.UNKNOWN

        self.on_open, self.on_apply = down, unknown


def forget_rows(service: Service) -> None:
    """As if other rows had displaced those in the cache of blobs: the next read goes to the store."""
    cache = service._cache
    for key in list(cache._batches):
        cache.drop(key)


async def fine(_: PartitionRef) -> None:
    return None


async def down(*_: object, **fields: object) -> None:
    raise StoreUnavailableError("the disk is gone")


@contextlib.asynccontextmanager
async def serving_on(directory: Path, **backends: BackendSettings) -> AsyncIterator[tuple[Service, dict[str, Store]]]:
    """A started service on these backends, each over a store with hooks; stopped at the end."""
    stores = {name: Store(directory / name) for name in backends}
    service = Service(directory, backends, open_store=lambda name, *_: stores[name])
    await service.start()
    try:
        yield service, stores
    finally:
        async with asyncio.timeout(PATIENCE):
            await service.stop()


def service_on(directory: Path, store: PartitionStore) -> Service:
    """A service whose only backend is that store."""
    return Service(directory, open_store=lambda *_: store)


@contextlib.asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[Service, Store]]:
    """A started service, stopped at the end."""
    store = Store(directory / "partitions")
    service = service_on(directory, store)
    await service.start()
    try:
        yield service, store
    finally:
        async with asyncio.timeout(PATIENCE):
            await service.stop()


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait for something that happens in the background."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event to await
            await asyncio.sleep(0.002)


def rows(*payloads: str) -> pa.RecordBatch:
    return batch_from_rows([{"payload": payload.encode()} for payload in payloads])


async def produce(service: Service, queue: str, *payloads: str, key: ProduceKey | None = None, timeout: int = 10_000) -> Produced:
    return await service.produce(queue, Produce(rows(*payloads), timeout, key))


async def lease(service: Service, queue: str, count: int = 100, timeout: int = 0, *, most: int = 1, lease_timeout: int = 60_000) -> Leased:
    return await service.lease(queue, Lease("c", count, timeout, lease_timeout, most))


async def settle(service: Service, queue: str, leased: Leased, disposition: Disposition = DONE) -> Settled:
    """The same disposition for every item that was leased."""
    selections: dict[int, list[Selection]] = {}
    for batch in map(in_columns, leased.batches):
        partition = batch.column("partition")[0].as_py()
        selections.setdefault(partition, []).append(Selection(disposition, offsets=batch.column("offset").to_numpy()))
    return await service.settle(queue, Settle(selections, 10_000))


def payloads(batches: Sequence[pa.RecordBatch]) -> list[str]:
    return [payload.decode() for batch in map(in_columns, batches) for payload in batch.column("payload").to_pylist()]


def spec(
    name: str, partitions: int = 1, *, max_attempts: int = 0, dead_queue: str | None = None, order: Literal["key"] | None = None
) -> QueueSpec:
    return QueueSpec(name, partitions, max_attempts=max_attempts, dead_queue=dead_queue, order=order)


def total(service: Service, queue: str) -> int:
    """Items of the queue, those on their way to the dead queue included."""
    return sum(each.total + each.transferring for each in service.stats(queue).partitions)


def schedule_spec(name: str, queue: str, cron: str = "* * * * *", **fields: object) -> ScheduleRecord:
    """A new schedule, as a call describes it."""
    call = {"name": name, "queue_name": queue, "cron": cron, "item": {"utf8": f"of {name}"}, **fields}
    return decode_create(msgspec.json.encode(call)).record(system.new_incarnation(), system.now())


@contextlib.contextmanager
def moved_ahead() -> Iterator[Callable[[Millis], None]]:
    """Moves the time of this thread; back again at the end."""
    total = 0

    def ahead(by: Millis) -> None:
        nonlocal total
        total += by
        system.move_ahead(by)

    try:
        yield ahead
    finally:
        system.move_ahead(-total)
