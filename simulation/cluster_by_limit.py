"""A simulated cluster whose queue has a limit of leased items, and keys, too. The invariants of `cluster_by_key.py` hold, and:

S22 No item is leased while as many are as the queue's `concurrency` allows, in all of its partitions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from simulation.cluster_by_key import ItemKeyWorld, MovingKeysWorld, Settings
from simulation.cluster_ledger import QueueLedger
from simulation.item_history import Cycle
from simulation.key_ledger import KeyHistory, KeyLedger
from simulation.known_items import Item
from simulation.promises import check
from simulation.scene import LEASED, Scene
from simulation.world import EventLog
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import QueuePatch, QueueSpec

LIMITS: list[Settings] = [{"concurrency": limit, "order": "key"} for limit in (1, 3, 3, 6)]
WITHOUT_ORDER: list[Settings] = [{"concurrency": limit} for limit in (1, 3, 3, 6)]


class LimitHistory(KeyHistory):
    """Follows the durable steps of one partition, and counts what is leased in all."""

    def follow(self, old: Scene, new: Scene, cycle: Cycle) -> None:
        super().follow(old, new, cycle)
        assert isinstance(self._ledger, LimitLedger)
        if not self.newest:
            return
        others = (self._ledger.trail(number).new for number in self._ledger.stores if number != self.partition)
        leased = sum(place.kind == LEASED for scene in (new, *others) for place in scene.alive.values())
        # An owner may not have heard of a change yet. What it leases is within its quota all the same.
        limit = max(cycle.record.concurrency, self._ledger.limited().concurrency)
        check(leased <= limit, f"{leased} items are leased, and {limit} may be")
        self._ledger.tally["at the queue's limit"] += leased == limit


class LimitLedger(KeyLedger):
    """KeyLedger of a queue with a limit. `limited`: returns the queue's record, as it is in the meta store."""

    def __init__(self, queue: str, items: dict[str, Item], limited: Callable[[], QueueRecord], *, keeps_keys: bool) -> None:
        super().__init__(queue, items, record=limited if keeps_keys else None)
        self.limited = limited

    def _history(self, incarnation: str, partition: int) -> LimitHistory:
        return LimitHistory(incarnation, partition, self)


class LimitWorld(ItemKeyWorld):
    """One history of a queue with a limit, determined by its seed."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        super().__init__(seed, log)
        self.rules = self.random.choice([LIMITS, WITHOUT_ORDER])

    def _ledger(self, spec: QueueSpec) -> QueueLedger:
        if spec.queue_name != "q0":
            return super()._ledger(spec)
        return LimitLedger(spec.queue_name, self.items, partial(self._record, "q0"), keeps_keys=self.rules is LIMITS)

    def _change_rules(self) -> None:
        rules = self.random.choice(self.rules)
        self.note("rules are to be", rules)
        clients = next(each for each in self.clients if each.ledger.queue == "q0")
        self.loop.begin(self.loop.outside, clients.update(QueuePatch(rules)))


class MovingLimitWorld(LimitWorld, MovingKeysWorld):
    """One history in which such a queue is rebalanced, too."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        super().__init__(seed, log)
        self.rules = LIMITS


def world_by_limit(seed: int, log: EventLog | None = None) -> LimitWorld:
    """The history of that seed: every third one is rebalanced."""
    return MovingLimitWorld(seed, log) if seed % 3 == 2 else LimitWorld(seed, log)


def run_by_limit(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    world_by_limit(seed, log).live()
