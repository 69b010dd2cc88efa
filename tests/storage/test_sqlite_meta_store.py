"""What the MetaStores here promise beyond the port: several processes, traces of deletes that are forgotten, faults."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import pytest

from sluiceway.adapters.meta.commit import HISTORY
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import MIGRATIONS, SqliteMetaStore
from sluiceway.ports.meta_store import NOTHING, ConflictError, MetaStore, MetaUnknownError, View
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import Opened, driven
from sluiceway.testing.meta_store_suite import check_visible_in_order, next_hint
from tests.server.server_process import PATIENCE

WRITER = """
import asyncio, sys
from pathlib import Path
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.ports.meta_store import ConflictError

async def main():
    store = SqliteMetaStore(Path(sys.argv[1]), busy_timeout=60_000)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(sys.argv[3])):
        print(await store.commit(puts={f"w/{sys.argv[2]}/{number}": b""}), flush=True)
        while True:
            total = (await store.read(["total"])).entries.get("total")
            try:
                put = {"total": b"%d" % (int(total.value) + 1 if total else 1)}
                await store.commit(checks={"total": total and total.stamp}, puts=put)
                break
            except ConflictError:
                pass
    await store.close()

asyncio.run(main())
"""


def start(path: Path, name: str, commits: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(commits)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_until_ready(writer: subprocess.Popen[str]) -> None:
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"


def finish(writer: subprocess.Popen[str]) -> list[int]:
    """Let it write; its stamps."""
    reports, _ = writer.communicate("go\n", timeout=PATIENCE)
    assert writer.returncode == 0
    return [int(stamp) for stamp in reports.split()]


@driven
async def test_processes_share_one_store(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    writers = [await asyncio.to_thread(start, path, str(number), 30) for number in range(4)]
    store = SqliteMetaStore(path)
    for writer in writers:
        await asyncio.to_thread(wait_until_ready, writer)
    finishing = asyncio.gather(*(asyncio.to_thread(finish, writer) for writer in writers))
    views: list[View] = []
    while not finishing.done():
        views.append(await store.read(prefixes=["w/"]))
        await asyncio.sleep(0)
    views.append(await store.read(prefixes=["w/"]))
    stamps = [stamp for reported in await finishing for stamp in reported]
    assert len(set(stamps)) == len(views[-1].entries) == 120
    check_visible_in_order(views, set(stamps))
    assert (await store.read(["total"])).entries["total"].value == b"120"
    await store.close()


@driven
async def test_a_watch_sees_another_process(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = SqliteMetaStore(path, poll_interval=20)
    watching = store.watch("w/")
    writer = await asyncio.to_thread(start, path, "0", 1)
    await asyncio.to_thread(wait_until_ready, writer)
    waiting = asyncio.create_task(next_hint(watching, 1))
    (stamp,) = await asyncio.to_thread(finish, writer)
    assert await waiting >= stamp
    await store.close()


@driven
async def test_a_watch_does_not_wait_for_the_poll_to_see_its_own_store(tmp_path: Path) -> None:
    store = SqliteMetaStore(tmp_path / "meta.sqlite", poll_interval=3_600_000)
    watching = store.watch("q/")
    stamp = await store.commit(puts={"q/a": b"0"})
    await next_hint(watching, stamp)
    waiting = asyncio.create_task(next_hint(watching, stamp + 1))
    # The first read is answered after the watch has looked, and found nothing.
    for _ in range(3):
        await store.read()
    stamp = await store.commit(puts={"q/a": b"1"})
    assert await waiting >= stamp
    await store.close()


@driven
async def test_a_watch_ends_when_the_store_closes(tmp_path: Path) -> None:
    for store in (SqliteMetaStore(tmp_path / "meta.sqlite", poll_interval=20), MemoryMetaStore()):
        watching = store.watch("q/")
        waiting = asyncio.create_task(anext(watching, "ended"))
        await asyncio.sleep(0)
        await store.close()
        assert await waiting == "ended"


@driven
async def test_a_store_opened_again_has_everything(tmp_path: Path) -> None:
    async def open_store() -> SqliteMetaStore:
        return SqliteMetaStore(tmp_path / "meta.sqlite")

    async with Opened(open_store) as store:
        await store.commit(puts={"a": b"1", "b": b"1"})
        stamp = await store.commit(deletes=["b"])
        view = await store.read(prefixes=[""])
    async with Opened(open_store) as store:
        assert await store.read(prefixes=[""]) == view
        with pytest.raises(ConflictError):
            await store.commit(unchanged={"b": stamp - 1})
        assert await store.commit(unchanged={"": stamp}) > stamp


async def check_forgetting(store: MetaStore, let_pass: Callable[[int], Awaitable[None]]) -> None:
    before = await store.commit(puts={"q/a": b"1", "q/b": b"1", "z": b"1"})
    view = await store.refresh(NOTHING, "q/")
    deleted = await store.commit(deletes=["q/a"])
    await let_pass(HISTORY - 2)
    # The last moment at which the trace of q/a is owed to one who read `before`; a delete is when old traces go.
    assert await store.commit(deletes=["z"]) == before + HISTORY
    assert (await store.refresh(view, "q/")).entries.keys() == {"q/b"}
    for prefix in ("q/", "q/a"):
        with pytest.raises(ConflictError):
            await store.commit(unchanged={prefix: before})
    last = await store.commit(unchanged={"q/": deleted, "r": deleted}, puts={"q/b": b"2"})
    await let_pass(HISTORY)
    # Nothing tells any more whether something was deleted since, so the answer is the safe one.
    for prefix in ("q/", "r"):
        with pytest.raises(ConflictError):
            await store.commit(unchanged={prefix: last - 1})
    assert await store.commit(unchanged={"q/": (await store.read()).stamp}, deletes=["q/b"]) > last
    assert (await store.refresh(view, "q/")).entries == {}


@driven
async def test_memory_forgets_deletes_only_when_nobody_can_be_misled() -> None:
    store = MemoryMetaStore()

    async def let_pass(commits: int) -> None:
        for _ in range(commits):
            await store.commit()

    await check_forgetting(store, let_pass)
    assert list(store._deleted) == ["q/b"]
    await store.close()


@driven
async def test_sqlite_forgets_deletes_only_when_nobody_can_be_misled(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = SqliteMetaStore(path)
    database = apsw.Connection(str(path))

    async def let_pass(commits: int) -> None:
        database.execute("UPDATE store SET stamp = stamp + ?", (commits,))

    await check_forgetting(store, let_pass)
    assert database.execute("SELECT key FROM entry WHERE value IS NULL").fetchall() == [(b"q/b",)]
    await store.close()


@driven
async def test_a_store_that_another_process_keeps_locked_is_an_unknown_outcome(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = SqliteMetaStore(path, busy_timeout=20)
    stamp = await store.commit(puts={"a": b"1"})
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(MetaUnknownError):
        await store.commit(puts={"a": b"2"})
    assert (await store.read(["a"])).entries["a"].value == b"1"
    other.execute("ROLLBACK")
    assert await store.commit(checks={"a": stamp}, puts={"a": b"3"}) > stamp
    await store.close()


def test_a_file_that_is_no_store_or_a_newer_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, only words\n" * 100)
    with pytest.raises(StoreUnavailableError, match="text"):
        SqliteMetaStore(tmp_path / "text")
    with pytest.raises(StoreUnavailableError):
        SqliteMetaStore(tmp_path / "missing" / "meta.sqlite")
    asyncio.run(SqliteMetaStore(tmp_path / "meta.sqlite").close())
    apsw.Connection(str(tmp_path / "meta.sqlite")).pragma("user_version", len(MIGRATIONS) + 1)
    with pytest.raises(StoreUnavailableError, match="newer version"):
        SqliteMetaStore(tmp_path / "meta.sqlite")


def test_several_that_make_the_file_at_one_moment_all_open_it(tmp_path: Path) -> None:
    """SQLite does not wait when two turn a new file into one with a write-ahead log."""
    for turn in range(40):
        path = tmp_path / f"{turn}.sqlite"
        with ThreadPoolExecutor(8) as pool:
            stores = list(pool.map(lambda _, path=path: SqliteMetaStore(path), range(8)))

        async def close(stores: list[SqliteMetaStore] = stores) -> None:
            for store in stores:
                await store.close()

        asyncio.run(close())
