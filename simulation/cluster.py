"""A whole cluster in virtual time: real instances over a simulated network, meta store and storage.

Invariants, under every fault:

S1  No two instances own a partition at once, and no two use the same token: writes follow the order of the fences.
S2  Acknowledged items are durable, once, at the acknowledged id. A refused request has no effect.
S3  No item is lost, duplicated, served after its end, or leased to two consumers at once: each step has its cause.
S4  A lease's answer matches what is stored, and goes to the client that asked.
S5  A settle succeeds only if every item that it names is settled or was before. Every reason for an ignored item is true.
S6  An instance that answers a peer from its own share calls no further peer.
S7  No log record reports a bug.
L1  After the world heals every partition is owned and open, and every instance knows it.
L2  All remaining items can be leased and completed through any single instance.
L3  A consumer that waits at one instance soon gets an item produced at another.
L4  An instance that is asked to stop does so in time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from simulation.cluster_clients import Clients, UnheardError
from simulation.cluster_instance import Instance
from simulation.cluster_ledger import QueueLedger
from simulation.cluster_store import SimPartitionStore, Vault
from simulation.cluster_weather import Weather, roads_of, weather_of
from simulation.group_checks import Tokens, check_overlap
from simulation.known_items import Item, new_rows
from simulation.logs import listening
from simulation.loop import Loop, Process, simulated
from simulation.meta import SharedMeta, SimMetaStore
from simulation.network import Network
from simulation.network_link import DIRECTIONS, Direction, Link, NotSentError, Roads
from simulation.planting import Bug, planted
from simulation.promises import check
from simulation.store import Store
from simulation.world import EventLog
from sluiceway.cluster.ownership import item_of
from sluiceway.contract.queue_settings import CircuitBreaker
from sluiceway.core.group.group_records import Strategy
from sluiceway.core.queue import poll_line, remote_items
from sluiceway.core.queue.logical_queue import LogicalQueue
from sluiceway.core.queue.partition_executor import PartitionExecutor
from sluiceway.instance.service import Membership, Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.backends import BackendSettings, MemoryBackend
from sluiceway.model.queue import decode_queue
from sluiceway.model.requests import DONE, Lease, QueuePatch, QueueSpec
from sluiceway.ports.meta_store import ConflictError, MetaUnknownError
from sluiceway.ports.partition_store import PartitionRef, StoreUnavailableError

HEALING: Millis = 75_000
"""Healing timeout in milliseconds: exceeds a hung opening, a member timeout, and their consequences."""
LINGERING: Millis = 2_000
"""How long a fault of the traffic phase may last beyond it, in milliseconds."""
SOON: Millis = 1_500
"""Deadline for a consumer at one instance to get an item produced at another, in milliseconds."""
GOING: Millis = 30_000
"""Deadline for an instance to hand over and stop, in milliseconds."""
DRAINING: Millis = 90_000
MAX_JUMP: Millis = 30_000
LARGE = [
    Bug("few", "One poll is told of an item at first.", poll_line, "FEW", lambda _few: 1),
    Bug("polls", "Polls last for seconds.", remote_items, "MAX_POLLS", lambda _most: 1),
]
OUTDATED_EVERY = 8
"""One in this many histories has an instance with outdated routing (`ClusterWorld.outdated`)."""


class ClusterWorld:
    """One history, determined by its seed. `live` raises BrokenPromiseError when an invariant is violated."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.log = log
        self.loop = Loop(self.random)
        self.weather = weather_of(self.random)
        self.store_roads, self.meta_roads = roads_of(self.random), roads_of(self.random)
        if self.weather.late_commits:
            self.store_roads = Roads(slow=10, late=0.25, latest=8_000)
        self.client_roads = roads_of(self.random)
        self.network = Network(self.loop, roads_of(self.random))
        self.shared = SharedMeta()
        self.vault = Vault(self._new_store)
        self.vault.straggles = lambda: self.weather.stragglers > 0 and self.random.random() < self.weather.stragglers
        self.items: dict[str, Item] = {}
        self.ledgers: dict[str, QueueLedger] = {}
        self.clients: list[Clients] = []
        self.instances: list[Instance] = []
        self.tokens = Tokens()
        self.names = count(1)
        self.numbers = count()
        self.spanned = 0
        """Number of successful settles of items in several partitions."""
        self.ended = False
        self.usable = frozenset({"available", "draining", "preparing"})
        self.draining = DRAINING
        """Partition states that count as healthy."""
        self.strategy: Strategy = self.random.choice(["rounds", "rounds", "claims"])
        self.traffic: Millis = self.random.choice([6_000, 15_000])
        self.pace: Millis = self.random.choice([60, 300, 1_000])
        self.wanted = self.random.choice([1, 2, 3, 3, 4])
        self.outdates = seed % OUTDATED_EVERY == OUTDATED_EVERY - 1
        self.outdated: Instance | None = None
        """The instance that learns late where partitions are, if the history has one. Most clients call it."""
        self.moved: asyncio.Future[None] | None = None
        """Done when an instance loses a partition. Waiting consumers then settle at once, before the outdated instance knows."""
        if self.outdates:
            self.wanted = max(self.wanted, 3)
            self.weather.joins += 2
            self.weather.stops += 2

    def live(self) -> None:
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(simulated(self.loop))
            stack.enter_context(listening(self.note, self.loop.fail))
            stack.enter_context(self.vault.noting_cycles())
            if self.seed % 4:
                stack.enter_context(planted(_scattered(self.random)))
            for rule in self._rules():
                stack.enter_context(planted(rule))
            stack.callback(self.loop.close)
            self.loop.after_step = self._look
            self.loop.run_until_complete(self._history())

    def _rules(self) -> list[Bug]:
        """Limits that are other ones in this history."""
        return LARGE if self.seed % 3 == 2 else []

    def note(self, *parts: object) -> None:
        if self.log is not None:
            self.log.add(self.loop.now, [self.loop.process.name, *parts])

    # ---- the script -------------------------------------------------------------------------------------------

    async def _history(self) -> None:
        for _ in range(self.wanted):
            self.loop.after(self.random.randrange(300), self._start)
        await asyncio.sleep(0.5)
        await self._create_queues()
        until = self.loop.now + self.traffic
        self._plan_troubles()
        if self.outdates:
            self._outdate()
        traffic = [work for each in self.clients for work in self._traffic_of(each, until)]
        if self.random.random() < 0.5:
            traffic.append(self._create_late(until))
        await asyncio.gather(*traffic)
        await self._heal()
        await self._drain()
        await self._check_demand()
        await self._end()

    async def _create_queues(self) -> None:
        dead_queue = self.random.choice([None, "dead", "dead"])
        if dead_queue is not None:
            await self._create(QueueSpec("dead", self.random.choice([1, 2])))
        await self._create(
            QueueSpec(
                "q0",
                self.random.choice([1, 3, 6]),
                lease_timeout=self.random.choice([2_000, 8_000]),
                max_attempts=self.random.choice([0, 3]),
                dead_queue=dead_queue,
                # Without a draw: histories without a breaker keep their random sequence.
                circuit_breaker=CircuitBreaker(0.5, 3) if self.seed % 4 == 1 else None,
            )
        )

    def _traffic_of(self, clients: Clients, until: Millis) -> list[Coroutine[Any, Any, None]]:
        producers = 0 if clients.ledger.queue == "dead" else self.random.randint(1, 4)
        consumers = self._consumers()
        return [*(clients.produce_until(until) for _ in range(producers)), *(clients.consume_until(until) for _ in range(consumers))]

    def _consumers(self) -> int:
        """Draw a queue's number of consumers."""
        return self.random.randint(1, 5)

    async def _create(self, spec: QueueSpec) -> None:
        self.ledgers[spec.queue_name] = ledger = self._ledger(spec)
        clients = self._clients(ledger)
        while True:
            try:
                await clients.ask(lambda service: service.create_queue(spec), 5_000)
                break
            except SluicewayError as error:
                if error.code == "queue_exists":
                    break
                check(error.code in ("unavailable", "outcome_unknown"), f"creating a queue ended with {error.code}: {error.detail}")
            except (UnheardError, NotSentError):
                pass
            await asyncio.sleep(0.1)
        clients.created = True
        self.clients.append(clients)
        self.note("there is a queue", spec.queue_name)

    def _ledger(self, spec: QueueSpec) -> QueueLedger:
        return QueueLedger(spec.queue_name, self.items)

    def _clients(self, ledger: QueueLedger) -> Clients:
        return Clients(self, ledger)

    async def _create_late(self, until: Millis) -> None:
        """Create a queue in the middle of the traffic."""
        await asyncio.sleep(self.random.random() * self.traffic / 2000)
        await self._create(QueueSpec("late", self.random.choice([1, 4]), lease_timeout=2_000))
        await asyncio.gather(*self._traffic_of(self.clients[-1], until))

    def _new_store(self, ref: PartitionRef) -> Store:
        records = (decode_queue(entry.value) for entry in self.shared.view.prefix(QUEUE).values())
        name = next((record.queue_name for record in records if record.incarnation == ref.incarnation), None)
        check(name is not None, f"a partition is opened of a queue that is not recorded: {ref}")
        return self.ledgers[name or ""].new_store(*ref)

    # ---- instances --------------------------------------------------------------------------------------------

    def some_instance(self) -> Instance | None:
        if self.outdated is not None and self.outdated.serves and self.random.random() < 0.6:
            return self.outdated
        there = [each for each in self.instances if not each.process.dead]
        return self.random.choice(there) if there else None

    def latest(self) -> Millis:
        """Return the time by the clock that is furthest ahead, in milliseconds."""
        return max(process.wall(self.loop.seconds) for process in self.loop.processes)

    def _start(self) -> None:
        name = f"n{next(self.names)}"
        rate = self.random.choice([0.9, 1.0, 1.1, self.random.uniform(0.9, 1.1)])
        process = self.loop.add(Process(name, rate, self.random.randrange(10_000, 10_000_000)))
        meta = Link(self.loop, process, self.meta_roads)
        store = Link(self.loop, process, self.store_roads)
        membership = Membership(
            lambda: SimMetaStore(self.shared, meta), lambda *_: self.network.transport(process), f"http://{name}", name, self.strategy
        )
        service = Service(
            self.directory,
            self._backends(),
            open_store=lambda backend, *_: SimPartitionStore(self.vault, name, store, backend),
            membership=membership,
        )
        instance = Instance(process, service, meta, store)
        self.instances.append(instance)
        self.note(name, "starts")
        self.loop.begin(process, self._serve(instance))

    def _backends(self) -> Mapping[str, BackendSettings]:
        """Build the backend settings of an instance that starts."""
        return {"default": MemoryBackend(write_timeout=self.random.choice([1_000, 10_000]))}

    async def _serve(self, instance: Instance) -> None:
        try:
            await instance.service.start()
        except (StoreUnavailableError, MetaUnknownError, ConflictError, SluicewayError) as error:
            self.note("does not start:", error)
            self.loop.after(0, partial(self._kill, instance, 500))
            return
        self.network.listen(f"http://{instance.name}", instance.process, instance.service.answer)
        instance.serves = True
        self.note("serves")

    def _kill(self, instance: Instance, pause: Millis) -> None:
        """Kill the instance without notice; another one starts after `pause` milliseconds, if the cluster needs it."""
        if instance.process.dead:
            return
        self.note(instance.name, "is gone")
        self.loop.kill(instance.process)
        instance.serves, instance.owned = False, {}
        self.network.down(instance.process)
        for link in instance.callers:
            link.break_off()
        if self.ended:
            return
        if not instance.going or self.random.random() < 0.7 or not self._serving():
            self.loop.after(pause, self._start)

    async def _go(self, instance: Instance) -> None:
        await instance.service.hand_over()
        instance.serves = False
        await instance.service.stop()
        self.note("has stopped")
        self.loop.after(0, partial(self._kill, instance, 100))

    async def pause(self, seconds: float) -> bool:
        """Sleep. True: a partition has moved, and the sleep ended early."""
        if not self.outdates:
            await asyncio.sleep(seconds)
            return False
        if self.moved is None or self.moved.done():
            self.moved = self.loop.create_future()
        done, _ = await asyncio.wait([self.moved], timeout=seconds)
        return bool(done)

    # ---- fault injection --------------------------------------------------------------------------------------

    def _plan_troubles(self) -> None:
        weather = self.weather
        script: tuple[tuple[int, Callable[[], None]], ...] = (
            (weather.kills, lambda: self._each(1, lambda each: self._kill(each, self.random.choice([100, 1_000, 5_000])))),
            (weather.stops, lambda: self._each(1, self._stop)),
            (weather.freezes, self._freeze),
            (weather.meta_cuts, lambda: self._cut("meta")),
            (weather.store_cuts, lambda: self._cut("store")),
            (weather.peer_cuts, self._cut_peers),
            (weather.jumps, lambda: self._each(1, self._set_clock)),
            (weather.joins, self._start),
            (weather.changes, self._change_strategy),
            (weather.updates, self._update),
            (weather.losses, self._lose_storage),
        )
        for times, act in script:
            for _ in range(times):
                self.loop.after(self.random.randrange(self.traffic), act)

    def _each(self, most: int, act: Callable[[Instance], None]) -> None:
        there = [each for each in self.instances if not each.process.dead]
        for each in self.random.sample(there, min(len(there), self.random.randint(1, most))):
            act(each)

    def _span(self) -> Millis:
        """Draw a fault's duration in milliseconds, near one of the timeouts that it may exceed."""
        span = self.random.choice([100, 700, 1_500, 2_000, 2_600, 3_500, 6_000]) * self.random.uniform(0.9, 1.1)
        return max(0, min(int(span), self.traffic + LINGERING - self.loop.now))

    def _stop(self, instance: Instance) -> None:
        if instance.serves and not instance.going:
            instance.going = True
            self.note(instance.name, "is to go")
            self.loop.begin(instance.process, self._go(instance))

    def _freeze(self) -> None:
        span = self._span()

        def freeze(instance: Instance) -> None:
            self.note(instance.name, "freezes for", span)
            instance.process.frozen = True
            self.loop.after(span, lambda: setattr(instance.process, "frozen", False))

        self._each(2, freeze)

    def _cut(self, what: str) -> None:
        span = self._span()
        ways: tuple[Direction, ...] = self.random.choice([DIRECTIONS, ("there",), ("back",)])

        def cut(instance: Instance) -> None:
            link: Link = getattr(instance, what)
            self.note(instance.name, "is cut off from", what, "for", span, *ways)
            link.cut.update(ways)
            self.loop.after(span, lambda: link.free(*ways))

        self._each(2, cut)

    def _cut_peers(self) -> None:
        there = [each for each in self.instances if not each.process.dead]
        if len(there) < 2:
            return
        span = self._span()
        one, other = self.random.sample(there, 2)
        self.note("nothing passes from", one.name, "to", other.name, "for", span)
        self.network.cut(one.process, other.process)
        self.loop.after(span, partial(self.network.uncut, one.process, other.process))

    def _outdate(self) -> None:
        """Pick a new outdated instance, every 0.5 to 2.5 seconds."""
        if not self.outdates:
            return
        serving = [each for each in self._serving() if each.serves]
        if serving:
            self.outdated = self.random.choice(serving)
            self.shared.without_hints = self.outdated.meta
            self.note(self.outdated.name, "hears late")
        self.loop.after(self.random.randrange(500, 2_500), self._outdate)

    def _set_clock(self, instance: Instance) -> None:
        instance.process.wall_ahead = self.random.randint(-MAX_JUMP, MAX_JUMP)
        self.note(instance.name, "has its clock set to", instance.process.wall_ahead, "ms ahead")

    def _change_strategy(self) -> None:
        """Restart all instances with the other strategy, one after another."""
        self.strategy = "claims" if self.strategy == "rounds" else "rounds"
        self.note("the strategy is to be", self.strategy)
        for delay, instance in enumerate([each for each in self.instances if not each.process.dead]):
            self.loop.after(delay * 500, partial(self._kill, instance, 200))

    def _update(self) -> None:
        patch = QueuePatch({"lease_timeout": self.random.choice([2_000, 8_000]), "max_attempts": self.random.choice([0, 3])})
        clients = self.random.choice(self.clients)
        if clients.ledger.queue != "dead":
            self.loop.begin(self.loop.outside, clients.update(patch))

    def _lose_storage(self) -> None:
        """Make a partition's storage empty for a while, as when a disk is not mounted. Afterwards restart its owners."""
        there = [ref for ref, kept in self.vault.partitions.items() if kept.store.txn]
        if not there:
            return
        # Mostly longer than it takes the group to give up the owner.
        ref, span = self.random.choice(there), self.random.randrange(3_000, 12_000)
        self.note("the storage of", *ref, "is away for", span)
        self.vault.away.add(ref)

        def back() -> None:
            self.vault.away.discard(ref)
            self._restart_stopped()

        self.loop.after(span, back)
        if self.random.random() < 0.7:
            # Otherwise no instance may have a reason to open it meanwhile.
            for instance in list(self.instances):
                if item_of(*ref) in instance.owns():
                    self._kill(instance, 100)

    def _restart_stopped(self) -> None:
        """Act as the operator: restart the affected instances once the right storage is back."""
        for instance in self._serving():
            if instance.serves and any("is not there" in each for each in instance.process.context.run(instance.service.problems)):
                self._kill(instance, 100)

    # ---- healing and draining ---------------------------------------------------------------------------------

    async def _heal(self) -> None:
        self.note("the world heals")
        self.weather = Weather()
        self.outdates, self.outdated, self.shared.without_hints = False, None, None
        for roads in (self.store_roads, self.meta_roads, self.client_roads, self.network.roads):
            roads.calm()
        self.network.free()
        for instance in self.instances:
            instance.meta.free(*DIRECTIONS)
            instance.store.free(*DIRECTIONS)
        self.vault.away.clear()
        await asyncio.sleep((LINGERING + 6_000) / 1000)
        # An answer from before the healing may have arrived since.
        self._restart_stopped()
        if not self._serving():
            self._start()
        deadline = self.loop.now + HEALING
        while problem := await self._problem():
            check(self.loop.now < deadline, f"not healed: {problem}")
            if "is not there" in problem:
                # An opening begun while the storage was away may have ended since the last restart.
                self._restart_stopped()
            await asyncio.sleep(0.5)

    def _serving(self) -> list[Instance]:
        return [each for each in self.instances if not each.process.dead and not each.going]

    async def _problem(self) -> str | None:
        """Return any remaining problem of any instance, None when all are healthy."""
        recorded = [decode_queue(entry.value) for entry in self.shared.view.prefix(QUEUE).values()]
        if not self._serving():
            return "no instance serves"
        for instance in self._serving():
            if not instance.serves:
                return f"{instance.name} has not started"
            if instance.service.queues() != recorded:
                return f"{instance.name} knows other queues than are recorded"
            for problem in instance.process.context.run(instance.service.problems):
                return f"{instance.name}: {problem}"
            for clients in self.clients:
                try:
                    stats = await clients.ask(lambda service, name=clients.ledger.queue: service.count(name), 5_000, instance)  # type: ignore[misc]
                except (SluicewayError, UnheardError, NotSentError) as error:
                    return f"{instance.name} cannot count {clients.ledger.queue}: {error!r}"
                closed = [each.partition for each in stats.partitions if each.state not in self.usable]
                if closed:
                    return f"partitions {closed} of {clients.ledger.queue} as seen by {instance.name}"
        return None

    async def _drain(self) -> None:
        """Drain every queue through one single instance."""
        instance = self.random.choice(self._serving())
        self.note("all is drained by way of", instance.name)
        deadline = self.loop.now + self.draining
        while any(clients.ledger.left() for clients in self.clients):
            left = {clients.ledger.queue: clients.ledger.left() for clients in self.clients}
            check(self.loop.now < deadline, f"{left} cannot be drained by way of {instance.name}")
            await asyncio.gather(*(clients.drain(instance) for clients in self.clients))
        for clients in self.clients:
            clients.ledger.check_drained()

    async def _check_demand(self) -> None:
        """Check each pair of instances: a consumer waits at one, and an item is produced at the other."""
        for waits in self._serving():
            for makes in self._serving():
                clients = self.random.choice(self.clients)
                client_id = f"d{next(clients.asked)}"
                clients.ledger.asks.lease_timeouts[client_id] = 30_000
                waiting = asyncio.create_task(clients.lease(Lease(client_id, 1, 10_000, 30_000), waits))
                await asyncio.sleep(self.random.random())
                began = self.loop.now
                batch = clients.ledger.add(None, *new_rows(clients.ledger.queue, [next(self.numbers)], [None]))
                check(await clients.produce(batch, makes), f"nothing can be produced at {makes.name}")
                holds = await waiting
                took = self.loop.now - began
                check(bool(holds) and took < SOON, f"what {makes.name} got, {waits.name} had after {took} ms")
                check(await clients.settle(holds, DONE, 10, waits), "a healthy cluster does not settle")

    async def _end(self) -> None:
        """Stop the instances one after another. The last one has no successor."""
        self.ended = True
        for instance in self._serving():
            instance.going = True
            going = self.loop.begin(instance.process, self._go(instance))
            done, _ = await asyncio.wait([going], timeout=GOING / 1000)
            check(bool(done), f"{instance.name} was asked to go, and has not gone after {GOING} ms")
            going.result()

    # ---- invariant checks -------------------------------------------------------------------------------------

    def _look(self, process: Process) -> None:
        """After each callback of an instance: check that it owns its items alone, and that its tokens rise."""
        for instance in self.instances:
            if instance.process is process and not process.dead:
                owns = instance.owns()
                if owns != instance.owned:
                    self.note(instance.name, "owns", *owns)
                    if self.moved is not None and not self.moved.done() and instance.owned.keys() - owns.keys():
                        self.moved.set_result(None)
                    instance.owned = owns
                    check_overlap(((each.name, each.owns()) for each in self.instances), self.loop.now)
                    self.tokens.serve(instance.name, owns)


def _scattered(random: Random) -> Bug:
    """Send keyed produces to random partitions, so that forwarded ones (intents) are as frequent as faults."""

    def target(self: Any, home: PartitionExecutor, _: object) -> PartitionExecutor:
        able: list[PartitionExecutor] = [executor for executor in self.executors.values() if executor.takes_items]
        return random.choice(able or [home])

    return Bug("scattered", "", LogicalQueue, "_target", lambda _: target)


def run_cluster(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    ClusterWorld(seed, log).live()
