"""Members of a group over a real etcd: in one loop, in processes that are killed, and while etcd is away."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from sluiceway.group import define, open_meta_store
from tests.group.test_group_member import ITEMS, QUICK, Process, divided, group_of, until
from tests.servers.etcd_server import EtcdServer, etcd_or_skip


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with etcd_or_skip() as server:
        yield server


def test_members_divide_the_items_and_leave(server: EtcdServer) -> None:
    async def story() -> None:
        other = open_meta_store(server.url("leaving"))
        async with group_of(server.url("leaving"), 2) as group:
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

    asyncio.run(story())


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_what_a_killed_process_had_goes_to_the_other_under_greater_tokens(server: EtcdServer, strategy: str) -> None:
    url = server.url(f"killed-{strategy}")

    async def story() -> None:
        store = open_meta_store(url)
        await define(store, "exporters", ITEMS, strategy=strategy, parameters=QUICK)  # type: ignore[arg-type]
        processes = [Process(url) for _ in range(2)]
        try:
            await until(lambda: divided(*processes))
            processes[0].signal(signal.SIGKILL)
            had = dict(processes[0].items)
            await until(lambda: divided(processes[1]))
            assert all(processes[1].items[item] > token for item, token in had.items())
        finally:
            for process in processes:
                process.end()
            await store.close()

    asyncio.run(story())


def test_while_etcd_is_away_nobody_owns_anything_and_then_all_is_owned_again() -> None:
    async def story(server: EtcdServer) -> None:
        async with group_of(server.url("away"), 2) as group:
            before = group.told()
            await asyncio.to_thread(server.kill)
            await until(lambda: group.told() == {})
            assert not any(member.items for member in group.members)
            await asyncio.to_thread(server.start)
            await until(lambda: group.divided(0, 1))
            assert all(group.told()[item] >= token for item, token in before.items())

    with etcd_or_skip() as server:
        asyncio.run(story(server))
