"""Data that an earlier version wrote: it opens, with everything that was in it; and how a layout is brought up to date."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import apsw
import numpy as np
import psycopg
import pytest
from psycopg import sql

from sluiceway.adapters import system
from sluiceway.adapters.meta import sqlite as meta_sqlite
from sluiceway.adapters.meta.etcd import EtcdMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage import partition_file, postgres, postgres_schema
from sluiceway.adapters.storage.partition_file import PartitionFile
from sluiceway.adapters.storage.postgres import PostgresPartitionStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.contract.queue_stats import PartitionStats
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.meta import Entry, View
from sluiceway.model.requests import DONE, Produced, Selection, Settle
from sluiceway.model.small_batch import in_columns
from sluiceway.ports.partition_store import PartitionRef, PartitionStore, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually, payloads, produce
from tests.servers.etcd_server import etcd_or_skip
from tests.servers.postgres_server import PostgresServer
from tests.storage.golden import FAR, GROUP_KEY, HOUR, KEY, POSTGRES_SCHEMA, dump, fill, service_on, take

DATA = Path(__file__).parents[1] / "data"
ARCHIVES = sorted(path.name for path in DATA.glob("layout-*.tar.gz"))
numbers = itertools.count()


def unpacked(archive: str, directory: Path) -> Path:
    with tarfile.open(DATA / archive) as tar:
        tar.extractall(directory, filter="data")
    return directory


# What earlier versions wrote


@pytest.mark.parametrize("origin", [*(name for name in ARCHIVES if "sqlite" in name), "today"])
@driven
async def test_data_on_sqlite_opens_with_all_that_was_in_it(tmp_path: Path, origin: str) -> None:
    if origin == "today":
        await fill(tmp_path, SqlitePartitionStore(tmp_path / "partitions"))
    else:
        unpacked(origin, tmp_path)
    await check(tmp_path, SqlitePartitionStore(tmp_path / "partitions"))


@pytest.mark.parametrize("origin", [*(name for name in ARCHIVES if "postgres" in name), "today"])
def test_data_on_postgres_opens_with_all_that_was_in_it(tmp_path: Path, server: PostgresServer, origin: str) -> None:
    schema = POSTGRES_SCHEMA
    if origin == "today":
        asyncio.run(fill(tmp_path, PostgresPartitionStore(server.dsn(), schema=schema)))
        (tmp_path / "partitions.sql").write_text(dump(server.dsn()))
    else:
        unpacked(origin, tmp_path)
    # Also what was written now goes through a script: so one that `golden.py` makes is known to be of use.
    schema = loaded(server, tmp_path / "partitions.sql")
    asyncio.run(check(tmp_path, PostgresPartitionStore(server.dsn(), schema=schema)))


def loaded(server: PostgresServer, script: Path) -> str:
    """The new schema in which the script was run."""
    schema = f"golden {next(numbers)}"
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(schema)))
        connection.execute(script.read_bytes())
    return schema


def test_data_of_every_earlier_layout_is_kept() -> None:
    layouts = {"sqlite": partition_file.MIGRATIONS, "postgres": postgres_schema.MIGRATIONS}
    needed = {f"layout-{version}-{name}.tar.gz" for name, migrations in layouts.items() for version in range(1, len(migrations))}
    assert needed <= set(ARCHIVES)


class Clock:
    """The time as the service sees it, an hour after the data was written."""

    def __init__(self) -> None:
        self._now = system.now
        self._ahead = HOUR

    def __call__(self) -> int:
        return self._now() + self._ahead

    def set(self, now: int) -> None:
        self._ahead = now - self._now()


async def check(directory: Path, store: PartitionStore) -> None:
    """Everything that `golden.fill` has put there is there, and can be worked off to the last item."""
    clock = Clock()
    with mock.patch.object(system, "now", clock):
        service = service_on(directory, store)
        await service.start()
        try:
            await _check_books(service)
            await _check_keys(service)
            await _check_leases(service)
            clock.set(FAR + HOUR)
            await _check_rest(service)
        finally:
            await service.stop()


def stats(service: Service) -> PartitionStats:
    (partition,) = service.stats("q").partitions
    gone = partition.completed + partition.dead + partition.cleared + partition.redriven
    assert partition.produced == gone + partition.total + partition.transferring
    return partition


async def _check_books(service: Service) -> None:
    await eventually(lambda: (stats(service).ready, stats(service).transferring) == (7, 0))
    now = stats(service)
    assert (now.ready, now.total_leased, now.scheduled, now.leases) == (7, 14, 3, 3)
    assert (now.produced, now.leased, now.completed, now.retried, now.expired, now.dead) == (40, 35, 14, 3, 2, 2)
    first, second = await _dead(service)
    queue = service.queue("q").incarnation
    assert first["payload"] == b"b0"
    assert (first["kind"], first["encoding"], first["reference"], first["origin"]) == ("order", "text", "r1", f"{queue}.0.10")
    assert ("trace", "t1") in first["headers"]
    assert ("sluiceway-reason", "bad") in first["headers"]
    assert (second["payload"], second["origin"]) == (b"c18", f"{queue}.0.34")
    assert ("sluiceway-reason", "poison") in second["headers"]


async def _dead(service: Service) -> list[dict[str, Any]]:
    """What is in the dead queue, which is then empty."""
    leased = await take(service, 10, FAR, queue="dead")
    await service.settle("dead", Settle({0: [Selection(DONE, lease=each.number) for each in leased.leases]}, 10_000))
    return [row for batch in map(in_columns, leased.batches) for row in batch.to_pylist()]


async def _check_keys(service: Service) -> None:
    assert await produce(service, "q", "k0", key=KEY) == Produced(0, 39, 1, True)
    assert await produce(service, "q", "k1", "k2", key=GROUP_KEY) == Produced(0, 40, 2, True)
    for key, payload, code in ((KEY, "other", "key_conflict"), (GROUP_KEY._replace(sequence=4), "k1", "stale_sequence")):
        with pytest.raises(SluicewayError) as refusal:
            await produce(service, "q", payload, key=key)
        assert refusal.value.code == code


async def _check_leases(service: Service) -> None:
    again = await take(service, 2, FAR, "key-1")
    assert payloads(again.batches) == ["b1", "b3"]
    assert [attempts for batch in map(in_columns, again.batches) for attempts in batch.column("attempts").to_pylist()] == [2, 2]
    closed = await service.settle("q", Settle({0: [Selection(DONE, lease=again.leases[0].number)]}, 10_000))
    assert closed.completed == 2
    # Of the ten, three were completed.
    some = await service.settle("q", Settle({0: [Selection(DONE, offsets=np.arange(16, 26))]}, 10_000))
    assert (some.completed, len(some.ignored)) == (7, 3)
    # The outcomes that were stated of the next lease: one is dead, two are to be retried, the rest is done.
    staged = await service.settle("q", Settle({0: [Selection(DONE, lease=6)]}, 10_000))
    assert (staged.dead, staged.retried, staged.completed) == (1, 2, 2)
    await eventually(lambda: not stats(service).transferring)
    assert [row["payload"] for row in await _dead(service)] == [b"c10"]


async def _check_rest(service: Service) -> None:
    attempts = dict.fromkeys(("c19", "k0", "k1", "k2", "d0", "d1", "d2"), 1) | dict.fromkeys(("c11", "c12", "c15", "c16", "c17"), 2)
    served: dict[str, int] = {}
    while (leased := await take(service, 100, FAR + 2 * HOUR)).leases:
        for batch in map(in_columns, leased.batches):
            served |= dict(zip(payloads([batch]), batch.column("attempts").to_pylist(), strict=True))
        await service.settle("q", Settle({0: [Selection(DONE, lease=each.number) for each in leased.leases]}, 10_000))
    assert served == attempts
    now = stats(service)
    assert (now.total, now.transferring, now.completed, now.dead) == (0, 0, 37, 3)


# SQLite files

ADDS: tuple[str, ...] = ("CREATE TABLE added (number INTEGER); INSERT INTO added VALUES (7);",)
FAILS: tuple[str, ...] = ("CREATE TABLE added (number INTEGER); INSERT INTO added VALUES (7); INSERT INTO missing VALUES (7);",)


class File:
    """One of the two kinds of SQLite file, as layout 1."""

    def __init__(self, kind: str, directory: Path) -> None:
        unpacked("layout-1-sqlite.tar.gz", directory)
        self.module = partition_file if kind == "partition" else meta_sqlite
        self.newest = len(self.module.MIGRATIONS)
        self.path = max((directory / "partitions").iterdir()) if kind == "partition" else directory / "meta.sqlite"

    @contextlib.contextmanager
    def layout(self, further: Sequence[str]) -> Iterator[None]:
        """The program knows these layouts on top of today's."""
        with mock.patch.object(self.module, "MIGRATIONS", (*self.module.MIGRATIONS, *further)):
            yield

    def open(self) -> None:
        if self.module is partition_file:
            file = PartitionFile(self.path)
            assert file.browse().records
            file.close()
            return
        store = SqliteMetaStore(self.path)
        assert asyncio.run(_read_and_close(store))

    def look(self) -> tuple[int, list[tuple[object, ...]], list[tuple[object, ...]]]:
        """Version, tables, and what stands in the added one."""
        db = apsw.Connection(str(self.path))
        tables = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name").fetchall()
        added = db.execute("SELECT * FROM added").fetchall() if ("added",) in tables else []
        version = db.pragma("user_version")
        db.close()
        return version, tables, added


async def _read_and_close(store: SqliteMetaStore) -> bool:
    view = await store.read(prefixes=["queue/"])
    await store.close()
    return len(view.entries) == 2


@pytest.fixture(params=["partition", "meta"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> File:
    return File(request.param, tmp_path)


def test_a_layout_is_brought_up_to_date_once_and_the_older_version_then_refuses(file: File) -> None:
    with file.layout(ADDS):
        file.open()
        file.open()
    version, _, added = after = file.look()
    assert (version, added) == (file.newest + 1, [(7,)])
    words = rf"newer version of Sluiceway \(layout {file.newest + 1}; this one knows up to {file.newest}\)"
    with pytest.raises(StoreUnavailableError, match=words):
        file.open()
    assert file.look() == after


def test_several_migrations_are_carried_out_in_order(file: File) -> None:
    with file.layout((*ADDS, "UPDATE added SET number = number + 1;", "UPDATE added SET number = number * 2;")):
        file.open()
    version, _, added = file.look()
    assert (version, added) == (file.newest + 3, [(16,)])


@pytest.mark.parametrize("scripts", [FAILS, (*ADDS, "INSERT INTO missing VALUES (7);")])
def test_a_migration_that_fails_leaves_the_file_as_it_was(file: File, scripts: Sequence[str]) -> None:
    before = file.look()
    assert before[0] == 1
    with file.layout(scripts), pytest.raises(Exception, match="missing"):
        file.open()
    assert file.look() == before
    file.open()


@driven
async def test_many_processes_bring_one_store_up_to_date(tmp_path: Path) -> None:
    file = File("meta", tmp_path)
    with file.layout(ADDS):
        await asyncio.gather(*(asyncio.to_thread(file.open) for _ in range(8)))
    version, _, added = file.look()
    assert (version, added) == (file.newest + 1, [(7,)])


@driven
async def test_a_partition_of_a_newer_layout_stops_alone(tmp_path: Path) -> None:
    unpacked("layout-1-sqlite.tar.gz", tmp_path)
    service = Service(tmp_path)
    await service.start()
    newer = PartitionRef(service.queue("q").incarnation, 0)
    await service.stop()
    file = tmp_path / "partitions" / f"{newer.incarnation}-0.sqlite"
    db = apsw.Connection(str(file))
    db.pragma("user_version", len(partition_file.MIGRATIONS) + 1)
    db.close()
    service = Service(tmp_path)
    await service.start()
    assert ["newer version of Sluiceway" in problem for problem in service.problems()] == [True]
    assert (await produce(service, "dead", "x")).items == 1
    await service.stop()


# PostgreSQL: that a layout is brought up to date by many at once, and a newer one refused, is in test_postgres_partition_store.py


def test_a_migration_that_fails_leaves_the_schema_as_it_was(
    tmp_path: Path, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = loaded(server, unpacked("layout-1-postgres.tar.gz", tmp_path) / "partitions.sql")

    async def opened() -> int:
        store = PostgresPartitionStore(server.dsn(), schema=schema)
        try:
            return len((await store.browse(ref)).records)
        finally:
            await store.close()

    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        names = connection.execute(sql.SQL("SELECT incarnation FROM {}.partition").format(sql.Identifier(schema))).fetchall()
        ref = PartitionRef(str(names[-1][0]), 0)
        tables = "SELECT tablename FROM pg_tables WHERE schemaname = %s ORDER BY 1"
        before = connection.execute(tables, [schema]).fetchall()
        with monkeypatch.context() as patch:
            patch.setattr(postgres, "MIGRATIONS", (*postgres_schema.MIGRATIONS, *FAILS))
            with pytest.raises(StoreUnavailableError, match="missing"):
                asyncio.run(opened())
        assert connection.execute(tables, [schema]).fetchall() == before
        version = connection.execute(sql.SQL("SELECT version FROM {}.layout").format(sql.Identifier(schema))).fetchall()
        assert version == [(1,)]
    assert asyncio.run(opened()) > 0


# etcd


@driven
async def test_a_meta_store_in_etcd_of_the_earlier_layout_is_taken_over() -> None:
    with etcd_or_skip() as etcd:
        for time in range(3):
            store = EtcdMetaStore(etcd.url("taken-over"))
            if not time:
                stamp = await store.commit({"a": None}, puts={"a": b"1"})
                etcd.put("taken-over/layout", b"1")
            assert await store.read(["a"]) == View(stamp, {"a": Entry(b"1", stamp)})
            await store.close()
        assert etcd.get("taken-over/layout") == b"2"
