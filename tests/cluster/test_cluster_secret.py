"""All instances of a cluster find one secret, whoever of them makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from simulation.loop import Loop
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.cluster.cluster_secret import CLUSTER_SECRET, secret_of
from sluiceway.cluster.compatibility_level import begin_level
from sluiceway.model.meta import Stamp
from sluiceway.ports.meta_store import MetaUnknownError


class Slow(MemoryMetaStore):
    """Every commit is held up until all that were waited for have come. The first one that is done does not say so."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self._barrier = asyncio.Barrier(together)
        self.unknown = 0

    async def commit(self, *args: Any, **named: Any) -> Stamp:
        await self._barrier.wait()
        await super().commit(*args, **named)
        self.unknown += 1
        raise MetaUnknownError("it is done, and nobody says so")


def test_instances_that_ask_at_one_time_are_told_the_same() -> None:
    async def ask() -> None:
        meta = Slow(5)
        found = set(await asyncio.gather(*(secret_of(meta) for _ in range(5))))
        assert meta.unknown == 1
        assert len(found) == 1
        secret = found.pop()
        assert await secret_of(meta) == secret
        assert (await meta.read([CLUSTER_SECRET])).entries[CLUSTER_SECRET].value == secret.encode()
        # As many random bits as an API key has.
        assert secret.startswith("slwc_")
        assert len(secret) == len("slwc_") + 48

    asyncio.run(ask())


def test_another_cluster_has_another_secret() -> None:
    async def ask() -> tuple[str, str]:
        return await secret_of(MemoryMetaStore()), await secret_of(MemoryMetaStore())

    one, other = asyncio.run(ask())
    assert one != other


class Unwilling(MemoryMetaStore):
    """No commit is ever done."""

    tries = 0

    async def commit(self, *args: Any, **named: Any) -> Stamp:
        self.tries += 1
        raise MetaUnknownError("read-only")


@pytest.mark.parametrize("begin", [secret_of, begin_level])
def test_a_meta_store_that_takes_no_commit_is_not_asked_without_a_pause(begin: Callable[[Unwilling], Awaitable[object]]) -> None:
    loop, meta = Loop(Random(0)), Unwilling()
    asked = loop.create_task(begin(meta))
    loop.run_until_complete(asyncio.sleep(10))
    loop.run_until_complete(asyncio.gather(asked, return_exceptions=True) if asked.cancel() else asyncio.sleep(0))
    loop.close()
    assert 10 <= meta.tries <= 101
