"""PostgresStream: what the server keeps for it, who may read, what goes wrong, and its options."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterable, Iterator

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.capture.streams import postgres_slot
from sluiceway.capture.streams.pgoutput import Decoder, Transaction, parse_lsn
from sluiceway.capture.streams.postgres_slot import PostgresStream, from_options, slot_name
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import BrokenOffError, UnknownPositionError
from sluiceway.testing.drive import driven
from tests.capture.postgres_source import SETTINGS, Source, begin, payloads, read_records
from tests.instance.instance_rig import eventually
from tests.servers.postgres_server import PostgresServer, binaries, server_or_skip
from tests.storage.test_postgres_faults import Proxy


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


# ---- what is kept --------------------------------------------------------------------------------------------------------


@driven
async def test_the_server_keeps_what_comes_after_the_position_and_nothing_before(source: Source) -> None:
    stream, start = await source.begin("{name} (id int PRIMARY KEY)")
    assert source.confirmed() == start
    positions = [start]
    for n in range(4):
        source.run(f"INSERT INTO {{name}} VALUES ({n})")
        positions.append((await read_records(stream, source.name, positions[-1], 1))[1])
    assert source.confirmed() == start
    await stream.kept(source.name, positions[2])
    # Exactly: not a byte further.
    assert source.confirmed() == positions[2]
    await stream.kept(source.name, positions[1])
    assert source.confirmed() == positions[2]
    for position in positions[:2]:
        with pytest.raises(UnknownPositionError, match="keeps nothing before"):
            await stream.read(source.name, position)
    assert [record["new"]["id"] for record in (await read_records(stream, source.name, positions[2], 2))[0]] == [2, 3]
    await stream.close()


@driven
async def test_the_server_may_forget_what_is_not_published(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY)")
    source.run("CREATE TABLE {name}_other (filler text)")
    stream, position = await source.begin()
    start = position

    async def moved() -> bool:
        nonlocal position
        source.run("INSERT INTO {name}_other SELECT repeat('x', 1000) FROM generate_series(1, 2000)")
        batch = await stream.read(source.name, position)
        assert not batch.records.num_rows
        if batch.upto is not None:
            assert (await stream.read(source.name, position, batch.upto)).records.num_rows == 0
            position = batch.upto
            await stream.kept(source.name, position)
        return parse_lsn(position) > parse_lsn(start) + (8 << 20)

    while not await moved():
        pass
    assert source.confirmed() == position
    source.run("INSERT INTO {name} VALUES (1)")
    await read_records(stream, source.name, position, 1)
    await stream.close()


@driven
async def test_where_nothing_happens_the_position_stays(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would move each time that it is kept, if it is kept in the same database."""
    monkeypatch.setattr(postgres_slot, "WAIT", 0.0)
    source.publish("{name} (id int PRIMARY KEY)")
    source.run("CREATE TABLE {name}_positions (position text)")
    stream = source.stream()
    position, moves = await begin(stream), 0
    for _ in range(50):
        batch = await stream.read(source.name, position)
        if batch.upto is not None:
            position, moves = batch.upto, moves + 1
        source.run(f"INSERT INTO {{name}}_positions VALUES ('{position}')")
    assert moves <= 2
    await stream.close()


@driven
async def test_moving_on_where_nothing_is_published_never_passes_a_commit(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is durable often ends in the middle of a commit, whose records would be lost if the position moved there."""
    monkeypatch.setattr(postgres_slot, "MOVE_BYTES", 1)
    monkeypatch.setattr(postgres_slot, "WAIT", 0.0)
    source.publish("{name} (id int PRIMARY KEY)")
    stream = source.stream()
    position, ids, rounds = await begin(stream), list[int](), 6

    def write() -> None:
        with psycopg.connect(source.server.dsn(), autocommit=True) as other:
            for n in range(rounds):
                # Nobody waits for the commit, so the log is written in whole pages first; and the commit, which names 3,000 parts of its
                # transaction, is longer than a page.
                other.execute(f"SET synchronous_commit = {'on' if n == rounds - 1 else 'off'}".encode())
                other.execute(MANY_PARTS.replace("{first}", str(n * 3_000)).replace("{name}", source.name).encode())

    writing = asyncio.create_task(asyncio.to_thread(write))
    while len(ids) < rounds * 3_000:
        batch = await stream.read(source.name, position)
        ids += [record["new"]["id"] for record in payloads(batch)]
        if batch.upto is not None:
            position = batch.upto
            await stream.kept(source.name, position)
        # Those that a commit made are there, or none of a later one.
        assert ids == list(range(1, len(ids) + 1))
    await writing
    await stream.close()


MANY_PARTS = """
DO $$ BEGIN
    FOR i IN {first} + 1 .. {first} + 3000 LOOP
        BEGIN
            INSERT INTO {name} VALUES (i);
        EXCEPTION WHEN division_by_zero THEN
            NULL;
        END;
    END LOOP;
END $$"""


# ---- slots ---------------------------------------------------------------------------------------------------------------


@driven
async def test_two_leaders_make_one_slot(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY)")
    streams = [source.stream() for _ in range(3)]
    with psycopg.connect(source.server.dsn()) as writer:
        # A slot begins when all have ended that were open when it was to be made.
        writer.execute(f"INSERT INTO {source.name} VALUES (1)".encode())
        asking = [asyncio.create_task(stream.seeds("")) for stream in streams]
        await eventually(lambda: bool(source.run(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{source.slot}'")))
        writer.commit()
    first, *others = await asyncio.gather(*asking)
    assert all(seeds == first for seeds in others)
    source.run("INSERT INTO {name} VALUES (2)")
    records, _ = await read_records(streams[0], source.name, first.partitions[0].start, 1)
    assert records[0]["new"] == {"id": 2}
    for stream in streams:
        await stream.close()


@driven
async def test_a_publication_that_is_added_is_a_seed_beyond_the_others(source: Source) -> None:
    other = Source(source.server)
    for each in (source, other):
        each.publish("{name} (id int PRIMARY KEY)")
    before, after = source.stream(), PostgresStream("cap", source.server.dsn(), [source.name, other.name])
    first = await before.seeds("")
    second = await after.seeds(first.upto)
    assert [born.token for born in second.partitions] == [other.name]
    assert await after.seeds(second.upto) == (second.upto, ())
    # One whose configuration is older takes nothing back.
    assert await before.seeds(second.upto) == (second.upto, ())
    await before.close()
    await after.close()
    other.drop()


@pytest.mark.parametrize("again", [False, True])
@driven
async def test_a_slot_that_is_gone_is_never_made_again(source: Source, again: bool) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} VALUES (1)")
    (_, upto) = await read_records(stream, source.name, position, 1)
    source.run(f"SELECT pg_drop_replication_slot('{source.slot}')")
    if again:
        source.run("INSERT INTO {name} VALUES (2)", f"SELECT pg_create_logical_replication_slot('{source.slot}', 'pgoutput')")
    await stream.kept(source.name, upto)
    for ask in (stream.read(source.name, upto), stream.read(source.name, position, upto), stream.read(source.name, position)):
        with pytest.raises(UnknownPositionError):
            await ask
    assert len(source.run(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{source.slot}'")) == again
    await stream.close()


@driven
async def test_a_slot_that_the_server_gave_up_is_an_unknown_position() -> None:
    with server_or_skip({**SETTINGS, "max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}) as server:
        server.administer("ALTER ROLE sluiceway REPLICATION")
        source = Source(server)
        source.publish("{name} (id int PRIMARY KEY)")
        source.run("CREATE TABLE {name}_other (filler text)")
        stream = source.stream()
        position = await begin(stream)
        lost = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{source.slot}' AND wal_status = 'lost'"
        while not source.run(lost):
            source.run("INSERT INTO {name}_other SELECT repeat('x', 1000) FROM generate_series(1, 10000)")
            server.administer("SELECT pg_switch_wal()", "CHECKPOINT")
        with pytest.raises(UnknownPositionError, match="dropped the changes of the slot"):
            await stream.read(source.name, position)
        with pytest.raises(SluicewayError, match="pg_drop_replication_slot"):
            await stream.seeds("")
        await stream.close()


@driven
async def test_a_position_beyond_the_servers_log_is_unknown(source: Source) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY)")
    for ask in (stream.read(source.name, "FFFF/0"), stream.read(source.name, position, "FFFF/0"), stream.read(source.name, "here")):
        with pytest.raises(UnknownPositionError):
            await ask
    # Nor is it taken for safe.
    await stream.kept(source.name, "FFFF/0")
    assert source.confirmed() == position
    await stream.close()


@driven
async def test_who_occupies_the_slot_is_waited_for(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY)")
    receive = binaries() / "pg_recvlogical"
    if not receive.exists():
        pytest.skip("no pg_recvlogical")
    options = [f"--dbname={source.server.dsn()}", f"--slot={source.slot}", "--start", "--file=/dev/null"]
    options += ["-o", "proto_version=1", "-o", f"publication_names={source.name}"]
    with subprocess.Popen([str(receive), *options], stderr=subprocess.DEVNULL) as other:  # noqa: ASYNC220 - it returns at once
        active = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{source.slot}' AND active"
        await eventually(lambda: bool(source.run(active)))
        source.run("INSERT INTO {name} VALUES (1)")
        with monkeypatch.context() as patience:
            patience.setattr(postgres_slot, "_OCCUPIED", 0.2)
            with pytest.raises(BrokenOffError, match="is active"):
                await stream.read(source.name, position)
        reading = asyncio.create_task(read_records(stream, source.name, position, 1))
        await asyncio.wait([reading], timeout=0.3)
        assert not reading.done()
        other.kill()
    assert (await reading)[0][0]["new"] == {"id": 1}
    await stream.close()


@driven
async def test_who_was_frozen_in_the_middle_of_a_call_keeps_nobody_from_reading(source: Source) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY, filler text)")
    source.run("INSERT INTO {name} SELECT n, repeat('x', 10000) FROM generate_series(1, 3000) AS n")
    peek = "SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', NULL, NULL, 'proto_version', '1', 'publication_names', '{name}')"
    with psycopg.connect(source.server.dsn(), autocommit=True) as frozen:
        # It takes nothing of the answer.
        frozen.pgconn.send_query(peek.replace("{slot}", source.slot).replace("{name}", source.name).encode())
        sending = f"SELECT 1 FROM pg_stat_activity WHERE pid = {frozen.info.backend_pid} AND wait_event = 'ClientWrite'"
        await eventually(lambda: bool(source.run(sending)))
        batch = await stream.read(source.name, position)
        assert batch.records.num_rows == 3_000
        assert batch.upto is not None
        await stream.kept(source.name, batch.upto)
        assert source.confirmed() == batch.upto
        assert source.run(sending)
        frozen.pgconn.finish()
    await stream.close()


# ---- what goes wrong -----------------------------------------------------------------------------------------------------


@driven
async def test_an_answer_that_is_cut_off_breaks_off(source: Source) -> None:
    source.publish("{name} (id int PRIMARY KEY)")
    proxy = Proxy()
    async with proxy.to(source.server.port) as port:
        stream = source.stream(port)
        position = await begin(stream)
        source.run("INSERT INTO {name} SELECT generate_series(1, 1000)")
        whole, upto = await read_records(stream, source.name, position, 1_000)
        proxy.answers = False
        for ask in (stream.read(source.name, position), stream.kept(source.name, upto), stream.seeds("")):
            with pytest.raises(BrokenOffError):
                await ask
        proxy.answers = True
        again = await stream.read(source.name, position, upto)
        assert payloads(again) == whole
        await stream.close()


@driven
async def test_a_transaction_that_takes_long_is_given_more_time(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_slot, "STATEMENT_TIMEOUT", 20)
    source.publish("{name} (id int PRIMARY KEY)")
    # The slot is made by somebody who is not in a hurry.
    source.run(f"SELECT pg_create_logical_replication_slot('{source.slot}', 'pgoutput')")
    position = source.confirmed()
    source.run("INSERT INTO {name} SELECT generate_series(1, 60000)")
    stream = source.stream()
    broken = 0
    while True:
        try:
            batch = await stream.read(source.name, position)
            break
        except BrokenOffError:
            broken += 1
            assert broken < 30
    assert broken
    assert batch.records.num_rows == 60_000
    await stream.close()


@driven
async def test_what_the_server_lacks_is_said(source: Source) -> None:
    stream = source.stream()
    with pytest.raises(SluicewayError, match=f'CREATE PUBLICATION "{source.name}"') as error:
        await stream.seeds("")
    assert error.value.field == "publications"
    source.publish("{name} (id int PRIMARY KEY)")
    source.server.administer("ALTER ROLE sluiceway NOREPLICATION")
    try:
        with pytest.raises(SluicewayError, match="REPLICATION"):
            await stream.seeds("")
    finally:
        source.server.administer("ALTER ROLE sluiceway REPLICATION")
    await stream.close()


@driven
async def test_a_role_that_may_not_read_any_more_is_said_until_it_may(source: Source) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} VALUES (1)")
    source.server.administer("ALTER ROLE sluiceway NOREPLICATION")
    try:
        for _ in range(2):
            with pytest.raises(SluicewayError, match="ALTER ROLE") as error:
                await stream.read(source.name, position)
            assert error.value.code == "forbidden"
        # That is a hint only, and no reason to stop.
        with pytest.raises(BrokenOffError):
            await stream.kept(source.name, source.run("SELECT pg_current_wal_flush_lsn()::text")[0][0])
    finally:
        source.server.administer("ALTER ROLE sluiceway REPLICATION")
    await read_records(stream, source.name, position, 1)
    await stream.close()


@driven
async def test_a_publication_that_was_dropped_is_said(source: Source) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY)")
    source.run("DROP PUBLICATION {name}", "INSERT INTO {name} VALUES (1)")
    with pytest.raises(SluicewayError, match=r"(?s)does not exist.*start another capture"):
        await stream.read(source.name, position)
    await stream.close()


@driven
async def test_a_transaction_that_is_too_large_is_said(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY, filler text)")
    monkeypatch.setattr(postgres_slot, "_MOST_BYTES", 1_000)
    source.run("INSERT INTO {name} VALUES (1, repeat('x', 1000))")
    with pytest.raises(SluicewayError, match="another capture, which begins after") as error:
        await stream.read(source.name, position)
    assert error.value.field == "publications"
    await stream.close()


@driven
async def test_what_is_not_understood_is_said(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, position = await source.begin("{name} (id int PRIMARY KEY)")
    source.run("INSERT INTO {name} VALUES (1)")

    class Later(Decoder):
        """As if the server said something that only later protocols have."""

        def feed(self, messages: Iterable[bytes]) -> list[Transaction]:
            return super().feed([*messages, b"S"])

    monkeypatch.setattr(postgres_slot, "Decoder", Later)
    with pytest.raises(SluicewayError, match="please report it") as error:
        await stream.read(source.name, position)
    assert not error.value.retryable
    await stream.close()


@driven
async def test_a_server_whose_log_is_not_for_it_is_said() -> None:
    with server_or_skip() as server:
        source = Source(server)
        stream = source.stream()
        with pytest.raises(SluicewayError, match="set wal_level = logical"):
            await stream.seeds("")
        await stream.close()


# ---- options -------------------------------------------------------------------------------------------------------------


@driven
async def test_options(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    source.publish("{name} (id int PRIMARY KEY)")
    monkeypatch.setenv("SOURCE_DSN", source.server.dsn())
    # Spark hands names over in lower case; others write them as they like.
    stream = from_options("cap", {"DSN_env": "SOURCE_DSN", "publications": f" {source.name} "})
    assert [born.token for born in (await stream.seeds("")).partitions] == [source.name]
    await stream.close()


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"publications": "p"}, "dsn_env", "either dsn_env or dsn_file"),
        ({"publications": "p", "dsn_env": "A", "dsn_file": "b"}, "dsn_file", "either dsn_env or dsn_file"),
        ({"publications": "p", "dsn_env": "NOT_THERE"}, "dsn_env", "is not set"),
        ({"publications": "p", "dsn_file": "/not/there"}, "dsn_file", "cannot be read"),
        ({"publications": "p", "dsn_env": "BAD_DSN"}, "dsn_env", "neither a PostgreSQL URL nor a connection string"),
        ({"dsn_env": "GOOD_DSN"}, "publications", "separated by commas"),
        ({"publications": "a,,b", "dsn_env": "GOOD_DSN"}, "publications", "separated by commas"),
        ({"publications": "a,a", "dsn_env": "GOOD_DSN"}, "publications", "named twice"),
        ({"publications": "x" * 64, "dsn_env": "GOOD_DSN"}, "publications", "separated by commas"),
        ({"publications": ",".join(f"{n:060}" for n in range(17)), "dsn_env": "GOOD_DSN"}, "publications", "longer than 1,000 bytes"),
        ({"publication": "p", "dsn_env": "GOOD_DSN"}, "publication", "did you mean publications?"),
        ({"colour": "p", "dsn_env": "GOOD_DSN"}, "colour", "expected one of dsn_env"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], field: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOD_DSN", "postgresql://localhost/x")
    monkeypatch.setenv("BAD_DSN", "secret sauce")
    with pytest.raises(SluicewayError) as error:
        from_options("cap", options)
    assert (error.value.code, error.value.field) == ("invalid_request", field)
    assert says in error.value.detail
    assert "secret" not in error.value.detail


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,20}", fullmatch=True) | st.sampled_from(
    ["a", "a_b", "A", "b", "b_c", "a.b", "x" * 128]
)
PUBLICATIONS = st.text(st.characters(exclude_characters="\0,", codec="utf-8"), min_size=1, max_size=15) | st.sampled_from(
    ["b", "b_c", "c", "B", "_b"]
)


@given(NAMES, PUBLICATIONS, NAMES, PUBLICATIONS)
def test_each_pair_of_names_has_a_slot_of_its_own(name: str, publication: str, other: str, another: str) -> None:
    slot = slot_name(name, publication)
    assert len(slot) <= 63
    assert set(slot) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")
    assert slot.startswith("sluiceway_")
    assert (slot == slot_name(other, another)) == ((name, publication) == (other, another))


def test_a_simple_slot_is_named_after_both() -> None:
    assert slot_name("orders", "all_tables") == "sluiceway_orders_all_tables"
    assert slot_name("or", "ders_all_tables") != slot_name("or_ders", "all_tables")
