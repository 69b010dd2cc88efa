"""Backups of a running instance, and what a restore makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from sluiceway.adapters.storage.memory import MemoryDisk, MemoryPartitionStore
from sluiceway.cluster.cluster_secret import CLUSTER_SECRET, secret_of
from sluiceway.cluster.ownership import GRANT
from sluiceway.contract.backup_answers import BlobsPart, RecordsPart
from sluiceway.core.group.group_records import Keys, Resource
from sluiceway.core.partition.records import Header, pack, unpack_header
from sluiceway.instance import backups, restoration
from sluiceway.instance.backups import Backup
from sluiceway.instance.restoration import GRANTS, NUMBERS, Restored, SavedPartition, renewed, restore, skipped
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.ids import ItemId
from sluiceway.model.access import SYSTEM
from sluiceway.model.backends import DEFAULT_BACKENDS, PostgresBackend, SqliteBackend
from sluiceway.model.changes import Changes, Fence, PartitionRef, Snapshot
from sluiceway.model.meta import Entry
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, ProduceKey, Redrive
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import PATIENCE, eventually, lease, payloads, produce, serving, settle, spec, total

DEAD = Disposition("dead", reason="broken")


unpack_records = msgspec.msgpack.Decoder(RecordsPart).decode
unpack_blobs = msgspec.msgpack.Decoder(BlobsPart).decode


class Saved:
    """All of a backup, as `restore` reads it."""

    layouts = (1, 1)

    def __init__(self) -> None:
        self.partitions: list[SavedPartition] = []
        self.meta_parts: list[bytes] = []
        self.record_parts: dict[PartitionRef, list[bytes]] = {}
        self.blob_data: dict[PartitionRef, dict[int, bytes]] = {}

    def meta(self) -> Iterator[bytes]:
        return iter(self.meta_parts)

    def records(self, ref: PartitionRef) -> Iterator[bytes]:
        return iter(self.record_parts[ref])

    def blobs(self, ref: PartitionRef) -> Iterator[tuple[int, bytes]]:
        return iter(self.blob_data[ref].items())


async def read(service: Service, backup: Backup) -> Saved:
    """Read a backup to its end, and end it."""
    saved = Saved()
    start: int | None = 0
    while start is not None:
        part = unpack_records(await service.backups.records(backup.id, None, start))
        saved.meta_parts.append(part.data)
        start = part.next
    for ref, partition in backup.partitions.items():
        saved.partitions.append(SavedPartition(ref, partition.queue_name, partition.backend))
        saved.record_parts[ref], left, start = [], list[int](), 0
        while start is not None:
            part = unpack_records(await service.backups.records(backup.id, ref, start))
            saved.record_parts[ref].append(part.data)
            left += [number for number, _ in part.blobs]
            start = part.next
        saved.blob_data[ref] = {}
        while left:
            saved.blob_data[ref] |= unpack_blobs(await service.backups.blobs(backup.id, ref, left)).blobs
            left = [number for number in left if number not in saved.blob_data[ref]]
    await service.backups.end(backup.id)
    return saved


async def taken(service: Service) -> Saved:
    return await read(service, await service.backups.begin(SYSTEM))


@contextlib.asynccontextmanager
async def restored(saved: Saved, data: Path) -> AsyncIterator[Service]:
    """A service on the restored data."""
    await restore(saved, data, DEFAULT_BACKENDS, lambda _: None)
    service = Service(data)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


@driven
async def test_items_leases_and_keys_are_as_at_the_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Everything in many parts.
    monkeypatch.setattr(backups, "BACKUP_PART_BYTES", 200)
    monkeypatch.setattr(restoration, "SLICE_BYTES", 100)
    monkeypatch.setattr(restoration, "SLICE_RECORDS", 2)
    async with serving(tmp_path / "data") as (service, _):
        await service.create_queue(spec("q", 3, dead_queue=None))
        for number in range(20):
            await produce(service, "q", f"{number}.a", f"{number}.b")
        first = await produce(service, "q", "once", key=ProduceKey("k"))
        leased = await lease(service, "q", 5, most=3)
        saved = await taken(service)
        later = await produce(service, "q", "later")
        await settle(service, "q", await lease(service, "q", 100, most=3))
    async with restored(saved, tmp_path / "new") as service:
        assert total(service, "q") == 41
        assert sum(each.total_leased for each in service.stats("q").partitions) == 5
        again = await produce(service, "q", "once", key=ProduceKey("k"))
        assert (again.deduplicated, again.first_offset) == (True, first.first_offset)
        assert (await settle(service, "q", leased)).completed == 5
        new = await produce(service, "q", "new")
        assert new.first_offset >= NUMBERS > later.first_offset
        rest = await lease(service, "q", 100, most=3)
        assert all(each.number > NUMBERS for each in rest.leases)
        found = [*payloads(leased.batches), *payloads(rest.batches)]
        assert sorted(found) == sorted(["once", "new", *(f"{number}.{each}" for number in range(20) for each in "ab")])
        assert (await settle(service, "q", rest)).completed == 37


@driven
async def test_a_restored_server_restarts_and_is_backed_up_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        saved = await taken(service)
    async with restored(saved, tmp_path / "new") as service:
        await produce(service, "q", "b")
    service = Service(tmp_path / "new")
    await service.start()
    saved = await taken(service)
    await service.stop()
    async with restored(saved, tmp_path / "newest") as service:
        leased = await lease(service, "q")
        assert payloads(leased.batches) == ["a", "b"]
        assert (await produce(service, "q", "c")).first_offset >= 2 * NUMBERS


@driven
async def test_what_is_settled_while_a_backup_is_read_is_in_it(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (service, store):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a", "b")
        backup = await service.backups.begin(SYSTEM)
        (ref,) = backup.partitions
        await settle(service, "q", await lease(service, "q"))
        assert total(service, "q") == 0
        saved = await read(service, backup)
        (number,) = saved.blob_data[ref]
        # Then nothing needs it.
        async with asyncio.timeout(PATIENCE):
            while await store.read(ref, [number]):  # noqa: ASYNC110 - the drop has no event to await
                await asyncio.sleep(0.002)
    async with restored(saved, tmp_path / "new") as service:
        assert payloads((await lease(service, "q")).batches) == ["a", "b"]


@driven
async def test_a_commit_in_flight_is_awaited_and_none_begins_meanwhile(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (service, store):
        await service.create_queue(spec("q", 2))
        await produce(service, "q", "a")
        going, may_end = asyncio.Event(), asyncio.Event()
        began: list[PartitionRef] = []

        async def slow(ref: PartitionRef) -> Outcome | None:
            began.append(ref)
            going.set()
            await may_end.wait()
            return None

        store.on_apply = slow
        first = asyncio.create_task(produce(service, "q", "b"))
        await going.wait()
        taking = asyncio.create_task(service.backups.begin(SYSTEM))
        await eventually(lambda: service.backups._share._gate.holds(lambda: None))
        second = asyncio.create_task(produce(service, "q", "c"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(began) == 1
        assert not taking.done()
        may_end.set()
        saved = await read(service, await taking)
        await asyncio.gather(first, second)
    async with restored(saved, tmp_path / "new") as service:
        assert sorted(payloads((await lease(service, "q", most=2)).batches)) == ["a", "b"]


@driven
async def test_records_are_read_once_whatever_is_committed_meanwhile(tmp_path: Path) -> None:
    """So commits are not held back while they are read."""
    async with serving(tmp_path / "data") as (service, store):
        await service.create_queue(spec("q", 2))
        await produce(service, "q", "a")
        read_ones: list[PartitionRef] = []
        browse = store.browse

        async def reading(ref: PartitionRef) -> Snapshot:
            read_ones.append(ref)
            found = await browse(ref)
            for text in "bcd":
                await produce(service, "q", text)
            return found

        store.browse = reading  # type: ignore[method-assign]
        saved = await taken(service)
        assert len(read_ones) == len(set(read_ones)) == 2
    async with restored(saved, tmp_path / "new") as service:
        assert sorted(payloads((await lease(service, "q", most=2)).batches)) == sorted("abcdbcd")


@driven
async def test_a_commit_that_does_not_end_refuses_the_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "PATIENCE", 20)
    async with serving(tmp_path / "data") as (service, store):
        await service.create_queue(spec("q"))
        may_end = asyncio.Event()

        async def slow(_: PartitionRef) -> Outcome | None:
            await may_end.wait()
            return None

        store.on_apply = slow
        producing = asyncio.create_task(produce(service, "q", "a"))
        await eventually(lambda: bool(service.backups._share._gate._in_flight))
        with pytest.raises(SluicewayError, match="has not ended within 20ms"):
            await service.backups.begin(SYSTEM)
        may_end.set()
        await producing
        assert (await taken(service)).partitions


def _all_arrived(service: Service) -> bool:
    return not any(part.transferring for name in ("q", "dead") for part in service.stats(name).partitions)


@driven
async def test_an_item_on_its_way_to_the_dead_queue_is_there_once(tmp_path: Path) -> None:
    """Backups at every step of many transfers, there and back."""
    async with serving(tmp_path / "data") as (service, _):
        await service.create_queue(spec("dead", 2))
        await service.create_queue(spec("q", 2, dead_queue="dead"))
        await produce(service, "q", *(f"{number}" for number in range(50)))
        saved: list[Saved] = []

        async def bury() -> None:
            while len(saved) < 15:
                await settle(service, "q", await lease(service, "q", 3, most=2), DEAD)

        async def dig_up() -> None:
            while len(saved) < 15:
                await service.redrive("dead", Redrive(10_000, 5))
                await asyncio.sleep(0)

        async def back_up() -> None:
            while len(saved) < 15:
                saved.append(await taken(service))

        await asyncio.gather(bury(), dig_up(), back_up())
    for number, each in enumerate(saved):
        async with restored(each, tmp_path / f"new-{number}") as service:
            await eventually(partial(_all_arrived, service))
            assert total(service, "q") + total(service, "dead") == 50


@driven
async def test_a_reopened_partition_ends_what_it_kept(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        backup = await service.backups.begin(SYSTEM)
        (ref,) = backup.partitions
        await service._drivers["q"].reload(10_000)
        await settle(service, "q", await lease(service, "q"))
        with pytest.raises(SluicewayError) as caught:
            await service.backups.blobs(backup.id, ref, [0])
        assert caught.value.code == "snapshot_gone"
        await service.backups.end(backup.id)
        assert (await taken(service)).partitions


@driven
async def test_a_backup_that_is_not_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path / "data") as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        backup = await service.backups.begin(SYSTEM)
        with pytest.raises(SluicewayError) as caught:
            await service.backups.begin(SYSTEM)
        assert caught.value.code == "too_many_requests"
        monkeypatch.setattr(backups, "BACKUP_IDLE", 10)
        await service.backups.records(backup.id, None, 0)
        await eventually(lambda: service.backups._share.has(""))
        with pytest.raises(SluicewayError) as caught:
            await service.backups.records(backup.id, None, 0)
        assert caught.value.code == "snapshot_gone"


@driven
async def test_a_backup_that_ends_while_its_records_are_read_leaves_nothing(tmp_path: Path) -> None:
    """As when another instance refuses: nobody would end it a second time."""
    async with serving(tmp_path / "data") as (service, _):
        await service.create_queue(spec("q", 3))
        share, driver, read = service.backups._share, service._drivers["q"], list[int]()
        follow = driver.follow_records

        async def late(number: int) -> None:
            share.end("id")
            await follow(number)
            read.append(number)

        driver.follow_records = late  # type: ignore[method-assign]
        with pytest.raises(SluicewayError, match="the backup has ended"):
            await share.record("id")
        assert (read, driver.recordings) == ([0], {})


@driven
async def test_a_partition_that_is_not_open_refuses(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (service, _):
        await service.create_queue(spec("q", 2))
        service._drivers["q"]._stop_partition(1, ValueError("broken"))
        with pytest.raises(SluicewayError) as caught:
            await service.backups.begin(SYSTEM)
        assert caught.value.code == "unavailable"


# -- restore ------------------------------------------------------------------------------------------------------------


async def a_backup(folder: Path) -> Saved:
    async with serving(folder / "data") as (service, _):
        await service.create_queue(spec("q", 2))
        for text in "abcd":
            await produce(service, "q", text)
        return await taken(service)


@driven
async def test_storage_elsewhere_is_restored_too_and_must_be_empty(tmp_path: Path) -> None:
    saved, disk = await a_backup(tmp_path), MemoryDisk()
    backends = {"default": PostgresBackend(url="postgresql://elsewhere")}
    await restore(saved, tmp_path / "new", backends, lambda _: None, open_store=lambda *_: MemoryPartitionStore(disk))
    service = Service(tmp_path / "new", backends, open_store=lambda *_: MemoryPartitionStore(disk))
    await service.start()
    assert sorted(payloads((await lease(service, "q", most=2)).batches)) == list("abcd")
    await service.stop()
    with pytest.raises(SluicewayError, match="of queue 'q' already"):
        await restore(saved, tmp_path / "newer", backends, lambda _: None, open_store=lambda *_: MemoryPartitionStore(disk))
    assert not (tmp_path / "newer").exists()
    assert len(disk.partitions) == 2


@driven
async def test_a_failed_restore_leaves_nothing(tmp_path: Path) -> None:
    saved, disk = await a_backup(tmp_path), MemoryDisk()

    def broken(_: PartitionRef) -> Iterator[bytes]:
        if any(partition.blobs for partition in disk.partitions.values()):
            raise invalid("dir", "damaged")
        return Saved.records(saved, _)

    saved.records = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(SluicewayError, match="damaged"):
        await restore(saved, tmp_path / "new", DEFAULT_BACKENDS, lambda _: None, open_store=lambda *_: MemoryPartitionStore(disk))
    assert not disk.partitions
    assert os.listdir(tmp_path) == ["data"]


class Failing(MemoryPartitionStore):
    """A store that is gone from its second write on."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self._writes = 0

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        self._writes += 1
        return await super().apply(ref, changes, fence) if self._writes < 2 else Outcome.UNKNOWN

    async def drop(self, ref: PartitionRef) -> None:
        raise StoreUnavailableError("gone")


ELSEWHERE = {"default": PostgresBackend(url="postgresql://elsewhere")}


async def an_interrupted_restore(folder: Path) -> tuple[Saved, MemoryDisk]:
    """A backup, and the storage to which half of it was restored, into the folder `new`."""
    saved, disk = await a_backup(folder), MemoryDisk()
    with pytest.raises(StoreUnavailableError, match="gone"):
        await restore(saved, folder / "new", ELSEWHERE, lambda _: None, open_store=lambda *_: Failing(disk))
    assert disk.partitions
    assert not (folder / "new").exists()
    return saved, disk


@driven
async def test_an_interrupted_restore_is_repeated(tmp_path: Path) -> None:
    saved, disk = await an_interrupted_restore(tmp_path)
    with pytest.raises(SluicewayError, match="If an interrupted restore left it, repeat that one, with the same --data"):
        await restore(saved, tmp_path / "newer", ELSEWHERE, lambda _: None, open_store=lambda *_: MemoryPartitionStore(disk))
    # Another backup, into the same folder.
    partitions, saved.partitions = saved.partitions, []
    with pytest.raises(SluicewayError, match="pass the --config that it had"):
        await restore(saved, tmp_path / "new", {}, lambda _: None, open_store=lambda *_: MemoryPartitionStore(disk))
    saved.partitions = partitions
    # Nor is it in the way that the repeat is interrupted.
    with pytest.raises(StoreUnavailableError, match="gone"):
        await restore(saved, tmp_path / "new", ELSEWHERE, lambda _: None, open_store=lambda *_: Failing(disk))
    await restore(saved, tmp_path / "new", ELSEWHERE, lambda _: None, open_store=lambda *_: MemoryPartitionStore(disk))
    assert sorted(each for each in os.listdir(tmp_path) if each != "data") == ["new"]
    assert not any("restoring" in each for each in os.listdir(tmp_path / "new"))
    service = Service(tmp_path / "new", ELSEWHERE, open_store=lambda *_: MemoryPartitionStore(disk))
    await service.start()
    assert sorted(payloads((await lease(service, "q", most=2)).batches)) == list("abcd")
    await service.stop()


@driven
@pytest.mark.parametrize("change", ["owner", "storage"])
async def test_a_repeated_restore_leaves_what_is_not_of_the_interrupted_one(tmp_path: Path, change: str) -> None:
    saved, disk = await an_interrupted_restore(tmp_path)
    ref = next(iter(disk.partitions))
    if change == "owner":
        await MemoryPartitionStore(disk).open(ref, Fence(1_000, 0, 0))
    else:
        disk.identity = "another"
    before = await MemoryPartitionStore(disk).browse(ref)
    with pytest.raises(SluicewayError, match="of queue 'q' already"):
        await restore(saved, tmp_path / "new", ELSEWHERE, lambda _: None, open_store=lambda *_: MemoryPartitionStore(disk))
    assert before.txn
    assert (await MemoryPartitionStore(disk).browse(ref)).txn == before.txn


@driven
async def test_what_a_killed_restore_left_in_the_folder_goes(tmp_path: Path) -> None:
    saved = await a_backup(tmp_path)
    left = tmp_path / ".new.restoring"
    (left / "partitions").mkdir(parents=True)
    for name in ("meta.sqlite", "partitions/half.sqlite"):
        (left / name).write_bytes(b"half")
    async with restored(saved, tmp_path / "new") as service:
        assert sorted(payloads((await lease(service, "q", most=2)).batches)) == list("abcd")
    assert not left.exists()
    assert not (tmp_path / "new/partitions/half.sqlite").exists()


@driven
async def test_of_two_restores_into_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    saved = await a_backup(tmp_path)
    refused = []

    async def again() -> None:
        with pytest.raises(SluicewayError, match=r"another restore into .*new is running"):
            await restore(saved, tmp_path / "new", DEFAULT_BACKENDS, lambda _: None)
        refused.append(True)

    tasks: list[asyncio.Task[None]] = []

    def tell(done: Restored) -> None:
        if done.partitions == 1:
            tasks.append(asyncio.ensure_future(again()))

    await restore(saved, tmp_path / "new", DEFAULT_BACKENDS, tell)
    await asyncio.gather(*tasks)
    assert refused == [True]
    service = Service(tmp_path / "new")
    await service.start()
    assert total(service, "q") == 4
    await service.stop()


@driven
async def test_what_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    saved = await a_backup(tmp_path)
    with pytest.raises(SluicewayError, match="is not empty"):
        await restore(saved, tmp_path / "data", DEFAULT_BACKENDS, lambda _: None)
    with pytest.raises(SluicewayError, match="has partitions of backend 'default'"):
        await restore(saved, tmp_path / "new", {"other": SqliteBackend()}, lambda _: None)
    saved.layouts = (1, 1_000)
    with pytest.raises(SluicewayError, match="newer version"):
        await restore(saved, tmp_path / "new", DEFAULT_BACKENDS, lambda _: None)


def test_offsets_and_leases_begin_above_all_that_were_given() -> None:
    empty = unpack_header(skipped(pack(Header(next=7, head=7, lease_number=3))))
    assert (empty.next, empty.head, empty.lease_number) == (NUMBERS + 7, NUMBERS + 7, NUMBERS + 3)
    waiting = unpack_header(skipped(pack(Header(next=7, head=5))))
    assert (waiting.next, waiting.head) == (NUMBERS + 7, 5)
    assert len(str(ItemId("k7f3q2ma", 999, 1_000 * NUMBERS))) < 64


def test_owners_of_a_restored_store_are_above_those_before() -> None:
    group = Keys("exporters")
    resource = msgspec.json.encode(Resource(items=("a",), era=3))
    before = {
        GRANT: b"3000000000",
        group.resource: resource,
        f"{group.members}m": b"{}",
        "opened/x/0": b"{}",
        "backend/default": b"x",
        "apikey/k": b"kept",
        CLUSTER_SECRET: b"slwc_known-to-whoever-has-the-backup",
    }
    after = renewed({key: Entry(value, 1) for key, value in before.items()})
    assert after.keys() == {GRANT, group.resource, "apikey/k"}
    assert int(after[GRANT].value) == 3_000_000_000 + GRANTS
    assert msgspec.json.decode(after[group.resource].value, type=Resource).era == 103


@driven
async def test_a_backup_does_not_have_the_clusters_secret(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (service, _):
        assert service._meta is not None
        secret = await secret_of(service._meta)
        saved = await taken(service)
    assert secret.encode() not in b"".join(saved.meta_parts)


@pytest.mark.parametrize("planted", ["link", "owner"])
def test_a_folder_of_another_user_is_not_restored_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    part = tmp_path / ".new.restoring"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        part.symlink_to(tmp_path / "elsewhere")
    else:
        part.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: part.stat().st_uid + 1)
    with pytest.raises(SluicewayError, match="is a link, or belongs to another user"), restoration._part_of(tmp_path / "new"):
        raise AssertionError("it was used")
    assert list(tmp_path.rglob("*lock*")) == []
