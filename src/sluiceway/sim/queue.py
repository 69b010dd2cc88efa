"""One queue of the simulated world: its stores, its ledger, and the owner that serves it, if one is alive."""

from __future__ import annotations

from sluiceway.core.logical_queue import BUSY_PATIENCE
from sluiceway.core.tickets import Request, Result, Ticket, Transfer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import Lease, Produce, Produced, ProduceKey
from sluiceway.node import burial
from sluiceway.sim.checks import check
from sluiceway.sim.items import Batch, Item
from sluiceway.sim.ledger import Ledger
from sluiceway.sim.owner import Handler, Owner
from sluiceway.sim.world import START, World

BURIAL_TIMEOUT = 30_000


class SimQueue:
    """Whoever owns it has a grant of its own, higher than that of all before."""

    def __init__(self, world: World, name: str, partitions: int, lease_timeout: Millis, max_attempts: int, dead: SimQueue | None) -> None:
        self.world = world
        self.dead = dead
        self.incarnation = name
        self.lease_timeout = lease_timeout
        dead_name = None if dead is None else dead.incarnation
        records = tuple(PartitionRecord(number) for number in range(partitions))
        self.record = QueueRecord(name, name, START, START, lease_timeout, max_attempts, dead_name, "", records)
        self.ledger = Ledger(name, partitions, max_attempts, dead is not None)
        self.stores = self.ledger.stores
        self.hurt = False
        """Some of its data has been damaged."""
        self.mistaken = False
        """Its owner has been made to make a mistake."""
        self.replies = 0
        self._grant = 0
        self.owner: Owner | None = None
        self.start()

    def now(self) -> Millis:
        """The time by the owner's clock."""
        return self.world.now + self.world.wall_ahead if self.owner is None else self.owner.now()

    def submit(self, request: Request, handler: Handler) -> None:
        """Ask. Where nobody serves the queue, the client finds that out at once."""
        if self.owner is not None and not self.owner.stopping:
            self.owner.submit(request, handler)
        else:
            handler(None if isinstance(request, Lease) else SluicewayError("unavailable", "nobody serves the queue"))

    # ---- owners -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.owner is None:
            self._grant += 1
            self.owner = Owner(self.world, self, self._grant)
            self.world.actors = (*self.world.actors, self.owner)

    def kill(self, pause: Millis) -> None:
        """The process dies; after the pause another one takes over."""
        self.world.note(self.incarnation, "is killed")
        if self.owner is not None:
            self._leave(self.owner, pause)

    def _leave(self, owner: Owner, pause: Millis) -> None:
        self.replies += owner.replies
        self.owner = None
        self.world.actors = tuple(actor for actor in self.world.actors if actor is not owner)
        self.world.after(pause, self.start)
        owner.die()

    def stop(self) -> None:
        """The owner stops in order, and another one takes over."""
        self.world.note(self.incarnation, "is stopped")
        if self.owner is not None and not self.owner.stopping:
            self.owner.begin_to_stop()

    def gone(self, owner: Owner) -> None:
        self._leave(owner, self.world.random.randint(0, 1_000))

    # ---- what the owner asks ----------------------------------------------------------------------------------

    def lease_answered(self, ticket: Ticket) -> None:
        # Later it gives up what has not come.
        if self.now() < ticket.deadline + BUSY_PATIENCE:
            self.ledger.lease_answered(ticket)

    def carry_over(self, owner: Owner, effect: Transfer) -> None:
        if owner is not self.owner:
            return  # it is dead
        world = self.world
        store = self.stores[effect.partition]
        rows = store.transfer_rows(effect.partition, effect.number, effect.slices)
        if store.is_damaged(effect.slices):
            owner.stop_partition(effect.partition, "a blob fails its checksum")
            owner.transferred(effect, False)
        elif rows is None:
            alive = effect.number in owner.machine.lanes[effect.partition].partition.transfers
            check(not alive, "rows on their way to the dead queue are lost")
            owner.transferred(effect, True)
        elif world.chance(world.weather.transfer_fails):
            owner.transferred(effect, False)
        else:
            assert self.dead is not None
            group = f"transfer/{self.incarnation}.{effect.partition}"
            key = ProduceKey(f"{group}/{effect.number}", group, effect.number)
            produce = Produce(burial.dead_rows(self.record, effect.reason, rows), BURIAL_TIMEOUT, key)
            batch = self.dead.arrival(produce, self, [row.payload for row in store.rows_of(effect.slices)])
            self.dead.submit(produce, lambda result: self._buried(owner, effect, batch, result))

    def _buried(self, owner: Owner, effect: Transfer, batch: Batch, result: Result | SluicewayError | None) -> None:
        assert self.dead is not None
        if isinstance(result, Produced):
            self.dead.ledger.produced(batch, result)
        elif isinstance(result, SluicewayError):
            check(result.code != "key_conflict", "the same transfer has other rows when it is repeated")
        # It may be in the dead queue, and the source does not hear of it.
        done = isinstance(result, Produced) and not self.world.chance(self.world.weather.transfer_fails / 2)
        self.world.after(0, lambda: owner.transferred(effect, done))

    def arrival(self, produce: Produce, source: SimQueue, payloads: list[str]) -> Batch:
        """The batch that a transfer is to this dead queue, whether or not it comes for the first time."""
        known = self.ledger.batches.get(produce.key)
        if known is not None:
            check([item.payload for item in known[0].items] == payloads, "the same transfer has other items when it is repeated")
            return known[0]
        items = []
        for index, (payload, origin) in enumerate(zip(payloads, produce.batch.column("origin").to_pylist(), strict=True)):
            before = source.ledger.items[payload]
            items.append(Item(payload, index, 0, before.reference, source.ledger.origin_of(before) or origin))
        batch = self.ledger.add(produce.key, items, produce.batch)
        batch.unknown = True
        return batch
