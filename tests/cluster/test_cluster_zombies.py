"""An instance whose lease has run out, and that does not know it yet: it was frozen, say. It answers nothing from what it remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluiceway.contract.queue_stats import LogicalQueueStats
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.inspection import Browse, DeleteItems, ListItems
from sluiceway.model.peers import Ask, Close, Count, Explain, FindLeases, Reload, RemainingItems, ShareRequest
from sluiceway.model.requests import DONE, Clear, Extend, Lease, Peek, Produce, ProduceKey, Redrive, Selection, Settle
from tests.cluster.cluster_rig import Cluster, Gate, cluster, counts, lapse, put, shares
from tests.instance.instance_rig import eventually, rows, spec

NOBODY = np.array([77], dtype=np.int64)


@asynccontextmanager
async def zombie(folder: Path) -> AsyncIterator[tuple[Cluster, Service, Service, Gate]]:
    """Of a queue of two partitions, each with an item, the second's and the first's owner; the latter's lease has run out."""
    async with cluster(folder, "a", "b") as (made, (a, _)):
        await a.create_queue(spec("q", 2))
        await put(a, "q", 0, "zero", "zero too")
        await put(a, "q", 1, "one")
        frozen = made.owner("q", 0)
        other = made.owner("q", 1)
        await frozen.answer(Ask(frozen.queue("q").incarnation, Lease("c", 1, lease_key="k")))
        yield made, other, frozen, lapse(made, frozen)


async def asked(service: Service, request: ShareRequest) -> Any:
    """What it tells another instance; or the error's code."""
    try:
        return await service.answer(Ask(service.queue("q").incarnation, request))
    except SluicewayError as error:
        return error.code


@pytest.mark.parametrize(
    "request_",
    [
        ListItems(0, 0, 10),
        Browse(0, ("ready",), 10),
        Browse(0, (), 10, "0a" * 24, 1),
        Peek(10, 0),
        Peek(10, 0, lease=1),
        Explain(0, 0),
        Settle({0: [Selection(DONE, offsets=NOBODY)]}, 1_000),
        Settle({0: [Selection(DONE, lease=77)]}, 1_000),
        Extend([(0, 77)], 1_000),
        DeleteItems({0: NOBODY}, 1_000),
        Clear(1_000, partitions=(0,)),
        Produce(rows("x"), 1_000),
        Produce(rows("x"), 1_000, ProduceKey("k")),
        Produce(rows("x"), 1_000, partition=0),
    ],
    ids=repr,
)
def test_it_refuses_what_it_could_answer_from_memory(tmp_path: Path, request_: ShareRequest) -> None:
    async def run() -> None:
        async with zombie(tmp_path) as (made, _, frozen, _gate):
            written = made.disk.partitions.copy()
            txns = [each.txn for each in written.values()]
            assert await asked(frozen, request_) in ("not_here", "unavailable")
            assert [each.txn for each in made.disk.partitions.values()] == txns

    asyncio.run(run())


def test_it_counts_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with zombie(tmp_path) as (_, _other, frozen, _gate):
            counted = await asked(frozen, Count())
            assert isinstance(counted, LogicalQueueStats)
            assert counted.partitions == []

    asyncio.run(run())


def test_its_own_client_is_told_that_the_partition_is_unavailable(tmp_path: Path) -> None:
    async def run() -> None:
        async with zombie(tmp_path) as (_, _other, frozen, _gate):
            counted = await frozen.count("q")
            assert [each.state for each in counted.partitions] == ["unavailable", "available"]
            assert counts(counted)[1] == (1, 0)

    asyncio.run(run())


def test_it_does_not_say_that_a_queue_that_is_to_be_deleted_is_empty(tmp_path: Path) -> None:
    async def run() -> None:
        async with zombie(tmp_path) as (_, _other, frozen, _gate):
            left = await asked(frozen, Close(60_000))
            assert isinstance(left, RemainingItems)
            assert (left.partitions, left.items) == ((), 0)

    asyncio.run(run())


def test_it_gives_nothing_out(tmp_path: Path) -> None:
    async def run() -> None:
        async with zombie(tmp_path) as (_, _other, frozen, _gate):
            leased = await asked(frozen, Lease("c", 10))
            assert leased.leases == []

    asyncio.run(run())


def test_it_shows_nothing_of_what_comes_next(tmp_path: Path) -> None:
    async def run() -> None:
        async with zombie(tmp_path) as (_, _other, frozen, _gate):
            assert await asked(frozen, Peek(10)) == []

    asyncio.run(run())


def test_it_redrives_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with zombie(tmp_path) as (_, _other, frozen, _gate):
            assert (await asked(frozen, Redrive(1_000, 10, "elsewhere", dry_run=True))).matched == 0

    asyncio.run(run())


def test_it_opens_nothing_anew(tmp_path: Path) -> None:
    async def run() -> None:
        async with zombie(tmp_path) as (made, _other, frozen, _gate):
            opened = len(made.stores[made.name(frozen)].fences)
            await asked(frozen, Reload(1_000))
            assert shares(frozen, "q") == []
            assert len(made.stores[made.name(frozen)].fences) == opened

    asyncio.run(run())


def test_it_does_not_say_that_nothing_is_leased_under_a_key(tmp_path: Path) -> None:
    async def run() -> None:
        async with zombie(tmp_path) as (_, other, frozen, _gate):
            assert await asked(frozen, FindLeases("c", "k", (0,))) in ("not_here", "unavailable")
            # Nor does it take more under the key from others.
            with pytest.raises(SluicewayError) as raised:
                await frozen.lease("q", Lease("c", 1, lease_key="k"))
            assert raised.value.code == "unavailable"
            with pytest.raises(SluicewayError):
                await other.lease("q", Lease("c", 1, lease_key="k"))
            assert counts(await other.count("q"))[1] == (1, 0)

    asyncio.run(run())


@pytest.mark.parametrize("noticed", [False, True])
def test_once_the_meta_store_confirms_that_it_is_its_own_it_serves_again(tmp_path: Path, noticed: bool) -> None:
    """Also if it found out by itself, and its lease was confirmed before it was told."""

    async def run() -> None:
        async with zombie(tmp_path) as (made, other, frozen, gate):
            before = max(fence for fence in made.stores[made.name(frozen)].fences)
            if noticed:
                await asked(frozen, Explain(0, 0))
                assert shares(frozen, "q") == []
            gate.open()
            await eventually(lambda: shares(frozen, "q") == [0])
            assert (await other.lease("q", Lease("c", 9, 10_000, lease_key="k"))).leases[0].partition == 0
            after = made.stores[made.name(frozen)].fences[-1]
            # The same owner with the same token: only the opening tells them apart.
            assert (after.era, after.grant) == (before.era, before.grant)
            assert after.opening > before.opening

    asyncio.run(run())
