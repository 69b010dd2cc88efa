"""A simulated cluster whose queue keeps its items unique. The invariants of `cluster.py` hold, and:

S19 An item is stored only while no other holds its unique key: in the queue, or waiting in it, as the setting says.
S20 An item that is not stored, its producer is told, is there when the call is made, under the id that the producer is told. A repetition
    has the first answer.
S21 All items of a unique key are in one partition.
L8  Once all is settled, every unique key is free.
"""

from __future__ import annotations

from simulation.cluster_by_key import ItemKeyClients, ItemKeyWorld, Settings
from simulation.cluster_clients import Clients
from simulation.cluster_instance import Instance
from simulation.cluster_ledger import QueueLedger
from simulation.known_items import Batch, new_rows
from simulation.promises import check
from simulation.unique_ledger import UniqueLedger
from simulation.world import EventLog
from sluiceway.model.requests import QueueSpec

NAMES = ["u", "v", "w", "x"]
KEYS = [None, None, "a", "b"]
UNIQUE: list[Settings] = [{"unique": "until_settled"}, {"unique": "while_waiting"}]
IN_ORDER: list[Settings] = [{**each, "order": "key"} for each in UNIQUE]


class UniqueClients(ItemKeyClients):
    """Clients most of whose items have one of few unique keys."""

    ledger: UniqueLedger

    def _item_keys(self, items: int) -> list[str | None]:
        return [self.random.choice(KEYS) for _ in range(items)]

    def _unique_keys(self, items: int) -> list[str | None]:
        return [self.random.choice([None, *NAMES, *NAMES]) for _ in range(items)]

    async def _produce_once(self, batch: Batch, instance: Instance | None) -> None:
        self.ledger.sends(batch)
        await super()._produce_once(batch, instance)


class UniqueWorld(ItemKeyWorld):
    """One history of a queue whose items are unique, determined by its seed."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        super().__init__(seed, log)
        # Unique keys have other homes with order, so it is there from beginning to end, or never.
        self.rules = self.random.choice([UNIQUE, UNIQUE, IN_ORDER])

    def _ledger(self, spec: QueueSpec) -> QueueLedger:
        if spec.queue_name != "q0":
            return QueueLedger(spec.queue_name, self.items)
        return UniqueLedger(spec.queue_name, self.items, has_homes=True)

    def _clients(self, ledger: QueueLedger) -> Clients:
        return UniqueClients(self, ledger) if isinstance(ledger, UniqueLedger) else Clients(self, ledger)

    async def _drain(self) -> None:
        await super(ItemKeyWorld, self)._drain()
        for clients in self.clients:
            if isinstance(clients, UniqueClients):
                await clients.repeat_all()
        await super(ItemKeyWorld, self)._drain()

    async def _check_demand(self) -> None:
        """Check that every unique key is free, now that all is settled."""
        clients = next(each for each in self.clients if isinstance(each, UniqueClients))
        keys = sorted({item.key for batch in clients.ledger.batches for item in batch.items}, key=str)
        for instance in self._serving():
            for key in keys:
                numbers = [next(self.numbers) for _ in NAMES]
                rows = new_rows(clients.ledger.queue, numbers, [None] * len(NAMES), [key] * len(NAMES), unique_keys=NAMES)
                batch = clients.ledger.add(None, *rows)
                check(await clients.produce(batch, instance), "nothing can be produced, and all is well")
                check(batch.answer is not None and not batch.answer.duplicates, f"unique keys of {key!r} are taken, and nothing is there")
            while clients.ledger.left():
                await clients.drain(instance)


def run_unique(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    UniqueWorld(seed, log).live()
