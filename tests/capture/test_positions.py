"""The position store passes the suite of its port over every meta store; and what it promises beyond it."""

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
from sluiceway.capture.logs import meta_positions
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.meta_store import MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.position_store import FencedError, PositionRecord, PositionStore, PositionUnknownError
from sluiceway.testing.drive import driven
from sluiceway.testing.position_store_suite import FULL, NOTHING, OpenPositions, PositionStoreSuite, at
from tests.capture.task_stores import OnEtcd, OnMemory, OnPostgres, OnSqlite, OpenMeta, Watched
from tests.server.server_process import PATIENCE
from tests.servers.etcd_server import etcd_or_skip
from tests.servers.postgres_server import server_or_skip


class PositionsOnMeta(PositionStoreSuite):
    @pytest.fixture
    def open_positions(self, open_meta: OpenMeta) -> OpenPositions:
        @contextlib.asynccontextmanager
        async def open_positions() -> AsyncIterator[PositionStore]:
            async with open_meta() as store:
                yield MetaPositions(store, "orders")

        return open_positions


class TestOnMemory(OnMemory, PositionsOnMeta):
    pass


class TestOnSqlite(OnSqlite, PositionsOnMeta):
    pass


class TestOnPostgres(OnPostgres, PositionsOnMeta):
    pass


class TestOnEtcd(OnEtcd, PositionsOnMeta):
    pass


# ---- what it costs, and faults ----------------------------------------------------------------------------------------


@driven
async def test_a_commit_is_one_commit_of_the_store() -> None:
    store = Watched(MemoryMetaStore())
    keeper = MetaPositions(store, "orders")
    opening, _ = await keeper.open("p", 1)
    assert store.since() == ["read", "commit"]
    for number in range(3):
        await keeper.commit(opening, at(number))
        assert store.since() == ["commit"]
    await MetaPositions(store, "orders").open("p", 1)
    store.since()
    with pytest.raises(FencedError):
        await keeper.commit(opening, at(4))
    assert store.since() == ["commit", "read"]
    # From then on it is known to be over, as far as a look is enough.
    with pytest.raises(FencedError):
        await keeper.commit(opening, at(4))
    assert store.since() == ["read"]


@driven
async def test_openings_that_are_not_remembered_any_more_cost_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_positions, "MAX_REMEMBERED", 2)
    store = Watched(MemoryMetaStore())
    keeper = MetaPositions(store, "orders")
    one, two, three = [(await keeper.open(token, 1))[0] for token in ("p", "q", "r")]
    store.since()
    await keeper.commit(one, at(1))
    assert store.since() == ["read", "commit"]
    await keeper.commit(three, at(1))
    assert store.since() == ["commit"]
    await keeper.commit(two, at(1))
    assert store.since() == ["read", "commit"]
    assert {token: stored.kept for token, stored in (await keeper.read()).items()} == dict.fromkeys("pqr", at(1))


@driven
async def test_what_is_unknown_is_said_to_be() -> None:
    store = Watched(MemoryMetaStore())
    keeper = MetaPositions(store, "orders")
    opening, _ = await keeper.open("p", 1)
    await keeper.commit(opening, at(1))

    async def away(what: str) -> None:
        raise StoreUnavailableError("away") if what == "read" else MetaUnknownError("no answer")

    store.after = away
    with pytest.raises(PositionUnknownError, match="no answer"):
        await keeper.commit(opening, at(2))
    store.after = store.nothing
    # It was.
    opening, kept = await keeper.open("p", 1)
    assert kept == at(2)
    store.before = away
    for work in (keeper.commit(opening, at(3)), keeper.open("p", 2), keeper.open("q", 1), keeper.read(), keeper.forget(["p"])):
        with pytest.raises(PositionUnknownError):
            await work
    store.before = store.nothing
    # It was not.
    assert (await keeper.open("p", 1))[1] == at(2)
    assert (await keeper.read()).keys() == {"p"}


@driven
async def test_a_commit_that_comes_late_does_not_land_over_a_later_opening() -> None:
    shared = MemoryMetaStore()
    store = Watched(shared)
    keeper, other = MetaPositions(store, "orders"), MetaPositions(shared, "orders")
    opening, _ = await keeper.open("p", 5)
    on_its_way, may_arrive = asyncio.Event(), asyncio.Event()

    async def late(what: str) -> None:
        if what == "commit":
            on_its_way.set()
            await may_arrive.wait()

    store.before = late
    committing = asyncio.create_task(keeper.commit(opening, at(7)))
    await on_its_way.wait()
    again, kept = await other.open("p", 5)
    assert kept == NOTHING
    await other.commit(again, at(1))
    may_arrive.set()
    with pytest.raises(FencedError) as caught:
        await committing
    assert caught.value.grant == 5
    assert (await other.read())["p"].kept == at(1)


@driven
async def test_captures_whose_names_begin_alike_are_two() -> None:
    store = MemoryMetaStore()
    one, two = MetaPositions(store, "orders"), MetaPositions(store, "orders-2")
    opening, _ = await one.open("p", 5)
    await one.commit(opening, FULL)
    assert (await two.open("p", 1))[1] == NOTHING
    assert (await one.read())["p"].kept == FULL
    with pytest.raises(SluicewayError, match="name"):
        MetaPositions(store, "or/ders")


# ---- killed in mid-commit ---------------------------------------------------------------------------------------------

READER = """
import asyncio, sys
from sluiceway.group import open_meta_store
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.ports.position_store import Kept

async def main():
    keeper = MetaPositions(open_meta_store(sys.argv[1]), "orders")
    opening, kept = await keeper.open("p", int(sys.argv[2]))
    at = int(kept.position or 0)
    while True:
        at += 1
        await keeper.commit(opening, Kept(position=str(at)))
        print(at, flush=True)

asyncio.run(main())
"""


def test_processes_that_are_killed_in_mid_commit_lose_nothing(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'meta.sqlite'}"
    last = 0
    for grant in range(1, 4):
        reader = subprocess.Popen([sys.executable, "-c", READER, url, str(grant)], stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        first = int(reader.stdout.readline())
        # One that was committed, and of which nobody was told.
        assert first in (last + 1, last + 2)
        for _ in range(15):
            reader.stdout.readline()
        reader.kill()
        reader.wait(PATIENCE)
        last = first + 15 + len([line for line in reader.stdout.read().split("\n") if line])
        reader.stdout.close()

    async def look() -> None:
        store = SqliteMetaStore(tmp_path / "meta.sqlite")
        opening, kept = await MetaPositions(store, "orders").open("p", 4)
        assert int(kept.position or 0) in (last, last + 1)
        assert opening.grant == 4
        await store.close()

    asyncio.run(look())


async def check_a_killed_server(make: Callable[[], MetaStore], kill: Callable[[], None], start: Callable[[], None]) -> None:
    """Readers commit while the server is killed: what they were told is there when they open again, and nothing is skipped."""
    store, there = make(), asyncio.Event()
    tokens = ["p", "q", "r"]
    committed = dict.fromkeys(tokens, 0)
    broken = 0

    async def read(token: str, most: int) -> None:
        nonlocal broken
        keeper = MetaPositions(store, "orders")
        while committed[token] < most:
            try:
                opening, kept = await keeper.open(token, 1)
                found = int(kept.position or 0)
                assert found in (committed[token], committed[token] + 1)
                committed[token] = found
                while committed[token] < most:
                    await keeper.commit(opening, PositionRecord(position=str(committed[token] + 1)))
                    committed[token] += 1
                    if committed[token] == 10:
                        there.set()
            except PositionUnknownError:
                broken += 1
                await asyncio.sleep(0.02)

    reading = [asyncio.create_task(read(token, 1_000_000)) for token in tokens]
    await there.wait()
    await asyncio.to_thread(kill)
    async with asyncio.timeout(PATIENCE):
        while broken < len(tokens):  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)
    await asyncio.to_thread(start)
    most = {token: at + 5 for token, at in committed.items()}
    async with asyncio.timeout(PATIENCE):
        while any(committed[token] < most[token] for token in tokens):
            for each in reading:
                if each.done():
                    await each
            await asyncio.sleep(0.01)
    for each in reading:
        each.cancel()
    await asyncio.wait(reading)
    await store.close()


@driven
async def test_a_postgresql_server_that_is_killed_in_mid_commit() -> None:
    with server_or_skip() as server:
        await check_a_killed_server(lambda: PostgresMetaStore(server.dsn(), statement_timeout=2_000), server.kill, server.start)


@driven
async def test_an_etcd_that_is_killed_in_mid_commit() -> None:
    with etcd_or_skip() as server:
        await check_a_killed_server(lambda: EtcdMetaStore(server.url("positions"), request_timeout=2_000), server.kill, server.start)
