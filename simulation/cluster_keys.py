"""Producers of a simulated cluster with long-lived keys, alone or in groups, that are repeated long after; and producers that keep an
order."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

from simulation.cluster_clients import Clients
from simulation.cluster_ledger import QueueLedger
from simulation.known_items import Batch, new_rows
from simulation.promises import check
from sluiceway.kernel.clock import Millis
from sluiceway.model.requests import ProduceKey

if TYPE_CHECKING:
    from simulation.cluster import ClusterWorld
from simulation.cluster_instance import Instance

AT_ONCE = 20
TRIES = 30
LATEST: Millis = 12_000
"""How far ahead items are scheduled at most, in milliseconds."""


class KeyClients(Clients):
    """Clients of one queue that repeat their keyed produces now and then, and all of them in the end."""

    def __init__(self, world: ClusterWorld, ledger: QueueLedger) -> None:
        super().__init__(world, ledger)
        self.groups = count(1)
        self._scheduled: float = getattr(world, "scheduled", 0.0)
        self.keyed: list[Batch] = []
        """Batches that may be repeated; of each group only the newest."""

    # ---- producers --------------------------------------------------------------------------------------------

    async def produce_until(self, until: Millis) -> None:
        if self.ledger.in_order is not None:
            await self._produce_in_order(until)
        elif self.random.random() < 0.3:
            await self._produce_in_group(until)
        else:
            await self._produce_in_disorder(until)

    async def _produce_in_disorder(self, until: Millis) -> None:
        while self.world.loop.now < until:
            await self._pause()
            if self.keyed and self.random.random() < 0.2:
                await self._produce_once(self.random.choice(self.keyed), None)
                continue
            key = ProduceKey(f"k{next(self.keys)}") if self.random.random() < 0.5 else None
            batch = self._batch(key, scheduled=self.random.random() < self._scheduled)
            if key is not None:
                self.keyed.append(batch)
            await self.produce(batch)

    async def _produce_in_group(self, until: Millis) -> None:
        """Produce a group's sequence: repeat each batch until it is acknowledged, then go on with the next."""
        group = f"g{self.ledger.queue}{next(self.groups)}"
        before: Batch | None = None
        for sequence in count(1):
            if self.world.loop.now >= until:
                return
            await self._pause()
            batch = self._batch(ProduceKey(f"{group}/{sequence}", group, sequence))
            if before is not None:
                # A repetition after a later sequence would be refused as stale.
                self.keyed.remove(before)
            self.keyed.append(batch)
            before = batch
            if not await self._insist(batch, until):
                return
            if self.random.random() < 0.3:
                await self._produce_once(batch, None)

    async def _produce_in_order(self, until: Millis) -> None:
        """Produce sequentially, and record the order."""
        assert self.ledger.in_order is not None
        producer, number = f"p{next(self.asked)}", count()
        while self.world.loop.now < until:
            await self._pause()
            key = ProduceKey(f"k{next(self.keys)}") if self.random.random() < 0.5 else None
            batch = self._batch(key)
            for item in batch.items:
                self.ledger.in_order[item.payload] = producer, next(number)
            if key is not None:
                self.keyed.append(batch)
                if not await self._insist(batch, until):
                    return
            else:
                await self._produce_once(batch, None)
                if batch.answer is None:
                    # The batch may still be accepted at any later time.
                    for item in batch.items:
                        del self.ledger.in_order[item.payload]

    async def _pause(self) -> None:
        await asyncio.sleep(self.random.random() * self.world.pace / 1000)

    def _batch(self, key: ProduceKey | None, *, scheduled: bool = False) -> Batch:
        numbers = [next(self.world.numbers) for _ in range(self.random.randint(1, 5))]
        now, all_of_it = self.world.latest(), self.random.random() < 0.5
        dues = [now + self.random.randrange(LATEST) if scheduled and (all_of_it or self.random.random() < 0.7) else None for _ in numbers]
        items = len(numbers)
        columns = self._item_keys(items), self._item_priorities(items), self._unique_keys(items)
        return self.ledger.add(key, *new_rows(self.ledger.queue, numbers, dues, *columns))

    def _item_keys(self, items: int) -> list[str | None]:
        """Draw the keys of a batch's items."""
        return [None] * items

    def _item_priorities(self, items: int) -> list[int | None]:
        """Draw their priorities."""
        return [None] * items

    def _unique_keys(self, items: int) -> list[str | None]:
        """Draw the unique keys of a batch's items."""
        return [None] * items

    async def _insist(self, batch: Batch, until: Millis) -> bool:
        """Repeat the batch anywhere until it is acknowledged or `until` is reached. Returns whether it was."""
        while batch.answer is None and self.world.loop.now < until:
            await self._produce_once(batch, None)
            if batch.answer is None:
                await asyncio.sleep(self.random.random() * 0.3)
        return batch.answer is not None

    async def produce_keyed(self, instance: Instance) -> None:
        """Produce a keyed batch at that instance. It belongs to no ordered producer, since it may come in between."""
        batch = self._batch(ProduceKey(f"k{next(self.keys)}"))
        self.keyed.append(batch)
        await self._produce_once(batch, instance)

    # ---- final checks -----------------------------------------------------------------------------------------

    async def repeat_all(self) -> None:
        """Check that every keyed batch still gets its first answer."""
        for start in range(0, len(self.keyed), AT_ONCE):
            await asyncio.gather(*(self._repeat(batch) for batch in self.keyed[start : start + AT_ONCE]))

    async def _repeat(self, batch: Batch) -> None:
        known = batch.answer
        for _ in range(TRIES):
            heard = self.heard
            await self._produce_once(batch, None)
            if batch.answer is not None and self.heard > heard:
                break
        check(batch.answer is not None, f"nothing is taken under the key {batch.key}, and all is well")
        self.ledger.tally["keys kept"] += known is not None
