"""PostgresPartitionStore: the suite of its port, and what it promises beyond it. Faults are in test_postgres_faults.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql

from sluiceway.adapters.storage import postgres
from sluiceway.adapters.storage.postgres import PostgresPartitionStore
from sluiceway.adapters.storage.postgres_connections import Link
from sluiceway.adapters.storage.postgres_openings import MANY_RECORDS, MAX_GROUP
from sluiceway.adapters.storage.postgres_schema import MIGRATIONS
from sluiceway.instance.service import Service
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition
from sluiceway.ports.partition_store import Changes, DamagedError, Fence, PartitionStore, RecordKind, Snapshot, StoreUnavailableError
from sluiceway.testing.drive import OpenStore, driven
from sluiceway.testing.partition_store_suite import FENCE, OTHER, REF, PartitionStoreSuite, after, cycle
from tests.instance.instance_rig import eventually, lease, payloads, produce, service_on, settle, spec, total
from tests.servers.postgres_server import PostgresServer, packaged

NEXT = Fence(1, 2, 1)
numbers = itertools.count()


@pytest.fixture
def schema() -> str:
    """One that no other test uses, and that must never be taken for SQL."""
    return f'Odd "{next(numbers)}"; DROP SCHEMA public; --'


def opener(server: PostgresServer, schema: str, max_connections: int = 8) -> OpenStore[PartitionStore]:
    async def open_store() -> PartitionStore:
        return PostgresPartitionStore(server.dsn(), schema=schema, max_connections=max_connections)

    return open_store


@pytest.fixture
def open_store(server: PostgresServer, schema: str) -> OpenStore[PartitionStore]:
    return opener(server, schema)


class TestPostgresPartitionStore(PartitionStoreSuite):
    @pytest.fixture
    def open_store(self, server: PostgresServer, schema: str) -> OpenStore[PartitionStore]:
        return opener(server, schema)


class TestPostgresPartitionStoreWithOneConnection(PartitionStoreSuite):
    @pytest.fixture
    def open_store(self, server: PostgresServer, schema: str) -> OpenStore[PartitionStore]:
        return opener(server, schema, max_connections=1)


def execute(server: PostgresServer, schema: str, statement: LiteralString) -> list[tuple[object, ...]]:
    """Behind the store's back."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(schema)))
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


async def write(store: PartitionStore) -> None:
    for ref in (REF, OTHER):
        await store.open(ref, FENCE)
        changes = Changes(1, b"header", puts={(RecordKind.LEASE, "7"): b"record"}, blobs={1: b"sound", 2: b"blob" * 10_000})
        assert await store.apply(ref, changes, FENCE) is Outcome.DONE


# Damage


@driven
async def test_a_damaged_blob_is_named_and_the_rest_is_readable(
    open_store: OpenStore[PartitionStore], server: PostgresServer, schema: str
) -> None:
    store = await open_store()
    await write(store)
    execute(server, schema, "UPDATE blob SET data = set_bit(data, 7, 1 - get_bit(data, 7)) WHERE partition_id = 1 AND number = 2")
    with pytest.raises(DamagedError, match="k7f3q2ma-0: blob 2 "):
        await store.read(REF, [1, 2])
    assert await store.read(REF, [1]) == {1: b"sound"}
    assert await store.read(OTHER, [2]) == {2: b"blob" * 10_000}
    await store.close()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("UPDATE record SET value = set_bit(value, 7, 1 - get_bit(value, 7)) WHERE partition_id = 1", "record lease:7"),
        ("UPDATE record SET key = set_bit(key, 0, 1 - get_bit(key, 0)) WHERE partition_id = 1", "record mease:7"),
        ("UPDATE partition SET header = NULL WHERE id = 1", "the header"),
        ("UPDATE partition SET txn = 2 WHERE id = 1", "the header"),
        ("UPDATE partition SET fence_era = 0 WHERE id = 1", "the header"),
    ],
)
@driven
async def test_damaged_small_records_are_found(
    open_store: OpenStore[PartitionStore], server: PostgresServer, schema: str, damage: LiteralString, named: str
) -> None:
    store = await open_store()
    await write(store)
    execute(server, schema, damage)
    with pytest.raises(DamagedError, match=f"k7f3q2ma-0: {named} "):
        await store.open(REF, NEXT)
    with pytest.raises(DamagedError):
        await store.browse(REF)
    assert await store.apply(REF, Changes(2, b""), NEXT) is Outcome.REFUSED  # the fence stayed where it was
    assert (await store.open(OTHER, NEXT)).txn == 1
    await store.close()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("UPDATE record SET value = set_bit(value, 7, 1 - get_bit(value, 7)) WHERE partition_id = 1", "record lease:7"),
        ("UPDATE partition SET header = NULL WHERE id = 1", "the header"),
    ],
)
@driven
async def test_damage_in_one_of_many_that_are_opened_at_once_is_its_own(
    open_store: OpenStore[PartitionStore], server: PostgresServer, schema: str, damage: LiteralString, named: str
) -> None:
    store = await open_store()
    await write(store)
    execute(server, schema, damage)
    new = REF._replace(partition=9)
    damaged, *sound = await asyncio.gather(*(store.open(ref, NEXT) for ref in (REF, OTHER, new)), return_exceptions=True)
    assert isinstance(damaged, DamagedError)
    assert f"k7f3q2ma-0: {named} " in str(damaged)
    assert [isinstance(each, BaseException) or each.txn for each in sound] == [1, 0]
    assert await store.apply(REF, Changes(2, b""), NEXT) is Outcome.REFUSED  # the fence stayed where it was
    assert await store.apply(OTHER, Changes(2, b""), NEXT) is Outcome.DONE
    assert await store.apply(new, Changes(1, b""), NEXT) is Outcome.DONE
    await store.close()


# Openings in groups


@driven
async def test_many_openings_are_few_statements(open_store: OpenStore[PartitionStore], monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    execute_one, run = Link.execute, Link.run

    async def counted(link: Link, query: LiteralString, params: Sequence[object] = ()) -> list[tuple[object, ...]]:
        statements.append(query)
        return await execute_one(link, query, params)

    async def counted_script(link: Link, script: LiteralString | sql.Composed) -> None:
        statements.append(str(script))
        await run(link, script)

    store = await open_store()
    refs = [REF._replace(partition=number) for number in range(2 * MAX_GROUP + 1)]
    assert {snapshot.txn for snapshot in await asyncio.gather(*(store.open(ref, FENCE) for ref in refs))} == {0}
    # Not the last one, which is a group of its own, so opened alone; half of the others have a record.
    for ref in refs[:-1:2]:
        assert await store.apply(ref, cycle(1), FENCE) is Outcome.DONE
    monkeypatch.setattr(Link, "execute", counted)
    monkeypatch.setattr(Link, "run", counted_script)
    found = await asyncio.gather(*(store.open(ref, NEXT) for ref in refs[:-1]))
    assert list(found) == [Snapshot(0, None, {}) if number % 2 else after(1) for number in range(2 * MAX_GROUP)]
    # Begin, lock, read, raise, commit.
    assert len(statements) == 2 * 5
    statements.clear()
    await asyncio.gather(*(store.open(ref, Fence(1, 3, 1)) for ref in refs[1:-1:2]))
    # Without records: nothing is read.
    assert len(statements) == 4
    await store.close()


@driven
async def test_a_partition_of_many_records_does_not_hold_up_its_group(open_store: OpenStore[PartitionStore]) -> None:
    store = await open_store()
    refs = [REF._replace(partition=number) for number in range(3)]
    puts = {ref: {(RecordKind.KEY, f"{number}"): b"" for number in range(MANY_RECORDS - 1 + ref.partition)} for ref in refs}
    for ref in refs:
        await store.open(ref, FENCE)
        assert await store.apply(ref, Changes(1, b"", puts=dict(puts[ref])), FENCE) is Outcome.DONE
    found = await asyncio.gather(*(store.open(ref, NEXT) for ref in refs))
    assert [snapshot.records for snapshot in found] == [puts[ref] for ref in refs]
    assert await asyncio.gather(*(store.apply(ref, Changes(2, b""), FENCE) for ref in refs)) == [Outcome.REFUSED] * 3
    await store.close()


# The schema


@driven
async def test_many_first_starts_at_once(open_store: OpenStore[PartitionStore], server: PostgresServer, schema: str) -> None:
    stores = [await open_store() for _ in range(8)]
    snapshots = await asyncio.gather(*(store.open(REF._replace(partition=number), FENCE) for number, store in enumerate(stores)))
    assert len(snapshots) == 8
    assert execute(server, schema, "SELECT version FROM layout") == [(len(MIGRATIONS),)]
    await asyncio.gather(*(store.close() for store in stores))


@driven
async def test_a_newer_layout_is_left_alone(open_store: OpenStore[PartitionStore], server: PostgresServer, schema: str) -> None:
    store = await open_store()
    await write(store)
    await store.close()
    execute(server, schema, "UPDATE layout SET version = version + 1")
    store = await open_store()
    with pytest.raises(StoreUnavailableError, match="newer version of Sluiceway"):
        await store.open(REF, NEXT)
    assert await store.apply(REF, Changes(2, b""), FENCE) is Outcome.REFUSED
    execute(server, schema, "UPDATE layout SET version = version - 1")
    assert (await store.browse(REF)).txn == 1
    await store.close()


@driven
async def test_an_older_layout_is_brought_up_to_date(
    open_store: OpenStore[PartitionStore], server: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store()
    await write(store)
    await store.close()
    monkeypatch.setattr(postgres, "MIGRATIONS", (*MIGRATIONS, "ALTER TABLE blob ADD COLUMN added bigint NOT NULL DEFAULT 5"))
    stores = [await open_store() for _ in range(4)]
    assert {(await store.browse(REF)).txn for store in stores} == {1}
    assert execute(server, schema, "SELECT DISTINCT version, added FROM layout, blob") == [(len(MIGRATIONS) + 1, 5)]
    assert await stores[0].apply(REF, Changes(2, b"", blobs={3: b"3"}), FENCE) is Outcome.DONE
    await asyncio.gather(*(store.close() for store in stores))


@driven
async def test_a_dropped_partition_leaves_no_rows(open_store: OpenStore[PartitionStore], server: PostgresServer, schema: str) -> None:
    store = await open_store()
    await write(store)
    many = dict.fromkeys(range(10, 2600), b"blob")
    records = {(RecordKind.KEY, f"{number}"): b"" for number in range(2_600)}
    assert await store.apply(REF, Changes(2, b"", puts=dict(records), blobs=dict(many)), FENCE) is Outcome.DONE
    await store.drop(REF)
    counts: LiteralString = "SELECT (SELECT count(*) FROM partition), (SELECT count(*) FROM record), (SELECT count(*) FROM blob)"
    assert execute(server, schema, counts) == [(1, 1, 2)]
    # A partition that is made again has nothing of its former life.
    assert (await store.open(REF, FENCE)).records == {}
    await store.close()


# Settings


@driven
async def test_a_server_that_does_not_sync_is_not_used(open_store: OpenStore[PartitionStore], server: PostgresServer) -> None:
    def durable() -> bool:
        with psycopg.connect(server.dsn()) as connection:
            return connection.execute("SHOW fsync").fetchone() == ("on",)

    store = await open_store()
    server.administer("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
    try:
        await eventually(lambda: not durable())
        with pytest.raises(StoreUnavailableError, match="fsync"):
            await store.open(REF, FENCE)
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.REFUSED
    finally:
        server.administer("ALTER SYSTEM RESET fsync", "SELECT pg_reload_conf()")
        await eventually(durable)
    assert (await store.open(REF, FENCE)).txn == 0
    await store.close()


@driven
async def test_a_dead_server_is_refused_at_once(server: PostgresServer) -> None:
    store = PostgresPartitionStore(server.dsn(port=1), statement_timeout=60_000)
    async with asyncio.timeout(30):
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.REFUSED
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            await store.open(REF, FENCE)
        with pytest.raises(StoreUnavailableError):
            await store.read(REF, [1])
    await store.close()


@driven
async def test_no_more_connections_than_allowed(server: PostgresServer, schema: str) -> None:
    store = PostgresPartitionStore(server.dsn() + " application_name=counted", schema=schema, max_connections=3)
    refs = [REF._replace(partition=number) for number in range(12)]
    await asyncio.gather(*(store.open(ref, FENCE) for ref in refs))
    assert await asyncio.gather(*(store.apply(ref, cycle(1), FENCE) for ref in refs)) == [Outcome.DONE] * 12
    rows = execute(server, schema, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'counted'")
    assert rows == [(3,)]
    await store.close()


@driven
async def test_two_owners(open_store: OpenStore[PartitionStore]) -> None:
    former, present = await open_store(), await open_store()
    await former.open(REF, FENCE)
    assert await former.apply(REF, cycle(1), FENCE) is Outcome.DONE
    assert await present.open(REF, NEXT) == after(1)
    assert await former.apply(REF, cycle(2, "b"), FENCE) is Outcome.REFUSED
    assert await present.apply(REF, cycle(2), NEXT) is Outcome.DONE
    assert await former.browse(REF) == after(2)
    await former.close()
    await present.close()


# The whole way


@driven
async def test_a_service_on_postgres(server: PostgresServer, schema: str, tmp_path: Path) -> None:
    def service() -> Service:
        return service_on(tmp_path, PostgresPartitionStore(server.dsn(), schema=schema))

    first = service()
    await first.start()
    await first.create_queue(spec("q", 3))
    for number in range(6):
        assert (await produce(first, "q", f"a{number}", f"b{number}")).items == 2
    leased = await lease(first, "q", 6, most=3)
    assert (await settle(first, "q", leased)).completed == 6
    kept = await lease(first, "q", 2)
    back = await lease(first, "q", 2)
    await settle(first, "q", back, Disposition("retry"))
    await first.stop()

    second = service()
    await second.start()
    assert total(second, "q") == 6
    rest = await lease(second, "q", 10, 5_000, most=3)
    assert sorted(payloads(leased.batches) + payloads(kept.batches) + payloads(rest.batches)) == sorted(
        f"{letter}{number}" for letter in "ab" for number in range(6)
    )
    await settle(second, "q", rest)
    await settle(second, "q", kept)
    assert total(second, "q") == 0
    await second.delete_queue("q", force=False)
    assert execute(server, schema, "SELECT * FROM partition") == []
    await second.stop()


def test_the_packaged_server_runs_the_store(server: PostgresServer, schema: str) -> None:
    """What a machine without PostgreSQL falls back on."""

    async def round_trip(dsn: str) -> None:
        store = PostgresPartitionStore(dsn, schema=schema)
        await store.open(REF, FENCE)
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.DONE
        assert await store.browse(REF) == after(1)
        await store.close()

    for bindir in packaged()[:1]:
        with PostgresServer(bindir) as packaged_server:
            asyncio.run(round_trip(packaged_server.dsn()))
