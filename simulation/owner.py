"""Owner process of one queue: feeds the logical queue and carries out its effects, as `local/queue_driver.py` does."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import NamedTuple, Protocol

from simulation.item_history import Cycle
from simulation.promises import InjectedMistakeError, check
from simulation.store import Fence, Store
from simulation.world import START, World
from sluiceway.core.partition.compaction import Compaction, open_rows
from sluiceway.core.partition.key_slots import home_of
from sluiceway.core.partition.partition import Partition
from sluiceway.core.queue.lease_scheduler import LEASE_PATIENCE
from sluiceway.core.queue.logical_queue import LogicalQueue
from sluiceway.core.queue.partition_executor import LONGEST_SAMPLE, ExecutorState, PartitionExecutor
from sluiceway.core.queue.tickets import (
    AdjustSlots,
    Commit,
    Compact,
    Effect,
    Forward,
    Grant,
    Open,
    Reply,
    Request,
    Result,
    TakeOut,
    TakeTokens,
    Ticket,
    Transfer,
    TransferEnd,
)
from sluiceway.kernel.clock import Clock, Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Extend, Lease, Produce, Settle
from sluiceway.model.sparse import compacted, decode_stored, encode_sparse
from sluiceway.ports.partition_store import Changes

COMPACTION_PAUSE: Millis = 1_000
COMPACTS_FOR: Millis = 40_000

Handler = Callable[[Result | SluicewayError | None], None]
"""A client's answer callback. Called with None if the client never hears the answer."""


class Waiting(NamedTuple):
    handler: Handler
    deadline: Millis
    """In true time."""


class Around(Protocol):
    """The served queue, as its owner sees it."""

    stores: list[Store]
    record: QueueRecord
    incarnation: str
    sides: list[list[int]]
    """Partitions of each logical queue: one logical queue for all partitions, or several side by side."""
    lease_keys: Counter[tuple[str, str]]
    """Number of requests with each (client, lease key)."""

    def carry_over(self, owner: Owner, effect: Transfer) -> None:
        """Produce a transfer's rows into its target, then call `transferred`."""
        ...

    def lease_answered(self, ticket: Ticket) -> None:
        """A lease request is answered with the leases that are durable for it."""
        ...

    def gone(self, owner: Owner) -> None:
        """The owner has answered every request and stopped."""
        ...


class WatchedQueue(LogicalQueue):
    """Checks each partition chosen for a keyed produce. `scatter` randomizes it, so that intents are as frequent as faults."""

    def __init__(self, incarnation: str, partitions: Iterable[int], lease_timeout: Millis, scatter: Random | None) -> None:
        super().__init__(incarnation, partitions, lease_timeout)
        self.tolerance = 0
        self._scatter = scatter

    def _target(self, home: PartitionExecutor, request: Produce) -> PartitionExecutor:
        target = super()._target(home, request)
        quick = [executor.has_or_will for executor in self.executors.values() if executor.takes_items and not executor.degraded]
        if target is home and quick and not home.degraded:
            more = max(self.tolerance, request.batch.num_rows // 2, min(quick) // 8)
            check(home.has_or_will <= min(quick) + more, "a produce with a key goes to its home, and another partition has far less")
        check(target is home or target.takes_items, "a produce with a key is to go to a partition that takes none")
        if self._scatter is None or home.degraded:
            return target
        return self._scatter.choice([executor for executor in self.executors.values() if executor.takes_items] or [home])


class Owner:
    """Owner of a queue until the process dies. Its clock is that of `adapters.system`: steady, however the wall clock is set."""

    def __init__(self, world: World, queue: Around, grant: int) -> None:
        self.world = world
        self.queue = queue
        self.grant = grant
        self.machines = [
            WatchedQueue(queue.incarnation, side, queue.record.lease_timeout, world.random if world.seed % 4 else None)
            for side in queue.sides
        ]
        self.machine_of = {number: machine for machine in self.machines for number in machine.executors}
        self.configure()
        self.waiting: dict[Ticket, Waiting] = {}
        self.answered: set[Ticket] = set()
        self.stopping = False
        self.dirty = True
        self.wake: Millis | None = None
        self.replies = 0
        self._clock = Clock(*self._readings())
        self._began = self._shown = self._clock.read(*self._readings())
        self._began_at = self._moment = world.now
        self._tasks = 0
        # By partition: openings since the last successful commit, and the time of the first of them.
        self._openings = dict.fromkeys(self.machine_of, (0, 0))
        self._longest = dict.fromkeys(self.machine_of, 0)
        """Longest commit of each partition in milliseconds, each counted up to LONGEST_SAMPLE."""
        self._gone: set[str] = set()
        """Clients that went away and hold nothing."""
        self._returned: set[tuple[int, int]] = set()
        """Leases that were given back."""
        self.haunts = False
        """Whether another owner has taken over without this one's knowledge."""
        self._compacting = Random(world.seed)
        """Separate generator, so that histories without compaction keep their random sequence."""
        self._compacts = world.seed % 8 == 7
        if self._compacts:
            world.after(self._compacting.randint(0, COMPACTION_PAUSE), self._compact)

    @property
    def executors(self) -> dict[int, PartitionExecutor]:
        return {number: machine.executors[number] for number, machine in self.machine_of.items()}

    def now(self) -> Millis:
        # Constant within a moment: its events and its turn have one time.
        if self._moment != self.world.now:
            self._moment = self.world.now
            self._shown = self._clock.read(*self._readings())
            true, own = self._moment - self._began_at, self._shown - self._began
            check(abs(own - true) <= true // 8 + 1, "an owner's time does not pass as the true time does")
        return self._shown

    def _readings(self) -> tuple[int, int]:
        """Read the wall clock and the steady clock, in nanoseconds."""
        return (self.world.now + self.world.wall_ahead) * 1_000_000, self.world.now * 1_000_000

    def configure(self) -> None:
        """Apply the queue's current settings."""
        self.record = self.queue.record
        for machine in self.machines:
            # In this world a queue's name is its incarnation.
            machine.configure(self.record, self.record.dead_queue)
        self.dirty = True

    # ---- requests ---------------------------------------------------------------------------------------------

    def submit(self, request: Request, handler: Handler, partition: int | None = None) -> None:
        """Submit to the logical queue with `partition`; without one, to the logical queue that the request belongs to."""
        machine = self._machine_for(request) if partition is None else self.machine_of[partition]
        ticket = Ticket(request, self.now() + request.request_timeout)
        pauses = isinstance(request, Produce) and bool(request.batch.num_rows) and "produce" in self.record.paused
        try:
            machine.submit(ticket)
        except SluicewayError as error:
            check(pauses and error.code == "queue_paused", f"a request is refused: {error.code}")
            handler(error)
            return
        check(not pauses, "a paused queue takes a produce")
        self.waiting[ticket] = Waiting(handler, self.world.now + request.request_timeout)
        self.dirty = True
        self.world.note(self.queue.incarnation, ticket, request)
        if self.world.chance(self.world.weather.cancels):
            self.world.after(self.world.random.randint(0, 3 * self.world.weather.slow), partial(self.cancel, machine, ticket))

    def _machine_for(self, request: Request) -> LogicalQueue:
        """Route a request like a router that knows each logical queue's partitions."""
        if len(self.machines) == 1:
            return self.machines[0]
        if isinstance(request, Produce) and request.key is not None:
            return self.machine_of[home_of(self.record, request.key)]
        if isinstance(request, Lease):
            return self.machines[zlib.crc32(request.client_id.encode()) % len(self.machines)]
        if isinstance(request, Settle):
            return self.machine_of[next(iter(request.selections))]
        if isinstance(request, Extend):
            return self.machine_of[request.leases[0][0] if request.leases else next(iter(request.offsets))]
        if isinstance(request, TakeOut):
            return self.machine_of[request.partition]
        return self.world.random.choice(self.machines)

    def cancel(self, machine: LogicalQueue, ticket: Ticket) -> None:
        if ticket in self.waiting and not ticket.done:  # else the answer is already on its way
            handler = self.waiting.pop(ticket).handler
            self.world.note(self.queue.incarnation, ticket, "is cancelled")
            self.answered.add(ticket)
            machine.cancel(ticket)
            if isinstance(ticket.request, Lease) and ticket.request.lease_key is None:
                self._gone.add(ticket.request.client_id)
            self.dirty = True
            handler(None)

    def die(self) -> None:
        """Drop all waiting requests unanswered. Commits in flight go on."""
        waiting, self.waiting = self.waiting, {}
        self.answered.update(waiting)
        for each in waiting.values():
            each.handler(None)

    def begin_to_stop(self) -> None:
        self.stopping = True
        for machine in self.machines:
            machine.close(final=False)
        self.dirty = True

    # ---- cycles ------------------------------------------------------------------------------------------------

    def cycle(self) -> None:
        self.dirty = False
        for machine in self.machines:
            for effect in machine.cycle(self.now()):
                self._carry_out(effect)
        times = [] if self.stopping else [at for machine in self.machines if (at := machine.wake_at()) is not None]
        self.wake = self.world.now + max(0, min(times) - self.now()) if times else None
        self._check_overdue()
        for machine in self.machines:
            check(not machine.index.overlooked(), "a partition has changed, and no cycle will look at it")
            self._check_idle(machine)
            self._check_hung(machine)
        self._check_given_back()
        if self.stopping and not self._tasks:
            self._end()

    def _end(self) -> None:
        for machine in self.machines:
            machine.close(final=True)
            for effect in machine.cycle(self.now()):
                if isinstance(effect, Reply):
                    self._reply(effect)
        check(not self.waiting, "the owner stopped and left a request without an answer")
        self.dirty = False
        self.queue.gone(self)

    def _check_overdue(self) -> None:
        for ticket, (_, deadline) in self.waiting.items():
            if deadline < self.world.now and not self.stopping:
                # While an owner's clock catches up after a step, it may lose an eighth of the time.
                patience = LEASE_PATIENCE if isinstance(ticket.request, Lease) else 0
                slack = (ticket.request.request_timeout + patience) // 7 + 1
                check(self.world.now <= deadline + patience + slack, f"{type(ticket.request).__name__.lower()} {ticket.number} is overdue")

    def _check_idle(self, machine: LogicalQueue) -> None:
        """Check that no consumer waits while items are ready."""
        if "lease" in self.record.paused:
            return
        circuit = machine.circuit
        if circuit is not None and circuit.room == 0:
            check(circuit.wake_at is not None, "a circuit breaker is open, and nothing will close it")
            return
        waiters = machine.lease_scheduler.waiters.values()
        if any(executor.state is ExecutorState.READY and executor.partition.log.ready_count for executor in machine.executors.values()):
            waits = any(not ticket.keyed for ticket in waiters)
            check(not waits, "items are ready, and a consumer waits")
            # A closed partition that was open before cannot hold leases of a lease key that is new.
            known = all(
                executor.takes_work or executor.knows_keys or executor.state is ExecutorState.STOPPED
                for executor in machine.executors.values()
            )
            new = known and any(self.queue.lease_keys[name] == 1 for ticket in waiters if (name := ticket.key_name))
            check(not new, "items are ready, and a consumer with a new lease key waits")

    def _check_hung(self, machine: LogicalQueue) -> None:
        """Check that no unkeyed produce waits behind a hung commit while half of the partitions are fast."""
        open_executors = [executor for executor in machine.executors.values() if executor.takes_work]
        if len(open_executors) < 2:
            return
        taking = {
            executor.number: self.now() - executor.committing_since if executor.state is ExecutorState.COMMITTING else 0
            for executor in open_executors
        }
        typical = sorted(max(taking[executor.number], self._longest[executor.number]) for executor in open_executors)[
            (len(open_executors) - 1) // 2
        ]
        for executor in open_executors:
            if taking[executor.number] > max(200, 5 * typical):
                stuck = any(isinstance(work, Produce) and work.key is None and not ticket.done for ticket, work in executor.waiting)
                check(not stuck, "a produce waits behind a commit that hangs, though it could be done elsewhere")

    def _check_given_back(self) -> None:
        """Check that a client that went away before it was told holds no lease."""
        if not self._gone and not self._returned:
            return
        for executor in self.executors.values():
            if executor.state is ExecutorState.READY:
                for lease in executor.partition.leases.values():
                    kept = lease.client_id in self._gone or (executor.number, lease.number) in self._returned
                    check(not kept or lease.number in executor.given_back, "a client that went away before it was told holds a lease")

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._reply(effect)
        elif isinstance(effect, Commit):
            self._tasks += 1
            self._commit(effect)
        elif isinstance(effect, Open):
            self._begin_to_open(effect)
        elif isinstance(effect, Transfer):
            durable = effect.number in self.queue.stores[effect.partition].look().transfers.by_number
            check(durable or self.haunts, "a transfer began before it was durable")
            if not self.stopping:
                self._tasks += 1
                self.world.note(self.queue.incarnation, "transfer", effect.partition, effect.number, "begins")
                self.world.after(self.world.latency(), lambda: self.queue.carry_over(self, effect))
        elif isinstance(effect, Forward):
            raise AssertionError("an intent names a partition that the logical queue has not")
        elif isinstance(effect, TakeTokens | AdjustSlots):
            raise AssertionError("no queue of this world has a limit")
        elif isinstance(effect.error, InjectedMistakeError):
            self.world.note(self.queue.incarnation, "partition", effect.partition, "made a mistake")
            # What the partition was taking back then is left to its deadline.
            self._gone.clear()
            self._returned.clear()
        else:
            raise effect.error

    def _ended(self) -> None:
        """Note that an operation in flight has ended."""
        self._tasks -= 1
        self.dirty = True

    # ---- opening ----------------------------------------------------------------------------------------------

    def _begin_to_open(self, effect: Open) -> None:
        count, since = self._openings[effect.partition]
        since = since or self.world.now
        # Pauses between openings double from 50 ms to 1 s.
        check(count <= 10 + (self.world.now - since) // 1_000, "a partition that takes no commit is opened without a pause")
        self._openings[effect.partition] = (count + 1, since)
        if not self.stopping:
            self._tasks += 1
            # Partitions load at different speeds, so that some are open while others are not.
            delay = self.world.random.randint(0, 20 * self.world.weather.slow)
            self.world.after(delay + self.world.latency(), partial(self._open, effect))

    def _open(self, effect: Open) -> None:
        store, fence = self.queue.stores[effect.partition], (self.grant, effect.opening)
        world = self.world
        fails = world.chance(world.weather.open_fails)
        # A failed open may still have raised the fence.
        if store.fence < fence and (not fails or world.chance(0.5)):
            store.open(fence)
        loaded: Partition | SluicewayError
        final = False
        if store.fence > fence:
            loaded, final = SluicewayError("unavailable", "a higher fence has opened the partition"), True
        elif store.damaged:
            loaded, final = SluicewayError("partition_damaged", "a record fails its checksum"), True
        else:
            loaded = SluicewayError("unavailable", "the store cannot be reached") if fails else store.load()
        world.note(self.queue.incarnation, "open", effect.partition, fence, "fails" if fails or final else f"txn {store.txn}")
        # The fence is up, so nothing else can have written in between.
        world.after(world.latency(), lambda: self._opened(effect, loaded, final))

    def _opened(self, effect: Open, loaded: Partition | SluicewayError, final: bool) -> None:
        if isinstance(loaded, Partition):
            loaded.log.min_sparse_bytes = 1
            loaded.log.find_sparse()
            # All but the newest leases of each cycle are packed.
            loaded.leases.unpacked_leases, loaded.leases.packed_at_once = 0, 2
        self.machine_of[effect.partition].opened(effect.partition, effect.opening, loaded, self.now(), final)
        self._ended()

    # ---- commits ----------------------------------------------------------------------------------------------

    def _commit(self, effect: Commit) -> None:
        world, store = self.world, self.queue.stores[effect.partition]
        luck, weather = world.random.random(), world.weather
        kind = ""
        circuit = self.machine_of[effect.partition].circuit
        cycle = Cycle(self.now(), self.record, circuit is not None and circuit.state == "open")
        flight = Flight(world, store, effect.changes, (self.grant, effect.opening), cycle)
        lands, syncs, answers = world.latency(), world.latency(), world.latency()
        if store.slow_until > world.now:
            lands += world.random.randint(0, store.slow)
        if store.damaged or luck < weather.refused or store.out_until > world.now:
            kind = "refused"
            world.after(answers, partial(self._committed, effect, flight, Outcome.REFUSED))
        elif luck < weather.refused + weather.unknown:
            kind = world.random.choice(["landed", "lost", "late"])
            if kind == "landed":
                world.after(lands, flight.write)
                world.after(lands + syncs, flight.sync)
                world.after(lands + syncs + answers, partial(self._committed, effect, flight, Outcome.UNKNOWN))
            else:
                world.after(answers, partial(self._committed, effect, flight, Outcome.UNKNOWN))
                if kind == "late":
                    world.after(answers + lands, flight.write)
                    world.after(answers + lands + syncs, flight.sync)
        else:
            world.after(lands, flight.write)
            world.after(lands + syncs, flight.sync)
            world.after(lands + syncs + answers, partial(self._committed, effect, flight, Outcome.DONE))
        world.note(self.queue.incarnation, "commit", effect.partition, flight.fence, "txn", effect.changes.txn, kind)
        if kind and self._compacts:
            # Rows that this cycle settles are open again if its commit does not land.
            executor = self.executors[effect.partition]
            executor.compactions()
            self._begin_to_compact(executor)

    def _committed(self, effect: Commit, flight: Flight, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            outcome = flight.outcome()
        if outcome is Outcome.DONE:
            self._openings[effect.partition] = (0, 0)
        self.world.note(self.queue.incarnation, "commit", effect.partition, flight.fence, "txn", effect.changes.txn, "is", outcome.value)
        machine = self.machine_of[effect.partition]
        executor = machine.executors[effect.partition]
        if effect.opening == executor.opening:
            took = min(LONGEST_SAMPLE, self.now() - executor.committing_since)
            self._longest[effect.partition] = max(took, self._longest[effect.partition])
        # The outcome must not depend on whether the store says that it answered at once.
        machine.committed(effect.partition, effect.opening, outcome, self.now(), at_once=bool(effect.changes.txn & 8))
        self._ended()

    # ---- compaction -------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Find sparse blobs of any size and compact each after a while, as long as there is traffic."""
        if self not in self.world.actors or self.stopping or self.world.now > START + COMPACTS_FOR:
            return
        for executor in self.executors.values():
            if executor.takes_work:
                blobs = executor.partition.log.blobs
                for blob, rows in open_rows(executor.partition, blobs).items():
                    check(len(rows) == blobs[blob].open, "the open rows of a blob are not those that are counted")
                self._begin_to_compact(executor)
        self.world.after(self._compacting.randint(50, COMPACTION_PAUSE), self._compact)

    def _begin_to_compact(self, executor: PartitionExecutor) -> None:
        for wanted in executor.compactions():
            self.world.after(self._compacting.randint(0, 500), partial(self._rewrite, executor.number, executor.opening, wanted))

    def _rewrite(self, number: int, opening: int, wanted: Compaction) -> None:
        store = self.queue.stores[number]
        if self not in self.world.actors or self.stopping or wanted.blob not in store.blobs or store.is_damaged_blob(wanted.blob):
            return
        kept = compacted(decode_stored(store.blobs[wanted.blob], wanted.columns), wanted.rows)
        request = Compact(number, opening, wanted.blob, len(kept.rows), int(kept.batch.nbytes), encode_sparse(kept), 1_000)
        self.submit(request, lambda _: None, number)

    # ---- transfers and damage ---------------------------------------------------------------------------------

    def transferred(self, effect: Transfer, end: TransferEnd) -> None:
        what = "has nowhere to go" if end.nowhere else "is done" if end.done else f"goes to {end.elsewhere}" if end.elsewhere else "failed"
        self.world.note(self.queue.incarnation, "transfer", effect.partition, effect.number, what)
        self.machine_of[effect.partition].transferred(effect.partition, effect.number, end, self.now())
        self._ended()

    def make_a_mistake(self, partition: int, step: str) -> None:
        """Make the partition's next `step` raise an injected error, unless the world has healed by then."""
        machine = self.executors[partition].partition

        def fail(*arguments: object) -> object:
            delattr(machine, step)
            if self.world.weather.mistakes:
                raise InjectedMistakeError(step)
            return getattr(machine, step)(*arguments)

        setattr(machine, step, fail)

    def stop_partition(self, partition: int, problem: str) -> None:
        self.world.note(self.queue.incarnation, "partition", partition, "is stopped:", problem)
        self.machine_of[partition].stop_executor(partition, problem, self.now())
        self.dirty = True

    # ---- replies ----------------------------------------------------------------------------------------------

    def _reply(self, effect: Reply) -> None:
        ticket, result = effect.ticket, effect.result
        if self.haunts and ticket not in self.waiting:
            return
        check(ticket not in self.answered, "a request is answered after it was answered or cancelled")
        self.answered.add(ticket)
        self.replies += 1
        self.world.note(self.queue.incarnation, ticket, "->", result.code if isinstance(result, SluicewayError) else result)
        handler = self.waiting.pop(ticket).handler
        if isinstance(result, list):
            if not self.haunts:
                self.queue.lease_answered(ticket)
            if not ticket.keyed and self.world.chance(self.world.weather.cancels):
                self._give_back(result)
                handler(None)
                return
            for grant in result:
                if self.queue.stores[grant.info.partition].is_damaged(grant.slices):
                    self.stop_partition(grant.info.partition, "a blob fails its checksum")
                    result = SluicewayError("partition_damaged", "a blob fails its checksum")
        handler(None if self.world.chance(self.world.weather.lost_replies) else result)

    def _give_back(self, grants: list[Grant]) -> None:
        """Give the leases back: the client hung up just before it was told."""
        for grant in grants:
            partition, number = grant.info[:2]
            machine = self.machine_of[partition]
            if machine.executors[partition].state is not ExecutorState.STOPPED:
                self._returned.add((partition, number))
            machine.give_back(partition, number)
        self.dirty = True


class Flight:
    """Commit in flight. A power loss takes what is not yet durable."""

    def __init__(self, world: World, store: Store, changes: Changes, fence: Fence, cycle: Cycle) -> None:
        self.cycle = cycle
        self.world = world
        self.store = store
        self.changes = changes
        self.fence = fence
        self._cuts = store.cuts
        self._written = False
        self._shut_out = False

    def write(self) -> None:
        if self.store.cuts == self._cuts:
            self._written = self.store.write(self.changes, self.fence, self.cycle)
            self._shut_out = not self._written
            self.world.spring()

    def sync(self) -> None:
        self.store.sync(self.changes)

    def outcome(self) -> Outcome:
        """Return the outcome that an answering store would report now."""
        if self._shut_out:
            return Outcome.REFUSED
        return Outcome.DONE if self._written and self.store.cuts == self._cuts else Outcome.UNKNOWN
