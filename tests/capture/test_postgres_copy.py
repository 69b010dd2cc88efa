"""The initial copy of a PostgresStream: what fits the changes after it, what another reader goes on with, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sluiceway.adapters.storage.postgres_connections import Link
from sluiceway.capture import CaptureConfig, run_member
from sluiceway.capture.streams import postgres_copy, postgres_slot
from sluiceway.capture.streams.postgres_copy import BEGIN, is_of_copy, parse_place
from sluiceway.capture.streams.postgres_slot import PostgresStream, from_options
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import Batch, BrokenOffError, ChangeStream, PlanLostError, UnknownPositionError
from sluiceway.testing.drive import driven
from tests.capture.postgres_source import SETTINGS, Source, payloads
from tests.capture.test_postgres_stream import TYPES
from tests.instance.instance_rig import eventually
from tests.server.server_running import running
from tests.servers.postgres_server import PATIENCE, PostgresServer, server_or_skip


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with server_or_skip(SETTINGS) as server:
        server.administer("ALTER ROLE sluiceway REPLICATION")
        yield server


@pytest.fixture
def source(server: PostgresServer) -> Iterator[Source]:
    source = Source(server)
    yield source
    source.drop()


def copying(source: Source) -> PostgresStream:
    return PostgresStream("cap", source.server.dsn(), [source.name], snapshot=True)


async def begun(stream: PostgresStream) -> str:
    (born,) = (await stream.seeds("")).partitions
    assert born.start == BEGIN
    return born.start


@dataclasses.dataclass
class Reading:
    """What one reader after another reads of the source's publication."""

    source: Source
    position: str
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    async def step(self, stream: ChangeStream, limit: int = 10) -> Batch:
        batch = await stream.read(self.source.name, self.position, limit=limit)
        self.records += payloads(batch)
        self.position = batch.upto or self.position
        return batch

    async def copy(self, stream: ChangeStream, limit: int = 10) -> None:
        """The rest of the copy."""
        while is_of_copy(self.position):
            await self.step(stream, limit)

    async def changes(self, stream: ChangeStream) -> None:
        """Everything up to now."""
        while (await self.step(stream)).records.num_rows:
            pass

    @property
    def copied(self) -> list[Any]:
        return [record["new"] for record in self.records if record["op"] == "snapshot"]


def applied(records: list[dict[str, Any]], strict: bool) -> dict[str, dict[str, Any]]:
    """The rows that the records lead to. `strict`: each change finds what it changes, and a row that is new was not there."""
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        found = rows.pop(json.dumps(record["key"]), None)
        assert not strict or (found is None) == (record["op"] in ("insert", "snapshot")), record
        if record["new"] is not None:
            key = {name: record["new"][name] for name in record["key"]}
            rows[json.dumps(key)] = record["new"]
    return rows


def by_id(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: int(row["id"]))


def rows_of(source: Source) -> list[dict[str, Any]]:
    return [row for (row,) in source.run("SELECT to_jsonb(found) FROM {name} AS found ORDER BY found.id")]


# ---- what is copied ------------------------------------------------------------------------------------------------------


@driven
async def test_a_copy_and_the_changes_after_it_fit_exactly(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY, n int)")
    source.run("INSERT INTO {name} SELECT n, 0 FROM generate_series(1, 200) AS n")
    stream = copying(source)
    reading = Reading(source, await begun(stream))
    assert not source.run(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{source.slot}'")
    first = await reading.step(stream)
    assert (first.records.num_rows, first.end) == (10, None)
    place = parse_place(reading.position)
    assert place is not None
    assert (place.lsn, place.schema, place.table, place.key) == (source.confirmed(), "public", source.name, ("10",))
    # Every row that is still to be copied is changed, moved, deleted; and there are new ones.
    source.run(
        "UPDATE {name} SET n = n + 1",
        "UPDATE {name} SET id = id + 1000 WHERE id % 10 = 0",
        "DELETE FROM {name} WHERE id % 10 = 1",
        "INSERT INTO {name} SELECT n, 7 FROM generate_series(300, 310) AS n",
    )
    await reading.copy(stream)
    assert reading.copied == [{"id": n, "n": 0} for n in range(1, 201)]
    assert reading.position == place.lsn == source.confirmed()
    await reading.changes(stream)
    assert by_id(applied(reading.records, strict=True).values()) == rows_of(source)
    await stream.close()


@driven
async def test_a_copy_that_begins_under_writes_fits_exactly(source: Source) -> None:
    """What is written between the slot's beginning and the first read of the copy is in one of the two."""
    source.publish("{name} (id int PRIMARY KEY, n int)")
    source.run("INSERT INTO {name} SELECT n, 0 FROM generate_series(1, 5000) AS n")
    for _ in range(3):
        stream = copying(source)
        with writing(source):
            reading = Reading(source, await begun(stream))
            await reading.copy(stream, limit=1_000)
        await reading.changes(stream)
        assert by_id(applied(reading.records, strict=True).values()) == rows_of(source)
        await stream.close()
        source.run(f"SELECT pg_drop_replication_slot('{source.slot}')")


@driven
async def test_a_copied_row_is_as_an_inserted_one(source: Source) -> None:
    columns = ", ".join(f"c{n} {kind}" for n, (kind, _, _) in enumerate(TYPES))
    values = ", ".join(value for _, value, _ in TYPES)
    source.publish(f"{{name}} (id int PRIMARY KEY, {columns}, twice int GENERATED ALWAYS AS (id * 2) STORED)")
    fill = ", ".join(["id", *(f"c{n}" for n in range(len(TYPES)))])
    source.run(f"INSERT INTO {{name}} ({fill}) VALUES (1, {values})")
    stream = copying(source)
    reading = Reading(source, await begun(stream))
    await reading.copy(stream)
    source.run(f"INSERT INTO {{name}} ({fill}) VALUES (2, {values})")
    while len(reading.records) < 2:
        await reading.step(stream)
    copied, inserted = reading.records
    assert copied.keys() == inserted.keys()
    assert (copied["op"], copied["table"], copied["key"]) == ("snapshot", inserted["table"], {"id": 1})
    assert copied["new"] == inserted["new"] | {"id": 1} == {f"c{n}": value for n, (_, _, value) in enumerate(TYPES)} | {"id": 1}
    assert (copied["committed_at"], copied["xid"], copied["seq"]) == (None, None, None)
    await stream.close()


@driven
async def test_the_tables_of_a_publication_are_copied_one_after_the_other(source: Source) -> None:
    source.publish(
        "{name} (b int, a text, n int, PRIMARY KEY (a, b))", '"{name}.odd ""one" (id text PRIMARY KEY)', "{name}_empty (id int PRIMARY KEY)"
    )
    source.run("CREATE TABLE {name}_child () INHERITS ({name})", "INSERT INTO {name}_child VALUES (1, 'not published', 0)")
    source.run("INSERT INTO {name} SELECT n % 5, 'it''s ' || n / 5, n FROM generate_series(0, 24) AS n")
    source.run("ALTER TABLE {name} REPLICA IDENTITY FULL")
    source.run("""INSERT INTO "{name}.odd ""one" VALUES ('a\\b"%s'), ('é'), ('')""")
    stream = copying(source)
    reading = Reading(source, await begun(stream))
    await reading.copy(stream, limit=4)
    tables = [record["table"] for record in reading.records]
    assert tables == [f"public.{source.name}"] * 25 + [f'public."{source.name}.odd ""one"'] * 3
    assert [(row["a"], row["b"]) for row in reading.copied[:25]] == sorted((f"it's {n // 5}", n % 5) for n in range(25))
    # The key of a record is the replica identity, as of changes; the order is the primary key's.
    assert reading.records[0]["key"] == reading.copied[0]
    assert sorted(row["id"] for row in reading.copied[25:]) == ["", 'a\\b"%s', "é"]
    await stream.close()


@driven
async def test_what_a_publication_leaves_out_is_not_copied(source: Source) -> None:
    if source.run("SELECT current_setting('server_version_num')::int >= 150000") != [(True,)]:
        pytest.skip("no column lists or row filters")
    source.run(
        "CREATE TABLE {name} (id int PRIMARY KEY, seen int, secret text)",
        "CREATE TABLE {name}_all (LIKE {name} INCLUDING ALL) PARTITION BY LIST (id)",
    )
    source.run("CREATE TABLE {name}_some PARTITION OF {name}_all FOR VALUES IN (1, 2)")
    source.run(
        "INSERT INTO {name} SELECT n, n, 'x' FROM generate_series(1, 9) AS n", "INSERT INTO {name}_all VALUES (1, 1, 'y'), (2, 2, 'y')"
    )
    source.run(
        "CREATE PUBLICATION {name} FOR TABLE {name} (id, seen) WHERE (id > 5), {name}_all (seen, id) WITH (publish_via_partition_root)"
    )
    stream = copying(source)
    reading = Reading(source, await begun(stream))
    await reading.copy(stream, limit=3)
    assert reading.copied == [{"id": n, "seen": n} for n in range(6, 10)] + [{"id": n, "seen": n} for n in (1, 2)]
    assert {record["table"] for record in reading.records[4:]} == {f"public.{source.name}_all"}
    await stream.close()


@driven
async def test_large_rows_make_small_batches(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_copy, "COPY_BYTES", 100_000)
    monkeypatch.setattr(postgres_copy, "_FIRST", 4)
    source.publish("{name} (id int PRIMARY KEY, filler text)")
    source.run("INSERT INTO {name} SELECT n, repeat('x', 10000) FROM generate_series(1, 100) AS n")
    stream = copying(source)
    reading, sizes = Reading(source, await begun(stream)), []
    while is_of_copy(reading.position):
        sizes.append((await reading.step(stream, limit=10_000)).records.num_rows)
    assert max(sizes) < 30
    assert [row["id"] for row in reading.copied] == list(range(1, 101))
    await stream.close()


@driven
async def test_a_copy_promises_no_more_than_the_slots_beginning(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} SELECT generate_series(1, 20)")
    stream = copying(source)
    reading = Reading(source, await begun(stream))
    first = await reading.step(stream)
    assert first.at is not None
    assert first.behind is not None
    source.run("INSERT INTO {name} VALUES (21)")
    second = await reading.step(stream)
    assert second.at == first.at
    assert second.behind is not None
    assert second.behind >= first.behind
    await reading.copy(stream)
    while len(reading.records) < 21:
        changed = await reading.step(stream)
    assert changed.records["at"].cast("int64")[0].as_py() >= first.at
    await stream.close()


# ---- another reader ------------------------------------------------------------------------------------------------------


@driven
async def test_another_reader_goes_on_behind_the_last_row_with_a_snapshot_of_its_own(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY, n int)")
    source.run("INSERT INTO {name} SELECT n, 0 FROM generate_series(1, 100) AS n")
    first = copying(source)
    reading = Reading(source, await begun(first))
    for _ in range(3):
        await reading.step(first)
    await first.close()
    # In what was copied, and in what was not.
    source.run("UPDATE {name} SET n = n + 1", "DELETE FROM {name} WHERE id % 10 = 0", "INSERT INTO {name} VALUES (7000, 7)")
    second = copying(source)
    await reading.copy(second)
    await reading.changes(second)
    copied = reading.copied
    assert copied[:30] == [{"id": n, "n": 0} for n in range(1, 31)]
    assert copied[30:] == [{"id": n, "n": 1} for n in range(31, 101) if n % 10] + [{"id": 7000, "n": 7}]
    # Some changes come that the rest of the copy had already. By key, they lead to the same rows.
    assert by_id(applied(reading.records, strict=False).values()) == rows_of(source)
    await second.close()


@driven
async def test_whoever_dies_before_the_first_batch_leaves_a_slot_that_is_used(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY, n int)")
    source.run("INSERT INTO {name} SELECT n, 0 FROM generate_series(1, 10) AS n")
    first = copying(source)
    start = await begun(first)
    await first.read(source.name, start, limit=3)
    await first.close()
    begins = source.confirmed()
    source.run("UPDATE {name} SET n = 1")
    second = copying(source)
    reading = Reading(source, start)
    assert (await reading.step(second)).at is None, "when the slot was made is not known"
    await reading.copy(second)
    assert reading.position == begins == source.confirmed()
    await reading.changes(second)
    assert reading.copied == [{"id": n, "n": 1} for n in range(1, 11)]
    assert applied(reading.records, strict=False).keys() == {json.dumps({"id": n}) for n in range(1, 11)}
    assert len(reading.records) == 20
    await second.close()


@driven
async def test_a_batch_is_repeated_by_the_reader_of_the_snapshot_alone(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY, n int)")
    source.run("INSERT INTO {name} SELECT n, 0 FROM generate_series(1, 30) AS n")
    stream = copying(source)
    reading = Reading(source, await begun(stream))
    begins = reading.position
    first = await reading.step(stream)
    middle = reading.position
    second = await reading.step(stream)
    source.run("DELETE FROM {name} WHERE id < 25")
    assert first.upto is not None
    assert second.upto is not None
    assert (await stream.read(source.name, begins, first.upto)).records.equals(first.records)
    assert (await stream.read(source.name, middle, second.upto, 1)).records.equals(second.records)
    with pytest.raises(PlanLostError, match="has gone with its reader"):
        await copying(source).read(source.name, middle, second.upto)
    # Nor by itself, once it has left the partition.
    stream.left(source.name)
    with pytest.raises(PlanLostError):
        await stream.read(source.name, middle, second.upto)
    await stream.close()


@driven
async def test_a_snapshot_does_not_outlast_its_reader(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} SELECT generate_series(1, 30)")
    held = "SELECT count(*) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND state = 'idle in transaction'"
    stream = copying(source)
    reading = Reading(source, await begun(stream))
    await reading.step(stream)
    assert source.run(held) == [(1,)]
    # What is kept of a copy tells the slot nothing.
    await stream.kept(source.name, reading.position)
    stream.left(source.name)
    await eventually(lambda: source.run(held) == [(0,)])
    await reading.copy(stream)
    await eventually(lambda: source.run(held) == [(0,)])
    await stream.close()


@driven
async def test_a_server_that_is_killed_in_the_middle_of_a_copy(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY, n int)")
    source.run("INSERT INTO {name} SELECT n, 0 FROM generate_series(1, 100) AS n")
    stream = copying(source)
    reading = Reading(source, await begun(stream))
    await reading.step(stream)
    await asyncio.to_thread(source.server.kill)
    with pytest.raises(BrokenOffError):
        await reading.step(stream)
    await asyncio.to_thread(source.server.start)
    source.reconnect()
    source.run("UPDATE {name} SET n = 1")
    while is_of_copy(reading.position):
        with contextlib.suppress(BrokenOffError):
            await reading.step(stream)
    while True:
        # Each connection of before notices only when it is used.
        with contextlib.suppress(BrokenOffError):
            await reading.changes(stream)
            break
    assert by_id(applied(reading.records, strict=False).values()) == rows_of(source)
    await stream.close()


@driven
async def test_two_readers_that_begin_at_once_make_one_slot(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} SELECT generate_series(1, 30)")
    streams = [copying(source) for _ in range(3)]
    start = await begun(streams[0])

    async def first(stream: PostgresStream) -> Batch:
        while True:
            with contextlib.suppress(BrokenOffError):
                return await stream.read(source.name, start)

    batches = await asyncio.gather(*(first(stream) for stream in streams))
    assert [batch.records.num_rows for batch in batches] == [30, 30, 30]
    places = [parse_place(batch.upto or "") for batch in batches]
    assert {place.lsn for place in places if place is not None} == {source.confirmed()}
    for stream in streams:
        await stream.close()


@driven
async def test_a_slot_whose_plugin_is_not_stored_yet_is_waited_for(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stores a new slot's name first. A reader that looks in between sees a slot that is not ours, without a position."""
    source.publish("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} SELECT generate_series(1, 30)")
    first, second = copying(source), copying(source)
    start = await begun(first)
    await first.read(source.name, start)
    look = postgres_slot._Slot._look

    async def in_between(slot: postgres_slot._Slot, link: Link) -> postgres_slot._Look:
        return (await look(slot, link))._replace(ours=False, wal_status=None, confirmed=None)

    monkeypatch.setattr(postgres_slot._Slot, "_look", in_between)
    with pytest.raises(BrokenOffError, match="is being created"):
        await second.read(source.name, start)
    monkeypatch.undo()
    assert (await second.read(source.name, start)).records.num_rows == 30
    await first.close()
    await second.close()


@driven
async def test_a_slot_whose_creator_gives_up_is_created_by_the_next_reader(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server drops a slot whose creation has not finished with the connection. Nothing has been read, so nothing is lost."""
    source.publish("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} SELECT generate_series(1, 30)")
    stream = copying(source)
    start = await begun(stream)

    @contextlib.asynccontextmanager
    async def created_by_another_that_gives_up(_slot: postgres_slot._Slot) -> AsyncIterator[str | None]:
        yield None

    monkeypatch.setattr(postgres_slot._Slot, "_exported", created_by_another_that_gives_up)
    with pytest.raises(BrokenOffError, match="has not finished"):
        await stream.read(source.name, start)
    monkeypatch.undo()
    assert (await stream.read(source.name, start)).records.num_rows == 30
    await stream.close()


# ---- what is refused -----------------------------------------------------------------------------------------------------


@driven
async def test_a_table_without_a_primary_key_is_refused(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY)", "{name}_without (id int)")
    stream = copying(source)
    with pytest.raises(SluicewayError, match=f"public.{source.name}_without has no primary key") as error:
        await stream.read(source.name, await begun(stream))
    assert error.value.field == "snapshot"
    await stream.close()


@driven
async def test_a_role_that_may_not_read_a_table_is_told(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} VALUES (1)", "REVOKE SELECT ON {name} FROM sluiceway")
    stream = copying(source)
    start = await begun(stream)
    with pytest.raises(SluicewayError, match="the role needs SELECT on each") as error:
        await stream.read(source.name, start)
    assert error.value.code == "forbidden"
    source.run(
        "GRANT SELECT ON {name} TO sluiceway", "ALTER TABLE {name} ENABLE ROW LEVEL SECURITY", "ALTER TABLE {name} FORCE ROW LEVEL SECURITY"
    )
    with pytest.raises(SluicewayError, match="all of their rows"):
        await stream.read(source.name, start)
    source.run("ALTER TABLE {name} DISABLE ROW LEVEL SECURITY")
    assert (await stream.read(source.name, start)).records.num_rows == 1
    await stream.close()


@driven
async def test_a_primary_key_that_is_too_long_for_a_position_is_told(source: Source) -> None:
    source.publish("{name} (id text PRIMARY KEY)")
    source.run("INSERT INTO {name} VALUES (repeat('x', 1000))")
    stream = copying(source)
    with pytest.raises(SluicewayError, match="too long for a copy"):
        await stream.read(source.name, await begun(stream))
    await stream.close()


@driven
async def test_a_slot_that_is_gone_in_the_middle_of_a_copy_is_an_unknown_position(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} SELECT generate_series(1, 30)")
    stream = copying(source)
    reading = Reading(source, await begun(stream))
    await reading.step(stream)
    await stream.close()
    source.run(f"SELECT pg_drop_replication_slot('{source.slot}')")
    for position in (reading.position, "copy [1]", "copy"):
        other = copying(source)
        if position == BEGIN:
            assert (await other.read(source.name, position)).records.num_rows == 30
        else:
            with pytest.raises(UnknownPositionError):
                await other.read(source.name, position)
        await other.close()


def test_the_option_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DSN", "host=127.0.0.1")
    given = {"publications": "p", "dsn_env": "SOURCE_DSN"}
    from_options("cap", given | {"snapshot": "initial"})
    from_options("cap", given | {"snapshot": ""})
    with pytest.raises(SluicewayError, match="expected initial") as error:
        from_options("cap", given | {"snapshot": "always"})
    assert error.value.field == "snapshot"


# ---- members -------------------------------------------------------------------------------------------------------------

MEMBER = """
import asyncio, json, sys
from sluiceway.capture import CaptureConfig, run_member
asyncio.run(run_member(CaptureConfig(**json.loads(sys.argv[1])), stop=asyncio.Event()))
"""


writes = itertools.count()


@contextlib.contextmanager
def writing(source: Source) -> Iterator[None]:
    """Rows are changed, deleted and inserted all the time."""
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(source.server.dsn(), autocommit=True) as connection:
            for n in writes:
                if stop.wait(0.002):
                    return
                for statement in (
                    f"UPDATE {source.name} SET n = n + 1 WHERE id = {n * 37 % 5000 + 1}",
                    f"DELETE FROM {source.name} WHERE id = {n * 53 % 5000 + 1}",
                    f"INSERT INTO {source.name} VALUES ({n * 91 % 5000 + 1}, -1) ON CONFLICT DO NOTHING",
                    f"UPDATE {source.name} SET id = id + {5_000 * (n + 1)} WHERE id = {n * 71 % 5000 + 1}",
                ):
                    connection.execute(statement.encode())

    thread = threading.Thread(target=write, name="writer")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE)


@driven
async def test_a_member_that_is_killed_in_the_middle_of_a_copy(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one goes on, while the tables are changed all the time: by key, what the queue has leads to the rows of the tables."""
    monkeypatch.setenv("SOURCE_DSN", source.server.dsn())
    source.publish("{name} (id int PRIMARY KEY, n int)")
    source.run("INSERT INTO {name} SELECT n, 0 FROM generate_series(1, 5000) AS n")
    with running(tmp_path / "data") as served:
        queue_name = served.queue(requested_partitions=1)
        told: dict[str, Any] = {
            "name": "cap",
            "meta": f"sqlite:{tmp_path / 'meta.db'}",
            "stream": "postgres",
            "options": {"publications": source.name, "dsn_env": "SOURCE_DSN", "snapshot": "initial"},
            "url": served.url,
            "queue": queue_name,
            "limit": 100,
        }
        with writing(source):
            await _until_killed(told, lambda: served.totals(queue_name)["produced"] >= 1_000)
            assert served.totals(queue_name)["produced"] < 5_000, "the copy had ended"
            stop = asyncio.Event()
            going = asyncio.create_task(run_member(CaptureConfig(**told), stop=stop))
            await eventually(lambda: served.totals(queue_name)["produced"] >= 6_000)
        source.run("INSERT INTO {name} VALUES (2000000000, 0)")
        records: list[dict[str, Any]] = []
        while not records or records[-1]["new"] != {"id": 2_000_000_000, "n": 0}:
            leased = (await asyncio.to_thread(served.lease, queue_name))["items"]
            records += [json.loads(b64decode(item["bytes"])) for item in leased]
        stop.set()
        await going
    assert by_id(applied(records, strict=False).values()) == rows_of(source)
    copied = [record["new"]["id"] for record in records if record["op"] == "snapshot"]
    # No more than the batch that was under way came twice.
    assert len(copied) - len(set(copied)) <= 100


async def _until_killed(told: dict[str, Any], holds: Callable[[], bool]) -> None:
    """Run a member in a process of its own, and kill it then."""
    with subprocess.Popen([sys.executable, "-c", MEMBER, json.dumps(told)]) as member:  # noqa: ASYNC220 - it returns at once
        try:
            await eventually(holds)
        finally:
            member.kill()
