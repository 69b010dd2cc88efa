"""A storage proves that it is the one that was, or its partitions stop by name: no id is ever given twice. docs/adr/0031."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
import psycopg
import pytest

from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.memory import MemoryDisk, MemoryPartitionStore
from sluiceway.instance.service import Service
from sluiceway.instance.storage_acceptance import accept
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.backend import Backend
from sluiceway.local.partition_openings import OPENED, RECORDED, Opening, Openings, OpeningsError, decode, key_of, record_existing
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.access import SYSTEM
from sluiceway.model.backends import BackendSettings, PostgresBackend
from sluiceway.model.meta import Stamp, View
from sluiceway.model.queue import PartitionRecord, QueueRecord, encode_queue
from sluiceway.ports.meta_store import ConflictError, MetaUnknownError
from sluiceway.ports.partition_store import Fence, FencedError, Least, LostError, PartitionRef, Snapshot, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.cli.cli_shell import Shell
from tests.cluster.cluster_rig import cluster
from tests.instance.instance_rig import Store, eventually, lease, payloads, produce, service_on, serving, settle, spec
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess
from tests.servers.postgres_server import PostgresServer

REF = PartitionRef("k7f3q2ma", 0)
numbers = itertools.count()


def only_file(data: Path) -> Path:
    """The database of the only partition."""
    (found,) = (each for each in data.rglob("*.sqlite") if each.name != "meta.sqlite")
    return found


def remove(file: Path) -> None:
    for each in file.parent.glob(f"{file.name}*"):
        each.unlink()


def unlock(folder: Path) -> None:
    for lock in folder.rglob("lock"):
        lock.unlink()


async def stopped(service: Service, queue: str, said: str) -> None:
    """Its partition is stopped, by name, and nothing is served."""
    (problem,) = service.problems()
    assert f"queue {queue}, partition 0: stopped" in problem
    assert said in problem
    assert "sluiceway backend accept" in problem
    checks = {check.name: check for check in await service.checks()}
    assert not checks["partitions"].ok
    with pytest.raises(SluicewayError, match=r"is not available|is stopped|within") as refused:
        await produce(service, queue, "again", timeout=50)
    assert refused.value.code in ("unavailable", "partition_damaged", "request_timeout")


# ---- from outside: one file of a server is removed ----------------------------------------------------------------


@pytest.mark.slow
def test_a_server_does_not_make_a_partition_anew_whose_file_is_gone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServerProcess(data) as server, httpx.Client(base_url=server.url) as http:
        http.post("/v1/queues.create", json={"queue_name": "q", "requested_partitions": 2}).raise_for_status()
        made = http.post("/v1/queue.produce", json={"queue_name": "q", "items": [{"utf8": "a"}]})
        made.raise_for_status()
        assert server.interrupt() == 0
    kept = tmp_path / "kept"
    kept.mkdir()
    (lost,) = (each for each in data.rglob("*-0.sqlite"))
    for each in lost.parent.glob(f"{lost.name}*"):
        shutil.move(each, kept)
    with ServerProcess(data) as server, httpx.Client(base_url=server.url) as http:
        ready = http.get("/readyz?verbose")
        assert ready.status_code == 503
        assert f"partition {lost.stem} is not there" in ready.text
        assert "sluiceway backend accept" in ready.text
        told = subprocess.run([*COMMAND, "doctor", "--url", server.url], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert told.returncode == 3
        assert f"partition {lost.stem} is not there" in told.stdout
        # The other one serves.
        http.post("/v1/queue.produce", json={"queue_name": "q", "items": [{"utf8": "b"}]}).raise_for_status()
        assert server.interrupt() == 0
    assert not lost.exists()
    for each in kept.iterdir():
        shutil.move(each, lost.parent)
    with ServerProcess(data) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/readyz").status_code == 200


# ---- SQLite -------------------------------------------------------------------------------------------------------


@driven
async def test_an_old_copy_of_a_file_is_not_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "old")
    file, copy = only_file(tmp_path), tmp_path / "copy"
    shutil.copy(file, copy)
    async with serving(tmp_path) as (service, _):
        await produce(service, "q", "new")
    newest = file.read_bytes()
    shutil.copy(copy, file)
    async with serving(tmp_path) as (service, _):
        await stopped(service, "q", "was last opened with")
    file.write_bytes(newest)
    async with serving(tmp_path) as (service, _):
        assert service.problems() == []
        assert payloads((await lease(service, "q")).batches) == ["old", "new"]


@driven
async def test_a_copy_made_in_the_same_run_is_known_by_its_turns_after_an_orderly_stop(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        await produce(service, "q", "old")
        ref = PartitionRef(service.queue("q").incarnation, 0)
        # Its log is written back, and nothing happens meanwhile.
        await store.release(ref)
        shutil.copy(only_file(tmp_path), copy)
        await produce(service, "q", "new")
    shutil.copy(copy, only_file(tmp_path))
    async with serving(tmp_path) as (service, _):
        await stopped(service, "q", "ends with cycle 1 of 2")


@driven
async def test_a_partition_that_is_older_when_it_is_opened_again_stops(tmp_path: Path) -> None:
    """Its owner knows best what it has acknowledged: the server may have failed over to a replica that was behind."""
    behind, disk = MemoryDisk(), MemoryDisk()
    store = Store(tmp_path, MemoryPartitionStore(disk))
    service = service_on(tmp_path, store)
    await service.start()
    await service.create_queue(spec("q"))
    await produce(service, "q", "a")
    ref = PartitionRef(service.queue("q").incarnation, 0)
    (partition,) = disk.partitions.values()
    replica = MemoryPartitionStore(behind)
    behind.identity = disk.identity
    await replica.open(ref, partition.fence)
    store._store = replica
    with pytest.raises(SluicewayError):
        await produce(service, "q", "b", timeout=200)
    await eventually(lambda: bool(service.problems()))
    await stopped(service, "q", "ends with cycle 0 of 1")
    await service.stop()
    # That is remembered, whatever becomes of the process.
    service = service_on(tmp_path, Store(tmp_path, MemoryPartitionStore(behind)))
    await service.start()
    await stopped(service, "q", "ends with cycle 0 of 1")
    await service.stop()


@driven
async def test_what_is_lost_for_good_is_accepted_by_an_operator(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
    remove(only_file(tmp_path))
    async with serving(tmp_path) as (service, _):
        await stopped(service, "q", "is not there")
        with pytest.raises(SluicewayError, match="partition 7 does not lie in backend 'default'"):
            await accept(service.meta, service.audit, "default", "q", [0, 7], SYSTEM)
        with pytest.raises(SluicewayError, match="no partition lies in backend 'other'"):
            await accept(service.meta, service.audit, "other", None, [], SYSTEM)
        assert await accept(service.meta, service.audit, "default", "q", [0], SYSTEM) == [("q", 0)]
        # Without a restart.
        await service.reload("q", 10_000)
        assert service.problems() == []
        await produce(service, "q", "b")
    async with serving(tmp_path) as (service, _):
        assert payloads((await lease(service, "q")).batches) == ["b"]


def test_a_folder_that_was_replaced_is_accepted_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    data = tmp_path / "data"

    async def once(*made: str) -> list[str]:
        service = Service(data)
        await service.start()
        try:
            if made and service.problems():
                raise SluicewayError("unavailable", *service.problems())
            if "q" not in {queue.queue_name for queue in service.queues()}:
                await service.create_queue(spec("q"))
            await produce(service, "q", *made, timeout=200)
            return payloads((await lease(service, "q")).batches)
        finally:
            await service.stop()

    assert asyncio.run(once("a")) == ["a"]
    shutil.rmtree(data / "partitions")
    with pytest.raises(SluicewayError, match="sluiceway backend accept default"):
        asyncio.run(once("b"))
    told = Shell("q", monkeypatch, capfdbinary).says("backend", "accept", "default", "--data", str(data))
    assert "Accepted 1 partitions of backend default" in told
    assert asyncio.run(once("b")) == ["b"]


@driven
async def test_what_is_deleted_leaves_no_record(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q", 3))
        assert len((await service.meta.read(prefixes=[OPENED])).entries) == 3

        async def fails(_: PartitionRef) -> None:
            raise StoreUnavailableError("the disk is gone")

        store.on_drop = fails
        await service.delete_queue("q", True)
        assert len((await service.meta.read(prefixes=[OPENED])).entries) == 3, "what is still there is not new"
    async with serving(tmp_path) as (service, _):
        assert (await service.meta.read(prefixes=[OPENED])).entries == {}


# ---- PostgreSQL ---------------------------------------------------------------------------------------------------


@driven
async def test_a_schema_that_was_dropped_is_not_made_anew(server: PostgresServer, tmp_path: Path) -> None:
    schema = f"itself{next(numbers)}"
    backends: dict[str, BackendSettings] = {"default": PostgresBackend(url=server.dsn(), schema=schema)}
    service = Service(tmp_path, backends)
    await service.start()
    await service.create_queue(spec("q", 2))
    await produce(service, "q", *map(str, range(10)))
    leased = await lease(service, "q", 5)
    await service.stop()
    async with await psycopg.AsyncConnection.connect(server.dsn(), autocommit=True) as link:
        await link.execute(f"ALTER SCHEMA {schema} RENAME TO {schema}_kept".encode())
        service = Service(tmp_path, backends)
        await service.start()
        (problem,) = service.problems()
        assert "backend default, which" not in problem
        assert "backend default is not served: this is not the storage that held the partitions: its identity is missing" in problem
        assert "sluiceway backend accept default" in problem
        with pytest.raises(SluicewayError):
            await produce(service, "q", "again", timeout=50)
        found = await link.execute("SELECT count(*) FROM pg_namespace WHERE nspname = %s", [schema])
        assert await found.fetchone() == (0,), "nothing is made in a database that is another one"
        # It passes as soon as the right one is there again.
        await link.execute(f"ALTER SCHEMA {schema}_kept RENAME TO {schema}".encode())
        await eventually(lambda: service.problems() == [])
        assert (await settle(service, "q", leased)).completed == 5
        await service.stop()


@driven
async def test_a_copy_of_a_live_data_directory_and_its_original_never_both_write(server: PostgresServer, tmp_path: Path) -> None:
    """Both count their starts from the same number, so that the one that starts next has the fence that the other has now."""
    backends: dict[str, BackendSettings] = {"default": PostgresBackend(url=server.dsn(), schema=f"itself{next(numbers)}")}
    original = Service(tmp_path / "data", backends)
    await original.start()
    await original.create_queue(spec("q"))
    await produce(original, "q", "a")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    copy = Service(tmp_path / "copy", backends)
    await copy.start()
    await produce(copy, "q", "b")
    with pytest.raises(SluicewayError):
        await produce(original, "q", "never", timeout=200)
    assert "above Fence(era=1, grant=1" in original.problems()[0]
    await original.stop()
    original = Service(tmp_path / "data", backends)
    await original.start()
    (problem,) = original.problems()
    assert "Does a copy of this server's data directory run somewhere else?" in problem
    with pytest.raises(SluicewayError):
        await produce(original, "q", "never", timeout=200)
    await produce(copy, "q", "c")
    await copy.stop()
    await original.stop()
    original = Service(tmp_path / "data", backends)
    await original.start()
    assert payloads((await lease(original, "q")).batches) == ["a", "b", "c"]
    await original.stop()


# ---- clusters -----------------------------------------------------------------------------------------------------


@driven
async def test_an_instance_with_another_database_serves_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a") as (made, [a]):
        await a.create_queue(spec("q", 4))
        for number in range(8):
            await produce(a, "q", str(number))
        made.disk = MemoryDisk()
        b = await made.start("b")
        await eventually(lambda: len(b.ownership.tokens(a.queue("q"))) == 2)
        await eventually(lambda: any("is not served: this is not the storage" in each for each in b.problems()))
        assert made.disk.partitions == {}
        assert a.problems() == []
        made.die("a")
        made.disk.identity = None
        assert any("is not served: this is not the storage" in each for each in b.problems())
        with pytest.raises(SluicewayError):
            await produce(b, "q", "again", timeout=50)
        assert made.disk.partitions == {}


# ---- the records --------------------------------------------------------------------------------------------------


class Unsure(MemoryMetaStore):
    """Commits that land and are not heard of, or are come before by another."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown = self.conflicts = 0

    async def commit(
        self,
        checks: object = None,
        unchanged: object = None,
        puts: object = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        if self.conflicts:
            self.conflicts -= 1
            raise ConflictError("another came between")
        stamp = await super().commit(checks, unchanged, puts, deletes, hint=hint)  # type: ignore[arg-type]
        if self.unknown:
            self.unknown -= 1
            raise MetaUnknownError("no answer")
        return stamp


@driven
async def test_only_what_was_confirmed_must_be_there() -> None:
    openings = Openings(MemoryMetaStore())
    # A crash after the claim, or after the storage was made: nothing was acknowledged, it may be made again.
    assert await openings.claim(REF, Fence(1, 1, 1)) is None
    assert await openings.claim(REF, Fence(1, 2, 1)) is None
    await openings.confirm(REF, Fence(1, 2, 1))
    assert await openings.claim(REF, Fence(1, 3, 1)) == Least(Fence(1, 2, 1))
    # One that was claimed since and never confirmed asks for no more.
    assert await openings.claim(REF, Fence(1, 4, 1)) == Least(Fence(1, 2, 1))
    await openings.confirm(REF, Fence(1, 4, 1))
    await openings.note(REF, Least(Fence(1, 4, 3), 17))
    assert await openings.claim(REF, Fence(2, 0, 0)) == Least(Fence(1, 4, 3), 17)


@driven
async def test_of_several_owners_only_the_last_to_claim_confirms() -> None:
    """Each may have opened another storage: the one that acknowledges is the one that is remembered."""
    meta = MemoryMetaStore()
    one, other = Openings(meta), Openings(meta)
    assert await one.claim(REF, Fence(1, 1, 1)) is None
    assert await other.claim(REF, Fence(1, 2, 1)) is None
    with pytest.raises(FencedError, match="was claimed by another owner"):
        await one.confirm(REF, Fence(1, 1, 1))
    with pytest.raises(FencedError, match="was claimed with"):
        await one.claim(REF, Fence(1, 1, 2))
    await one.note(REF, Least(Fence(1, 1, 1), 5))
    await other.confirm(REF, Fence(1, 2, 1))
    assert await one.claim(REF, Fence(1, 3, 1)) == Least(Fence(1, 2, 1))


@driven
async def test_a_record_that_has_changed_since_it_was_read_ahead_is_read_again() -> None:
    meta = MemoryMetaStore()
    one, other = Openings(meta), Openings(meta)
    await one.claim(REF, Fence(1, 1, 1))
    await one.confirm(REF, Fence(1, 1, 1))
    await other.read_ahead(REF)
    await one.note(REF, Least(Fence(1, 1, 1), 7))
    assert await other.claim(REF, Fence(1, 2, 1)) == Least(Fence(1, 1, 1), 7)
    await one.read_ahead(REF)
    await other.claim(REF, Fence(1, 4, 1))
    with pytest.raises(FencedError, match="was claimed with"):
        await one.claim(REF, Fence(1, 3, 1))
    with pytest.raises(FencedError, match="was claimed by another owner"):
        await other.confirm(REF, Fence(1, 2, 1))


@driven
async def test_what_the_meta_store_does_not_answer_is_tried_again() -> None:
    meta = Unsure()
    openings = Openings(meta)
    meta.unknown = 1
    with pytest.raises(OpeningsError, match="no answer"):
        await openings.claim(REF, Fence(1, 1, 1))
    meta.conflicts = 2
    assert await openings.claim(REF, Fence(1, 1, 2)) is None
    meta.unknown = 1
    with pytest.raises(OpeningsError):
        await openings.confirm(REF, Fence(1, 1, 2))
    # It had landed.
    assert await openings.claim(REF, Fence(1, 1, 3)) == Least(Fence(1, 1, 2))


@driven
async def test_openings_of_one_moment_share_a_commit() -> None:
    class Counting(MemoryMetaStore):
        commits = 0

        async def commit(self, *args: object, **named: object) -> Stamp:
            self.commits += 1
            return await super().commit(*args, **named)  # type: ignore[arg-type]

    meta = Counting()
    openings = Openings(meta)
    refs = [PartitionRef("k7f3q2ma", number) for number in range(1_200)]
    await asyncio.gather(*(openings.claim(ref, Fence(1, 1, 1)) for ref in refs))
    await asyncio.gather(*(openings.confirm(ref, Fence(1, 1, 1)) for ref in refs))
    assert meta.commits <= 8
    assert len((await meta.read(prefixes=[OPENED])).entries) == 1_200
    await openings.forget(refs)
    assert (await meta.read(prefixes=[OPENED])).entries == {}


@driven
async def test_one_that_is_claimed_higher_takes_no_other_with_it() -> None:
    meta = MemoryMetaStore()
    openings, other = Openings(meta), PartitionRef("k7f3q2ma", 1)
    await openings.claim(REF, Fence(2, 0, 0))
    results = await asyncio.gather(openings.claim(REF, Fence(1, 0, 0)), openings.claim(other, Fence(1, 0, 0)), return_exceptions=True)
    assert isinstance(results[0], FencedError)
    assert results[1] is None


@driven
async def test_a_partition_that_is_lost_while_it_is_opened_is_released_then() -> None:
    """Otherwise nobody ever lets go of it, and its next owner has to take it from a process that is alive."""
    opens, released = asyncio.Event(), list[PartitionRef]()

    class Slow(MemoryPartitionStore):
        async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
            await opens.wait()
            return await super().open(ref, fence, least)

        async def release(self, ref: PartitionRef) -> None:
            assert opens.is_set()
            released.append(ref)

    backend = Backend("default", Slow(MemoryDisk()), 1_000)
    backend.attach(REF, lambda _: False)
    opening = asyncio.create_task(backend.open(REF, Fence(1, 1, 1)))
    await asyncio.sleep(0)
    backend.detach(REF)
    await asyncio.sleep(0)
    opens.set()
    await opening
    await backend.close()
    assert released == [REF]


@driven
async def test_nothing_is_acknowledged_where_the_meta_store_does_not_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    meta, disk = Unsure(), MemoryDisk()
    backend = Backend("default", MemoryPartitionStore(disk), 1_000, openings=Openings(meta))
    backend.attach(REF, lambda _: False)

    async def confirm_fails(*_: object) -> None:
        raise OpeningsError("away")

    openings = Openings(meta)
    monkeypatch.setattr(openings, "confirm", confirm_fails)
    cut_off = Backend("default", MemoryPartitionStore(disk), 1_000, openings=openings)
    cut_off.attach(REF, lambda _: False)
    with pytest.raises(OpeningsError):
        await cut_off.open(REF, Fence(1, 1, 1))
    assert cut_off.why_down is None, "that says nothing of the backend"
    # As nothing was, a storage that is empty will do; from then on it must be the same.
    disk.partitions.clear()
    await backend.open(REF, Fence(1, 2, 1))
    disk.partitions.clear()
    with pytest.raises(LostError):
        await Backend("default", MemoryPartitionStore(disk), 1_000, openings=Openings(meta)).open(REF, Fence(1, 3, 1))
    await backend.close()


# ---- what an earlier version wrote --------------------------------------------------------------------------------


def old(incarnation: str, partitions: int) -> dict[str, bytes]:
    """A queue as an earlier version recorded it."""
    record = QueueRecord(incarnation, incarnation, 1, 1, tuple(map(PartitionRecord, range(partitions))))
    return {QUEUE + incarnation: encode_queue(record)}


@driven
async def test_partitions_of_an_earlier_version_must_be_there_and_later_ones_are_new() -> None:
    meta = MemoryMetaStore()
    await meta.commit(puts=old("aaaaaaaa", 1_100))
    await asyncio.gather(*(record_existing(meta) for _ in range(3)))
    openings = Openings(meta)
    for number in (0, 1_099):
        assert await openings.claim(PartitionRef("aaaaaaaa", number), Fence(1, 1, 0)) == Least(Fence(0, 0, 0))
    await meta.commit(puts=old("bbbbbbbb", 1))
    await record_existing(meta)
    assert await openings.claim(PartitionRef("bbbbbbbb", 0), Fence(1, 1, 0)) is None


@driven
async def test_an_adoption_that_was_cut_off_goes_on() -> None:
    meta = Unsure()
    await meta.commit(puts=old("aaaaaaaa", 700))
    meta.unknown = 1
    with pytest.raises(MetaUnknownError):
        await record_existing(meta)
    await record_existing(meta)
    view: View = await meta.read([RECORDED], [OPENED])
    assert len(view.prefix(OPENED)) == 700
    assert RECORDED in view.entries


@driven
async def test_a_data_directory_of_an_earlier_version_is_adopted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        ref = PartitionRef(service.queue("q").incarnation, 0)

    async def forget() -> None:
        meta = SqliteMetaStore(tmp_path / "meta.sqlite")
        await meta.commit(deletes=[RECORDED, key_of(ref)])
        await meta.close()

    await forget()
    async with serving(tmp_path) as (service, _):
        assert service.problems() == []
        assert payloads((await lease(service, "q")).batches) == ["a"]
        found = decode((await service.meta.read([key_of(ref)])).entries[key_of(ref)])
        assert found is not None
        assert found.opened == found.claimed > Fence(0, 0, 0)
    await forget()
    remove(only_file(tmp_path))
    async with serving(tmp_path) as (service, _):
        await stopped(service, "q", "is not there")


def test_the_record_is_small() -> None:
    assert len(msgspec.json.encode(Opening(Fence(2, 10, 0), Fence(2, 9, 1), 1_000_000))) < 80


# ---- two ways to one directory ------------------------------------------------------------------------------------


@driven
async def test_a_directory_with_two_names_has_one_owner(tmp_path: Path) -> None:
    """A bind mount is the same to the lock: it is of the file, not of its name."""
    data, other = tmp_path / "data", tmp_path / "other"
    service = Service(data)
    await service.start()
    other.symlink_to(data)
    with pytest.raises(DirectoryInUseError, match="is in use by the process with id"):
        await Service(other).start()
    await service.stop()


@driven
async def test_a_second_server_that_finds_no_lock_takes_nothing_from_the_first(tmp_path: Path) -> None:
    first, second = Service(tmp_path), Service(tmp_path)
    await first.start()
    await first.create_queue(spec("q"))
    await produce(first, "q", "a")
    unlock(tmp_path)
    await second.start()
    (problem,) = second.problems()
    assert "locked" in problem
    with pytest.raises(SluicewayError):
        await produce(second, "q", "never", timeout=50)
    await produce(first, "q", "b")
    await first.stop()
    await eventually(lambda: second.problems() == [])
    assert payloads((await lease(second, "q")).batches) == ["a", "b"]
    await second.stop()
