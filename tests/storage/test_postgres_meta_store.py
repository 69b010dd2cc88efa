"""PostgresMetaStore: the suite of its port, and what becomes of a commit whose line is cut or whose server is hung."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import pytest

from sluiceway.adapters.meta import postgres
from sluiceway.adapters.meta.commit import HISTORY
from sluiceway.adapters.meta.postgres import PostgresMetaStore
from sluiceway.adapters.meta.watches import Watches, changed_by, hint_of
from sluiceway.ports.meta_store import NOTHING, ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import Opened, OpenStore, driven
from sluiceway.testing.meta_store_suite import MetaStoreSuite, next_hint
from tests.servers.postgres_server import PATIENCE, PostgresServer
from tests.storage.test_postgres_faults import Proxy

numbers = itertools.count()


@pytest.fixture
def schema() -> str:
    return f'Odd "{next(numbers)}"; DROP SCHEMA public; --'


@pytest.fixture
def open_store(server: PostgresServer, schema: str) -> OpenStore[MetaStore]:
    async def open_store() -> MetaStore:
        return PostgresMetaStore(server.dsn(), schema=schema)

    return open_store


class TestPostgresMetaStore(MetaStoreSuite):
    @pytest.fixture
    def open_store(self, server: PostgresServer, schema: str) -> OpenStore[MetaStore]:
        async def open_store() -> MetaStore:
            return PostgresMetaStore(server.dsn(), schema=schema)

        return open_store


@pytest.mark.parametrize("landed", [True, False])
@driven
async def test_a_commit_whose_line_is_cut_is_unknown(server: PostgresServer, schema: str, landed: bool) -> None:
    proxy = Proxy()
    async with proxy.to(server.port) as port:
        store = PostgresMetaStore(server.dsn(port), schema=schema)
        await store.commit(puts={"a": b"1"})

        def treat(data: bytes) -> bytes:
            # Every commit names the channel of its notification.
            if b"sluiceway Odd" not in data:
                return data
            if landed:
                proxy.answers = False
                return data
            proxy.cut()
            return b""

        proxy.treat = treat
        with pytest.raises(MetaUnknownError):
            await store.commit(puts={"a": b"2"})
        proxy.treat, proxy.answers = bytes, True
        assert (await store.read(["a"])).entries["a"].value == (b"2" if landed else b"1")
        await store.close()


@driven
async def test_a_server_that_is_gone_and_comes_back(server: PostgresServer, open_store: OpenStore[MetaStore]) -> None:
    async with Opened(open_store) as store:
        # A watch shows what comes after it, so it is there first.
        watching = store.watch("a")
        first = await store.commit(puts={"a": b"1"})
        await next_hint(watching, first)
        await asyncio.to_thread(server.kill)
        with pytest.raises(StoreUnavailableError):
            await store.read(["a"])
        with pytest.raises(MetaUnknownError):
            await store.commit(puts={"a": b"2"})
        await asyncio.to_thread(server.start)
        assert (await store.read(["a"])).entries["a"].value == b"1"
        waiting = asyncio.create_task(next_hint(watching, first + 1))
        stamp = await store.commit(puts={"a": b"3"})
        assert await waiting >= stamp


@driven
async def test_a_hung_server_is_given_up_on(server: PostgresServer, schema: str) -> None:
    store = PostgresMetaStore(server.dsn(), schema=schema, statement_timeout=500)
    await store.commit(puts={"a": b"1"})
    await asyncio.to_thread(server.pause)
    try:
        with pytest.raises(StoreUnavailableError):
            await store.read(["a"])
        with pytest.raises(MetaUnknownError):
            await store.commit(puts={"a": b"2"})
    finally:
        await asyncio.to_thread(server.resume)
    assert (await store.read(["a"])).entries["a"].value in (b"1", b"2")
    await store.close()


@driven
@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.read(["a"]),
        lambda store: store.refresh(NOTHING, "a"),
        lambda store: store.commit(puts={"a": b"2"}),
    ],
    ids=["read", "refresh", "commit"],
)
async def test_who_gives_up_does_not_wait_for_a_hung_server(
    server: PostgresServer, schema: str, call: Callable[[PostgresMetaStore], Coroutine[Any, Any, object]]
) -> None:
    store = PostgresMetaStore(server.dsn(), schema=schema, statement_timeout=60_000)
    await store.commit(puts={"a": b"1"})
    await asyncio.to_thread(server.pause)
    try:
        asking = asyncio.create_task(call(store))
        for _ in range(50):
            await asyncio.sleep(0)
        asking.cancel()
        # Else the driver asks the server to cancel, and waits for it.
        await asyncio.wait([asking], timeout=10)
        assert asking.cancelled()
    finally:
        await asyncio.to_thread(server.resume)
    assert (await store.read(["a"])).entries["a"].value in (b"1", b"2")
    await store.close()


@driven
async def test_a_notification_wakes_a_watch_that_hardly_ever_looks(server: PostgresServer, schema: str) -> None:
    one, two = (PostgresMetaStore(server.dsn(), schema=schema, poll_interval=86_400_000) for _ in range(2))
    stamp = await two.commit(puts={"a": b"1"})
    watching = one.watch("a")
    await next_hint(watching, stamp)
    for number in range(5):
        waiting = asyncio.create_task(next_hint(watching, stamp + 1))
        stamp = await two.commit(puts={"a": b"%d" % number})
        assert await waiting >= stamp
    await one.close()
    await two.close()


@driven
async def test_a_deleted_key_is_forgotten_in_the_end(open_store: OpenStore[MetaStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.adapters.meta.commit.HISTORY", 5)
    monkeypatch.setattr("sluiceway.adapters.meta.postgres.HISTORY", 5)
    assert HISTORY > 5
    async with Opened(open_store) as store:
        first = await store.commit(puts={"a": b"1"})
        view = await store.refresh(NOTHING, "a")
        for _ in range(10):
            await store.commit(puts={"b": b"1"})
            await store.commit(deletes=["a", "b"])
        # Whatever is not known any more has changed.
        with pytest.raises(ConflictError):
            await store.commit(unchanged={"zzz": first})
        assert await store.refresh(view, "a") == await store.read(prefixes=["a"])


@driven
async def test_many_writers_of_two_openings_count_without_a_gap(open_store: OpenStore[MetaStore]) -> None:
    async def count(store: MetaStore) -> None:
        for _ in range(20):
            while True:
                entry = (await store.read(["total"])).entries.get("total")
                try:
                    total = int(entry.value) + 1 if entry else 1
                    await store.commit({"total": entry.stamp if entry else None}, puts={"total": b"%d" % total})
                    break
                except ConflictError:
                    continue

    async with Opened(open_store) as one, Opened(open_store) as two:
        await asyncio.gather(*(count(store) for store in (one, two) * 4))
        assert (await one.read(["total"])).entries["total"].value == b"160"


@driven
async def test_a_store_of_the_first_layout_is_brought_up_to_date(
    server: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(postgres, "MIGRATIONS", postgres.MIGRATIONS[:1])
        old = PostgresMetaStore(server.dsn(), schema=schema)
        assert (await old.read(["a"])).stamp == 0
        async with old._schema.link() as link, link.transaction():
            await link.execute("UPDATE store SET stamp = 7")
            await link.execute("INSERT INTO entry VALUES (%s, 7, %s)", [b"a", b"1"])
        await old.close()
    store = PostgresMetaStore(server.dsn(), schema=schema)
    assert await store.commit({"a": 7}, {"a": 7}, {"b": b"2"}) == 8
    assert (await store.read(["a"])).entries["a"] == (b"1", 7)
    await store.close()


@driven
async def test_a_commit_of_a_process_that_is_away_holds_up_nobody(server: PostgresServer, schema: str) -> None:
    """All commits wait for one lock, so none may hold it while its client does something else."""
    proxy = Proxy()
    async with proxy.to(server.port) as port:
        away, other = PostgresMetaStore(server.dsn(port), schema=schema), PostgresMetaStore(server.dsn(), schema=schema)
        await away.commit(puts={"a": b"1"})
        proxy.swallows = True
        waiting = asyncio.create_task(away.commit(puts={"a": b"2"}))
        await next_hint(other.watch("a"), 2)
        assert not waiting.done()
        await other.commit(puts={"b": b"3"})
        proxy.cut()
        with pytest.raises(MetaUnknownError):
            await waiting
        await away.close()
        await other.close()


def test_a_hint_says_what_has_changed() -> None:
    hint = hint_of(["group/g/member/a", "group/g/plan", "queue/orders", "grant"])
    assert changed_by(hint) == ["grant", "group/g", "queue/orders"]
    # By an earlier release, by anybody else, and of more than fits: it may be anything.
    for alien in ("", "[1]", "{}", "x", hint_of([f"queue/{number}" for number in range(1_000)])):
        assert changed_by(alien) == [""]


@driven
async def test_a_commit_elsewhere_wakes_only_the_watches_that_it_concerns(
    server: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[Collection[str]] = []
    both = asyncio.Event()
    wake = Watches.wake

    def noted(self: Watches, changed: Collection[str] = ("",)) -> None:
        woken.append(changed)
        wake(self, changed)
        if changed == ["queue/q"]:
            both.set()

    one, other = PostgresMetaStore(server.dsn(), schema=schema), PostgresMetaStore(server.dsn(), schema=schema)
    hints = one.watch("queue/")
    await one.commit(puts={"queue/first": b""})
    await anext(hints)
    monkeypatch.setattr(Watches, "wake", noted)
    while ["group/g"] not in woken:
        # Its connection for notifications may not be there yet.
        await other.commit(puts={"group/g/member/a": b"1"})
        await asyncio.sleep(0.01)
    await other.commit(puts={"queue/q": b"1"})
    await asyncio.wait_for(both.wait(), PATIENCE)
    await one.close()
    await other.close()
