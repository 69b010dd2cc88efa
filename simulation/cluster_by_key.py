"""A simulated cluster whose queues go by the keys of their items. The invariants of `cluster.py` hold, and:

S14 In order, an item of a key is leased only when no item before it waits, and none of the key is leased otherwise. A returned item holds
    up its key through its delay; one that was scheduled does not. Without `runs`, a lease has one item of a key, with it several in order.
S15 When an item goes back, those behind it in the run of its key do, too.
S16 Never more items of a key are leased than `key_concurrency` allows.
S17 Where keys are kept together, a partition takes only items whose keys are at home there. A produce that is divided by keys stores each
    item once, however often it is repeated, and a repetition gets the first answer.
L6  Once the world has healed, each key is served in its turn, although one floods and new ones keep coming.
S18 When a rebalance moves a key, its new home serves none of its items before the former one has none left.
L7  A consumer that waits at one instance soon gets a key's next item when another has settled the one before, or given it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from simulation.cluster import DRAINING, HEALING, SOON, ClusterWorld
from simulation.cluster_clients import Clients
from simulation.cluster_instance import Instance
from simulation.cluster_keys import KeyClients
from simulation.cluster_ledger import Hold, QueueLedger
from simulation.cluster_rebalances import Doings, RebalanceWorld
from simulation.cluster_weather import Weather
from simulation.key_ledger import KeyLedger
from simulation.known_items import Batch, new_rows
from simulation.promises import check
from simulation.world import EventLog
from sluiceway.contract.queue_settings import RetryBackoff
from sluiceway.kernel.clock import Millis
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.model.requests import DONE, RELEASE, Disposition, Lease, QueuePatch, QueueSpec

Settings = dict[str, Any]
KEYS = [None, "a", "a", "a", "b", "b", "c", "d", "e"]
TOGETHER: list[Settings] = [
    {"order": "key"},
    {"order": "key"},
    {"order": "key", "fair": "key"},
    {"key_concurrency": 1},
    {"key_concurrency": 2, "fair": "key"},
    {"order": "key", "key_concurrency": 3},
]
"""Settings under which all items of a key are in one partition."""
ANY: list[Settings] = [*TOGETHER, {}, {"fair": "key"}, {"fair": "key"}]
NONE: Settings = {"order": None, "fair": None, "key_concurrency": 0}
FLOOD = 9
"""Items of the key that floods."""
FEW = 2
"""Items of each key that it must not keep waiting."""
FEW_WITHIN = 15
"""Leases of two items within which those are served, and all of the flood, however many new keys come."""
FLOOD_WITHIN = 60


class ItemKeyClients(KeyClients):
    """Clients whose items have keys, and some of whom ask for runs."""

    ledger: KeyLedger
    repeats = True
    """Whether produces have idempotency keys."""

    async def produce_until(self, until: Millis) -> None:
        if self.repeats:
            await super().produce_until(until)
            return
        while self.world.loop.now < until:
            await self._pause()
            await self._produce_once(self._batch(None, scheduled=self.random.random() < self._scheduled), None)

    def _item_keys(self, items: int) -> list[str | None]:
        if self.random.random() < 0.15:
            return [None] * items
        return [self.random.choice(KEYS) for _ in range(items)]

    def _runs(self, client_id: str) -> bool:
        return self.ledger.runs.setdefault(client_id, self.random.random() < 0.6)

    async def lease(self, request: Lease, instance: Instance | None = None) -> list[Hold]:
        self.ledger.runs.setdefault(request.client_id, request.runs)
        return await super().lease(request, instance)

    async def use(self, holds: Sequence[Hold]) -> None:
        """Settle the leases piece by piece, many items by giving them back, or vanish."""
        for _ in range(self.random.randint(1, 3)):
            await self.world.pause(self.random.random() * 0.4)
            deed = self.random.random()
            if deed < 0.1:
                await self.extend(holds)
            elif deed < 0.2:
                return
            else:
                await self.settle([self._part_of(each) for each in holds], self._some_disposition(), 2)
        await self.settle(holds, DONE, 5)

    def _part_of(self, hold: Hold) -> Hold:
        """Take some items out of the hold."""
        chosen = [offset for offset in hold.items if self.random.random() < 0.4]
        return Hold(hold.partition, hold.number, hold.client_id, {offset: hold.items.pop(offset) for offset in chosen})


class ItemKeyWorld(ClusterWorld):
    """One history of a queue that goes by keys, determined by its seed."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        super().__init__(seed, log)
        # One lease after the other, where a key may have one item leased.
        self.draining = 10 * DRAINING
        pick = self.random.choice
        if self.random.random() < 0.4:
            # Mild faults, so that more of a history is traffic.
            self.weather = Weather(kills=pick([0, 1, 2]), freezes=pick([0, 1]), joins=pick([0, 1]))
            for roads in (self.store_roads, self.meta_roads, self.client_roads, self.network.roads):
                roads.calm()
        self.traffic, self.pace, self.wanted = pick([2_000, 4_000]), pick([150, 300]), pick([1, 2, 2, 3])
        self.scheduled = pick([0.0, 0.2])
        """Share of produced items that are due later."""
        self.changes = pick([0, 0, 1, 3])
        """Number of times that the rules change."""
        self.rules = pick([TOGETHER, TOGETHER, ANY])

    # ---- the script -------------------------------------------------------------------------------------------

    async def _create_queues(self) -> None:
        pick = self.random.choice
        dead_queue = pick([None, "dead"])
        if dead_queue is not None:
            await self._create(QueueSpec("dead", 1))
        lease_timeout, max_attempts, backoff = pick([1_500, 4_000]), pick([0, 3]), pick([None, None, RetryBackoff(200, 1_500)])
        await self._create(
            QueueSpec(
                "q0",
                pick([1, 2, 4]),
                lease_timeout=lease_timeout,
                max_attempts=max_attempts,
                dead_queue=dead_queue,
                retry_backoff=backoff,
                **pick(self.rules),
            )
        )

    def _ledger(self, spec: QueueSpec) -> QueueLedger:
        keeps = spec.queue_name == "q0" and self.rules is TOGETHER
        return KeyLedger(spec.queue_name, self.items, record=partial(self._record, "q0") if keeps else None)

    def _record(self, queue: str) -> QueueRecord:
        records = (decode_queue(entry.value) for entry in self.shared.view.prefix(QUEUE).values())
        return next(record for record in records if record.queue_name == queue)

    def _clients(self, ledger: QueueLedger) -> Clients:
        clients = ItemKeyClients(self, ledger)
        # A home that a key had while the queue kept items' keys together, or did not, is unknown after a change of that (ADR 53).
        clients.repeats = self.rules is TOGETHER or not self.changes
        return clients

    def _consumers(self) -> int:
        return self.random.randint(1, 4)

    async def _create_late(self, until: Millis) -> None:
        """Create none: a queue without rules is the business of other histories."""

    def _plan_troubles(self) -> None:
        super()._plan_troubles()
        for _ in range(self.changes):
            self.loop.after(self.random.randrange(self.traffic), self._change_rules)

    def _change_rules(self) -> None:
        rules = {**NONE, **self.random.choice(self.rules)}
        self.note("rules are to be", rules)
        clients = next(each for each in self.clients if each.ledger.queue == "q0")
        self.loop.begin(self.loop.outside, clients.update(QueuePatch(rules)))

    async def _drain(self) -> None:
        await super()._drain()
        for clients in self.clients:
            assert isinstance(clients, KeyClients)
            await clients.repeat_all()
        await super()._drain()

    # ---- fairness ---------------------------------------------------------------------------------------------

    async def _check_demand(self) -> None:
        """Check demand by key; other histories check that of items without keys."""
        await self._check_turns()
        await self._check_next()

    async def _check_turns(self) -> None:
        """Check in calm weather that one key that floods, and others that keep coming, keep no key waiting."""
        others: Settings = self.random.choice([{}, {"order": "key"}, {"key_concurrency": 3}, {"order": "key", "key_concurrency": 3}])
        clients, instance = await self._calm_queue(QueueSpec("turns", 1, fair="key", **others)), self.random.choice(self._serving())
        flood = await self._produced(clients, ["flood"] * FLOOD, instance)
        few = await self._produced(clients, ["few", "too"] * FEW, instance)
        for leases in range(FLOOD_WITHIN):
            if all(item.ended for item in (*flood.items, *few.items)):
                break
            check(
                leases < FEW_WITHIN or all(item.ended for item in few.items), f"a flood of one key keeps others waiting for {leases} leases"
            )
            await self._produced(clients, [f"new{leases}.{each}" for each in range(3)], instance)
            holds = await self._leased(clients, 2, instance)
            check(await clients.settle(holds, DONE, 10, instance), "a healthy cluster does not settle")
        check(all(item.ended for item in flood.items), f"new keys keep others waiting for {FLOOD_WITHIN} leases")

    async def _check_next(self) -> None:
        """Check that a settlement wakes consumers that wait for its key, at each instance."""
        one: Settings = self.random.choice([{"order": "key"}, {"key_concurrency": 1}])
        clients = await self._calm_queue(QueueSpec("one", 1, **one))
        for waits in self._serving():
            settles = self.random.choice(self._serving())
            await self._produced(clients, ["one"] * 2, settles)
            holds = await self._leased(clients, 1, settles)
            waiting = asyncio.create_task(self._leased(clients, 1, waits))
            await asyncio.sleep(self.random.random() / 2)
            check(not waiting.done(), "two items of a key are leased at once, and one may be")
            began, disposition = self.loop.now, self.random.choice([DONE, Disposition("retry"), RELEASE])
            check(await clients.settle(holds, disposition, 10, settles), "a healthy cluster does not settle")
            found = await waiting
            took = self.loop.now - began
            check(bool(found) and took < SOON, f"what {settles.name} has settled lets the next go at {waits.name} after {took} ms")
            check(await clients.settle(found, DONE, 10, waits), "a healthy cluster does not settle")
            while clients.ledger.left():
                await clients.drain(waits)

    async def _calm_queue(self, spec: QueueSpec) -> Clients:
        """Create a queue, and wait until all instances serve it."""
        await self._create(spec)
        deadline = self.loop.now + HEALING
        while problem := await self._problem():
            check(self.loop.now < deadline, f"a new queue is not served: {problem}")
            await asyncio.sleep(0.1)
        return self.clients[-1]

    async def _leased(self, clients: Clients, items: int, instance: Instance) -> list[Hold]:
        client_id = f"d{next(clients.asked)}"
        clients.ledger.asks.lease_timeouts[client_id] = 30_000
        return await clients.lease(Lease(client_id, items, 5_000, 30_000, runs=clients._runs(client_id)), instance)

    async def _produced(self, clients: Clients, keys: list[str], instance: Instance) -> Batch:
        numbers = [next(self.numbers) for _ in keys]
        batch = clients.ledger.add(None, *new_rows(clients.ledger.queue, numbers, [None] * len(keys), keys))
        check(await clients.produce(batch, instance), "nothing can be produced, and all is well")
        return batch


class MovingKeysWorld(ItemKeyWorld, RebalanceWorld):
    """One history in which such a queue is rebalanced, too. The invariants of `cluster_rebalances.py` hold as well."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        super().__init__(seed, log)
        pick = self.random.choice
        self.rules = TOGETHER
        self.traffic, self.scheduled = pick([5_000, 8_000]), pick([0.1, 0.3, 0.6])
        self.doings = Doings(pick([2, 4, 8]), pick([0, 0, 1]), pick([0, 0, 1]), pick([0, 1]), pick([0.0, 0.3, 0.7]), pick([0.2, 0.5]))

    def _rebalance(self) -> None:
        clients = self.random.choice([each for each in self.clients if each.ledger.queue == "q0"])
        self.loop.begin(self.loop.outside, self._ask_for(clients, self.random.choice([None, 1, 2, 3, 4, 6]), "natural", None))


def world_by_key(seed: int, log: EventLog | None = None) -> ItemKeyWorld:
    """The history of that seed: every third one is rebalanced."""
    return MovingKeysWorld(seed, log) if seed % 3 == 2 else ItemKeyWorld(seed, log)


def run_by_key(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    world_by_key(seed, log).live()
