"""The load balancers of two instances over one meta store: what they report, and the round that comes of it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.cluster import instance_view, load_balancer
from sluiceway.cluster.compatibility_level import begin_level
from sluiceway.cluster.instance_view import Instances
from sluiceway.cluster.load_balancer import LoadBalancer
from sluiceway.cluster.ownership import KEYS, Clustered
from sluiceway.core.group.group_records import LoadReport, Token, owners
from sluiceway.core.group.load_balance import PACE, reports_of
from sluiceway.core.queue.partition_load import Counts
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import STEADY

ITEMS = [f"k7f3q2ma.{number}" for number in range(8)]


class Instance:
    """An instance without a server: it counts by hand."""

    def __init__(self, meta: MemoryMetaStore, name: str) -> None:
        self.meta = meta
        self.ownership = Clustered(name, f"http://{name}", parameters=STEADY)
        self.partitions: set[int] = set()
        self.done: dict[int, int] = dict.fromkeys(range(8), 0)

    def gained(self, incarnation: str, partition: int, token: Token) -> None:
        self.partitions.add(partition)

    def expects(self, incarnation: str, partition: int) -> None: ...

    async def lost(self, incarnation: str, partition: int) -> None:
        self.partitions.discard(partition)

    async def start(self) -> None:
        await self.ownership.start(self.meta, self)
        driver: Any = SimpleNamespace(
            record=SimpleNamespace(incarnation="k7f3q2ma"),
            queue=SimpleNamespace(counts=lambda: {number: Counts(self.done[number], 0, 0) for number in self.partitions}),
        )
        self.balancer = LoadBalancer(self.ownership, self.meta, lambda: [driver], PACE._replace(looks=2))


async def unavailable() -> dict[str, LoadReport]:
    raise StoreUnavailableError("the meta store cannot be reached")


def test_busy_partitions_of_one_instance_are_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(load_balancer, "system", SimpleNamespace(steady=lambda: clock.now))

    async def story() -> None:
        meta = MemoryMetaStore()
        await begin_level(meta)
        a, b = Instance(meta, "a"), Instance(meta, "b")
        await a.start()
        writes = a.ownership.placing(ITEMS)
        await a.ownership.follow(await meta.commit(writes.checks, puts=writes.puts))
        await b.start()
        while not len(a.partitions) == len(b.partitions) == 4:
            await a.ownership.changed(50)
        busy = sorted(a.partitions)[:2]
        while len(b.partitions.intersection(busy)) != 1 or len(a.partitions) != 4:
            clock.now += PACE.look
            for each in (a, b):
                each.done |= {number: each.done[number] + 500 * PACE.look // 1_000 for number in busy}
                await each.balancer.step()
            # A report goes with the next beat.
            await a.ownership.changed(150)
        look = a.ownership.look
        assert look is not None
        assert look.round is not None
        assert look.round.trigger == "loads are uneven"
        assert Counter(owners(look).values()) == {a.ownership.name: 4, b.ownership.name: 4}
        assert reports_of(await meta.read(prefixes=[KEYS.loads]), KEYS).keys() == {a.ownership.name, b.ownership.name}
        view = Instances(b.ownership, lambda: ())
        shown = {each.name: each for each in (await view.with_loads()).instances}
        assert 0 < (shown[a.ownership.name].load or 0) < 1
        # Once more without the meta store: what was known.
        monkeypatch.setattr(b.ownership, "reports", unavailable)
        monkeypatch.setattr(instance_view, "REPORTS_KEPT", 0)
        assert {each.name: each.load for each in (await view.with_loads()).instances} == {name: each.load for name, each in shown.items()}
        for each in (a, b):
            await each.ownership.leave()
        assert not (await meta.read(prefixes=[KEYS.loads])).entries

    driven(story)()
