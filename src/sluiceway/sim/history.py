"""One history from its seed: traffic in bad weather, then the world heals, and everything that is left is drained."""

from __future__ import annotations

from functools import partial
from itertools import count

from sluiceway.core.lane import LaneState
from sluiceway.core.tickets import Result
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.requests import Lease, Produce
from sluiceway.sim.audit import audit
from sluiceway.sim.checks import check
from sluiceway.sim.clients import Clients
from sluiceway.sim.items import new_rows
from sluiceway.sim.queue import SimQueue
from sluiceway.sim.world import MAX_JUMP, EventLog, Weather, World

TRAFFIC: Millis = 25_000
HEALING: Millis = 90_000 + 2 * MAX_JUMP
"""Longer than the longest hang of an opening and a commit, any timeout, and the time by which a clock can have been set back."""


class History:
    """One or two queues, which may share a dead queue, each a real logical queue; and what befalls them."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.world = World(seed, log)
        self.random = self.world.random
        self.queues = self._new_queues()
        numbers = count()
        self.clients = [Clients(queue, numbers) for queue in self.queues]

    def _new_queues(self) -> list[SimQueue]:
        """A dead queue comes before those whose dead queue it is."""
        pick = self.random.choice
        queues: list[SimQueue] = []
        dead: SimQueue | None = None
        if self.random.random() < 0.6:
            dead = SimQueue(self.world, "dead", pick([1, 2]), pick([300, 2_000]), 0, None)
            queues.append(dead)
        for number in range(pick([1, 1, 2])):
            keeps_dead = dead is not None and (number == 0 or self.random.random() < 0.7)
            max_attempts = pick([0, 1, 2, 3]) if keeps_dead else 0
            queue = SimQueue(self.world, f"q{number}", pick([1, 2, 3, 4]), pick([300, 2_000]), max_attempts, dead if keeps_dead else None)
            queues.append(queue)
        for queue in queues:
            self.world.note(queue.record)
        return queues

    def live(self) -> None:
        """Raises BrokenPromiseError, or whatever the code under test raises."""
        self._begin()
        for _ in range(10):
            self.world.run(self.world.now + TRAFFIC // 10)
            audit(self.queues)
        self._heal()
        self._drain()
        self._end()

    # ---- bad weather ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        weather = self.world.weather
        requests = self.random.choice([30, 120])
        for clients in self.clients:
            is_dead = clients.queue.record.queue_name == "dead"
            clients.begin(requests // 3 if is_dead else requests, TRAFFIC, [1, 0, 6, 1] if is_dead else [4, 3, 6, 1])
        mischief = {
            self._kill: weather.kills,
            self._stop: weather.stops,
            self._cut_power: weather.power_cuts,
            self._fail_for_a_while: weather.outages,
            self._damage: weather.damages,
            self._set_clock: weather.jumps,
            self._make_a_mistake: weather.mistakes,
        }
        for deed, times in mischief.items():
            for _ in range(times):
                strike = partial(self.world.ambush.append, deed) if self.random.random() < 0.5 else deed
                self.world.after(self.random.randint(0, TRAFFIC), strike)

    def _some_queues(self) -> list[SimQueue]:
        """All, as when they share a process or a machine; or one."""
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
            # What goes to a dead queue that is stopped is tried again and again.
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
        audit(self.queues)

    def _check_open(self, with_stopped: bool) -> None:
        for queue in self.queues:
            assert queue.owner is not None
            for lane in queue.owner.machine.lanes.values():
                stopped = with_stopped and queue.hurt and lane.state is LaneState.STOPPED
                check(lane.state is LaneState.READY or stopped, f"{queue.incarnation}.{lane.number} did not recover: {lane.state.value}")

    def _probe(self) -> None:
        """A damaged partition takes nothing along: the queue's others serve."""
        for clients in self.clients:
            ready = _ready(clients.queue)
            while ready:
                refusals = self._ask(clients)
                # The probe itself may be what first meets the damage.
                if not refusals or _ready(clients.queue) == ready:
                    check(not refusals, f"a damaged partition keeps others from serving: {refusals}")
                    break
                ready = _ready(clients.queue)

    def _ask(self, clients: Clients) -> list[str]:
        """Produce and lease, and say what was refused."""
        refusals: list[str] = []

        def answered(answer: Result | SluicewayError | None) -> None:
            if isinstance(answer, SluicewayError):
                refusals.append(answer.code)

        items, rows = new_rows([next(clients.numbers)], [None])
        clients.ledger.add(None, items, rows).unknown = True
        clients.queue.submit(Produce(rows, 5_000), answered)
        clients.queue.submit(Lease("probe", 1, 5_000, 1_000, 1, f"probe {items[0].payload}"), answered)
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
        """Items that are anywhere, and requests that wait."""
        left = 0
        for queue in self.queues:
            assert queue.owner is not None
            stats = queue.owner.machine.stats()
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
    return sum(lane.state is LaneState.READY for lane in queue.owner.machine.lanes.values())


def run_history(seed: int, log: EventLog | None = None) -> History:
    """The history of that seed, from beginning to end."""
    history = History(seed, log)
    history.live()
    return history
