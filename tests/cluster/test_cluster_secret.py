"""All instances of a cluster find one secret, whoever of them makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.cluster.cluster_secret import CLUSTER_SECRET, secret_of
from sluiceway.model.meta import Stamp
from sluiceway.ports.meta_store import MetaUnknownError


class Slow(MemoryMetaStore):
    """Every commit is held up until all that were waited for have come. The first one that is done does not say so."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self._barrier = asyncio.Barrier(together)
        self.unknown = 0

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        await self._barrier.wait()
        await super().commit(checks, unchanged, puts, deletes, hint=hint)
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
