"""One server alone, before and after its data directory was that of a cluster: whose writes count is never in doubt."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.memory import MemoryDisk, MemoryPartitionStore
from sluiceway.cluster.ownership import GRANT, KEYS
from sluiceway.core.group.group_records import Strategy
from sluiceway.instance.service import Membership, Service
from sluiceway.model.backends import SqliteBackend
from sluiceway.model.requests import Lease
from sluiceway.ports.partition_store import Fence, FencedError, PartitionRef
from tests.cluster.cluster_rig import STEADY, Wires, clustered
from tests.instance.instance_rig import Store, payloads, produce, spec


class Place:
    """A data directory whose server changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = MemoryDisk()
        self.wires = Wires()
        self.store: Store

    def service(self, strategy: Strategy | None = None, name: str = "a") -> Service:
        """Alone, or as one of a cluster."""
        self.store = store = Store(self.folder, MemoryPartitionStore(self.disk))
        membership = None
        if strategy is not None:
            membership = Membership(lambda: SqliteMetaStore(self.folder / "meta.sqlite"), self.wires, name, name, strategy, STEADY)
        made = Service(self.folder, {"default": SqliteBackend()}, membership=membership, open_store=lambda *_: store)
        self.wires.instances[name] = made
        return made

    async def run(self, strategy: Strategy | None = None, *, create: bool = False) -> Fence:
        """Serve for a moment; the fence by which it did."""
        service = self.service(strategy)
        await service.start()
        if create:
            await service.create_queue(spec("q", 1))
        await produce(service, "q", "x")
        await service.hand_over()
        await service.stop()
        return self.store.fences[-1]


def test_a_server_that_was_always_alone_counts_its_starts_as_ever(tmp_path: Path) -> None:
    async def run() -> None:
        place = Place(tmp_path)
        assert [await place.run(create=n == 0) for n in range(3)] == [Fence(1, n + 1, 1) for n in range(3)]
        store = SqliteMetaStore(tmp_path / "meta.sqlite")
        view = await store.read(prefixes=["group/", "cluster/", "closing/", GRANT])
        await store.close()
        # Nothing of a cluster is ever written, but for the level.
        assert {key: entry.value for key, entry in view.entries.items() if key != KEYS.level} == {GRANT: b"3"}

    asyncio.run(run())


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_from_alone_to_a_cluster_and_back_each_is_above_all_before(tmp_path: Path, strategy: Strategy) -> None:
    async def run() -> None:
        place = Place(tmp_path)
        fences = [await place.run(create=True)]
        for _ in range(2):
            fences += [await place.run(strategy), await place.run(strategy), await place.run(), await place.run()]
        assert fences == sorted(set(fences))
        assert [fence.era for fence in fences] == [1, 2, 2, 3, 3, 4, 4, 5, 5]
        ref = next(iter(place.disk.partitions))
        store = MemoryPartitionStore(place.disk)
        for old in fences[:-1]:
            with pytest.raises(FencedError):
                await store.open(PartitionRef(*ref), old._replace(opening=1_000))
        # All of it is there.
        service = place.service()
        await service.start()
        assert len(payloads((await service.lease("q", Lease("c", 100))).batches)) == len(fences)
        await service.stop()

    asyncio.run(run())


def test_a_change_of_the_strategy_is_above_all_before(tmp_path: Path) -> None:
    async def run() -> None:
        place = Place(tmp_path)
        strategies: list[Strategy] = ["rounds", "claims", "rounds", "claims"]
        fences = [await place.run(strategy, create=n == 0) for n, strategy in enumerate(strategies)]
        assert [fence.era for fence in fences] == [2, 3, 4, 5]

    asyncio.run(run())


def test_queues_that_came_and_went_while_there_was_no_cluster_are_divided_once_there_is(tmp_path: Path) -> None:
    async def run() -> None:
        place = Place(tmp_path)
        await place.run("rounds", create=True)
        alone = place.service()
        await alone.start()
        await alone.delete_queue("q", force=True)
        await alone.create_queue(spec("new", 3))
        await produce(alone, "new", "x")
        await alone.stop()
        again = place.service("rounds")
        await again.start()
        look = clustered(again).member.look
        assert look is not None
        assert look.resource is not None
        assert look.resource.items == tuple(f"{again.queue('new').incarnation}.{number}" for number in range(3))
        assert payloads((await again.lease("new", Lease("c", 1, 20_000))).batches) == ["x"]
        await again.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("first", "second"), [(None, "rounds"), ("rounds", None), (None, None)])
def test_who_is_alone_shares_its_directory_with_nobody(tmp_path: Path, first: Strategy | None, second: Strategy | None) -> None:
    async def run() -> None:
        place = Place(tmp_path)
        there = place.service(first)
        await there.start()
        with pytest.raises(DirectoryInUseError):
            await place.service(second, "b").start()
        await there.create_queue(spec("q", 1))
        await produce(there, "q", "x")
        await there.stop()

    asyncio.run(run())
