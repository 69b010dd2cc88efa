"""A simulated cluster whose queues go by the priorities of their items, some by keys, too. The invariants of `cluster_by_key.py` hold, and:

S18 An item is leased only when none of higher priority, nor an older one of its own, waits in its partition; with `fair`, none of its key.
L8  Once the world has healed, an urgent item is the next of its queue, whatever waits.
"""

from __future__ import annotations

from simulation.cluster_by_key import ItemKeyClients, ItemKeyWorld, Settings
from simulation.cluster_clients import Clients
from simulation.cluster_ledger import QueueLedger
from simulation.item_history import Cycle
from simulation.key_ledger import KeyHistory, KeyLedger
from simulation.known_items import new_rows
from simulation.promises import check
from simulation.scene import READY, Scene
from simulation.world import EventLog
from sluiceway.model.item_keys import DEFAULT_PRIORITY
from sluiceway.model.requests import DONE, QueuePatch, QueueSpec

RULES: list[Settings] = [
    {"priority": "strict"},
    {"priority": "strict"},
    {"priority": "strict", "fair": "key"},
    {"priority": "strict", "fair": "key", "key_concurrency": 2},
]
NONE: Settings = {"priority": None, "fair": None, "key_concurrency": 0}
PRIORITIES = [None, 0, 0, 3, 4, 5, 9]


class PriorityHistory(KeyHistory):
    """Follows the durable steps of one partition, and what holds of priorities."""

    def __init__(self, incarnation: str, partition: int, ledger: KeyLedger) -> None:
        super().__init__(incarnation, partition, ledger)
        self._priorities: dict[str, int] = {}
        """Those of items that were stored while the queue had rules: of the others nothing is noted."""

    def follow(self, old: Scene, new: Scene, cycle: Cycle) -> None:
        born = [payload for payload in new.alive if payload not in old.alive and self._is_new(payload)]
        super().follow(old, new, cycle)
        if cycle.record.priority is not None:
            for payload in born:
                given = self.items[payload].priority
                self._priorities[payload] = DEFAULT_PRIORITY if given is None else given
            self._check_highest(old, new)

    def _check_highest(self, old: Scene, new: Scene) -> None:
        """Check what was leased against what has waited all the time: within a cycle, an item may come after a lease, or come back."""
        leased: dict[str | None, tuple[int, int]] = {}
        waiting: dict[str | None, tuple[int, int]] = {}
        for payload, priority in self._priorities.items():
            place, was = new.alive.get(payload), old.alive.get(payload)
            if place is None:
                continue
            flow = None if self.record.fair is None else self.keys.get(payload)
            rank = -priority, place.first
            if place.lease in self.newest:
                leased[flow] = max(rank, leased.get(flow, rank))
            elif place.kind == READY and was is not None and (was.kind, was.offset) == (READY, place.offset):
                waiting[flow] = min(rank, waiting.get(flow, rank))
        for flow in leased.keys() & waiting.keys():
            check(leased[flow] < waiting[flow], f"priority {-leased[flow][0]} is served, and {-waiting[flow][0]} waits, of key {flow!r}")
            self._ledger.tally["highest first"] += leased[flow][0] < waiting[flow][0]


class PriorityLedger(KeyLedger):
    """KeyLedger of a queue with priorities."""

    def _history(self, incarnation: str, partition: int) -> PriorityHistory:
        return PriorityHistory(incarnation, partition, self)


class PriorityClients(ItemKeyClients):
    """Clients whose items have priorities."""

    def _item_priorities(self, items: int) -> list[int | None]:
        return [self.random.choice(PRIORITIES) for _ in range(items)]


class PriorityWorld(ItemKeyWorld):
    """One history of a queue with priorities, determined by its seed."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        super().__init__(seed, log)
        self.rules = RULES

    def _ledger(self, spec: QueueSpec) -> QueueLedger:
        return PriorityLedger(spec.queue_name, self.items, record=None)

    def _clients(self, ledger: QueueLedger) -> Clients:
        clients = PriorityClients(self, ledger)
        # As in `cluster_by_key.py`: a limit keeps keys together.
        clients.repeats = not self.changes
        return clients

    def _change_rules(self) -> None:
        rules = {**NONE, **self.random.choice(self.rules)}
        self.note("rules are to be", rules)
        clients = next(each for each in self.clients if each.ledger.queue == "q0")
        self.loop.begin(self.loop.outside, clients.update(QueuePatch(rules)))

    async def _check_demand(self) -> None:
        """Check in calm weather that an urgent item waits for no other."""
        clients, instance = await self._calm_queue(QueueSpec("urgent", 1, priority="strict")), self.random.choice(self._serving())
        for priorities in ([0] * 9, [4, None], [9]):
            numbers = [next(self.numbers) for _ in priorities]
            rows = new_rows("urgent", numbers, [None] * len(numbers), priorities=priorities)
            check(await clients.produce(clients.ledger.add(None, *rows), instance), "nothing can be produced, and all is well")
        served: list[int | None] = []
        for _ in range(4):
            holds = await self._leased(clients, 1, instance)
            served += [item.priority for hold in holds for item in hold.items.values()]
            check(await clients.settle(holds, DONE, 10, instance), "a healthy cluster does not settle")
        check(served == [9, 4, None, 0], f"items are served by priority as {served}")
        while clients.ledger.left():
            await clients.drain(instance)


def run_by_priority(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    PriorityWorld(seed, log).live()
