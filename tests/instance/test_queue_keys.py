"""The keys of a queue, as any instance tells them to people, with their texts, which are in the items only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Lease, Produce, QueueSpec
from tests.cluster.cluster_rig import cluster, shares
from tests.instance.instance_rig import lease, serving


async def put(service: Service, *keys: str | None) -> None:
    await service.produce("q", Produce(batch_from_rows([{"payload": b"x", "key": key} for key in keys]), 20_000))


def test_keys_are_shown_with_their_texts_and_what_blocks_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(QueueSpec("q", order="key", fair="key"))
            await put(service, "é", "é", "é", "b", "b")
            await lease(service, "q", 1)
            await put(service, None, None)
            found = await service.keys("q", 20)
            assert (found.waiting, found.blocked, found.limited, found.skipped) == (2, 1, 0, [])
            assert {each.key for each in found.busiest} == {"é", "b", None} == {each.key for each in found.oldest}
            (blocked,) = (each for each in found.busiest if each.blocked_by is not None)
            assert (blocked.leased, blocked.returned, blocked.blocked_by) == (1, 0, "lease")
            assert found.busiest[0].key == "é", "it has three items, the others have two"
            assert [each.key for each in (await service.keys("q", 1)).busiest] == ["é"]

    asyncio.run(scenario())


def test_a_queue_whose_keys_do_not_matter_has_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(QueueSpec("q"))
            await put(service, "a", "b")
            found = await service.keys("q", 20)
            assert (found.waiting, found.busiest, found.oldest) == (0, [], [])

    asyncio.run(scenario())


def test_keys_after_a_restart_are_read_from_storage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(QueueSpec("q", order="key"))
            await put(service, *(f"k{n}" for n in range(30)))
            for n in range(30):
                await put(service, f"k{n}")
        async with serving(tmp_path) as (service, _):
            found = await service.keys("q", 100)
            assert sorted(str(each.key) for each in found.oldest) == sorted(f"k{n}" for n in range(30))
            assert {each.waiting for each in found.busiest} == {2}

    asyncio.run(scenario())


@pytest.mark.parametrize("is_down", [False, True])
def test_keys_whose_items_have_gone_or_cannot_be_read_are_only_counted(
    tmp_path: Path, is_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def blobs(*given: object, **options: object) -> dict[int, object]:
        if is_down:
            raise SluicewayError("unavailable", "the storage does not answer")
        return {}

    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(QueueSpec("q", order="key", fair="key"))
            await put(service, "a", None)
            monkeypatch.setattr(QueueDriver, "blobs", blobs)
            found = await service.keys("q", 20)
            assert (found.waiting, [each.key for each in found.busiest]) == (1, [None])

    asyncio.run(scenario())


@pytest.mark.parametrize("at", range(2))
def test_every_instance_tells_the_keys_of_all(tmp_path: Path, at: int) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (made, services):
            await services[0].create_queue(QueueSpec("q", 4, key_concurrency=1))
            for n in range(6):
                await put(services[n % 2], *[f"k{n}"] * (n + 2))
            while any(part.servable for part in (await services[0].count("q")).partitions):
                await services[0].lease("q", Lease("c", 100, 10_000))
            found = await services[at].keys("q", 3)
            assert [(each.key, each.waiting, each.leased, each.blocked_by) for each in found.busiest] == [
                (f"k{n}", n + 1, 1, "limit") for n in (5, 4, 3)
            ]
            assert (found.waiting, found.blocked, found.limited, found.skipped) == (6, 6, 6, [])
            assert len(found.oldest) == 3
            other = services[1 - at]
            made.wires.refuses.add("ba"[at])
            found = await services[at].keys("q", 20)
            assert found.skipped == sorted(shares(other, "q"))
            assert 0 < found.waiting < 6

    asyncio.run(scenario())


def test_explain_has_the_key_of_an_item(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(QueueSpec("q", order="key"))
            await put(service, "a", "a", "b")
            await lease(service, "q", 2)
            said = await service.explain("q", 0, 1)
            assert (said.state, said.key) == ("ready", "a")
            assert said.reason.startswith("an earlier item of its key is leased; it waits for the item with the origin")
            said = await service.explain("q", 0, 0)
            assert (said.state, said.key) == ("leased", "a")

    asyncio.run(scenario())
