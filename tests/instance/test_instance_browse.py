"""Browsing a partition of a real instance: the pages of one snapshot, when it is let go, what bounds it, and in a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local import snapshot_reader
from sluiceway.model.changes import RecordKind
from sluiceway.model.inspection import Browse, BrowsedPage
from sluiceway.model.requests import Clear
from sluiceway.ports.partition_store import PartitionRef, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import cluster
from tests.cluster.test_cluster_items import NUMBERS, filled
from tests.instance.instance_rig import Store, eventually, forget_rows, lease, produce, service_on, serving, settle, spec

READY = Browse(0, ("ready",), 2)


def texts(page: BrowsedPage) -> list[str]:
    return [payload.decode() for batch, _ in page.rows for payload in batch.column("payload").to_pylist()]


def after(page: BrowsedPage, request: Browse = READY) -> Browse:
    """The request for the next page."""
    return Browse(request.partition, (), request.limit, page.snapshot, page.position, request.payload)


async def begin(service: Service, letters: str) -> None:
    """A queue with one item for each letter, each in a blob of its own."""
    await service.create_queue(spec("q"))
    for letter in letters:
        await produce(service, "q", letter)


async def rest(service: Service, page: BrowsedPage, request: Browse = READY) -> list[str]:
    """What the following pages have."""
    found = []
    while page.snapshot is not None:
        page = await service.browse("q", after(page, request))
        found += texts(page)
    return found


async def code(service: Service, request: Browse) -> str:
    with pytest.raises(SluicewayError) as raised:
        await service.browse("q", request)
    return raised.value.code


async def blobs(service: Service, store: Store, number: int = 0) -> int:
    """How many the store keeps."""
    snapshot = await store.browse(PartitionRef(service.queue("q").incarnation, number))
    return sum(kind is RecordKind.BLOB for kind, _ in snapshot.records)


async def until_blobs(service: Service, store: Store, count: int) -> None:
    async with asyncio.timeout(60):
        while await blobs(service, store) != count:  # noqa: ASYNC110 - what is waited for has no event to await
            await asyncio.sleep(0.01)


@driven
async def test_pages_are_of_one_moment_and_what_is_gone_meanwhile_is_kept_for_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await begin(service, "abcde")
        first = await service.browse("q", READY)
        assert texts(first) == ["a", "b"]
        await settle(service, "q", await lease(service, "q"))
        await produce(service, "q", "later")
        # Not from what happens to be in memory.
        forget_rows(service)
        assert await blobs(service, store) == 6
        assert texts(await service.browse("q", after(first))) == ["c", "d"]
        assert await rest(service, first) == ["c", "d", "e"]
        assert await rest(service, first) == ["c", "d", "e"], "a page may be asked for again, the last one, too"
        assert texts(await service.browse("q", READY)) == ["later"]


@driven
async def test_a_snapshot_that_nobody_reads_is_let_go_with_what_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (service, store):
        await begin(service, "abcde")
        first = await service.browse("q", READY)
        await settle(service, "q", await lease(service, "q"))
        assert await blobs(service, store) == 5
        monkeypatch.setattr(snapshot_reader, "SNAPSHOT_IDLE", 1)
        assert texts(await service.browse("q", after(first))) == ["c", "d"]
        await until_blobs(service, store, 0)
        assert await code(service, after(first)) == "snapshot_gone"


@driven
async def test_what_fits_on_one_page_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_reader, "SNAPSHOT_READ", 600_000)
    async with serving(tmp_path) as (service, store):
        await begin(service, "a")
        page = await service.browse("q", READY)
        assert (texts(page), page.snapshot) == (["a"], None)
        await settle(service, "q", await lease(service, "q"))
        await until_blobs(service, store, 0)
        assert texts(await service.browse("q", READY)) == []


@driven
async def test_what_is_completed_while_its_page_is_read_is_on_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await begin(service, "a")
        forget_rows(service)

        async def settled(_: PartitionRef) -> None:
            store.on_read = nothing
            await settle(service, "q", await lease(service, "q"))
            forget_rows(service)

        async def nothing(_: PartitionRef) -> None:
            return None

        store.on_read = settled
        assert texts(await service.browse("q", READY)) == ["a"]
        assert service.stats("q").partitions[0].completed == 1
        await until_blobs(service, store, 0)


@driven
async def test_a_snapshot_ends_with_the_opening_of_its_partition(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await begin(service, "abcde")
        first = await service.browse("q", READY)
        await service.clear("q", Clear(request_timeout=5_000))
        assert await blobs(service, store) == 5
        await service.reload("q", 10_000)
        assert await code(service, after(first)) == "snapshot_gone"
        await until_blobs(service, store, 0)


@driven
async def test_what_a_dead_instance_kept_is_removed_by_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path / "partitions")
    service = service_on(tmp_path, store)
    await service.start()
    await begin(service, "abcde")
    await service.browse("q", READY)
    await service.clear("q", Clear(request_timeout=5_000))
    await service.stop()
    async with serving(tmp_path) as (service, store):
        await until_blobs(service, store, 0)
        assert texts(await service.browse("q", READY)) == []


@driven
async def test_snapshots_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (service, _):
        await begin(service, "abcde")
        monkeypatch.setattr(snapshot_reader, "MAX_SNAPSHOTS", 2)
        pages = [await service.browse("q", READY) for _ in range(2)]
        assert await code(service, READY) == "too_many_requests"
        assert await rest(service, pages[1]) == ["c", "d", "e"], "those that are there go on"
        await service.reload("q", 10_000)
        await eventually(lambda: not service._context.snapshots)
        monkeypatch.setattr(snapshot_reader, "MAX_SNAPSHOT_RUNS", 9)
        page = await service.browse("q", READY)
        assert await code(service, READY) == "too_many_requests"
        monkeypatch.setattr(snapshot_reader, "MAX_SNAPSHOT_RUNS", 4)
        assert await code(service, READY) == "too_many_items"
        assert await rest(service, page) == ["c", "d", "e"]


@driven
async def test_a_page_is_no_larger_than_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_reader, "MAX_LEASE_BYTES", 2_500)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        for _ in range(4):
            await produce(service, "q", "x" * 500, "y" * 500)
        request = Browse(0, ("ready",), 100)
        page = await service.browse("q", request)
        assert len(texts(page)) == 4
        assert len(await rest(service, page, request)) == 4


@driven
async def test_a_store_that_cannot_be_read_is_said_and_asked_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await begin(service, "a")
        forget_rows(service)

        async def broken(_: PartitionRef) -> None:
            raise StoreUnavailableError("gone")

        working, store.on_read = store.on_read, broken
        assert await code(service, READY) == "unavailable"
        store.on_read = working
        assert texts(await service.browse("q", READY)) == ["a"]
        store.missing = {0}
        forget_rows(service)
        assert await code(service, READY) == "snapshot_gone"


@pytest.mark.parametrize("at", range(3))
def test_any_instance_of_a_cluster_reads_every_partition(tmp_path: Path, at: int) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            service = (await filled(made, "x", "y", "z"))[at]
            for number in NUMBERS:
                request = Browse(number, ("leased", "ready"), 2)
                page = await service.browse("q", request)
                assert texts(page) == ["x", "y"]
                assert await rest(service, page, request) == ["z"]
                bare = await service.browse("q", Browse(number, ("ready",), 9, payload=False))
                assert texts(bare) == ["", "", ""]
            assert await code(service, Browse(99, ("ready",), 2)) == "invalid_request"

    asyncio.run(run())


def test_a_partition_that_goes_to_another_owner_is_read_anew(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services: list[Any] = await filled(made, "x", "y", "z")
            owner = made.owner("q", 0)
            page = await services[0].browse("q", READY)
            keeper = next(each for each in services if each is not owner)
            await made.leave(made.name(owner))
            assert await code(keeper, after(page)) == "snapshot_gone"
            anew = await keeper.browse("q", READY)
            assert texts(anew) + await rest(keeper, anew) == ["x", "y", "z"]

    asyncio.run(run())
