"""Rows in memory are those of partitions that are served: a queue that is deleted, or a partition that has moved away, leaves none."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sluiceway.core.queue.partition_executor import ExecutorState
from sluiceway.instance.service import Service
from sluiceway.local.blob_cache import ENTRY_BYTES, BlobCache
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually, lease, payloads, produce, rows, serving, spec


def kept(service: Service) -> tuple[int, int]:
    """Blobs and bytes in memory."""
    return len(service._cache), service._cache.size


def test_all_blobs_of_a_partition_are_dropped_at_once() -> None:
    cache, batch = BlobCache(), rows("a")
    for held in ("one", "other"):
        for number in range(3):
            cache.put((held, number), batch)
    cache.drop(("one", 1))
    cache.drop_all("one")
    cache.drop_all("nothing")
    assert len(cache) == 3
    assert cache.size == 3 * (batch.nbytes + ENTRY_BYTES)
    assert cache.get(("one", 0)) is None
    assert cache.get(("other", 2)) is not None
    cache.drop_all("other")
    assert (len(cache), cache.size) == (0, 0)
    assert not cache._numbers


def test_what_is_displaced_is_not_dropped_twice() -> None:
    batch = rows("a")
    cache = BlobCache(2 * (batch.nbytes + ENTRY_BYTES))
    for number in range(5):
        cache.put(("one", number), batch)
    assert len(cache) == 2
    assert cache._numbers == {"one": {3, 4}}
    cache.drop_all("one")
    assert cache.size == 0


@driven
async def test_a_queue_that_is_deleted_with_its_items_leaves_none_in_memory(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("stays"))
        await produce(service, "stays", "a")
        before = kept(service)
        for number in range(20):
            await service.create_queue(spec(f"q{number}"))
            await produce(service, f"q{number}", "a")
            assert kept(service)[0] == before[0] + 1
            await service.delete_queue(f"q{number}", force=True)
        assert kept(service) == before
        assert len(service._cache._numbers) == 1


@driven
async def test_a_partition_that_is_lost_leaves_no_items_in_memory(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        for payload in "abcd":
            await produce(service, "q", payload)
        driver = service._drivers["q"]
        assert kept(service)[0] == 4
        await driver.lose(0, 0)
        assert kept(service)[0] == 2
        # It comes back, and its items are read again.
        driver.gain(service.ownership.tokens(driver.record))
        await driver.opened()
        assert sorted(payloads((await lease(service, "q", most=2)).batches)) == ["a", "b", "c", "d"]


@driven
async def test_rows_that_are_read_too_late_are_not_kept(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        service._cache.drop_all(next(iter(service._cache._numbers)))
        reading, goes_on = asyncio.Event(), asyncio.Event()

        async def wait(_: PartitionRef) -> None:
            reading.set()
            await goes_on.wait()

        store.on_read = wait
        leased = asyncio.create_task(lease(service, "q"))
        await reading.wait()
        driver = service._drivers["q"]
        # The lease is stored by then, and waits for its rows.
        await eventually(lambda: driver.queue.executors[0].state is ExecutorState.READY)
        await driver.lose(0, 0)
        goes_on.set()
        assert payloads((await leased).batches) == ["a"]
        assert kept(service) == (0, 0)
