"""A data directory is adopted by a cluster: everything arrives, also when each step in turn is the last of its process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluiceway.adapters import system
from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.memory import MemoryDisk, MemoryPartitionStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.cluster.ownership import KEYS
from sluiceway.cluster.queue_changes import DROPPING
from sluiceway.core.group.item_placement import begin, era_of
from sluiceway.instance import adoption
from sluiceway.instance.adoption import Adopted, Copied, adopt_directory
from sluiceway.instance.adoption_mark import read_mark
from sluiceway.instance.api_keys import keys_of
from sluiceway.instance.service import Membership, Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local import partition_copy
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.access import SYSTEM, KeySpec
from sluiceway.model.backends import BackendSettings, S3Backend, SqliteBackend
from sluiceway.model.bundle_records import BundleRecord
from sluiceway.model.items import batch_from_rows
from sluiceway.model.meta import Stamp, View
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import QueueRecord, decode_queue, encode_queue
from sluiceway.model.requests import BundleCount, Disposition, Leased, Produce, ProduceKey
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import Changes, Fence, Least, PartitionRef, PartitionStore, RecordKind, Snapshot
from tests.cluster.cluster_rig import STEADY, Wires
from tests.instance.instance_rig import PATIENCE, eventually, lease, payloads, produce, rows, schedule_spec, settle, spec

BUCKET: Mapping[str, BackendSettings] = {"bucket": S3Backend(bucket="b")}
URL = "postgresql://user:password@db:5432/meta?sslmode=disable"
HOUR = 3_600_000


class Killed(Exception):
    """The end of a process."""


class Steps:
    """The process ends at its step number `last`: before it, or after it, with the answer lost."""

    def __init__(self, last: int | None = None, *, after: bool = False) -> None:
        self._left, self._after = last, after

    async def take(self, step: Callable[[], Any]) -> Any:
        if self._left is None:
            return await step()
        if self._left == 0:
            raise Killed
        self._left -= 1
        if self._left:
            return await step()
        if self._after:
            await step()
        raise Killed


class Meta:
    """A meta store whose commits are steps."""

    def __init__(self, store: MetaStore, steps: Steps) -> None:
        self._store, self._steps = store, steps

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        return await self._store.read(keys, prefixes)

    async def refresh(self, view: View, prefix: str) -> View:
        return await self.read(prefixes=[prefix])

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        stamp: Stamp = await self._steps.take(lambda: self._store.commit(checks, unchanged, puts, deletes, hint=hint))
        return stamp

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        return self._store.watch(prefix)

    async def close(self) -> None:
        if not isinstance(self._store, MemoryMetaStore):
            await self._store.close()


class Target(MemoryPartitionStore):
    """A store in memory whose changes are steps."""

    def __init__(self, disk: MemoryDisk, steps: Steps) -> None:
        super().__init__(disk)
        self._steps = steps
        self._used: set[tuple[PartitionRef, Fence]] = set()

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        assert (ref, fence) not in self._used, "no fence is used twice"
        self._used.add((ref, fence))
        opening = super().open
        snapshot: Snapshot = await self._steps.take(lambda: opening(ref, fence, least))
        return snapshot

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        applying = super().apply
        outcome: Outcome = await self._steps.take(lambda: applying(ref, changes, fence))
        return outcome

    async def drop(self, ref: PartitionRef) -> None:
        dropping = super().drop
        await self._steps.take(lambda: dropping(ref))


class Cluster:
    """A cluster's meta store and storage, which outlive each attempt."""

    def __init__(self) -> None:
        self.meta, self.disk = MemoryMetaStore(), MemoryDisk()
        self.told: list[Copied] = []

    async def adopt(self, data: Path, backends: Mapping[str, BackendSettings] = BUCKET, steps: Steps | None = None) -> Adopted:
        taken = steps or Steps()

        def open_store(name: str, settings: BackendSettings, data: Path) -> PartitionStore:
            if isinstance(settings, SqliteBackend):
                assert settings.path is not None
                return SqlitePartitionStore(Path(settings.path))
            return Target(self.disk, taken)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adoption, "SqliteMetaStore", lambda path: Meta(SqliteMetaStore(path), taken))
            patch.setattr(partition_copy, "SLICE_BYTES", 600)
            patch.setattr(partition_copy, "SLICE_RECORDS", 8)
            # So that the steps always come in the same order.
            patch.setattr(adoption, "COPIES_AT_ONCE", 1)
            return await adopt_directory(data, lambda: Meta(self.meta, taken), URL, backends, self.told.append, open_store=open_store)

    @asynccontextmanager
    async def serving(self, folder: Path) -> AsyncIterator[Service]:
        """An instance."""
        membership = Membership(lambda: Meta(self.meta, Steps()), Wires(), "here", parameters=STEADY)
        service = Service(folder, BUCKET, membership=membership, open_store=lambda *_: MemoryPartitionStore(self.disk))
        await service.start()
        try:
            yield service
        finally:
            async with asyncio.timeout(PATIENCE):
                await service.hand_over()
                await service.stop()

    async def queues(self) -> dict[str, QueueRecord]:
        entries = (await self.meta.read(prefixes=[QUEUE])).entries.values()
        return {record.queue_name: record for record in map(decode_queue, (entry.value for entry in entries))}


@asynccontextmanager
async def alone(data: Path) -> AsyncIterator[Service]:
    """A standalone server."""
    service = Service(data)
    await service.start()
    try:
        yield service
    finally:
        async with asyncio.timeout(PATIENCE):
            await service.stop()


async def check_refused(data: Path, why: str) -> None:
    """No server starts on the directory alone."""
    service = Service(data)
    with pytest.raises(SluicewayError, match=why):
        await service.start()
    await service.meta.close()
    assert service._lock is not None
    service._lock.release()


async def fill(data: Path) -> tuple[Leased, str]:
    """Give the directory something of everything. Returns a lease, and the text of an API key."""
    async with alone(data) as service:
        await service.create_queue(spec("rejects"))
        await service.create_queue(spec("orders", 2, max_attempts=3, dead_queue="rejects"))
        await service.create_queue(spec("unused"))
        for number in range(2):
            for batch in range(4):
                names = [f"{number}.{batch}.{each}" for each in range(3)]
                await service.produce("orders", Produce(rows(*names), 10_000, partition=number))
        await service.produce("orders", Produce(later := batch_from_rows([{"payload": b"later", "enqueue_at": 4_000_000_000_000}]), 10_000))
        assert later.num_rows == 1
        bundle = BundleRecord(
            id="album",
            queue_name="orders",
            queue_incarnation=service.queue("orders").incarnation,
            follow_up=None,
            items=None,
            created_at=system.now(),
        )
        await service.bundles.create(bundle, SYSTEM)
        await service.produce("orders", Produce(rows("keyed"), 10_000, ProduceKey("once"), bundle="album"))
        leased = await lease(service, "orders", 5, lease_timeout=HOUR)
        await settle(service, "orders", await lease(service, "orders", 2), Disposition("dead", reason="too bad"))
        await service.pause("unused", ["produce"], True)
        for name in ("nightly", "paused"):
            await service.schedules.create(schedule_spec(name, "orders", "0 3 1 1 *", paused=name == "paused"), SYSTEM)
        service.schedule_driver._firings.touched["nightly"] = None
        await eventually(lambda: service.stats("rejects").partitions[0].ready == 2)
    async with keys_of(data) as keys:
        key = await keys.create(KeySpec("reader", ["read:*"]), SYSTEM)
    return leased, key.text


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Leased, str]:
    data = tmp_path_factory.mktemp("adoption") / "data"
    return (data, *asyncio.run(fill(data)))


@pytest.fixture
def data(filled: tuple[Path, Leased, str], tmp_path: Path) -> Path:
    return copied(filled[0], tmp_path / "data")


def copied(data: Path, to: Path) -> Path:
    shutil.copytree(data, to)
    return to


async def contents(store: PartitionStore, ref: PartitionRef) -> tuple[Snapshot, dict[int, bytes]]:
    snapshot = await store.browse(ref)
    blobs = [int(key) for kind, key in snapshot.records if kind is RecordKind.BLOB]
    return snapshot, await store.read(ref, blobs)


async def check_equal(data: Path, cluster: Cluster) -> None:
    """The cluster has the directory's queues, in the bucket, with all their records and blobs."""
    own = SqliteMetaStore(data / "meta.sqlite")
    source, target = SqlitePartitionStore(data / "partitions"), MemoryPartitionStore(cluster.disk)
    try:
        assert (mark := await read_mark(own)) is not None
        assert mark.state == "done"
        records = [decode_queue(entry.value) for entry in (await own.read(prefixes=[QUEUE])).entries.values()]
        queues = await cluster.queues()
        assert queues.keys() == {record.queue_name for record in records}
        for record in records:
            there = queues[record.queue_name]
            assert there.incarnation == record.incarnation
            assert {each.backend for each in there.partitions} == {"bucket"}
            for each in record.partitions:
                ref = PartitionRef(record.incarnation, each.partition)
                (before, blobs), (after, copies) = await contents(source, ref), await contents(target, ref)
                assert (after.header, after.records, copies) == (before.header, before.records, blobs)
        for prefix in ("apikey/", "audit/", "history/"):
            entries = (await own.read(prefixes=[prefix])).entries
            assert {key: entry.value for key, entry in (await cluster.meta.read(list(entries))).entries.items()} == {
                key: entry.value for key, entry in entries.items()
            }
    finally:
        await source.close()
        await own.close()


def test_a_cluster_goes_on_where_the_server_stopped(filled: tuple[Path, Leased, str], data: Path, tmp_path: Path) -> None:
    _, leased, key = filled

    async def run() -> None:
        cluster = Cluster()
        adopted = await cluster.adopt(data)
        assert (adopted.queues, adopted.partitions, adopted.api_keys, adopted.copied_partitions) == (3, 4, 1, 4)
        assert cluster.told[-1] == Copied(4, 4, adopted.copied_bytes)
        await check_equal(data, cluster)
        async with cluster.serving(tmp_path / "instance") as service:
            stats = {each.partition: each for each in service.stats("orders").partitions}
            assert sum(each.total_leased for each in stats.values()) == 5
            assert (await settle(service, "orders", leased)).completed == 5
            again = await produce(service, "orders", "keyed", key=ProduceKey("once"))
            assert again.deduplicated
            rest = await lease(service, "orders", 1_000, most=2)
            assert len(payloads(rest.batches)) == 24 + 1 - 5 - 2
            assert len(payloads((await lease(service, "rejects")).batches)) == 2
            assert sum(each.scheduled for each in service.stats("orders").partitions) == 1
            with pytest.raises(SluicewayError, match="paused"):
                await produce(service, "unused", "x")
            assert [*service.schedules.names()] == ["nightly", "paused"]
            await eventually(lambda: [*service.schedule_driver._firings.held()] == ["nightly"])
            assert [*service.bundles.names()] == ["album"]
            album = service.bundles.find("album")
            assert album is not None
            ((_, counted, _),) = await service.bundle_driver.shown([album])
            assert counted == BundleCount(1)
        async with keys_of(tmp_path / "other", "memory:") as keys:
            keys._meta = cluster.meta
            assert await keys.find(key) is not None

    asyncio.run(run())


def test_any_step_may_be_the_last(filled: tuple[Path, Leased, str], tmp_path: Path) -> None:
    """Before and after each step: at no time both the server and the cluster may serve the queues, and the next attempt completes it."""

    async def attempt(last: int, after: bool) -> bool:
        data, cluster, steps = copied(filled[0], tmp_path / f"{last}-{after}"), Cluster(), Steps(last, after=after)
        try:
            await cluster.adopt(data, steps=steps)
        except Killed:
            own = SqliteMetaStore(data / "meta.sqlite")
            mark = await read_mark(own)
            await own.close()
            states.add("" if mark is None else mark.state)
            if await cluster.queues():
                assert mark is not None
                assert mark.state != "copying"
            for ref, half in cluster.disk.partitions.items():
                assert not half.header or len(half.records) == records[ref]
        else:
            return False
        await cluster.adopt(data)
        await check_equal(data, cluster)
        shutil.rmtree(data)
        return True

    async def count_records() -> None:
        cluster = Cluster()
        await cluster.adopt(copied(filled[0], tmp_path / "whole"))
        records.update({ref: len(each.records) for ref, each in cluster.disk.partitions.items()})

    states: set[str] = set()
    records: dict[PartitionRef, int] = {}
    asyncio.run(count_records())
    for after in (False, True):
        last = 1
        while asyncio.run(attempt(last, after)):
            last += 1
        assert last > 20
    assert states == {"", "copying", "publishing", "done"}


def test_a_directory_used_again_after_an_attempt_is_copied_anew(data: Path, tmp_path: Path) -> None:
    async def run() -> None:
        cluster = Cluster()
        with pytest.MonkeyPatch.context() as patch:
            # All partitions are in the bucket, and nothing refers to them.
            patch.setattr(adoption, "Opening", Killer())
            with pytest.raises(Killed):
                await cluster.adopt(data)
        assert len(cluster.disk.partitions) == 4
        async with alone(data) as service:
            await settle(service, "orders", await lease(service, "orders", 100))
            await produce(service, "orders", "newer")
        adopted = await cluster.adopt(data)
        assert adopted.copied_partitions == 4
        await check_equal(data, cluster)

    asyncio.run(run())


class Killer:
    """In place of a class: the process ends when it is used."""

    def __call__(self, *_: object) -> None:
        raise Killed


def test_it_is_done_once(data: Path, tmp_path: Path) -> None:
    async def run() -> None:
        cluster = Cluster()
        assert not (await cluster.adopt(data)).was_done
        async with cluster.serving(tmp_path / "instance") as service:
            await settle(service, "orders", await lease(service, "orders", 1_000, most=2))
            left = service.stats("orders")
            again = await cluster.adopt(data)
            assert (again.was_done, again.queues, again.copied_partitions) == (True, 3, 0)
            assert service.stats("orders") == left
            await service.delete_queue("orders", True)
        assert (await cluster.adopt(data)).was_done
        assert "orders" not in await cluster.queues()

    asyncio.run(run())


def test_a_running_cluster_serves_what_it_adopts(data: Path, tmp_path: Path) -> None:
    async def run() -> None:
        cluster = Cluster()
        async with cluster.serving(tmp_path / "instance") as service:
            await service.create_queue(spec("own", 3))
            await cluster.adopt(data)
            await eventually(lambda: "orders" in {queue.queue_name for queue in service.queues()})
            leased = await lease(service, "orders", 100, timeout=60_000, most=2)
            assert payloads(leased.batches)

    asyncio.run(run())


def test_the_server_refuses_an_adopted_directory(data: Path) -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.adopt(data)
        await check_refused(data, r"are in the cluster with the meta store postgresql://db:5432/meta since 20.*--config")
        with pytest.raises(SluicewayError, match="are in the cluster"):
            async with keys_of(data):
                pass
        with pytest.raises(SluicewayError, match="went to another cluster, with the meta store postgresql://db:5432/meta"):
            await Cluster().adopt(data)

    asyncio.run(run())


def test_an_interrupted_publication_keeps_the_server_off_until_it_is_repeated(data: Path) -> None:
    """It may have landed. The next attempt knows; and if that is refused, the server starts again."""

    async def run() -> None:
        cluster = Cluster()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adoption, "_batch", Killer())
            with pytest.raises(Killed):
                await cluster.adopt(data)
        await check_refused(data, r"may be in the cluster .* interrupted at .* run `sluiceway cluster adopt")
        async with cluster.serving(data.with_name("instance")) as service:
            await service.create_queue(spec("orders"))
        with pytest.raises(SluicewayError, match="the cluster has a queue 'orders', too"):
            await cluster.adopt(data)
        async with alone(data) as service:
            assert service.stats("orders").partitions

    asyncio.run(run())


def test_a_queue_created_meanwhile_is_not_overwritten(data: Path) -> None:
    async def run() -> None:
        cluster = Cluster()
        committing = cluster.meta.commit

        async def be_late(checks: Any = None, unchanged: Any = None, puts: Any = None, deletes: Any = (), *, hint: bool = True) -> Stamp:
            if QUEUE + "orders" in puts:
                cluster.meta.commit = committing  # type: ignore[method-assign]
                await committing(puts={QUEUE + "orders": b"another's"})
            return await committing(checks, unchanged, puts, deletes)

        cluster.meta.commit = be_late  # type: ignore[method-assign]
        with pytest.raises(SluicewayError, match="the cluster has a queue 'orders', too"):
            await cluster.adopt(data)
        assert {key: entry.value for key, entry in (await cluster.meta.read(prefixes=[QUEUE])).entries.items()} == {
            QUEUE + "orders": b"another's"
        }
        async with alone(data) as service:
            assert service.stats("orders").partitions

    asyncio.run(run())


def test_a_late_commit_of_an_earlier_attempt_conflicts(data: Path) -> None:
    async def run() -> None:
        cluster, held = Cluster(), list[Mapping[str, Any]]()
        committing = cluster.meta.commit

        async def hold(checks: Any = None, unchanged: Any = None, puts: Any = None, deletes: Any = (), *, hint: bool = True) -> Stamp:
            if any(key.startswith(QUEUE) for key in puts):
                held.append({"checks": checks, "unchanged": unchanged, "puts": puts, "deletes": deletes})
                raise MetaUnknownError("no answer")
            return await committing(checks, unchanged, puts, deletes)

        cluster.meta.commit = hold  # type: ignore[method-assign]
        with pytest.raises(MetaUnknownError):
            await cluster.adopt(data)
        with pytest.raises(MetaUnknownError):
            await cluster.adopt(data)
        with pytest.raises(ConflictError):
            await committing(**held[0])
        await committing(**held[1])
        cluster.meta.commit = committing  # type: ignore[method-assign]
        # What landed before the third attempt is found.
        await cluster.adopt(data)
        await check_equal(data, cluster)

    asyncio.run(run())


def test_the_era_is_above_all_of_the_directory(data: Path, tmp_path: Path) -> None:
    async def run() -> None:
        own = SqliteMetaStore(data / "meta.sqlite")
        for strategy in ("rounds", "claims", "rounds"):
            entry = (await own.read([KEYS.resource])).entries.get(KEYS.resource)
            _, writes = begin(KEYS, entry, (), strategy, first_era=2)
            await own.commit(writes.checks, puts=writes.puts)
        await own.close()
        cluster = Cluster()
        async with cluster.serving(tmp_path / "instance") as service:
            await service.create_queue(spec("own"))
            assert await era(cluster) == 2
            await cluster.adopt(data)
            # The directory's era, of a server alone, is the fifth.
            assert await era(cluster) == 6
            await eventually(lambda: "orders" in {queue.queue_name for queue in service.queues()})
            assert payloads((await lease(service, "orders", 5, timeout=60_000)).batches)
            await produce(service, "own", "x")
            await eventually(lambda: all(opened.fence.era == 6 for opened in cluster.disk.partitions.values()))

    async def era(cluster: Cluster) -> int:
        return era_of((await cluster.meta.read([KEYS.resource])).entries[KEYS.resource])

    asyncio.run(run())


def test_storage_that_the_cluster_shares_stays_where_it_is(tmp_path: Path) -> None:
    async def run() -> None:
        cluster, data = Cluster(), tmp_path / "data"
        service = Service(data, BUCKET, open_store=lambda *_: MemoryPartitionStore(cluster.disk))
        await service.start()
        await service.create_queue(spec("orders", 2))
        await produce(service, "orders", "one", "two")
        leased = await lease(service, "orders", 1, most=2, lease_timeout=HOUR)
        await service.stop()
        adopted = await cluster.adopt(data)
        assert (adopted.partitions, adopted.copied_partitions) == (2, 0)
        async with cluster.serving(tmp_path / "instance") as service:
            assert (await settle(service, "orders", leased)).completed == 1
            assert len(payloads((await lease(service, "orders", 5, most=2)).batches)) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("backends", "why"),
    [
        ({"default": SqliteBackend()}, "needs a backend that every instance reaches"),
        ({"bucket": S3Backend(bucket="b", partition_affinity=0.0)}, "needs a backend that every instance reaches"),
    ],
)
def test_the_cluster_must_have_storage_of_its_own(data: Path, backends: Mapping[str, BackendSettings], why: str) -> None:
    async def run() -> None:
        with pytest.raises(SluicewayError, match=why):
            await Cluster().adopt(data, backends)
        async with alone(data):
            pass

    asyncio.run(run())


def test_a_backend_that_the_cluster_does_not_know_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        cluster, data, elsewhere = Cluster(), tmp_path / "data", SqliteBackend(path=str(tmp_path / "elsewhere"), partition_affinity=0.0)
        service = Service(data, {"fast": SqliteBackend(path=elsewhere.path)})
        await service.start()
        await service.create_queue(spec("orders"))
        await produce(service, "orders", "one")
        await service.stop()
        with pytest.raises(SluicewayError, match="the storage of backend 'fast'"):
            await cluster.adopt(data)
        # Of that name, but another storage.
        with pytest.raises(SluicewayError, match="the storage of backend 'fast'"):
            await cluster.adopt(data, {"fast": S3Backend(bucket="b")})
        assert (await cluster.adopt(data, {**BUCKET, "fast": elsewhere})).copied_partitions == 1
        async with cluster.serving(tmp_path / "instance") as service:
            assert payloads((await lease(service, "orders")).batches) == ["one"]

    asyncio.run(run())


def test_what_is_in_use_or_under_way_is_refused(data: Path, tmp_path: Path) -> None:
    async def run() -> None:
        cluster = Cluster()
        async with alone(data):
            with pytest.raises(DirectoryInUseError, match="stop that server first"):
                await cluster.adopt(data)
        with pytest.raises(SluicewayError, match="is not the data folder of a server"):
            await cluster.adopt(tmp_path)
        own = SqliteMetaStore(data / "meta.sqlite")
        await own.commit(puts={DROPPING + "k7f3q2ma": b"1"})
        with pytest.raises(SluicewayError, match="still to be removed; start the server once"):
            await cluster.adopt(data)
        (entry,) = (await own.read([QUEUE + "orders"])).entries.values()
        await own.commit(puts={QUEUE + "orders": encode_queue(replace(decode_queue(entry.value), rebalance="r"))})
        with pytest.raises(SluicewayError, match="queue 'orders' is being rebalanced"):
            await cluster.adopt(data)
        await own.close()
        assert not await cluster.queues()

    asyncio.run(run())


def test_more_than_one_commit_takes_is_published_bit_by_bit(data: Path) -> None:
    """The queues come after their dead queues, and an attempt goes on where the one before was killed, whatever its configuration says."""

    async def run() -> None:
        cluster = Cluster()
        committing = cluster.meta.commit

        async def end_with_a_queue(
            checks: Any = None, unchanged: Any = None, puts: Any = None, deletes: Any = (), *, hint: bool = True
        ) -> Stamp:
            stamp = await committing(checks, unchanged, puts, deletes)
            if any(key.startswith(QUEUE) for key in puts):
                raise Killed
            return stamp

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adoption, "BATCH_BYTES", 1)
            patch.setattr(cluster.meta, "commit", end_with_a_queue)
            with pytest.raises(Killed):
                await cluster.adopt(data)
            assert list(await cluster.queues()) == ["rejects"]
            patch.setattr(cluster.meta, "commit", committing)
            adopted = await cluster.adopt(data, {"another": S3Backend(bucket="b")})
        assert adopted.copied_partitions == 0
        await check_equal(data, cluster)

    asyncio.run(run())
