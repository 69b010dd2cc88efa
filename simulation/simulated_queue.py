"""One queue of the simulated world: its stores, its ledger, and its owner while one is alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from simulation.known_items import Batch, new_rows
from simulation.owner import Handler, Owner
from simulation.promises import check
from simulation.queue_ledger import Ledger
from simulation.world import World
from sluiceway.core.queue.lease_scheduler import LEASE_PATIENCE
from sluiceway.core.queue.tickets import Request, Result, Ticket, Transfer, TransferEnd
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local import dead_letters
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import TRANSFER_GROUP, Lease, Produce, Produced, ProduceKey

BURIAL_TIMEOUT = 30_000


class SimQueue:
    """Queue whose every new owner gets a higher grant than all before it. `queues`: all queues of the world by name."""

    def __init__(self, world: World, record: QueueRecord, queues: dict[str, SimQueue]) -> None:
        self.world = world
        self.record = record
        self.incarnation = record.incarnation
        self.queues = queues
        queues[record.queue_name] = self
        numbers = [each.partition for each in record.partitions]
        self.sides = [numbers]
        if len(numbers) > 1 and world.random.random() < 0.3:
            cut = world.random.randint(1, len(numbers) - 1)
            self.sides = [numbers[:cut], numbers[cut:]]
        self.ledger = Ledger(record.incarnation, len(numbers))
        self.stores = self.ledger.stores
        self.lease_keys: Counter[tuple[str, str]] = Counter()
        """Number of requests with each (client, lease key)."""
        self.hurt = False
        """Whether any of its data has been damaged."""
        self.mistaken = False
        """Whether an error was injected into its owner."""
        self.replies = 0
        self._grant = 0
        self.owner: Owner | None = None
        self.start()

    def now(self) -> Millis:
        """Return the time by the owner's clock, in milliseconds."""
        return self.world.now + self.world.wall_ahead if self.owner is None else self.owner.now()

    def submit(self, request: Request, handler: Handler, partition: int | None = None) -> None:
        """Send a request to the owner. Without one the client hears of it at once."""
        if isinstance(request, Lease):
            self.ledger.asks.lease_timeouts[request.client_id] = request.lease_timeout
            if request.lease_key is not None:
                self.lease_keys[request.client_id, request.lease_key] += 1
        if self.owner is not None and not self.owner.stopping:
            self.owner.submit(request, handler, partition)
        else:
            handler(None if isinstance(request, Lease) else SluicewayError("unavailable", "nobody serves the queue"))

    def configure(self, **settings: object) -> None:
        """Change settings at once, without a restart."""
        self.record = msgspec.structs.replace(self.record, version=self.record.version + 1, **settings)
        self.world.note(self.incarnation, "has new settings", settings)
        if self.owner is not None:
            self.owner.configure()

    # ---- owners -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.owner is None:
            self._grant += 1
            self.owner = Owner(self.world, self, self._grant)
            self.world.actors = (*self.world.actors, self.owner)

    def kill(self, pause: Millis) -> None:
        """Kill the owner process; another one takes over after `pause` milliseconds."""
        self.world.note(self.incarnation, "is killed")
        if self.owner is not None:
            self._leave(self.owner, pause)

    def _leave(self, owner: Owner, pause: Millis) -> None:
        self.replies += owner.replies
        self.owner = None
        self._rest(owner)
        self.world.after(pause, self.start)

    def _rest(self, owner: Owner) -> None:
        """Take the owner's turns away for good."""
        self.world.actors = tuple(actor for actor in self.world.actors if actor is not owner)
        owner.die()

    def stop(self) -> None:
        """Stop the owner in order; another one takes over."""
        self.world.note(self.incarnation, "is stopped")
        if self.owner is not None and not self.owner.stopping:
            self.owner.begin_to_stop()

    def gone(self, owner: Owner) -> None:
        self._leave(owner, self.world.random.randint(0, 1_000))

    def haunt(self, pause: Millis, numbers: Iterator[int]) -> None:
        """Split brain: the owner is taken for dead and replaced, then runs on for a while, and so do some of its clients."""
        owner, random = self.owner, self.world.random
        if owner is None or owner.stopping:
            return
        self.world.note(self.incarnation, "is taken for dead")
        self._leave(owner, pause)
        owner.haunts = True
        asleep, awake = random.choice([0, 200, 5_000]), random.choice([500, 5_000])
        self.world.after(asleep, partial(self._wake, owner))
        for moment in (random.randint(0, awake) for _ in range(4)):
            self.world.after(asleep + moment, partial(self._ask_old, owner, numbers))
        self.world.after(asleep + awake, partial(self._rest, owner))

    def _wake(self, owner: Owner) -> None:
        owner.dirty = True
        self.world.actors = (*self.world.actors, owner)

    def _ask_old(self, owner: Owner, numbers: Iterator[int]) -> None:
        """Ask the deposed owner to produce and to lease. Whatever it acknowledges must be durable; it need not answer."""
        if owner not in self.world.actors:
            return
        items, rows = new_rows(self.incarnation, [next(numbers)], [None])
        self.ledger.add(None, items, rows).unknown = True

        def produced(answer: Result | SluicewayError | None) -> None:
            check(not isinstance(answer, Produced) or items[0].origin is not None, "an owner that was shut out acknowledges a produce")

        def leased(answer: Result | SluicewayError | None) -> None:
            for grant in answer if isinstance(answer, list) else ():
                taken = self.ledger.trails[grant.info.partition].clients.get(grant.info.number)
                check(taken == client_id, "an owner that was shut out leases items")

        owner.submit(Produce(rows, 1_000), produced)
        client_id = f"old {items[0].payload}"
        self.ledger.asks.lease_timeouts[client_id] = 1_000
        owner.submit(Lease(client_id, 3, 100, 1_000), leased)

    # ---- effects of the owner ---------------------------------------------------------------------------------

    def lease_answered(self, ticket: Ticket) -> None:
        # After the grace period the owner gives up leases whose outcome is still unknown.
        if self.now() < ticket.deadline + LEASE_PATIENCE:
            self.ledger.lease_answered(ticket)

    def carry_over(self, owner: Owner, effect: Transfer) -> None:
        if owner not in self.world.actors:
            return  # dead owner
        world, way = self.world, self.ledger.trails[effect.partition].ways[effect.number]
        name = self.record.dead_queue if effect.target is None else effect.target
        check(name == way.target, "a transfer goes to another queue than was decided")
        check(effect.incarnation == way.incarnation, "a redrive goes to another queue of the same name")
        target = None if name is None else self.queues.get(name)
        if target is not None and effect.incarnation not in (None, target.incarnation):
            target = None
        store = self.stores[effect.partition]
        rows = store.transfer_rows(effect.partition, effect.number, effect.slices)
        if store.is_damaged(effect.slices):
            owner.stop_partition(effect.partition, "a blob fails its checksum")
            owner.transferred(effect, TransferEnd())
        elif target is None and effect.reason:
            owner.transferred(effect, TransferEnd(done=True))
        elif target is None:
            way.nowhere = True
            owner.transferred(effect, TransferEnd(nowhere=True))
        elif rows is None:
            alive = effect.number in owner.executors[effect.partition].partition.transfers.by_number
            check(not alive or owner.haunts, "rows on their way to another queue are lost")
            owner.transferred(effect, TransferEnd(done=not alive))
        elif world.chance(world.weather.transfer_fails):
            owner.transferred(effect, TransferEnd())
        else:
            group = f"{TRANSFER_GROUP}{self.incarnation}.{effect.partition}"
            key = ProduceKey(f"{group}/{effect.number}", group, effect.number)
            dies = bool(effect.reason)
            sent = dead_letters.dead_rows(self.record, effect.reason, rows) if dies else dead_letters.redriven_rows(self.record, rows)
            if effect.instead is not None:
                nothing = Produce(sent.slice(0, 0), BURIAL_TIMEOUT, key)
                target.submit(nothing, partial(self._taken_back, owner, effect, effect.instead))
                return
            produce = Produce(sent, BURIAL_TIMEOUT, key)
            items = [self.ledger.items[row.payload] for row in store.rows_of(effect.slices)]
            batch = target.ledger.arriving(key, items, produce.batch, way)
            taken_back = partial(self._taken_back, owner, effect, target.incarnation)
            again = partial(target.submit, Produce(sent.slice(0, 0), BURIAL_TIMEOUT, key), taken_back)
            target.submit(produce, partial(self._carried, owner, effect, target, batch, again))

    def _taken_back(self, owner: Owner, effect: Transfer, instead: str, result: Result | SluicewayError | None) -> None:
        """Handle the answer to the empty produce that blocks a transfer's key: the old dead queue now never takes the items, or has them
        already."""
        taken = isinstance(result, SluicewayError) and result.code == "key_conflict"
        elsewhere = instead if isinstance(result, Produced) and not self.world.chance(self.world.weather.transfer_fails / 2) else None
        self.world.after(0, lambda: owner.transferred(effect, TransferEnd(done=taken, elsewhere=elsewhere)))

    def _carried(
        self,
        owner: Owner,
        effect: Transfer,
        target: SimQueue,
        batch: Batch,
        again: Callable[[], None],
        result: Result | SluicewayError | None,
    ) -> None:
        if isinstance(result, Produced):
            target.ledger.produced(batch, result)
        elif isinstance(result, SluicewayError) and result.code == "key_conflict":
            check(bool(effect.reason) and batch.answer is None, "the same transfer has other rows when it is repeated")
            again()
            return
        # The transfer may have arrived while its source hears nothing.
        done = isinstance(result, Produced) and not self.world.chance(self.world.weather.transfer_fails / 2)
        self.world.after(0, lambda: owner.transferred(effect, TransferEnd(done=done)))
