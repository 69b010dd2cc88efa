"""One history of a queue: traffic under faults, then the world heals and all remaining items are drained."""

from __future__ import annotations

from functools import partial
from itertools import count
from random import Random

from simulation.clients import Clients
from simulation.durable_audit import audit
from simulation.known_items import new_rows
from simulation.promises import check
from simulation.simulated_queue import SimQueue
from simulation.world import MAX_JUMP, START, EventLog, Weather, World
from sluiceway.contract.queue_settings import CircuitBreaker, RetryBackoff
from sluiceway.core.queue.partition_executor import ExecutorState
from sluiceway.core.queue.tickets import Result
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import Lease, Produce

TRAFFIC: Millis = 25_000
LONGEST_HANG: Millis = 15_000
HEALING: Millis = 90_000 + LONGEST_HANG + 2 * MAX_JUMP
"""Exceeds the longest hang of an opening plus a commit, every timeout, and the farthest that a clock can be set back, in milliseconds."""


class History:
    """One or two queues, which may share a dead queue, each with real logical queues; and the faults injected into them."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.world = World(seed, log)
        self.random = self.world.random
        # A generator of its own: histories without a breaker keep their random sequence.
        self.breakers = Random(seed) if seed % 4 == 1 else None
        self.queues = self._new_queues()
        if self.breakers is not None:
            for queue in self.queues:
                queue.configure(circuit_breaker=self._some_breaker())
        self.numbers = count()
        self.clients = [Clients(queue, self.numbers) for queue in self.queues]

    def _new_queues(self) -> list[SimQueue]:
        """Create the queues, each dead queue before the queues that name it."""
        pick = self.random.choice
        queues: dict[str, SimQueue] = {}
        if self.random.random() < 0.7:
            self._new_queue("dead", pick([1, 2]), None, queues)
            if self.random.random() < 0.6:
                self._new_queue("dead 2", 1, None, queues)
        for number in range(pick([1, 1, 2])):
            keeps_dead = "dead" in queues and (number == 0 or self.random.random() < 0.7)
            self._new_queue(f"q{number}", pick([1, 2, 3, 4]), "dead" if keeps_dead else None, queues)
        return list(queues.values())

    def _new_queue(self, name: str, partitions: int, dead_queue: str | None, queues: dict[str, SimQueue]) -> None:
        records = tuple(PartitionRecord(number) for number in range(partitions))
        record = QueueRecord(name, name, START, START, records, lease_timeout=300, dead_queue=dead_queue)
        settings = self._some_settings() if dead_queue is not None or self.random.random() < 0.3 else {}
        queue = SimQueue(self.world, record, queues)
        queue.configure(lease_timeout=self.random.choice([300, 2_000]), **settings)

    def _some_breaker(self) -> CircuitBreaker | None:
        assert self.breakers is not None
        return self.breakers.choice([None, CircuitBreaker(0.2, 2), CircuitBreaker(0.5, 1), CircuitBreaker(0.5, 5)])

    def _some_settings(self) -> dict[str, object]:
        pick = self.random.choice
        breaker = {} if self.breakers is None else {"circuit_breaker": self._some_breaker()}
        return breaker | {
            "max_attempts": pick([0, 1, 2, 3]),
            "expire_timeout": pick([0, 0, 1_500, 8_000]),
            "retry_backoff": pick([None, RetryBackoff(50, 200), RetryBackoff(700, 3_000)]),
        }

    def live(self) -> None:
        """Run the history. Raises BrokenPromiseError, or any exception of the code under test."""
        self._begin()
        for _ in range(10):
            self.world.run(self.world.now + TRAFFIC // 10)
            audit(self.queues)
        self._heal()
        self._drain()
        self._end()

    # ---- fault injection --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        weather = self.world.weather
        requests = self.random.choice([30, 120])
        for clients in self.clients:
            is_dead = clients.queue.incarnation == "dead"
            clients.begin(requests // 3 if is_dead else requests, TRAFFIC, [5, 0, 20, 5, 1] if is_dead else [40, 30, 60, 10, 3])
        mischief = {
            self._kill: weather.kills,
            self._stop: weather.stops,
            self._cut_power: weather.power_cuts,
            self._fail_for_a_while: weather.outages,
            self._damage: weather.damages,
            self._set_clock: weather.jumps,
            self._make_a_mistake: weather.mistakes,
            self._slow_down: weather.hangs,
            self._haunt: weather.ghosts,
            self._pause: weather.pauses,
            self._update: weather.updates,
            self._redrive: weather.redrives,
        }
        for deed, times in mischief.items():
            for _ in range(times):
                strike = partial(self.world.ambush.append, deed) if self.random.random() < 0.5 else deed
                self.world.after(self.random.randint(0, TRAFFIC), strike)

    def _some_queues(self) -> list[SimQueue]:
        """Choose the queues that a fault hits: all, as if they shared a machine, or one."""
        return self.queues if self.random.random() < 0.5 else [self.random.choice(self.queues)]

    def _kill(self) -> None:
        pause = self.random.choice([0, 100, 3_000])
        for queue in self._some_queues():
            queue.kill(pause)

    def _stop(self) -> None:
        for queue in self._some_queues():
            queue.stop()

    def _cut_power(self) -> None:
        queues, with_owner = self._some_queues(), self.random.random() < 0.5
        for queue in queues:
            self.world.note(queue.incarnation, "loses power")
            for store in queue.stores:
                store.lose_power()
            if with_owner:
                queue.kill(1_000)

    def _fail_for_a_while(self) -> None:
        queue = self.random.choice(self.queues)
        partition = self.random.randrange(len(queue.stores))
        self.world.note(queue.incarnation, "partition", partition, "takes no commit")
        queue.stores[partition].out_until = self.world.now + self.random.randint(2_000, 20_000)

    def _damage(self) -> None:
        queue = self.random.choice(self.queues)
        partition = self.random.randrange(len(queue.stores))
        store = queue.stores[partition]
        queue.hurt = True
        if store.blobs and self.random.random() < 0.7:
            store.damaged_blobs.add(self.random.choice(sorted(store.blobs)))
        else:
            store.damaged = True
        self.world.note(queue.incarnation, "partition", partition, "is damaged, blobs", sorted(store.damaged_blobs))

    def _set_clock(self) -> None:
        self.world.set_wall_clock(self.random.randint(-MAX_JUMP, MAX_JUMP))

    def _slow_down(self) -> None:
        """Slow one partition's store for a while."""
        queue = self.random.choice(self.queues)
        store = self.random.choice(queue.stores)
        store.slow, store.slow_until = self.random.choice([500, 3_000, LONGEST_HANG]), self.world.now + self.random.randint(1_000, 10_000)
        self.world.note(queue.incarnation, "partition", queue.stores.index(store), "takes up to", store.slow, "ms longer")

    def _haunt(self) -> None:
        self.random.choice(self.queues).haunt(self.random.choice([0, 100, 1_000]), self.numbers)

    def _pause(self) -> None:
        queue = self.random.choice(self.queues)
        queue.configure(paused=self.random.choice([("produce",), ("lease",), ("produce", "lease")]))
        self.world.after(self.random.randint(500, 5_000), lambda: queue.configure(paused=()))

    def _update(self) -> None:
        queue = self.random.choice(self.queues)
        settings = self._some_settings()
        if queue.record.dead_queue is not None:
            dead = [each for each in self.queues if each.incarnation.startswith("dead")]
            settings["dead_queue"] = self.random.choice(dead).incarnation
            former = next(each for each in dead if each.incarnation == queue.record.dead_queue)
            if len(dead) > 1 and self.random.random() < 0.7:
                # The dead queue accepts nothing for a while, and the queue gets another one meanwhile.
                former.configure(paused=("produce",))
                self.world.after(self.random.randint(2_000, 6_000), lambda: former.configure(paused=()))
                other = next(each.incarnation for each in dead if each is not former)
                self.world.after(self.random.randint(0, 2_000), lambda: queue.configure(**{**settings, "dead_queue": other}))
                return
        queue.configure(lease_timeout=self.random.choice([300, 2_000]), **settings)

    def _redrive(self) -> None:
        """Redrive from the dead queue, if there is one; sometimes to a queue that no longer exists."""
        dead, *others = self.clients
        if dead.queue.incarnation == "dead":
            dead.redrive([*(clients.queue.incarnation for clients in others), "gone"])

    def _make_a_mistake(self) -> None:
        queue = self.random.choice(self.queues)
        partition, step = self.random.randrange(len(queue.stores)), self.random.choice(["take_changes", "tick"])
        if queue.owner is not None:
            queue.mistaken = True
            queue.owner.make_a_mistake(partition, step)

    # ---- liveness ---------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self.world.weather = Weather()
        self.world.ambush.clear()
        self.world.note("the world heals")
        self.world.run(self.world.now + HEALING)
        for queue in self.queues:
            check(queue.owner is not None, "nobody serves the queue")
            # A transfer to a stopped dead queue is retried forever.
            check(queue.hurt or not queue.owner or not queue.owner.waiting, "a request was never answered")
        self._check_open(with_stopped=True)
        audit(self.queues)
        if any(queue.hurt for queue in self.queues):
            self._probe()
            for queue in self.queues:
                for store in queue.stores:
                    store.repair()
                queue.kill(0)
            self.world.run(self.world.now + 10_000)
        self._check_open(with_stopped=False)
        self._recover()
        audit(self.queues)

    def _recover(self) -> None:
        """Check that a partition that was slow is used again after a few produces."""
        for _ in range(20):
            slow = [
                (queue, executor)
                for queue in self.queues
                if queue.owner
                for executor in queue.owner.executors.values()
                if executor.degraded
            ]
            if not slow:
                return
            for queue, executor in slow:
                items, rows = new_rows(queue.incarnation, [next(self.numbers)], [None])
                queue.ledger.add(None, items, rows).unknown = True
                queue.submit(Produce(rows, 1_000), lambda _: None, executor.number)
            self.world.run(self.world.now + 1_500)
        check(False, "a partition that was slow is avoided for ever")

    def _check_open(self, with_stopped: bool) -> None:
        for queue in self.queues:
            assert queue.owner is not None
            for executor in queue.owner.executors.values():
                stopped = with_stopped and queue.hurt and executor.state is ExecutorState.STOPPED
                check(
                    executor.state is ExecutorState.READY or stopped,
                    f"{queue.incarnation}.{executor.number} did not recover: {executor.state.value}",
                )

    def _probe(self) -> None:
        """Check that a damaged partition is isolated: the queue's other partitions serve."""
        for clients in self.clients:
            ready = _ready(clients.queue)
            while ready:
                refusals = self._ask(clients)
                # The probe itself may be the first to hit the damage.
                if not refusals or _ready(clients.queue) == ready:
                    check(not refusals, f"a damaged partition keeps others from serving: {refusals}")
                    break
                ready = _ready(clients.queue)

    def _ask(self, clients: Clients) -> list[str]:
        """Produce and lease on an undamaged partition; return the codes of refused requests."""
        refusals: list[str] = []

        def answered(answer: Result | SluicewayError | None) -> None:
            if isinstance(answer, SluicewayError):
                refusals.append(answer.code)

        owner = clients.queue.owner
        assert owner is not None
        sound = next(executor.number for executor in owner.executors.values() if executor.state is ExecutorState.READY)
        items, rows = new_rows(clients.queue.incarnation, [next(self.numbers)], [None])
        clients.ledger.add(None, items, rows).unknown = True
        clients.queue.submit(Produce(rows, 5_000), answered, sound)
        clients.queue.submit(Lease("probe", 1, 5_000, 1_000, 1, f"probe {items[0].payload}"), answered, sound)
        self.world.run(self.world.now + 10_000)
        return refusals

    def _drain(self) -> None:
        for _ in range(200):
            if not self._left():
                break
            for clients in self.clients:
                clients.drain()
            self.world.run(self.world.now + 10_000)
        check(not self._left(), "something is stuck")
        audit(self.queues)

    def _left(self) -> int:
        """Count remaining items and waiting requests."""
        left = 0
        for queue in self.queues:
            assert queue.owner is not None
            for stats in (machine.stats() for machine in queue.owner.machines):
                left += stats.produce_waiting + stats.lease_waiting + stats.complete_waiting + stats.in_flight
                left += sum(each.total + each.transferring for each in stats.partitions)
        return left

    def _end(self) -> None:
        for queue in self.queues:
            queue.stop()
        before = [queue.owner for queue in self.queues]
        self.world.run(self.world.now + 10_000)
        check(all(queue.owner is not owner for queue, owner in zip(self.queues, before, strict=True)), "an owner does not stop")


def _ready(queue: SimQueue) -> int:
    assert queue.owner is not None
    return sum(executor.state is ExecutorState.READY for executor in queue.owner.executors.values())


def run_history(seed: int, log: EventLog | None = None) -> History:
    """Run the whole history of the seed and return it."""
    history = History(seed, log)
    history.live()
    return history
