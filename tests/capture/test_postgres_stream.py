"""PostgresStream: the suite of its port, every kind of change, and a busy database that is killed, on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from sluiceway.adapters import system
from sluiceway.capture import CaptureConfig, TaskRunner, look, run_member
from sluiceway.capture.presenter import DEAD_LETTERS_ALARM, group_of
from sluiceway.capture.streams import postgres_slot
from sluiceway.capture.streams.postgres_slot import PostgresStream
from sluiceway.ports.change_stream import Batch, BrokenOffError, ChangeStream
from sluiceway.testing.change_stream_suite import ChangeStreamSuite, World, next_batch
from sluiceway.testing.drive import driven
from tests.capture.postgres_source import SETTINGS, Source, begin, numbers, payloads, read_records
from tests.instance.instance_rig import eventually
from tests.server.server_running import running
from tests.servers.postgres_server import PATIENCE, PostgresServer, binaries, server_or_skip


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


# ---- the suite -----------------------------------------------------------------------------------------------------------


class TwoTables:
    """A World of two publications."""

    def __init__(self, server: PostgresServer) -> None:
        self.server, self._sources, self._opened = server, [Source(server), Source(server)], list[PostgresStream]()
        for source in self._sources:
            source.publish("{name} (label text PRIMARY KEY)")
        asyncio.run(self._begin())

    async def _begin(self) -> None:
        stream = await self.open()
        await stream.seeds("")
        await stream.close()

    async def open(self) -> ChangeStream:
        return PostgresStream("cap", self.server.dsn(), [source.name for source in self._sources])

    async def write(self, count: int) -> list[str]:
        names = [f"n{next(numbers)}" for _ in range(count)]
        for name, source in zip(names, itertools.cycle(self._sources), strict=False):
            source.run(f"INSERT INTO {{name}} VALUES ('{name}')")
        return names

    def names(self, records: Any) -> list[str]:
        return [json.loads(payload)["new"]["label"] for payload in records["payload"].to_pylist()]

    async def nowhere(self, position: str) -> str:
        return "0/10"

    async def interrupt(self) -> None:
        self.server.stop()

    async def restore(self) -> None:
        await asyncio.to_thread(self.server.start)

    def drop(self) -> None:
        if not self.server.running:
            self.server.start()
        for source in self._sources:
            source.drop()


class TestPostgresStream(ChangeStreamSuite):
    @pytest.fixture
    def world(self, server: PostgresServer) -> Iterator[World]:
        world = TwoTables(server)
        yield world
        world.drop()


@driven
async def test_a_record_that_is_too_large_for_an_item_becomes_a_dead_letter_and_the_rest_goes_on(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DSN", source.server.dsn())
    source.publish("{name} (id int PRIMARY KEY, body text)")
    with running(tmp_path / "data") as served:
        dead_queue = served.queue()
        told = CaptureConfig(
            name="cap",
            meta=f"sqlite:{tmp_path / 'meta.db'}",
            stream="postgres",
            options={"publications": source.name, "dsn_env": "SOURCE_DSN"},
            url=served.url,
            queue=served.queue(dead_queue=dead_queue),
        )
        stop = asyncio.Event()
        runners: list[TaskRunner] = []
        capturing = asyncio.create_task(run_member(told, stop=stop, watch=runners.append))
        await eventually(lambda: bool(runners) and bool(runners[0].claims))
        source.run("INSERT INTO {name} VALUES (1, 'a')")
        source.run("INSERT INTO {name} VALUES (2, repeat('x', 9 << 20)), (3, 'b')", "INSERT INTO {name} VALUES (4, 'c')")
        await eventually(lambda: served.totals(told.queue)["produced"] == 3)
        seen = await look("cap", told.meta)
        while seen.positions[source.name].kept.records < 4:
            seen = await look("cap", told.meta)
        shown = group_of(seen, system.now())
        (alarm,) = shown.alarms
        assert (alarm.partition, alarm.member) == (source.name, runners[0].name)
        assert alarm.why.startswith(f"1 record was too large for the target, and went to the dead queue {dead_queue}; the last, at ")
        assert shown.partitions[0].dead_letters == 1
        assert not group_of(seen, system.now() + DEAD_LETTERS_ALARM + 60_000).alarms
        stop.set()
        await capturing
        assert [json.loads(b64decode(each["bytes"]))["new"]["id"] for each in served.lease(told.queue)["items"]] == [1, 3, 4]
        letters = served.lease(dead_queue)["items"]
        assert [each["headers"]["sluiceway-part"] for each in letters] == ["1/2", "2/2"]
        assert {each["reference"] for each in letters} == {f"public.{source.name}:[2]"}
        change = json.loads(b"".join(b64decode(each["bytes"]) for each in letters))
        assert (change["op"], change["new"]) == ("insert", {"id": 2, "body": "x" * (9 << 20)})


# ---- what is read --------------------------------------------------------------------------------------------------------

TYPES: list[tuple[str, str, Any]] = [
    ("boolean", "true", True),
    ("smallint", "-7", -7),
    ("integer", "7", 7),
    ("bigint", "9223372036854775807", 9223372036854775807),
    ("real", "'0.1'", 0.1),
    ("double precision", "'1e-300'", 1e-300),
    ("double precision", "'NaN'", "NaN"),
    ("double precision", "'-Infinity'", "-Infinity"),
    ("numeric", "1.10", "1.10"),
    ("text", "E'a\"b\\\\\\n\\u00e9'", 'a"b\\\né'),
    ("varchar(5)", "''", ""),
    ("json", "'{\"a\": [1, null]}'", {"a": [1, None]}),
    ("jsonb", "'\"x\"'", "x"),
    ("bytea", "'\\x00ff'", "\\x00ff"),
    ("uuid", "'00000000-0000-0000-0000-000000000001'", "00000000-0000-0000-0000-000000000001"),
    ("timestamptz", "'2026-01-31 08:00:00.5+02'", "2026-01-31 06:00:00.5+00"),
    ("timestamp", "'2026-01-31 08:00:00'", "2026-01-31 08:00:00"),
    ("date", "'2026-01-31'", "2026-01-31"),
    ("interval", "'1 day 2 hours'", "P1DT2H"),
    ("integer[]", "'{1,NULL}'", "{1,NULL}"),
    ("text", "NULL", None),
]


@driven
async def test_each_type_is_read(source: Source) -> None:
    stream, position = await source.begin("{name} (" + ", ".join(f"c{n} {kind}" for n, (kind, _, _) in enumerate(TYPES)) + ")")
    source.run("INSERT INTO {name} VALUES (" + ", ".join(value for _, value, _ in TYPES) + ")")
    ((record,), _) = await read_records(stream, source.name, position, 1)
    assert record["new"] == {f"c{n}": value for n, (_, _, value) in enumerate(TYPES)}
    assert record["key"] is None
    await stream.close()


@driven
async def test_each_kind_of_change_is_read(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY, name text, big text)", '"{name}.odd" (a int, b int, PRIMARY KEY (b, a))')
    source.run("ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL")
    stream, position = await source.begin()
    source.run(
        "INSERT INTO {name} VALUES (1, 'one', repeat('x', 10000))",
        "UPDATE {name} SET name = 'uno'",
        "UPDATE {name} SET id = 2, big = ''",
        "DELETE FROM {name}",
        'INSERT INTO "{name}.odd" VALUES (1, 2)',
        'TRUNCATE {name}, "{name}.odd"',
        "ALTER TABLE {name} ADD age int DEFAULT 5",
        "INSERT INTO {name} VALUES (3)",
    )
    records, _ = await read_records(stream, source.name, position, 8)
    name = f"public.{source.name}"
    odd = f'public."{source.name}.odd"'
    told = [(record["table"], record["op"], record["key"], record["new"], record.get("unchanged")) for record in records]
    assert told[:5] == [
        (name, "insert", {"id": 1}, {"id": 1, "name": "one", "big": "x" * 10_000}, None),
        # What is large and did not change is not in the server's log.
        (name, "update", {"id": 1}, {"id": 1, "name": "uno"}, ["big"]),
        (name, "update", {"id": 1}, {"id": 2, "name": "uno", "big": ""}, None),
        (name, "delete", {"id": 2}, None, None),
        (odd, "insert", {"a": 1, "b": 2}, {"a": 1, "b": 2}, None),
    ]
    assert sorted(told[5:7]) == [(odd, "truncate", None, None, None), (name, "truncate", None, None, None)]
    assert told[7] == (name, "insert", {"id": 3}, {"id": 3, "name": None, "big": None, "age": 5}, None)
    await stream.close()


@driven
async def test_the_replica_identity_is_the_key(source: Source) -> None:
    source.publish("{name} (id int, name text)", "{name}_u (id int NOT NULL UNIQUE, name text)")
    source.run("ALTER TABLE {name} REPLICA IDENTITY FULL", "ALTER TABLE {name}_u REPLICA IDENTITY USING INDEX {name}_u_id_key")
    stream, position = await source.begin()
    for table in ("{name}", "{name}_u"):
        source.run(f"INSERT INTO {table} VALUES (1, 'a')", f"UPDATE {table} SET name = 'b'", f"DELETE FROM {table}")
    records, upto = await read_records(stream, source.name, position, 6)
    assert [record["key"] for record in records] == [
        {"id": 1, "name": "a"},
        {"id": 1, "name": "a"},
        {"id": 1, "name": "b"},
        *[{"id": 1}] * 3,
    ]
    batch = await stream.read(source.name, position, upto)
    table = f"public.{source.name}"
    keys = [f'{table}:[1,"a"]', f'{table}:[1,"a"]', f'{table}:[1,"b"]', *[f"{table}_u:[1]"] * 3]
    assert batch.records["key"].to_pylist() == keys
    assert batch.records["kind"].to_pylist() == ["insert", "update", "delete"] * 2
    await stream.close()


@driven
async def test_transactions_come_whole_in_the_order_of_their_commits(source: Source) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY)")
    with psycopg.connect(source.server.dsn()) as late:
        late.execute(f"INSERT INTO {source.name} SELECT generate_series(1, 50)".encode())
        source.run("INSERT INTO {name} VALUES (100)", "BEGIN", "INSERT INTO {name} VALUES (101)", "ROLLBACK")
        late.execute(f"INSERT INTO {source.name} VALUES (51)".encode())
    source.run("INSERT INTO {name} VALUES (102)")
    sizes, records = list[int](), list[dict[str, Any]]()
    while sum(sizes) < 53:
        batch = await next_batch(stream, source.name, position, limit=10)
        assert batch.upto is not None
        # Each batch again, by itself.
        assert (await stream.read(source.name, position, batch.upto, 1)).records.equals(batch.records)
        sizes.append(batch.records.num_rows)
        records += payloads(batch)
        position = batch.upto
    assert sizes == [1, 51, 1]
    assert [record["new"]["id"] for record in records] == [100, *range(1, 52), 102]
    assert [record["seq"] for record in records] == [1, *range(1, 52), 1]
    assert len({(record["lsn"], record["xid"], record["committed_at"]) for record in records}) == 3
    await stream.close()


@driven
async def test_the_same_texts_whatever_the_session_is_set_to(source: Source) -> None:
    stream, position = await source.begin("{name} (a timestamptz, b interval, c bytea, d double precision, e money, f regclass)")
    source.run("INSERT INTO {name} VALUES ('2026-01-31 08:00Z', '1 day 2 hours', 'x', 0.1::float8 + 0.2, 1.5, 'pg_class')")
    first = await next_batch(stream, source.name, position)
    odd = {
        "TimeZone": "Asia/Tokyo",
        "intervalstyle": "postgres_verbose",
        "bytea_output": "escape",
        "datestyle": "German",
        "extra_float_digits": "-3",
    }
    source.server.administer(*(f"ALTER ROLE sluiceway SET {name} = '{value}'" for name, value in odd.items()))
    try:
        other = source.stream()
        assert (await other.read(source.name, position, first.upto)).records.equals(first.records)
        await other.close()
    finally:
        source.server.administer("ALTER ROLE sluiceway RESET ALL")
    await stream.close()


@driven
async def test_what_a_killed_server_would_lose_is_not_read(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_slot, "MOVE_BYTES", 1)
    stream, position = await source.begin("{name} (id int PRIMARY KEY)")
    source.server.pause_wal_writer()
    source.run("CREATE TABLE {name}_other ()")
    source.run("SET synchronous_commit = off", "INSERT INTO {name} SELECT generate_series(1001, 2000)")
    assert source.run("SELECT count(*) FROM {name}") == [(1_000,)]
    batch = await stream.read(source.name, position)
    assert not batch.records.num_rows
    # It is committed already, and its time is older than now.
    assert batch.at is None
    # Nor does the position pass it: after the kill, others are there.
    position = batch.upto or position
    source.server.kill()
    source.server.start()
    source.reconnect()
    source.run("INSERT INTO {name} VALUES (2)")
    records = None
    while records is None:
        with contextlib.suppress(BrokenOffError):
            records, _ = await read_records(stream, source.name, position, 1)
    assert [record["new"]["id"] for record in records] == [2]
    assert source.run("SELECT * FROM {name}") == [(2,)]
    await stream.close()


@driven
async def test_the_heartbeat_is_not_ahead(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY)")
    promised = 0
    for n in range(5):
        source.run(f"INSERT INTO {{name}} VALUES ({n})")
        batch = await next_batch(stream, source.name, position)
        assert batch.upto is not None
        assert batch.at is not None
        at = batch.records["at"].cast("int64").to_pylist()
        assert promised <= min(at)
        promised, position = batch.at, batch.upto
        # It is not far behind either.
        assert max(at) - promised <= postgres_slot.SLACK
    idle = await stream.read(source.name, position)
    assert (idle.behind, idle.end) == (0, None)
    assert idle.at is not None
    assert idle.at >= promised
    await stream.close()


# ---- a busy database that is killed --------------------------------------------------------------------------------------

SCRIPT: LiteralString = """
\\set id random(1, 200)
\\set other random(1, 200)
\\set kind random(1, 10)
BEGIN;
INSERT INTO {name} (id, n, note) VALUES (:id, 1, repeat('long ', 1000)) ON CONFLICT (id) DO UPDATE SET n = {name}.n + 1;
\\if :kind = 1
DELETE FROM {name} WHERE id = :other;
\\elif :kind = 2
UPDATE {name} SET note = 'short' WHERE id = :other;
\\elif :kind = 3
UPDATE {name} SET id = :other WHERE id = :id AND NOT EXISTS (SELECT 1 FROM {name} WHERE id = :other);
\\endif
INSERT INTO {name}_log (what) VALUES (:id);
COMMIT;
"""


@dataclasses.dataclass
class Copy:
    """What the tables are by the records that were read."""

    rows: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    log: list[int] = dataclasses.field(default_factory=list)

    def apply(self, record: dict[str, Any]) -> None:
        if record["table"].endswith("_log"):
            self.log.append(record["new"]["n"])
            return
        before = self.rows.pop(record["key"]["id"], {})
        assert bool(before) == (record["op"] != "insert"), record
        if record["new"] is not None:
            assert record["new"]["id"] not in self.rows
            self.rows[record["new"]["id"]] = record["new"] | {name: before[name] for name in record.get("unchanged", [])}


@driven
@pytest.mark.slow
async def test_a_copy_is_the_same_row_by_row_after_the_server_was_killed_under_load(source: Source) -> None:
    if not (binaries() / "pgbench").exists():
        pytest.skip("no pgbench")
    server, kills = source.server, 3
    source.publish("{name} (id int PRIMARY KEY, n int, note text)")
    source.run("ALTER TABLE {name} ALTER note SET STORAGE EXTERNAL", "CREATE TABLE {name}_log (n serial PRIMARY KEY, what int)")
    source.run("ALTER PUBLICATION {name} ADD TABLE {name}_log")
    stream = source.stream()
    position, copy, taken = await begin(stream), Copy(), list[tuple[str, str, Batch]]()

    async def step() -> bool:
        """One batch; whether there was something in it. Each batch is the same when it is read again, by another and after a kill."""
        nonlocal position
        if len(taken) == 3:
            other = source.stream()
            try:
                for begun, upto, before in taken:
                    assert (await other.read(source.name, begun, upto)).records.equals(before.records)
                await stream.kept(source.name, taken[-1][1])
                taken.clear()
            finally:
                await other.close()
        batch = await stream.read(source.name, position, limit=300)
        if batch.upto is None:
            return False
        taken.append((position, batch.upto, batch))
        for record in payloads(batch):
            copy.apply(record)
        position = batch.upto
        return bool(batch.records.num_rows)

    async def read_until(count: int, load: subprocess.Popen[bytes] | None) -> None:
        """So many records of the log, or, without a load, to the end."""
        while len(copy.log) < count:
            try:
                if not await step() and load is None:
                    return
            except BrokenOffError:
                await asyncio.sleep(0.05)
            assert load is None or load.poll() is None, "the load has ended"

    for _ in range(kills):
        load = bench(source)
        try:
            await read_until(len(copy.log) + 500, load)
            await asyncio.to_thread(server.kill)
        finally:
            load.kill()
            load.wait(PATIENCE)
        await asyncio.to_thread(server.start)
    await read_until(1 << 60, None)
    source.reconnect()
    rows = source.run("SELECT id, n, note FROM {name} ORDER BY id")
    assert [(row["id"], row["n"], row["note"]) for _, row in sorted(copy.rows.items())] == rows
    assert sorted(copy.log) == [n for (n,) in source.run("SELECT n FROM {name}_log ORDER BY n")]
    assert len(copy.log) >= 500 * kills
    await stream.close()


def bench(source: Source) -> subprocess.Popen[bytes]:
    """Four clients that write until they are killed, or the server is."""
    dsn = psycopg.conninfo.conninfo_to_dict(source.server.dsn())
    where = ["-h", str(dsn["host"]), "-p", str(dsn["port"]), "-U", str(dsn["user"])]
    command = [str(binaries() / "pgbench"), *where, "-n", "-c", "4", "-T", "600", "-f", "/dev/stdin", "--max-tries=100", str(dsn["dbname"])]
    environment = {"PATH": os.environ["PATH"], "PGPASSWORD": str(dsn["password"])}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdin is not None
    process.stdin.write(SCRIPT.replace("{name}", source.name).encode())
    process.stdin.close()
    return process
