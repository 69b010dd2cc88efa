"""A simulated cluster whose queues are rebalanced all the time, over two backends. The invariants of `cluster.py` hold, and:

S8  Records of a rebalance state facts, and S9 the coordinator alone records steps (`cluster_records.py`).
S10 A repeated keyed produce gets its first answer, wherever the key's home has gone, also after the rebalance.
S11 Moved items keep their attempts, their enqueue, due and expiry times, and their origins.
S12 In a queue with one partition, first leases follow each sequential producer's order, and no item of a new partition is leased before
    all of the old one is finished.
S13 A partition is removed only when empty, and its data is dropped only after its removal.
L5  After the world heals each rebalance ends as planned or as before; nothing is half-way or left over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations

from simulation.cluster import ClusterWorld
from simulation.cluster_clients import Clients, UnheardError
from simulation.cluster_instance import Instance
from simulation.cluster_keys import KeyClients
from simulation.cluster_ledger import QueueLedger
from simulation.cluster_records import RecordWatch
from simulation.cluster_store import Vault
from simulation.cluster_weather import Weather
from simulation.item_history import Cycle
from simulation.network_link import NotSentError
from simulation.planting import Bug
from simulation.promises import check
from simulation.scene import Scene
from simulation.store import Store
from simulation.world import EventLog
from sluiceway.cluster.ownership import item_of
from sluiceway.cluster.rebalance_records import OPEN
from sluiceway.contract.rebalances import DrainMode
from sluiceway.core.partition import admission
from sluiceway.core.rebalance import steps
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.access import Actor
from sluiceway.model.backends import BackendSettings, MemoryBackend
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.model.rebalance import Rebalance, decode_rebalance
from sluiceway.model.requests import QueueSpec
from sluiceway.ports.partition_store import PartitionRef

SOMEBODY = Actor("somebody")
ENDING: Millis = 90_000
"""Deadline for each rebalance to end after the world has healed and all items are leased, in milliseconds."""
BURST = 16
"""Number of keyed produces sent to an instance while it misses the records."""
AFFINITIES = [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.3)]
DECLINED = ("rebalance_open", "nothing_to_rebalance", "invalid_request", "plan_changed", "not_cancellable", "rebalance_not_found")
MAYBE = ("unavailable", "partition_damaged", "outcome_unknown", "version_conflict", "queue_not_found")


SMALL_MESSAGES = [
    Bug("few keys", "The keys of some slots need several messages.", module, "MAX_KEYS_BYTES", lambda _most: 600)
    for module in (admission, steps)
]


class _Removed:
    """Follower of a partition opened after its removal: it must take no items."""

    def __init__(self, ref: PartitionRef) -> None:
        self.ref = ref

    def follow(self, _old: Scene, new: Scene, _cycle: Cycle) -> None:
        check(not new.alive and not new.leaving, f"{self.ref} takes items, and was removed: {[*new.alive]}")


@dataclass
class Doings:
    """Administrative actions during traffic: counts, and probabilities of faults at steps."""

    rebalances: int
    cancels: int
    pauses: int
    affinities: int
    strikes: float
    """Probability that a fault strikes an instance just when a step of a rebalance is recorded."""
    deafness: float
    """Probability that the fault is not to hear of the step."""


class RebalanceWorld(ClusterWorld):
    """One history with rebalances, determined by its seed."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        super().__init__(seed, log)
        pick = self.random.choice
        self.doings = Doings(
            pick([4, 8, 16]), pick([0, 1, 4]), pick([0, 0, 3]), pick([1, 2, 4]), pick([0.0, 0.3, 0.7]), pick([0.2, 0.5, 1.0])
        )
        if self.random.random() < 0.5:
            # Faults at steps only, so that histories reach more steps.
            self.weather = Weather(kills=pick([0, 1]), joins=pick([0, 1]), jumps=pick([0, 2]))
            for roads in (self.store_roads, self.meta_roads, self.client_roads, self.network.roads):
                roads.calm()
        self.traffic, self.pace, self.wanted = pick([8_000, 14_000]), pick([300, 600, 1_200]), pick([1, 2, 3, 4])
        self.network.echo = pick([0.0, 0.0, 0.1, 0.5])
        self.affinities = pick(AFFINITIES)
        self.settings: dict[str, dict[str, BackendSettings]] = {}
        """Backend settings by instance name. Each instance reads its own live."""
        self.vault = Vault(self._new_store, self._dropped)
        self.watch = RecordWatch(self.vault.partitions, self._step)
        self.shared.followers.append(self.watch.follow)
        self.scheduled = pick([0.1, 0.4, 0.9])
        """Share of produced items that are due later."""
        self.resting = False

    def _rules(self) -> list[Bug]:
        return super()._rules() + (SMALL_MESSAGES if self.seed % 5 == 4 else [])

    # ---- the script -------------------------------------------------------------------------------------------

    async def _create_queues(self) -> None:
        pick = self.random.choice
        dead_queue = pick([None, "dead", "dead"])
        if dead_queue is not None:
            await self._create(QueueSpec("dead", pick([1, 2])))
        partitions, lease_timeout, max_attempts, expire_timeout = pick([1, 3, 6]), pick([2_000, 8_000]), pick([0, 3]), pick([0, 0, 12_000])
        await self._create(
            QueueSpec(
                "q0",
                partitions,
                lease_timeout=lease_timeout,
                max_attempts=max_attempts,
                dead_queue=dead_queue,
                expire_timeout=expire_timeout,
            )
        )
        if self.random.random() < 0.6:
            await self._create(QueueSpec("line", 1, lease_timeout=pick([2_000, 8_000])))
            self.ledgers["line"].in_order = {}

    def _clients(self, ledger: QueueLedger) -> Clients:
        return KeyClients(self, ledger)

    def _consumers(self) -> int:
        # Often few, so that items are left to be moved.
        return self.random.choice([0, 1, 1, 2, 4])

    async def _drain(self) -> None:
        self.resting = True
        await super()._drain()
        await self._end_rebalances()
        # Keyed produces that are still accepted are accepted now, and drained as well.
        for clients in self.clients:
            assert isinstance(clients, KeyClients)
            await clients.repeat_all()
        await super()._drain()

    # ---- backends and stores ----------------------------------------------------------------------------------

    def _backends(self) -> Mapping[str, BackendSettings]:
        timeout = self.random.choice([1_000, 10_000])
        settings = _backends(self.affinities, timeout)
        self.settings[f"n{len(self.instances) + 1}"] = settings
        return settings

    def _new_store(self, ref: PartitionRef) -> Store:
        record = next((each for each in self.records() if each.incarnation == ref.incarnation), None)
        if record is None or record.partition(ref.partition) is not None:
            return super()._new_store(ref)
        # By an opening in flight at the removal, or by an instance that has not heard of it.
        self.note("a partition is opened that was removed:", *ref)
        self.watch.tally["opened when removed"] += 1
        store = Store()
        store.trail = _Removed(ref)
        return store

    def _dropped(self, ref: PartitionRef) -> None:
        self.note("the data of", *ref, "goes")
        record = next(each for each in self.records() if each.incarnation == ref.incarnation)
        check(record.partition(ref.partition) is None, f"the data of a partition goes that {record.queue_name} has: {ref}")
        ledger = self.ledgers[record.queue_name]
        scene = self.vault.partitions[ref].store.scene()
        ledger.stores.pop(ref.partition, None)
        check(not scene.alive and not scene.leaving, f"the data of {ref} goes with {[*scene.alive, *scene.leaving]}")

    def records(self) -> list[QueueRecord]:
        return [decode_queue(entry.value) for entry in self.shared.view.prefix(QUEUE).values()]

    def open_rebalances(self) -> list[Rebalance]:
        return [decode_rebalance(entry.value) for entry in self.shared.view.prefix(OPEN).values()]

    # ---- fault injection --------------------------------------------------------------------------------------

    def _plan_troubles(self) -> None:
        super()._plan_troubles()
        doings = self.doings
        script = (
            (doings.rebalances, self._rebalance),
            (doings.cancels, self._cancel),
            (doings.pauses, self._pause),
            (doings.affinities, self._change_affinities),
        )
        for times, act in script:
            for _ in range(times):
                self.loop.after(self.random.randrange(self.traffic), act)

    def _change_affinities(self) -> None:
        """Change the configuration of all instances, one after another."""
        self.affinities = self.random.choice(AFFINITIES)
        self.note("affinities are to be", *self.affinities)
        for instance in self.instances:
            self.loop.after(self.random.choice([0, 500]), partial(self._reload, instance, self.affinities))

    def _reload(self, instance: Instance, affinities: tuple[float, float]) -> None:
        settings = self.settings[instance.name]
        settings.update(_backends(affinities, settings["default"].write_timeout))

    def _rebalance(self) -> None:
        clients = self.random.choice(self.clients)
        name = clients.ledger.queue
        requested = 1 if name == "line" else self.random.choice([None, 1, 2, 3, 4, 6])
        drain: DrainMode = "natural" if name == "line" else self.random.choice(["natural", "copy", "copy"])
        rate = self.random.choice([None, 20, 100]) if drain == "copy" else None
        if name != "line" and self.random.random() < 0.15:
            self.loop.begin(self.loop.outside, self._ask_for_many(clients, drain, rate))
            return
        if name == "line":
            # Otherwise the partition mostly stays in its backend.
            self._change_affinities()
        self.loop.begin(self.loop.outside, self._ask_for(clients, requested, drain, rate))

    async def _ask_for(self, clients: Clients, requested: int | None, drain: DrainMode, rate: int | None) -> None:
        name = clients.ledger.queue
        try:
            found = await clients.ask(lambda service: service.rebalance(name, requested, drain, rate, None, SOMEBODY), 5_000)
        except SluicewayError as error:
            self.note("no rebalance of", name, error.code)
            check(error.code in DECLINED + MAYBE, f"a rebalance ended with {error.code}: {error.detail}")
        except (UnheardError, NotSentError):
            pass
        else:
            plan = found.plan
            self.note(
                "rebalance", found.id, "of", name, "makes", plan.creates, "drains", plan.drains, drain, "in order" if plan.in_order else ""
            )

    async def _ask_for_many(self, clients: Clients, drain: DrainMode, rate: int | None) -> None:
        requested = self.random.choice([None, 2, 4])
        try:
            await clients.ask(lambda service: service.rebalance_many("[qd]*", requested, drain, rate, SOMEBODY), 5_000)
        except SluicewayError as error:
            check(error.code in DECLINED + MAYBE, f"a batch of rebalances ended with {error.code}: {error.detail}")
        except (UnheardError, NotSentError):
            pass

    def _cancel(self) -> None:
        """Cancel an open rebalance, whatever its step."""
        those = self.open_rebalances()
        if those:
            id = self.random.choice(those).id
            self.watch.cancels.add(id)
            self.note("somebody cancels", id)
            self.loop.begin(self.loop.outside, self._ask_to_cancel(id))

    async def _ask_to_cancel(self, id: str) -> None:
        try:
            await self.random.choice(self.clients).ask(lambda service: service.cancel_rebalance(id, SOMEBODY), 5_000)
        except SluicewayError as error:
            self.note("not cancelled:", error.code)
            check(error.code in DECLINED + MAYBE, f"a cancellation ended with {error.code}: {error.detail}")
        except (UnheardError, NotSentError):
            pass

    def _pause(self) -> None:
        """Pause a random partition for a while."""
        record = self.random.choice(self.records())
        number = self.random.choice(record.partitions).partition
        self.note("partition", number, "of", record.queue_name, "is to be paused")
        self.loop.begin(self.loop.outside, self._ask_to_pause(record.queue_name, number, True))
        self.loop.after(self._span(), lambda: self._resume(record.queue_name, number))

    def _resume(self, queue_name: str, number: int) -> None:
        self.loop.begin(self.loop.outside, self._ask_to_pause(queue_name, number, False))

    async def _ask_to_pause(self, queue_name: str, number: int, paused: bool) -> None:
        try:
            await self.random.choice(self.clients).ask(lambda service: service.set_partition(queue_name, number, paused, SOMEBODY), 5_000)
        except SluicewayError as error:
            check(error.code in DECLINED + MAYBE, f"a pause ended with {error.code}: {error.detail}")
        except (UnheardError, NotSentError):
            pass

    def _step(self, rebalance: Rebalance, coordinator: str) -> None:
        """React to a recorded step: strike the instance that has recorded it, or another one."""
        self.note("rebalance", rebalance.id, "of", rebalance.queue_name, "is", rebalance.state, "at", rebalance.step)
        if self.resting or self.random.random() >= self.doings.strikes:
            return
        there = [each for each in self.instances if not each.process.dead]
        others, struck = ([each for each in there if (each.name == coordinator) is those] for those in (False, True))
        if rebalance.step == "drain" and rebalance.state == "running" and self.random.random() < 0.5:
            # Just when items are to be moved. The coordinator still reaches all instances.
            for one, other in permutations(others, 2):
                self.network.cut(one.process, other.process)
                self.loop.after(1_500, partial(self.network.uncut, one.process, other.process))
            self.loop.after(self.random.choice([20, 100, 500]), self._cancel)
            return
        if others and self.random.random() < self.doings.deafness:
            # An instance that missed the step goes on as before, which matters when homes change.
            if rebalance.step in ("shut", "keys") or self.random.random() < 0.2:
                self._deafen(self.random.choice(_losers(rebalance, others) or others), struck, rebalance.queue_name)
            return
        struck = struck if self.random.random() < 0.6 else there
        if not struck:
            return
        instance = self.random.choice(struck)
        # Long enough that another coordinator may have taken over.
        span = self.random.choice([700, 2_600, 5_000, 6_500])
        deed = self.random.random()
        if deed < 0.3:
            self.loop.after(self.random.choice([0, 5, 50]), partial(self._kill, instance, self.random.choice([100, 2_000])))
        elif deed < 0.5:
            self.note(instance.name, "freezes for", span, "at a step")
            instance.process.frozen = True
            self.loop.after(span, lambda: setattr(instance.process, "frozen", False))
        elif deed < 0.8:
            link = instance.meta if deed < 0.7 else instance.store
            self.note(instance.name, "is cut off at a step for", span)
            link.cut.update(("there", "back"))
            self.loop.after(span, lambda: link.free("there", "back"))
        else:
            self.loop.after(self.random.choice([0, 20, 200]), self._cancel)

    def _deafen(self, instance: Instance, coordinators: list[Instance], queue_name: str) -> None:
        """Keep the instance from hearing what was recorded, for almost the length of its lease, while clients call it all the more."""
        span = self.random.randrange(1_000, 2_800)
        self.note(instance.name, "is deaf for", span)
        instance.meta.cut.update(("there", "back"))
        self.network.deaf.add(instance.name)
        for each in coordinators if self.random.random() < 0.5 else ():
            self.network.cut(each.process, instance.process)
            self.loop.after(self.random.randrange(span), partial(self.network.uncut, each.process, instance.process))
        clients = next((each for each in self.clients if each.ledger.queue == queue_name), None)
        if isinstance(clients, KeyClients):
            for _ in range(BURST):
                self.loop.after(self.random.randrange(span), lambda: self.loop.begin(self.loop.outside, clients.produce_keyed(instance)))

        def hears() -> None:
            instance.meta.free("there", "back")
            self.network.deaf.discard(instance.name)

        self.loop.after(span, hears)

    # ---- final checks -----------------------------------------------------------------------------------------

    async def _problem(self) -> str | None:
        for record in self.records():
            for each in record.partitions:
                if each.state == "paused":
                    self._resume(record.queue_name, each.partition)
        return await super()._problem()

    async def _end_rebalances(self) -> None:
        """Check that all rebalances end and leave nothing behind."""
        deadline = self.loop.now + ENDING
        while problem := await self._left():
            check(self.loop.now < deadline, f"rebalances do not end: {problem}")
            await asyncio.sleep(0.5)

    async def _left(self) -> str | None:
        for each in self.open_rebalances():
            return f"{each.id} of {each.queue_name} is {each.state} at {each.step}: {each.problem}"
        problem = self.watch.left_over(self.shared.view) or self.watch.half_way(self.shared.view)
        if problem is None:
            self.usable = frozenset({"available"})
            problem = await self._problem()
        return problem


def _losers(rebalance: Rebalance, instances: list[Instance]) -> list[Instance]:
    """Return the instances with partitions that stay and lose keys; for an ordered queue, those whose partition is replaced."""
    pairs = zip(rebalance.homes, rebalance.slots, strict=True)
    losers = {home for home, final in pairs if home != final} - {*rebalance.plan.drains}
    losers = {*rebalance.plan.drains} if rebalance.plan.in_order else losers
    return [each for each in instances if any(item_of(rebalance.incarnation, number) in each.owned for number in losers)]


def _backends(affinities: tuple[float, float], write_timeout: Millis) -> dict[str, BackendSettings]:
    first, other = affinities
    return {
        "default": MemoryBackend(partition_affinity=first, write_timeout=write_timeout),
        "other": MemoryBackend(partition_affinity=other, write_timeout=write_timeout),
    }


def run_rebalances(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    RebalanceWorld(seed, log).live()
