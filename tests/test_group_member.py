"""Members of a group over real meta stores: in one loop, and in processes that are killed and frozen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from server_process import PATIENCE
from sluiceway.group import Gained, GroupMember, Lost, MetaStore, Parameters, Token, define, open_meta_store
from sluiceway.kernel.errors import SluicewayError

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

    async def join(self, count: int = 1) -> None:
        for _ in range(count):
            self.notes.append(Notes())
            self.members.append(GroupMember(self.store, "exporters", self.notes[-1]))
            await self.members[-1].join()

    def divided(self, *among: int) -> bool:
        """Whether those members, and no others, own all, evenly, each item once."""
        held = [list(self.members[at].items) for at in among]
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
            before = group.members[0].items
            await group.members[0].stop()
            assert group.notes[0].items == {}
            await until(lambda: group.divided(1))
            assert all(group.members[1].items[item] > token for item, token in before.items())

    asyncio.run(story())


@pytest.mark.parametrize("strategy", ["claims", "rounds"])
def test_a_change_of_strategy_begins_an_era_whose_tokens_are_greater(strategy: str) -> None:
    async def story() -> None:
        async with group_of("memory:", 3) as group:
            before = {item: token for member in group.members for item, token in member.items.items()}
            await define(group.store, "exporters", ITEMS, strategy="claims")
            await until(
                lambda: group.divided(0, 1, 2) and all(token.era == 2 for member in group.members for token in member.items.values())
            )
            if strategy == "rounds":
                await define(group.store, "exporters", ITEMS, strategy="rounds")
                await until(
                    lambda: group.divided(0, 1, 2) and all(token.era == 3 for member in group.members for token in member.items.values())
                )
            after = {item: token for member in group.members for item, token in member.items.items()}
            assert all(after[item] > before[item] for item in ITEMS)

    asyncio.run(story())


def test_items_come_and_go() -> None:
    async def story() -> None:
        async with group_of("memory:", 2) as group:
            await define(group.store, "exporters", ["part-1", "new"])
            await until(lambda: sorted(item for member in group.members for item in member.items) == ["new", "part-1"])

    asyncio.run(story())


def test_what_the_handler_raises_is_no_reason_to_stop() -> None:
    async def story() -> None:
        store = open_meta_store("memory:")
        await define(store, "g", ["a", "b"], parameters=QUICK)

        def handler(change: Gained | Lost) -> None:
            raise ValueError("not today")

        member = GroupMember(store, "g", handler)
        await member.join()
        await until(lambda: sorted(member.items) == ["a", "b"])
        assert member.token("a") is not None
        await member.leave()
        assert member.token("a") is None
        await store.close()

    asyncio.run(story())


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

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def divided(*processes: Process) -> bool:
    held = [process.read() for process in processes]
    return sorted(item for items in held for item in items) == sorted(ITEMS) and all(held)


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
            processes[1].signal(signal.SIGSTOP)
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
