"""The instances of a cluster read a changed configuration each for itself: at the same moment, or one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.cluster import coordinator
from sluiceway.instance.service import Membership, Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM
from sluiceway.model.backends import BackendSettings, SqliteBackend
from sluiceway.model.configuration import Configuration
from sluiceway.model.requests import Produced
from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import STEADY, Gate, Meta, Wires
from tests.instance.instance_rig import eventually, produce, spec

ONE = Configuration(backends={"one": SqliteBackend()})
BOTH = Configuration(backends={"one": SqliteBackend(), "two": SqliteBackend()})
VACATED = Configuration(backends={"one": SqliteBackend(), "two": SqliteBackend(partition_affinity=0)})
SECOND = Configuration(backends={"one": SqliteBackend(partition_affinity=0), "two": SqliteBackend()})


class Instance(Service):
    """One that shares its folder, as workers do."""

    def __init__(self, data: Path, name: str, wires: Wires, store: MemoryMetaStore, backends: Mapping[str, BackendSettings]) -> None:
        self.to_meta = Meta(store)
        super().__init__(data, backends, membership=Membership(lambda: self.to_meta, wires, name, name, parameters=STEADY))
        wires.instances[name] = self


@contextlib.asynccontextmanager
async def two(data: Path, configuration: Configuration = ONE) -> AsyncIterator[tuple[Instance, Instance]]:
    wires, store = Wires(), MemoryMetaStore()
    a, b = (Instance(data, name, wires, store, configuration.backends) for name in ("a", "b"))
    async with contextlib.AsyncExitStack() as stack:
        for instance in (a, b):
            await instance.start()
            stack.push_async_callback(instance.stop)
        yield a, b


def at(prefix: str) -> Callable[[Mapping[str, bytes]], bool]:
    return lambda written: any(key.startswith(prefix) for key in written)


async def reloads(instance: Instance) -> list[tuple[str, list[str]]]:
    entries = await instance.audit.list(100, action="config.reload")
    return sorted((entry.detail["instance"], entry.detail["changed"]) for entry in entries)


@driven
async def test_all_that_are_given_a_new_backend_at_one_moment_take_it(tmp_path: Path) -> None:
    async with two(tmp_path) as (a, b):
        gate = Gate(only=at("backend/"))
        a.to_meta.on_commit = gate
        first = asyncio.create_task(a.reconfigure(ONE, BOTH))
        await gate.reached.wait()
        # By now the one has found that nobody has noted the folder's identity, and the other notes it.
        assert await b.reconfigure(ONE, BOTH) == ["backends.two"]
        gate.open()
        assert await first == ["backends.two"]
        for name, instance in (("q", a), ("r", b)):
            record = await instance.create_queue(spec(name, 4))
            assert [each.backend for each in record.partitions] == ["one", "two"] * 2
        await eventually(lambda: a.problems() == b.problems() == [])
        assert await reloads(a) == sorted((each.ownership.name, ["backends.two"]) for each in (a, b))


@driven
async def test_a_backend_does_not_go_while_another_instance_makes_a_queue_on_it(tmp_path: Path) -> None:
    async with two(tmp_path, BOTH) as (a, b):
        gate = Gate(only=at("audit/"))
        a.to_meta.on_commit = gate
        going = asyncio.create_task(a.reconfigure(BOTH, ONE))
        await gate.reached.wait()
        await b.create_queue(spec("q", 2))
        gate.open()
        with pytest.raises(SluicewayError, match=r"backends\.two: it holds 1 partitions") as refused:
            await going
        assert refused.value.code == "restart_required"
        assert a.problems() == []


@driven
async def test_one_that_was_not_given_a_backend_says_so_and_sends_items_elsewhere(tmp_path: Path) -> None:
    async with two(tmp_path) as (knows, old):
        await knows.reconfigure(ONE, SECOND)
        await knows.create_queue(spec("q", 4))
        await eventually(lambda: len(old.stats("q").partitions) == len(knows.stats("q").partitions) == 2)
        (problem,) = old.problems()
        assert "backend two, which holds 2 partitions, is not served" in problem
        assert "reload" in problem
        assert knows.problems() == []
        served = {each.partition for each in knows.stats("q").partitions}
        for _ in range(4):
            done = await produce(old, "q", "x")
            assert isinstance(done, Produced)
            assert done.partition in served
        assert await old.reconfigure(ONE, SECOND) == ["backends.one.partition_affinity", "backends.two"]
        await eventually(lambda: all(each.state == "available" for each in old.stats("q").partitions))
        assert old.problems() == []


@driven
async def test_a_backend_goes_once_the_data_of_its_partitions_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rebalance that stays for a while: who asks for the change waits, and is not refused."""
    gone = asyncio.Event()

    async def later(_seconds: float) -> None:
        await gone.wait()

    monkeypatch.setattr(coordinator, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": later}))
    async with two(tmp_path, BOTH) as (a, b):
        await a.create_queue(spec("q", 2))
        for instance in (a, b):
            await instance.reconfigure(BOTH, VACATED)
        await a.rebalance("q", None, "natural", None, None, SYSTEM)
        await eventually(lambda: a.queue("q").rebalance is None)
        going = [asyncio.create_task(instance.reconfigure(VACATED, ONE)) for instance in (a, b)]
        done, _ = await asyncio.wait(going, timeout=0.5)
        assert not done
        gone.set()
        assert await asyncio.gather(*going) == [["backends.two"]] * 2
