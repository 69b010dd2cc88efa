"""The sync logs here pass the suite of their port; and what the one in a meta store promises beyond it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sluiceway.adapters.meta.etcd import EtcdMetaStore
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.postgres import PostgresMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.capture.logs.meta_log import MetaSyncLog
from sluiceway.core.group.task_state import Partition, Snapshot, State, decode, encode
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.meta_store import MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.sync_log import LogUnavailableError, SyncLog
from sluiceway.testing.drive import driven
from sluiceway.testing.sync_log_suite import LARGE, LONG, Entries, OpenLog, SyncLogSuite, check_order, of, read_all, records
from tests.capture.task_stores import OnEtcd, OnMemory, OnPostgres, OnSqlite, OpenMeta, Watched
from tests.server.server_process import PATIENCE
from tests.servers.etcd_server import etcd_or_skip
from tests.servers.postgres_server import server_or_skip


class LogOnMeta(SyncLogSuite):
    @pytest.fixture
    def open_log(self, open_meta: OpenMeta) -> OpenLog:
        @contextlib.asynccontextmanager
        async def open_log() -> AsyncIterator[SyncLog]:
            async with open_meta() as store:
                log = MetaSyncLog(store, "orders")
                try:
                    yield log
                finally:
                    await log.close()

        return open_log


class TestOnMemory(OnMemory, LogOnMeta):
    pass


class TestOnSqlite(OnSqlite, LogOnMeta):
    pass


class TestOnPostgres(OnPostgres, LogOnMeta):
    pass


class TestOnEtcd(OnEtcd, LogOnMeta):
    pass


# ---- what it costs, and faults ----------------------------------------------------------------------------------------


@driven
async def test_an_append_is_one_commit_and_what_came_is_read_at_once() -> None:
    shared = MemoryMetaStore()
    store = Watched(shared)
    log, other = MetaSyncLog(store, "orders"), MetaSyncLog(shared, "orders")
    await log.read(0)
    await log.append([b"a", b"b"])
    assert store.since() == ["read", "read", "commit"]
    assert (await log.read(0)).end == 2
    store.since()
    for number in (1, 2):
        await log.append([b"a", b"b"])
        assert store.since() == ["commit"]
        assert (await log.read(number * 2)).end == number * 2 + 2
        assert store.since() == ["read"]
    await other.append([b"c"])
    await log.wait(6, LONG)
    assert store.since() == []
    assert (await log.read(6)).entries == ((7, b"c"),)
    assert store.since() == ["read"]
    # Of two one looks again.
    await log.append([b"d"])
    assert store.since() == ["commit"]
    await other.append([b"e"])
    await log.append([b"f"])
    assert store.since() == ["commit", "read", "commit"]
    await log.append(records("g", 2_000))
    assert store.since() == ["commit"] * 3
    await log.trim(1_500)
    assert store.since() == ["commit"] * 2
    await log.close()
    await other.close()


@driven
async def test_a_wait_does_not_need_to_look_where_hints_come_and_looks_where_they_do_not() -> None:
    shared = MemoryMetaStore()
    for hints, poll in ((True, 3_600_000), (False, 20)):
        store = Watched(shared)
        store.hints = hints
        log, other = MetaSyncLog(store, "orders", poll_interval=poll), MetaSyncLog(shared, "orders")
        for _ in range(3):
            end = (await log.read(0)).end
            waiting = asyncio.create_task(log.wait(end, LONG))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not waiting.done()
            await other.append([b"more"])
            await waiting
            assert (await log.read(end)).entries == ((end + 1, b"more"),)
        await log.close()
        assert store.watches == 0
        await other.close()


@driven
async def test_a_wait_says_nothing_of_a_store_that_is_away_and_ends_in_time_also_if_it_hangs() -> None:
    shared = MemoryMetaStore()
    store = Watched(shared)
    log = MetaSyncLog(store, "orders", poll_interval=5)
    await log.read(0)

    async def away(what: str) -> None:
        raise StoreUnavailableError("away")

    async def hangs(what: str) -> None:
        await asyncio.Event().wait()

    for store.before in (away, hangs):
        await log.wait(0, 30)
        assert "read" in store.since()
    store.before = away
    with pytest.raises(LogUnavailableError, match="away"):
        await log.read(0)
    with pytest.raises(LogUnavailableError, match="away"):
        await MetaSyncLog(store, "orders").append([b"a"])
    await log.close()


@driven
async def test_what_may_have_been_appended_is_not_appended_again() -> None:
    shared = MemoryMetaStore()
    store = Watched(shared)
    log = MetaSyncLog(store, "orders")

    async def unheard(what: str) -> None:
        raise MetaUnknownError("no answer")

    for before, after in ((False, True), (True, False)):
        store.before, store.after = (unheard if before else store.nothing), (unheard if after else store.nothing)
        with pytest.raises(LogUnavailableError, match="no answer"):
            await log.append([b"maybe %d" % after])
        store.before = store.after = store.nothing
        await log.append([b"surely"])
    assert [record for _, record in await read_all(log)] == [b"maybe 1", b"surely", b"surely"]
    store.after = unheard
    with pytest.raises(LogUnavailableError, match="no answer"):
        await log.trim(1)
    assert (await log.read(0)).first == 2
    await log.close()


@driven
async def test_of_a_long_append_of_which_something_is_unknown_the_rest_is_not_said() -> None:
    store = Watched(MemoryMetaStore())
    log = MetaSyncLog(store, "orders")

    async def third(what: str) -> None:
        if store.asked.count("commit") == 3:
            raise MetaUnknownError("no answer")

    store.before = third
    with pytest.raises(LogUnavailableError):
        await log.append(records("a", 5_000))
    store.before = store.nothing
    there = await read_all(log)
    assert [record for _, record in there] == records("a", 5_000)[: len(there)]
    assert 1_000 < len(there) < 2_000
    await log.close()


@driven
async def test_what_others_have_in_the_inbox_is_seen_also_by_who_came_to_look_for_its_own() -> None:
    shared = MemoryMetaStore()
    store = Watched(shared)
    log, other = MetaSyncLog(store, "orders"), MetaSyncLog(shared, "orders")
    inbox = "tasks/orders/log-inbox/"

    async def come_first(what: str) -> None:
        if what == "commit" and store.asked.count("commit") <= 2:
            await other.append([b"first"])

    async def take_along(what: str) -> None:
        if what == "commit" and store.asked.count("commit") == 3:
            # Its own is taken along, and then comes one of somebody who is not heard of again.
            await other.append([b"by the way"])
            await shared.commit(puts={f"{inbox}another/{1:016}/0000": b"theirs"})

    store.before, store.after = come_first, take_along
    await log.append([b"mine"])
    assert store.asked.count("commit") == 3
    for number in range(3):
        await log.append([b"next %d" % number])
    said = [record for _, record in await read_all(log)]
    assert said == [b"first", b"first", b"mine", b"by the way", b"theirs", b"next 0", b"next 1", b"next 2"]
    assert not (await shared.read(prefixes=[inbox])).entries
    await log.close()
    await other.close()


@driven
async def test_an_entry_that_somebody_has_removed_is_no_gap_that_nobody_sees() -> None:
    store = MemoryMetaStore()
    log = MetaSyncLog(store, "orders")
    await log.append(records("a", 30))
    keys = sorted((await store.read(prefixes=["tasks/orders/log/"])).entries)
    assert len(keys) == 30
    await store.commit(deletes=[keys[16]])
    assert len((await log.read(0, 16)).entries) == 16
    with pytest.raises(LogUnavailableError, match=r"record 17 .*orders.* is missing"):
        await log.read(0)
    await log.close()


@driven
async def test_what_is_trimmed_is_gone_from_the_store() -> None:
    store = MemoryMetaStore()
    log = MetaSyncLog(store, "orders")
    await log.append(records("a", 2_500))
    await log.trim(2_490)
    assert len((await store.read(prefixes=["tasks/orders/"])).entries) == 11
    assert await log.read(0) == (2_491, tuple((number + 1, b"a %d" % number) for number in range(2_490, 2_500)), 2_500)
    await log.close()


@driven
async def test_logs_whose_names_begin_alike_are_two() -> None:
    store = MemoryMetaStore()
    one, two = MetaSyncLog(store, "orders"), MetaSyncLog(store, "orders-2")
    await one.append([b"a"])
    assert await two.read(0) == (1, (), 0)
    await one.close()
    await two.close()
    with pytest.raises(SluicewayError, match="name"):
        MetaSyncLog(store, "or/ders")


def test_a_snapshot_of_2000_partitions_fits() -> None:
    def partition(number: int) -> Partition:
        token = f"shardId-{number:012}"
        position = f"{4_960_000_000_000_000_000_000_000_000_000 + number:056}"
        return Partition(token, (f"shardId-{number // 2:012}",), position, "owned", (), f"executor-{number % 200:03}-k7f3q2ma", number)

    state = State(seq=90_000, partitions={each.token: each for each in map(partition, range(2_000))})
    data = encode(Snapshot(state))
    assert len(data) < LARGE / 2
    assert decode(data) == Snapshot(state)


# ---- killed in mid-commit ---------------------------------------------------------------------------------------------

WRITER = """
import asyncio, sys
from sluiceway.group import open_meta_store
from sluiceway.capture.logs.meta_log import MetaSyncLog

async def main():
    log = MetaSyncLog(open_meta_store(sys.argv[1]), "orders")
    for number in range(1_000_000):
        await log.append([f"{sys.argv[2]} {number}".encode()])
        print(number, flush=True)

asyncio.run(main())
"""


def test_processes_that_are_killed_in_mid_append(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'meta.sqlite'}"
    names = ["one", "two", "three"]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, url, name], stdout=subprocess.PIPE, text=True) for name in names]
    said: dict[str, int] = {}
    for name, writer in zip(names, writers, strict=True):
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.kill()
        said[name] = 20 + len([line for line in writer.stdout.read().split("\n") if line])
        writer.wait(PATIENCE)
        writer.stdout.close()

    async def look() -> None:
        store = SqliteMetaStore(tmp_path / "meta.sqlite")
        log = MetaSyncLog(store, "orders")
        # What who was killed has left in the inbox comes before it.
        await log.append([b"more"])
        entries = await read_all(log)
        assert [number for number, _ in entries] == list(range(1, len(entries) + 1))
        assert entries[-1][1] == b"more"
        for name in names:
            mine = of(name, entries)
            assert mine == records(name, len(mine))
            # What it was told is there, and at most one that it was not told of, or did not come to say.
            assert said[name] <= len(mine) <= said[name] + 1
        await log.close()
        await store.close()

    asyncio.run(look())


async def check_a_killed_server(make: Callable[[], MetaStore], kill: Callable[[], None], start: Callable[[], None]) -> None:
    """Several append while their server is killed and started again: what they were told is there, once, and the rest at most once."""
    stores = [make() for _ in range(4)]
    logs = [MetaSyncLog(store, "orders") for store in stores]
    known: list[list[bytes]] = [[] for _ in logs]
    unknown: set[bytes] = set()
    going = True

    async def write(number: int) -> None:
        at = 0
        while going:
            record = b"w%d %d" % (number, at)
            at += 1
            try:
                await logs[number].append([record])
                known[number].append(record)
            except LogUnavailableError:
                unknown.add(record)
                await asyncio.sleep(0.05)

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not holds():  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.005)

    reading = asyncio.create_task(follow_through(logs[0], lambda: going))
    writing = [asyncio.create_task(write(number)) for number in range(len(logs))]
    await until(lambda: all(len(each) >= 5 for each in known))
    await asyncio.to_thread(kill)
    await until(lambda: bool(unknown))
    await asyncio.to_thread(start)
    before = list(map(len, known))
    await until(lambda: all(len(each) >= least + 5 for each, least in zip(known, before, strict=True)))
    going = False
    await asyncio.gather(*writing)
    entries = await read_all(logs[1])
    assert [number for number, _ in entries] == list(range(1, len(entries) + 1))
    there = [record for _, record in entries]
    assert len(there) == len(set(there))
    assert set(there) <= {record for each in known for record in each} | unknown
    for number, each in enumerate(known):
        assert [record for record in of(f"w{number}", entries) if record not in unknown] == each
    seen = await reading
    assert seen == entries[: len(seen)]
    for log, store in zip(logs, stores, strict=True):
        await log.close()
        await store.close()


async def follow_through(log: SyncLog, goes_on: Callable[[], bool]) -> Entries:
    """What comes, whatever happens to the store meanwhile."""
    found: Entries = []
    while goes_on():
        after = found[-1][0] if found else 0
        with contextlib.suppress(LogUnavailableError):
            await log.wait(after, 200)
            found += (await log.read(after)).entries
    check_order(found)
    return found


@driven
@pytest.mark.slow
async def test_a_postgresql_server_that_is_killed_in_mid_append() -> None:
    with server_or_skip() as server:
        await check_a_killed_server(lambda: PostgresMetaStore(server.dsn(), statement_timeout=2_000), server.kill, server.start)


@driven
@pytest.mark.slow
async def test_an_etcd_that_is_killed_in_mid_append() -> None:
    with etcd_or_skip() as server:
        await check_a_killed_server(lambda: EtcdMetaStore(server.url("log"), request_timeout=2_000), server.kill, server.start)
