"""Members of a group over real meta stores: in one loop, and in processes that are killed and frozen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from sluiceway.core.group.group_records import Keys, read_group
from sluiceway.group import Gained, GroupMember, Lost, MetaStore, Parameters, Token, define, open_meta_store
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.meta_store import View
from tests.server.server_process import PATIENCE
from tests.servers.pids import freeze
from tests.servers.postgres_server import server_or_skip

QUICK = Parameters(settle_timeout=20, round_interval=50, beat_interval=50, lease_timeout=2_000, member_timeout=2_500)
ITEMS = [f"part-{n}" for n in range(12)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what processes print has no event
            await asyncio.sleep(0.01)


class Notes:
    """A handler that keeps what it was told."""

    def __init__(self) -> None:
        self.items: dict[str, Token] = {}
        self.tokens: list[tuple[str, Token]] = []

    async def __call__(self, change: Gained | Lost) -> None:
        if isinstance(change, Gained):
            assert change.item not in self.items
            self.items[change.item] = change.token
            self.tokens.append(change)
        else:
            del self.items[change.item]


class Group:
    def __init__(self, store: MetaStore) -> None:
        self.store = store
        self.members: list[GroupMember] = []
        self.notes: list[Notes] = []

    async def join(self, count: int = 1, *, store: MetaStore | None = None, notes: Notes | None = None) -> None:
        for _ in range(count):
            self.notes.append(notes or Notes())
            self.members.append(GroupMember(store or self.store, "exporters", self.notes[-1]))
            await self.members[-1].join()

    def told(self) -> dict[str, Token]:
        """What its members were told that they own."""
        return {item: token for notes in self.notes for item, token in notes.items.items()}

    def divided(self, *among: int) -> bool:
        """Whether those members have been told that they own all, evenly, each item once. (What they were told does not lapse unheard.)"""
        held = [list(self.notes[at].items) for at in among]
        even = max(map(len, held)) - min(map(len, held)) <= 1
        return even and sorted(item for items in held for item in items) == sorted(ITEMS)


@pytest.fixture(params=["memory:", "sqlite:"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory:" else f"sqlite:{tmp_path / 'meta.sqlite'}"


@contextlib.asynccontextmanager
async def group_of(url: str, count: int) -> AsyncIterator[Group]:
    store = open_meta_store(url)
    group = Group(store)
    await define(store, "exporters", ITEMS, parameters=QUICK)
    await group.join(count)
    try:
        if count:
            await until(lambda: group.divided(*range(count)))
        yield group
    finally:
        for member in group.members:
            await member.stop()
        await store.close()


def test_members_divide_the_items_and_leave_in_good_order(url: str) -> None:
    async def story() -> None:
        async with group_of(url, 3) as group:
            await group.members[1].leave()
            assert group.notes[1].items == {}
            await until(lambda: group.divided(0, 2))
            await group.join()
            await until(lambda: group.divided(0, 2, 3))

    asyncio.run(story())


def test_what_a_member_that_stops_dead_had_goes_to_others_under_greater_tokens(url: str) -> None:
    async def story() -> None:
        async with group_of(url, 2) as group:
            before = dict(group.notes[0].items)
            await group.members[0].stop()
            assert group.notes[0].items == {}
            await until(lambda: group.divided(1))
            assert all(group.notes[1].items[item] > token for item, token in before.items())

    asyncio.run(story())


@pytest.mark.parametrize("strategy", ["claims", "rounds"])
def test_a_change_of_strategy_begins_an_era_whose_tokens_are_greater(strategy: str) -> None:
    async def story() -> None:
        async with group_of("memory:", 3) as group:
            before = group.told()
            await define(group.store, "exporters", ITEMS, strategy="claims")
            await until(lambda: group.divided(0, 1, 2) and {token.era for token in group.told().values()} == {2})
            if strategy == "rounds":
                await define(group.store, "exporters", ITEMS, strategy="rounds")
                await until(lambda: group.divided(0, 1, 2) and {token.era for token in group.told().values()} == {3})
            after = group.told()
            assert all(after[item] > before[item] for item in ITEMS)

    asyncio.run(story())


def test_items_come_and_go() -> None:
    async def story() -> None:
        async with group_of("memory:", 2) as group:
            await define(group.store, "exporters", ["part-1", "new"])
            await until(lambda: sorted(item for notes in group.notes for item in notes.items) == ["new", "part-1"])

    asyncio.run(story())


def test_what_the_handler_raises_is_no_reason_to_stop() -> None:
    async def story() -> None:
        store = open_meta_store("memory:")
        await define(store, "g", ["a", "b"], parameters=QUICK)

        def handler(change: Gained | Lost) -> None:
            raise ValueError("not today")

        member = GroupMember(store, "g", handler)
        await member.join()
        await until(lambda: member.token("a") is not None and sorted(member.items) == ["a", "b"])
        await member.leave()
        assert member.token("a") is None
        await store.close()

    asyncio.run(story())


class Hanging:
    """A store whose reads, while it hangs, have no answer until it does not."""

    def __init__(self, store: MetaStore) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.commit, self.watch, self.close = store.commit, store.watch, store.close
        self._store = store

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        await self.answers.wait()
        return await self._store.read(keys, prefixes)

    async def refresh(self, view: View, prefix: str) -> View:
        return await self.read(prefixes=[prefix])


def test_a_member_whose_store_hangs_is_told_that_it_has_lost_everything() -> None:
    async def story() -> None:
        async with group_of("memory:", 1) as group:
            store = Hanging(group.store)
            await group.join(store=store)
            await until(lambda: group.divided(0, 1))
            store.answers.clear()
            await until(lambda: group.notes[1].items == {} and group.divided(0))
            assert group.members[1].items == {}
            assert group.members[1].token(ITEMS[0]) is None
            store.answers.set()
            await until(lambda: group.divided(0, 1))

    asyncio.run(story())


def test_nobody_gets_an_item_before_the_old_owner_s_handler_has_returned() -> None:
    patient = Parameters(settle_timeout=20, round_interval=50, beat_interval=50, lease_timeout=600_000, member_timeout=750_000)
    stopped = asyncio.Event()

    class Slow(Notes):
        async def __call__(self, change: Gained | Lost) -> None:
            await super().__call__(change)
            if isinstance(change, Lost):
                await stopped.wait()

    async def story() -> None:
        async with group_of("memory:", 0) as group:
            await define(group.store, "exporters", ITEMS, parameters=patient)
            await group.join(notes=Slow())
            await until(lambda: group.divided(0))
            await group.join()
            keys, other = Keys("exporters"), group.members[1].name

            async def has_seen_its_plan() -> bool:
                look = read_group(await group.store.read(prefixes=[keys.prefix]), keys, 0)
                return look.plan is not None and other in look.plan.owners and look.members[other].applied == look.plan.round

            async with asyncio.timeout(PATIENCE):
                while not await has_seen_its_plan():  # noqa: ASYNC110 - it asks the store
                    await asyncio.sleep(0)
            assert group.notes[1].items == {}
            stopped.set()
            await until(lambda: group.divided(0, 1))

    asyncio.run(story())


@pytest.mark.parametrize("steps", range(8))
def test_a_member_can_be_stopped_at_any_moment_of_its_waking_up(steps: int) -> None:
    async def story() -> None:
        async with group_of("memory:", 1) as group:
            await group.store.commit(puts={Keys("exporters").prefix + "hint": b""})
            for _ in range(steps):
                await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE):
                await group.members[0].stop()

    asyncio.run(story())


def test_a_record_that_cannot_be_read_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with group_of("memory:", 1) as group:
            key = Keys("exporters").resource
            good = (await group.store.read([key])).entries[key].value
            await group.store.commit(puts={key: b"not for me"})
            await until(lambda: group.notes[0].items == {})
            assert "could not process" in caplog.text
            await group.store.commit(puts={key: good})
            await until(lambda: group.divided(0))

    asyncio.run(story())


def test_two_groups_on_one_store_do_not_know_each_other() -> None:
    async def story() -> None:
        async with group_of("memory:", 2) as group:
            notes = Notes()
            await define(group.store, "exporters2", ["a", "b"], parameters=QUICK)
            member = GroupMember(group.store, "exporters2", notes)
            await member.join()
            await until(lambda: sorted(notes.items) == ["a", "b"])
            await until(lambda: group.divided(0, 1))
            await member.leave()
            assert notes.items == {}
            await until(lambda: group.divided(0, 1))

    asyncio.run(story())


def test_members_over_postgresql() -> None:
    async def story(dsn: str) -> None:
        login = conninfo_to_dict(dsn)
        url = "postgresql://{user}:{password}@{host}:{port}/{dbname}".format(**login)
        other = open_meta_store(url)
        async with group_of(url, 2) as group:
            await group.join(store=other)
            await until(lambda: group.divided(0, 1, 2))
            before = dict(group.notes[0].items)
            await group.members[0].stop()
            await until(lambda: group.divided(1, 2))
            assert all(group.told()[item] > token for item, token in before.items())
            await group.members[1].leave()
            await until(lambda: group.divided(2))
            await group.members[2].stop()
            await other.close()

    with server_or_skip() as server:
        asyncio.run(story(server.dsn()))


def test_more_items_than_a_plan_can_hold_are_refused_before_anything_is_written() -> None:
    async def story() -> None:
        store = open_meta_store("memory:")
        await define(store, "g", [f"{n:016}" for n in range(20_000)])
        with pytest.raises(SluicewayError, match=r"items.*a commit holds 1048576.*divide"):
            await define(store, "h", [f"{n:016}" for n in range(40_000)])
        # Those that were there may still be waited for.
        with pytest.raises(SluicewayError, match=r"20000 before.*change fewer"):
            await define(store, "g", [f"x{n:015}" for n in range(20_000)])
        assert (await store.read(prefixes=[Keys("h").prefix])).entries == {}

    asyncio.run(story())


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "groups.md").read_text()
    program = text.partition("```python\n")[2].partition("```")[0]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        try:
            assert process.stdout is not None
            owned = sorted(process.stdout.readline().split(" Token")[0] for _ in range(12))
        finally:
            process.kill()
    assert owned == sorted(f"mine: region-{n}" for n in range(12))


@pytest.mark.parametrize("bad", ["", "é", "a" * 201, "new\nline", 7])
def test_a_bad_item_is_refused(bad: object) -> None:
    async def story() -> None:
        store = open_meta_store("memory:")
        with pytest.raises(SluicewayError, match="items"):
            await define(store, "g", [bad])  # type: ignore[list-item]

    asyncio.run(story())


@pytest.mark.parametrize("url", ["", "redis://x", "sqlite:", "memory:x"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(SluicewayError, match="expected"):
        open_meta_store(url)


PROGRAM = """
import asyncio, sys
from sluiceway.group import GroupMember, open_meta_store
async def main():
    def tell(change):
        print(type(change).__name__, change.item, *getattr(change, "token", ()), flush=True)
    member = GroupMember(open_meta_store(sys.argv[1]), "exporters", tell)
    await member.join()
    await asyncio.Event().wait()
asyncio.run(main())
"""


class Process:
    """A member in a process of its own. `items` is what it says that it owns."""

    def __init__(self, url: str) -> None:
        self.items: dict[str, Token] = {}
        self._process = subprocess.Popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._partial = b""

    def read(self) -> dict[str, Token]:
        with contextlib.suppress(BlockingIOError):
            self._partial += os.read(self._output, 1 << 16)
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            what, item, *token = line.decode().split()
            if what == "Gained":
                self.items[item] = Token(*map(int, token))
            else:
                self.items.pop(item)
        return self.items

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def freeze(self, store: Path) -> None:
        freeze(self._process.pid, store)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def divided(*processes: Process) -> bool:
    held = [process.read() for process in processes]
    return sorted(item for items in held for item in items) == sorted(ITEMS) and all(held)


@pytest.mark.slow
def test_processes_that_are_killed_and_frozen(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'meta.sqlite'}"

    async def story() -> None:
        store = open_meta_store(url)
        await define(store, "exporters", ITEMS, parameters=QUICK)
        processes = [Process(url) for _ in range(3)]
        try:
            await until(lambda: divided(*processes))
            processes[0].signal(signal.SIGKILL)
            had = dict(processes[0].items)
            await until(lambda: divided(*processes[1:]))
            assert all((processes[1].items | processes[2].items)[item] > token for item, token in had.items())
            processes[1].freeze(tmp_path / "meta.sqlite")
            frozen = dict(processes[1].items)
            await until(lambda: divided(processes[2]))
            assert all(processes[2].items[item] > token for item, token in frozen.items())
            processes[1].signal(signal.SIGCONT)
            # It finds out that it has lost everything, and gets its share again.
            await until(lambda: divided(*processes[1:]))
        finally:
            for process in processes:
                process.end()
            await store.close()

    asyncio.run(story())
