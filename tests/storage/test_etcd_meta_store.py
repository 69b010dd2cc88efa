"""EtcdMetaStore: the suite of its port, and what it makes of etcd's limits, of deletes, and of others who use the same etcd."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from sluiceway.adapters.meta import etcd
from sluiceway.adapters.meta.etcd import MAX_AT_ONCE, MAX_OPS, TRACE_BYTES, EtcdMetaStore
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.group import open_meta_store
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.meta_store import MAX_COMMIT_BYTES, MAX_COMMIT_KEYS, NOTHING, ConflictError, Entry, MetaStore, Stamp, View
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import Opened, OpenStore, driven
from sluiceway.testing.meta_store_suite import MetaStoreSuite, check_visible_in_order, next_hint
from tests.servers.etcd_server import EtcdServer, etcd_or_skip
from tests.storage.test_sqlite_meta_store import finish, wait_until_ready

numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with etcd_or_skip() as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"test-{next(numbers)}"


@pytest.fixture
def open_store(server: EtcdServer, name: str) -> OpenStore[MetaStore]:
    async def open_store() -> MetaStore:
        return EtcdMetaStore(server.url(name))

    return open_store


class TestEtcdMetaStore(MetaStoreSuite):
    @pytest.fixture
    def open_store(self, server: EtcdServer, name: str) -> OpenStore[MetaStore]:
        async def open_store() -> MetaStore:
            return EtcdMetaStore(server.url(name))

        return open_store


# ---- several processes, and others ------------------------------------------------------------------------------------

WRITER = """
import asyncio, sys
from sluiceway.group import open_meta_store
from sluiceway.ports.meta_store import ConflictError

async def main():
    store = open_meta_store(sys.argv[1])

    async def write(writer):
        for number in range(int(sys.argv[3])):
            print(await store.commit(puts={f"w/{writer}/{number}": b""}), flush=True)
            while True:
                total = (await store.read(["total"])).entries.get("total")
                try:
                    put = {"total": b"%d" % (int(total.value) + 1 if total else 1)}
                    await store.commit(checks={"total": total and total.stamp}, puts=put)
                    break
                except ConflictError:
                    pass

    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*(write(f"{sys.argv[2]}.{number}") for number in range(2)))
    await store.close()

asyncio.run(main())
"""


def start(url: str, name: str, commits: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, url, name, str(commits)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@driven
@pytest.mark.slow
async def test_eight_writers_in_four_processes_become_visible_in_order(
    server: EtcdServer, name: str, open_store: OpenStore[MetaStore]
) -> None:
    writers = [await asyncio.to_thread(start, server.url(name), str(number), 15) for number in range(4)]
    async with Opened(open_store) as store:
        for writer in writers:
            await asyncio.to_thread(wait_until_ready, writer)
        finishing = asyncio.gather(*(asyncio.to_thread(finish, writer) for writer in writers))
        views: list[View] = []
        while not finishing.done():
            views.append(await store.read(prefixes=["w/"]))
        views.append(await store.read(prefixes=["w/"]))
        stamps = [stamp for reported in await finishing for stamp in reported]
        assert len(set(stamps)) == len(views[-1].entries) == 120
        check_visible_in_order(views, set(stamps))
        assert (await store.read(["total"])).entries["total"].value == b"120"


@driven
async def test_others_in_the_same_etcd_change_nothing(server: EtcdServer, name: str, open_store: OpenStore[MetaStore]) -> None:
    async with Opened(open_store) as store:
        stamp = await store.commit(puts={"q/a": b"1"})
        neighbour = EtcdMetaStore(server.url(f"{name}0"))
        await neighbour.commit(puts={"q/b": b"2"})
        await neighbour.close()
        for key in (f"{name}", f"{name}.", "zzz", "a"):
            server.put(key, b"other")
        assert await store.read(["q/b"], [""]) == View(stamp, {"q/a": Entry(b"1", stamp)})
        later = await store.commit({"q/a": stamp}, {"": stamp}, {"q/c": b"3"})
        # Their writes leave gaps between our stamps, no more.
        assert later > stamp + 1
        assert (await store.read()).stamp == later


@driven
async def test_a_store_of_a_newer_version_is_left_alone(server: EtcdServer, name: str, open_store: OpenStore[MetaStore]) -> None:
    server.put(f"{name}/layout", b"3")
    async with Opened(open_store) as store:
        with pytest.raises(StoreUnavailableError, match="newer version"):
            await store.read()
    assert server.keys(f"{name}/") == ["layout"]


# ---- deletes ----------------------------------------------------------------------------------------------------------


@driven
async def test_it_answers_as_the_store_in_memory_does(open_store: OpenStore[MetaStore]) -> None:
    """Random commits, many of them on stamps of the past: the same conflicts, and the same entries by the same commits."""
    chance = random.Random(7)
    keys = [f"{a}{b}{c}" for a in "qr" for b in ("", "/", "/a") for c in ("", "1", "é")]
    model = MemoryMetaStore()
    stamps: list[tuple[Stamp, Stamp]] = [(0, 0)]
    outcomes = {True: 0, False: 0}
    async with Opened(open_store) as store:
        for _ in range(400):
            held = (await model.read(prefixes=[""])).entries
            deletes = [key for key in held if chance.random() < 0.1]
            puts = {key: b"x" for key in keys if key not in deletes and chance.random() < 0.1}
            # Mostly of late, as otherwise everything has changed.
            prefixes = {prefix: chance.choice(stamps[-4:]) for prefix in ("q/a", "r/", "q", "r/é1", "s") if chance.random() < 0.3}
            checks = {key: chance.choice(stamps[-6:]) for key in keys if chance.random() < 0.03}
            try:
                expected = await model.commit(
                    {key: of[0] or None for key, of in checks.items()}, {key: of[0] for key, of in prefixes.items()}, puts, deletes
                )
            except ConflictError:
                expected = None
            try:
                stamp = await store.commit(
                    {key: of[1] or None for key, of in checks.items()}, {key: of[1] for key, of in prefixes.items()}, puts, deletes
                )
            except ConflictError:
                stamp = None
            assert (stamp is None) == (expected is None)
            outcomes[stamp is None] += 1
            if stamp is not None and expected is not None:
                stamps.append((expected, stamp))
        view, modelled = await store.read(prefixes=[""]), await model.read(prefixes=[""])
        translated = dict(stamps)
        assert {key: translated[entry.stamp] for key, entry in modelled.entries.items()} == {
            key: e.stamp for key, e in view.entries.items()
        }
    assert min(outcomes.values()) > 50


@driven
async def test_a_key_deleted_and_created_again_has_changed_twice(open_store: OpenStore[MetaStore]) -> None:
    async with Opened(open_store) as store:
        first = await store.commit(puts={"q/a": b"1"})
        gone = await store.commit(deletes=["q/a"])
        again = await store.commit(checks={"q/a": None}, puts={"q/a": b"1"})
        for since in (first, gone):
            with pytest.raises(ConflictError):
                await store.commit(unchanged={"q/": since})
        for stamp in (first, gone, None):
            with pytest.raises(ConflictError):
                await store.commit(checks={"q/a": stamp})
        await store.commit({"q/a": again}, {"q/": again})
        # Once more, and it is only the delete that could be missed.
        latest = await store.commit(deletes=["q/a"])
        with pytest.raises(ConflictError):
            await store.commit(unchanged={"q/": again})
        await store.commit(unchanged={"q/": latest})


@driven
async def test_a_delete_is_noticed_however_long_the_key_and_the_prefix_are(open_store: OpenStore[MetaStore]) -> None:
    long = "é" * TRACE_BYTES
    async with Opened(open_store) as store:
        for prefix in ("é", long[: TRACE_BYTES // 2], long, long + "/a"):
            since = await store.commit(puts={long + "/a": b"1", "other": b""})
            await store.commit(deletes=["other"])
            await store.commit(unchanged={prefix: since})
            await store.commit(deletes=[long + "/a"])
            with pytest.raises(ConflictError):
                await store.commit(unchanged={prefix: since})


@driven
async def test_a_refresh_knows_no_long_deleted_key_and_none_of_long_ago(
    open_store: OpenStore[MetaStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "q/" + "x" * TRACE_BYTES
    async with Opened(open_store) as store:
        await store.commit(puts={"q/large": bytes(20_000), "q/a": b"", "q/b": b"", long + "1": b"", long + "2": b""})
        view = await store.refresh(NOTHING, "q/")
        # Both have the same trace.
        await store.commit(deletes=[long + "2"])
        assert (await store.refresh(view, "q/")).entries.keys() == {"q/large", "q/a", "q/b", long + "1"}
        monkeypatch.setattr(etcd, "HISTORY", 10)
        monkeypatch.setattr("sluiceway.adapters.meta.commit.HISTORY", 10)
        view = await store.refresh(view, "q/")
        await store.commit(deletes=["q/a"])
        for _ in range(40):
            await store.commit(puts={"q/b": b"1"})
        assert isinstance(store, EtcdMetaStore)
        assert store._forgetting is not None
        await store._forgetting
        assert await store.refresh(view, "q/") == await store.read(prefixes=["q/"])


@driven
async def test_traces_go_once_nobody_relies_on_them(
    server: EtcdServer, name: str, open_store: OpenStore[MetaStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "HISTORY", 100)
    monkeypatch.setattr(etcd, "MAX_FORGOTTEN", 3)
    count = 0

    async def commit(times: int, **writes: object) -> Stamp:
        nonlocal count
        for _ in range(times):
            count += 1
            stamp: Stamp = await store.commit(**writes)  # type: ignore[arg-type]
        return stamp

    async with Opened(open_store) as store:
        assert isinstance(store, EtcdMetaStore)
        early = [f"q/{number}" for number in range(10)]
        before = await commit(1, puts=dict.fromkeys([*early, "q/late", "z"], b""))
        deleted = await commit(1, deletes=early)
        await commit(100 - count)
        # At the hundredth commit nothing is forgotten, at the two hundredth what was there at the hundredth.
        late = await commit(1, deletes=["q/late"])
        await commit(199 - count)
        with pytest.raises(ConflictError):
            await store.commit(unchanged={"q/": before})
        await store.commit(unchanged={"z": before})
        assert store._forgetting is not None
        await store._forgetting
        assert server.keys(f"{name}/trace/") == ["q/late"]
        # Nothing tells any more whether something was deleted since, so the answer is the safe one.
        for prefix in ("q/", "z"):
            with pytest.raises(ConflictError):
                await store.commit(unchanged={prefix: deleted})
        for unchanged in ({"q/": late - 1}, {"z": deleted, "q/": late}, {"q/": late, "z": deleted}):
            with pytest.raises(ConflictError):
                await store.commit(unchanged=unchanged)
        await store.commit(unchanged={"q/": late, "z": late})


@driven
async def test_a_trace_renewed_while_it_is_forgotten_stays(server: EtcdServer, name: str, open_store: OpenStore[MetaStore]) -> None:
    async with Opened(open_store) as store, Opened(open_store) as other:
        assert isinstance(store, EtcdMetaStore)
        await store.commit(puts={"a": b"", "b": b""})
        first = await store.commit(deletes=["a", "b"])
        await store._forget(first)
        last = await store.commit(puts={"a": b""})
        transact, since = store._transact, last

        async def renewed_meanwhile(*args: object, **options: object) -> object:
            nonlocal since
            if args and "request_delete_range" in str(args[1]) and since == last:
                since = await other.commit(deletes=["a"]) - 1
            return await transact(*args, **options)  # type: ignore[arg-type]

        store._transact = renewed_meanwhile  # type: ignore[assignment]
        await store._forget(last)
        assert since > last
        assert server.keys(f"{name}/trace/") == ["a"]
        with pytest.raises(ConflictError):
            await store.commit(unchanged={"a": since})


# ---- etcd's limits ----------------------------------------------------------------------------------------------------


@driven
async def test_the_longest_commits_go_through_as_one(server: EtcdServer, open_store: OpenStore[MetaStore]) -> None:
    length = MAX_COMMIT_BYTES // MAX_COMMIT_KEYS
    keys = [f"{number:0{length}}" for number in range(MAX_COMMIT_KEYS)]
    longest = f"{next(numbers):0128}"
    store = EtcdMetaStore(server.url(longest))
    # Beside as many compares as etcd may do by itself.
    checks: dict[str, Stamp | None] = dict.fromkeys(f"{number:600}" for number in range(MAX_OPS))
    assert sum(map(len, checks)) <= etcd.MAX_COMPARED_BYTES
    first = await store.commit(checks, puts=dict.fromkeys(keys, b""))
    view = await store.read(prefixes=[""])
    assert view == View(first, dict.fromkeys(keys, Entry(b"", first)))
    last = await store.commit(checks, deletes=keys)
    assert await store.read(prefixes=[""]) == View(last, {})
    # Their names begin alike, so that they share a trace.
    assert len(server.keys(f"{longest}/trace/")) == 1
    await store.close()
    async with Opened(open_store) as other:
        different = [f"{number:04}{'x' * (length - 4)}" for number in range(MAX_COMMIT_KEYS)]
        await other.commit(puts=dict.fromkeys(different, b""))
        last = await other.commit(checks, deletes=different)
        assert await other.read(prefixes=[""]) == View(last, {})
        last = await other.commit(puts=dict.fromkeys(different[:500], b""), deletes=different[500:])
        assert len((await other.read(prefixes=[""])).entries) == 500


@driven
async def test_as_many_checks_as_you_like(open_store: OpenStore[MetaStore]) -> None:
    keys = [f"k{number}" for number in range(300)]
    async with Opened(open_store) as store:
        first = await store.commit(puts=dict.fromkeys(keys, b"1"))
        all_of_them: dict[str, Stamp | None] = dict.fromkeys(keys, first)
        prefixes = dict.fromkeys(keys, first)
        last = await store.commit(all_of_them | {"none": None}, prefixes, {"a": b""})
        changed = await store.commit(puts={"k7": b"2"})
        refused: list[tuple[dict[str, Stamp | None], dict[str, Stamp]]] = [
            (all_of_them, {}),
            ({}, prefixes),
            (all_of_them | {"k7": changed, "a": None}, {}),
            (all_of_them | {"k7": None}, {}),
        ]
        for checks, unchanged in refused:
            with pytest.raises(ConflictError):
                await store.commit(checks, unchanged, {"b": b""})
        assert sorted((await store.read(["b"], ["a"])).entries) == ["a"]
        assert (await store.commit(all_of_them | {"k7": changed}, {"a": last}, {"b": b""})) > changed


@driven
async def test_many_checks_hold_at_the_moment_of_the_commit(open_store: OpenStore[MetaStore]) -> None:
    """Each adds to a total and puts a key of its own, and says that all that it has seen is as it was: none may be lost."""
    fixed: dict[str, Stamp | None] = dict.fromkeys(f"none{number}" for number in range(MAX_OPS))

    async def count(store: MetaStore) -> None:
        for _ in range(10):
            while True:
                view = await store.read(["total"])
                entry = view.entries.get("total")
                total = int(entry.value) + 1 if entry else 1
                try:
                    await store.commit(fixed | {"total": entry.stamp if entry else None}, puts={"total": b"%d" % total})
                    break
                except ConflictError:
                    continue

    async def disturb(store: MetaStore) -> None:
        for number in range(30):
            await store.commit(puts={f"other{number}": b""})

    async with Opened(open_store) as one, Opened(open_store) as two:
        await asyncio.gather(*(count(store) for store in (one, two) * 2), disturb(one), disturb(two))
        assert (await one.read(["total"])).entries["total"].value == b"40"


class Between:
    """Does something once, between the moment that a view shows and the reading of it."""

    def __init__(self, store: EtcdMetaStore, act: Callable[[], Awaitable[object]]) -> None:
        self.done = False
        self._act = act
        self._read = store._read_at
        store._read_at = self._act_and_read  # type: ignore[method-assign, assignment]

    async def _act_and_read(self, *args: Any) -> Any:
        if not self.done:
            await self._act()
            self.done = True
        return await self._read(*args)


@driven
async def test_all_of_a_view_is_of_one_moment(open_store: OpenStore[MetaStore]) -> None:
    keys = [f"k{number}" for number in range(2 * MAX_AT_ONCE + 1)]
    async with Opened(open_store) as store, Opened(open_store) as writer:
        assert isinstance(store, EtcdMetaStore)
        stamp = await writer.commit(puts=dict.fromkeys(keys, b""))
        expected = View(stamp, dict.fromkeys(keys, Entry(b"", stamp)))
        between = Between(store, lambda: writer.commit(puts=dict.fromkeys(keys[:9], b"later"), deletes=keys[9:]))
        assert await store.read(keys, ["k", "k1"]) == expected
        assert between.done
        assert (await store.read(keys, ["k", "k1"])).stamp > stamp


@driven
async def test_a_view_whose_moment_is_compacted_before_it_is_read_is_read_anew(
    server: EtcdServer, open_store: OpenStore[MetaStore]
) -> None:
    async with Opened(open_store) as store:
        assert isinstance(store, EtcdMetaStore)
        stamp = await store.commit(puts={"a": b"1"})
        between = Between(store, lambda: asyncio.to_thread(server.compact))
        assert await store.read(["a"]) == View(stamp, {"a": Entry(b"1", stamp)})
        assert between.done


# ---- watching ---------------------------------------------------------------------------------------------------------


class Heard:
    """What the store's watches hear from etcd."""

    def __init__(self, store: EtcdMetaStore) -> None:
        self.anything = asyncio.Event()
        self.canceled = 0
        self.streams = 0
        self.events = 0
        self._lines = store._etcd.lines
        store._etcd.lines = self._listen  # type: ignore[assignment,method-assign]

    async def _listen(self, *args: Any) -> AsyncIterator[Any]:
        self.streams += 1
        async for streamed in self._lines(*args):
            self.anything.set()
            self.canceled += streamed.result.canceled
            self.events += len(streamed.result.events)
            yield streamed


@driven
async def test_a_watch_sleeps_through_a_compaction_and_wakes(server: EtcdServer, open_store: OpenStore[MetaStore]) -> None:
    async with Opened(open_store) as store, Opened(open_store) as other:
        watching = store.watch("q/")
        stamp = await store.commit(puts={"q/a": b"1"})
        await next_hint(watching, stamp)
        waiting = asyncio.create_task(next_hint(watching, stamp + 1))
        await store.read()
        server.compact()
        stamp = await other.commit(deletes=["q/a"])
        assert await waiting >= stamp


@driven
async def test_a_watch_shows_what_was_compacted_before_it_looked(server: EtcdServer, open_store: OpenStore[MetaStore]) -> None:
    async with Opened(open_store) as store, Opened(open_store) as other:
        await store.commit(puts={"q/a": b"1"})
        watching = store.watch("q/")
        await other.commit(deletes=["q/a"])
        stamp = await other.commit(puts={"r": b""})
        server.compact()
        assert await anext(watching) >= stamp


@driven
async def test_a_quiet_store_s_watch_is_not_ended_by_what_others_write(server: EtcdServer, name: str) -> None:
    store = EtcdMetaStore(server.url(name), poll_interval=86_400_000)
    stamp = await store.commit(puts={"q/a": b"1"})
    for number in range(5):
        server.put(f"zzz{number}", b"")
    server.compact()
    heard = Heard(store)
    waiting = asyncio.create_task(next_hint(store.watch("q/"), stamp + 1))
    await heard.anything.wait()
    stamp = await store.commit(puts={"q/a": b"2"})
    assert await waiting >= stamp
    assert not heard.canceled
    await store.close()


@driven
async def test_a_watch_is_sent_only_what_is_to_be_told(server: EtcdServer, name: str) -> None:
    store, other = (EtcdMetaStore(server.url(name), poll_interval=86_400_000) for _ in range(2))
    stamp = await store.commit(puts={"q/a": b"1"})
    heard, watching = Heard(store), store.watch("q/")
    waiting = asyncio.create_task(next_hint(watching, stamp + 1))
    await heard.anything.wait()
    for number in range(10):
        await other.commit(puts={"q/a": b"%d" % number}, hint=False)
    assert await other.commit(puts={"r/a": b"1"})
    last = await other.commit(deletes=["q/a"])
    assert await waiting == last
    assert heard.events == 2
    await store.close()
    await other.close()


@driven
async def test_a_watch_ends_when_the_store_closes(server: EtcdServer, name: str) -> None:
    store = EtcdMetaStore(server.url(name), poll_interval=86_400_000)
    await store.commit(puts={"r": b""})
    heard = Heard(store)
    waiting = asyncio.create_task(anext(store.watch("q/"), "ended"))
    await heard.anything.wait()
    await store.close()
    assert await waiting == "ended"


# ---- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("etcd://", "expected etcd://"),
        ("etcd:///name", "expected etcd://"),
        ("etcd:localhost", "expected"),
        ("etcd://host:port", "expected etcd://"),
        ("etcd://one,,two", "expected etcd://"),
        ("etcd://host/a/b", "the name after the slash"),
        ("etcd://host/é", "the name after the slash"),
        ("etcd://host?ca_file=x", "needs TLS"),
        ("etcds://host?cafile=x", "only ca_file, cert_file, key_file"),
        ("etcds://host?ca_file", "expected etcd://"),
        ("etcds://host?ca_file=/missing.pem", "cannot be read as PEM"),
    ],
)
def test_a_bad_url_is_refused_without_its_password(url: str, says: str) -> None:
    if "//" in url:
        url = url.replace("//", "//user:hunter2@", 1)
    with pytest.raises(SluicewayError) as caught:
        open_meta_store(url)
    assert says in str(caught.value)
    assert "hunter2" not in f"{caught.value!r} {caught.value.__cause__!r}"
