"""A small deterministic world around one LogicalQueue: stores that fail, consumers that vanish, virtual time, one seed.

`python tests/queue_world.py SEED` replays a seed with its trace; `python tests/queue_world.py FIRST COUNT` runs many.
"""

from __future__ import annotations

import heapq
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from queue_ledger import Batch, Held, Ledger, fate_of
from sluiceway.core.lane import LaneState
from sluiceway.core.logical_queue import FLIGHT_PATIENCE, LogicalQueue
from sluiceway.core.tickets import Commit, Effect, Open, Reply, Request, Result, Ticket, Transfer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Extend, Extended, Lease, Produce, Produced, ProduceKey, Selection, Settle, Settled

START: Millis = 1_000_000_000_000
TRAFFIC = 25_000
"""Milliseconds of traffic, before the world heals and drains."""

Handler = Callable[[Result | SluicewayError | None], None]
"""What a client does with its answer; None if it was cancelled."""


@dataclass
class Weather:
    """How often things go wrong. All zero: a good day."""

    refused: float = 0
    unknown: float = 0
    hang: float = 0
    open_fails: float = 0
    transfer_fails: float = 0
    cancels: float = 0
    kills: int = 0
    slow: Millis = 10


class World:
    def __init__(self, seed: int, make: Callable[[str, range, Millis], LogicalQueue] = LogicalQueue) -> None:
        self.random = Random(seed)
        self.now = START
        self.events: list[tuple[Millis, int, Callable[[], None]]] = []
        self.count = 0
        self.trace: deque[str] = deque(maxlen=4_000)
        pick = self.random.choice
        self.weather = Weather(
            refused=pick([0, 0, 0.02, 0.2]),
            unknown=pick([0, 0.02, 0.1, 0.3]),
            hang=pick([0, 0, 0.01, 0.03]),
            open_fails=pick([0, 0, 0.3, 0.7]),
            transfer_fails=pick([0, 0.2, 0.5]),
            cancels=pick([0, 0, 0.05, 0.2]),
            slow=pick([1, 10, 10, 200]),
            kills=pick([0, 0, 1, 3]),
        )
        keeps_dead = self.random.random() < 0.6
        max_attempts = pick([0, 1, 2, 3]) if keeps_dead else 0
        self.partitions = pick([1, 2, 3, 4])
        self.ledger = Ledger(self.partitions, max_attempts, keeps_dead)
        lease_timeout = pick([300, 2_000])
        self.make: Callable[[], LogicalQueue] = partial(make, "q", range(self.partitions), lease_timeout)
        self.queue = self.make()
        self.grant = 1
        for _ in range(self.weather.kills):
            self.after(self.random.randint(0, TRAFFIC), self.kill)
        self.waiting: dict[Ticket, Handler] = {}
        self.answered: set[Ticket] = set()
        self.turns_now = 0
        self.replies = 0
        self.note(f"{self.weather} partitions={self.partitions} max_attempts={max_attempts} keeps_dead={keeps_dead}")

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now - START:>7} {text}")

    # ---- time -------------------------------------------------------------------------------------------------

    def after(self, delay: Millis, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, action))

    def run(self, until: Millis) -> None:
        """Let time pass: what is due happens, and each moment in which anything happened ends with a turn."""
        self.turn()
        while True:
            wake = self.queue.wake_at()
            moments = ([self.events[0][0]] if self.events else []) + ([] if wake is None else [wake])
            if not moments or min(moments) > until:
                self.now = max(self.now, until)
                return
            self.pass_to(max(self.now, min(moments)))
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
            self.turn()

    def pass_to(self, moment: Millis) -> None:
        self.turns_now = self.turns_now + 1 if moment == self.now else 0
        assert self.turns_now < 1_000, "the queue turns without end"
        self.now = moment

    def turn(self) -> None:
        for effect in self.queue.turn(self.now):
            self.carry_out(effect)
        self.check_overdue()

    def check_overdue(self) -> None:
        for ticket in self.waiting:
            patience = FLIGHT_PATIENCE if isinstance(ticket.request, Lease) else 0
            assert self.now <= ticket.deadline + patience, f"{name_of(ticket)} is overdue"

    def latency(self) -> Millis:
        if self.random.random() < self.weather.hang:
            return self.random.randint(1_000, 45_000)
        return self.random.randint(0, self.weather.slow)

    def kill(self) -> None:
        """The process dies: nobody is answered, what is in flight goes on, and a new owner with a higher grant begins."""
        self.note("killed")
        waiting, self.waiting = self.waiting, {}
        self.answered.update(waiting)
        self.queue, self.grant = self.make(), self.grant + 1
        for handler in waiting.values():
            handler(None)

    # ---- the store --------------------------------------------------------------------------------------------

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self.reply(effect)
        elif isinstance(effect, Commit):
            self.commit(effect)
        elif isinstance(effect, Open):
            self.after(self.latency(), partial(self.open, self.queue, (self.grant, effect.opening), effect))
        elif isinstance(effect, Transfer):
            self.note(f"transfer {effect.partition}/{effect.number} begins")
            self.after(self.latency(), partial(self.transfer, self.queue, effect))
        else:
            raise effect.error

    def open(self, queue: LogicalQueue, fence: tuple[int, int], effect: Open) -> None:
        store = self.ledger.stores[effect.partition]
        if store.fence > fence:
            return  # the process that asked is dead
        # A failed open may have raised the fence all the same.
        fails = self.random.random() < self.weather.open_fails
        if not fails or self.random.random() < 0.5:
            store.fence = fence
        loaded = SluicewayError("unavailable", "the store cannot be reached") if fails else store.load()
        self.note(f"open {effect.partition} #{effect.opening}: {'fails' if fails else f'txn {store.txn}'}")
        # Nothing else can have written in between: the fence is up.
        self.after(self.latency(), lambda: queue.opened(effect.partition, effect.opening, loaded, self.now))

    def commit(self, effect: Commit) -> None:
        luck, weather = self.random.random(), self.weather
        land = partial(self.land, effect, (self.grant, effect.opening))
        tell = partial(self.committed, self.queue, effect)
        lands, answer = self.latency(), self.latency()
        name = f"commit {effect.partition} #{effect.opening} txn {effect.changes.txn}"
        if luck < weather.refused:
            self.note(f"{name}: refused")
            self.after(answer, partial(tell, Outcome.REFUSED))
        elif luck < weather.refused + weather.unknown:
            kind = self.random.choice(["landed", "lost", "late"])
            self.note(f"{name}: unknown, {kind}")
            if kind == "landed":
                self.after(lands, land)
                self.after(lands + answer, partial(tell, Outcome.UNKNOWN))
            else:
                self.after(answer, partial(tell, Outcome.UNKNOWN))
                if kind == "late":
                    self.after(answer + lands, land)
        else:
            self.after(lands, land)
            self.after(lands + answer, partial(tell, Outcome.DONE))

    def land(self, effect: Commit, fence: tuple[int, int]) -> None:
        landed = self.ledger.stores[effect.partition].apply(effect.changes, fence)
        self.note(f"txn {effect.changes.txn} of {effect.partition} #{effect.opening} {'lands' if landed else 'is shut out'}")

    def committed(self, queue: LogicalQueue, effect: Commit, outcome: Outcome) -> None:
        queue.committed(effect.partition, effect.opening, outcome, self.now)

    def transfer(self, queue: LogicalQueue, effect: Transfer) -> None:
        luck = self.random.random()
        done = luck > self.weather.transfer_fails and self.ledger.bury(effect)
        if done and luck < self.weather.transfer_fails * 1.5:
            done = False  # the dead queue has it, and nobody hears of it
        self.note(f"transfer {effect.partition}/{effect.number}: {done}")
        self.after(self.latency(), lambda: queue.transferred(effect.partition, effect.number, done, self.now))

    # ---- replies ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, handler: Handler) -> Ticket:
        ticket = Ticket(request, self.now + request.request_timeout)
        self.waiting[ticket] = handler
        self.queue.submit(ticket)
        self.note(f"{name_of(ticket)} {request if not isinstance(request, Produce) else request.key}")
        if self.random.random() < self.weather.cancels:
            self.after(self.random.randint(0, 3 * self.weather.slow), lambda: self.cancel(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        if ticket in self.waiting and not ticket.done:  # else the answer is on its way
            handler = self.waiting.pop(ticket)
            self.note(f"{name_of(ticket)} is cancelled")
            self.answered.add(ticket)
            self.queue.cancel(ticket)
            handler(None)

    def reply(self, effect: Reply) -> None:
        ticket = effect.ticket
        assert ticket not in self.answered, f"{name_of(ticket)} is answered after it was answered or cancelled"
        self.answered.add(ticket)
        self.replies += 1
        result = effect.result
        self.note(f"{name_of(ticket)} -> {result.code if isinstance(result, SluicewayError) else result}")
        self.waiting.pop(ticket)(result)


def name_of(ticket: Ticket) -> str:
    return f"{type(ticket.request).__name__.lower()} {ticket.number}"


def code_of(result: Result | SluicewayError | None) -> str:
    assert result is None or isinstance(result, SluicewayError), f"an answer to another question: {result}"
    return "cancelled" if result is None else result.code


class Clients:
    """Producers and consumers of a world. A consumer's calls about one lease follow each other; anything else overlaps."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.ledger = world.ledger
        self.keyed: dict[str, list[Batch]] = {}
        self.sequence = 0
        self.open = True

    def begin(self, requests: int) -> None:
        for _ in range(requests):
            call = self.random.choices([self.produce, self.produce_keyed, self.lease, self.settle_anything], [4, 3, 6, 1])[0]
            self.world.after(self.random.randint(0, TRAFFIC), call)

    # Producers

    def new_batch(self, key: ProduceKey | None) -> Batch:
        random, now = self.random, self.world.now
        dues = [now + random.randint(1, 4_000) if random.random() < 0.1 else None for _ in range(random.randint(1, 6))]
        return self.ledger.new_batch(key, dues)

    def produce(self) -> None:
        self.ask(self.new_batch(None))

    def produce_keyed(self) -> None:
        if self.random.random() < 0.5:
            key = ProduceKey(f"k{self.random.randint(0, 6)}")
        else:
            self.sequence += self.random.random() < 0.3
            sequence = max(0, self.sequence - (self.random.random() < 0.2))
            key = ProduceKey(f"{sequence}/{self.random.randint(0, 2)}", "g", sequence)
        bodies = self.keyed.setdefault(key.key, [])
        if not bodies or self.random.random() < 0.1:
            bodies.append(self.new_batch(key))
        self.ask(self.random.choice(bodies))

    def ask(self, batch: Batch) -> None:
        batch.asking += 1
        timeout = self.random.choice([50, 500, 5_000])
        self.world.submit(Produce(batch.rows(), timeout, batch.key), partial(self.produced, batch))

    def produced(self, batch: Batch, result: Result | SluicewayError | None) -> None:
        batch.asking -= 1
        if isinstance(result, Produced):
            self.ledger.produced(batch, result)
            return
        code = code_of(result)
        if code in ("cancelled", "outcome_unknown"):
            batch.unknown = True
        elif code == "key_conflict":
            assert batch.key is not None, "a conflict without a key"
            assert batch.answer is None, "a body that was taken is in conflict with itself"
            assert any(other.may_exist for other in self.keyed[batch.key.key] if other is not batch), "a conflict with nothing"
        else:
            assert code == "unavailable" or (code == "stale_sequence" and batch.key is not None), code

    # Consumers

    def lease(self, batch_size: int = 0, request_timeout: Millis | None = None) -> None:
        random = self.random
        key = None
        if not batch_size and random.random() < 0.3:
            key = f"L{random.randint(0, 8)}"
        size = batch_size or (5 if key else random.choice([1, 3, 10]))
        most = self.world.partitions if batch_size or key else random.randint(1, self.world.partitions)
        wait = request_timeout if request_timeout is not None else random.choice([0, 0, 100, 3_000])
        client = "c" if key else f"c{random.randint(0, 2)}"
        request = Lease(client, size, wait, random.choice([None, 500, 5_000]), most, key)
        self.world.submit(request, partial(self.leased, request, self.world.now))
        if key and random.random() < 0.6:
            self.world.after(random.randint(0, random.choice([300, 2_000])), lambda: self.repeat(request))

    def repeat(self, request: Lease) -> None:
        self.world.submit(request, partial(self.leased, request, self.world.now))

    def leased(self, request: Lease, asked_at: Millis, result: Result | SluicewayError | None) -> None:
        if isinstance(result, list):
            for held in self.ledger.granted(request, result, asked_at, self.world.now):
                self.world.after(self.random.randint(0, 600), partial(self.next_step, held, self.random.randint(1, 3)))
        else:
            code = code_of(result)
            assert code in ("cancelled", "unavailable", "outcome_unknown"), code
            assert code != "unavailable" or request.lease_key is not None, "a lease without a key is refused"

    def next_step(self, held: Held, steps: int) -> None:
        if not held.items:
            return
        steps_ = partial(self.next_step, held, steps - 1)
        if not self.open:
            self.settle_ids(held, sorted(held.items), "done", steps_)
        elif steps > 0:
            random = self.random
            some = sorted(random.sample(sorted(held.items), random.randint(1, len(held.items))))
            verdict = random.choices(["done", "retry", "dead"], [5, 3, 2])[0]
            choice = random.choices(["ids", "all", "close", "stage", "extend", "abandon"], [3, 3, 3, 3, 2, 1])[0]
            if choice == "ids":
                self.settle_ids(held, some, verdict, steps_)
            elif choice == "all":
                self.settle_ids(held, sorted(held.items), "done", steps_)
            elif choice == "close":
                self.close(held, steps_)
            elif choice == "stage":
                self.stage(held, some, verdict, partial(self.close, held, steps_) if random.random() < 0.7 else steps_)
            elif choice == "extend":
                self.extend(held, steps_)

    def later(self, step: Callable[[], None]) -> None:
        self.world.after(self.random.randint(0, 300), step)

    def settle_ids(self, held: Held, offsets: list[int], verdict: str, then: Callable[[], None]) -> None:
        verdicts = dict.fromkeys(offsets, verdict)
        after = self.random.choice([0, 0, 700])
        not_before = self.world.now + after
        self.ledger.settling(held, verdicts)

        def answered(result: Result | SluicewayError | None) -> None:
            if isinstance(result, Settled):
                self.ledger.check_counts(result, len(verdicts))
                ignored = {int(name.rpartition(".")[2]) for name, _ in result.ignored}
                self.ledger.settled(held, verdicts, ignored, not_before)
                for offset in ignored:
                    held.items.pop(offset, None)
            else:
                held.uncertain = True
            self.later(then)

        selection = Selection(fate_of(verdict, after), offsets=np.array(offsets, dtype=np.int64))
        self.world.submit(Settle({held.partition: [selection]}, self.random.choice([100, 2_000])), answered)

    def close(self, held: Held, then: Callable[[], None]) -> None:
        verdicts = {offset: held.staged.get(offset, "done") for offset in held.items}
        if held.uncertain:
            verdicts = dict.fromkeys(held.items, "done")
        self.ledger.settling(held, verdicts)

        def answered(result: Result | SluicewayError | None) -> None:
            if isinstance(result, Settled):
                gone = {*verdicts} if result.ignored else set()
                assert gone or held.uncertain or result.total == len(verdicts)
                self.ledger.settled(held, verdicts, gone, 0)
                held.items.clear()
            else:
                held.uncertain = True
            self.later(then)

        fate = Selection(fate_of("done", 0), lease=held.number)
        self.world.submit(Settle({held.partition: [fate]}, self.random.choice([100, 2_000])), answered)

    def stage(self, held: Held, offsets: list[int], verdict: str, then: Callable[[], None]) -> None:
        def answered(result: Result | SluicewayError | None) -> None:
            if isinstance(result, Settled) and not result.ignored:
                assert result.total == len(offsets)
                held.staged.update(dict.fromkeys(offsets, verdict))
            else:
                held.uncertain = True
            self.later(then)

        selection = Selection(fate_of(verdict, 0), offsets=np.array(offsets, dtype=np.int64))
        self.world.submit(Settle({held.partition: [selection]}, self.random.choice([100, 2_000]), stage=True), answered)

    def extend(self, held: Held, then: Callable[[], None]) -> None:
        timeout = self.random.choice([200, 4_000])
        deadline = self.world.now + timeout
        held.deadline = min(held.deadline, deadline)

        def answered(result: Result | SluicewayError | None) -> None:
            if isinstance(result, Extended) and result.leases:
                assert [(info.partition, info.number, info.lease_deadline) for info in result.leases] == [(*held.name, deadline)]
                lease = self.ledger.stores[held.partition].look().leases.get(held.number)
                assert lease is not None, "extended before it was durable"
                assert lease.deadline == deadline, "extended before it was durable"
                held.deadline = deadline
            self.later(then)

        self.world.submit(Extend([held.name], self.random.choice([100, 2_000]), timeout), answered)

    def settle_anything(self) -> None:
        """Ids of several partitions that were never leased, or long ago, and of another queue."""
        stale = np.array([10**6], dtype=np.int64)
        selections = {n: [Selection(fate_of("done", 0), offsets=stale)] for n in range(self.world.partitions)}

        def answered(result: Result | SluicewayError | None) -> None:
            if isinstance(result, Settled):
                assert not result.total
                assert [reason for _, reason in result.ignored] == ["unknown"] * (self.world.partitions + 1)

        self.world.submit(Settle(selections, 1_000, foreign=["other.0.1"]), answered)


def run_world(seed: int, make: Callable[[str, range, Millis], LogicalQueue] = LogicalQueue) -> World:
    """One history: traffic in bad weather, then the world heals, and what is left is drained. A failure says how to replay it."""
    world = World(seed, make)
    try:
        _live(world)
    except Exception as error:
        error.add_note(f"replay it with its trace: python tests/queue_world.py {seed}")
        error.add_note("\n".join([*world.trace][-12:]))
        raise
    return world


def _live(world: World) -> None:
    clients = Clients(world)
    clients.begin(world.random.choice([30, 120]))
    for _ in range(10):
        world.run(world.now + TRAFFIC // 10)
        world.ledger.audit()
    world.weather = Weather()
    # The longest hang, the longest pause before a reopening, and the patience of a lease.
    world.run(world.now + 150_000)
    assert not world.waiting, f"never answered: {[name_of(ticket) for ticket in world.waiting]}"
    assert all(lane.state is LaneState.READY for lane in world.queue.lanes.values()), "a partition did not recover"
    world.ledger.audit()
    clients.open = False
    for _ in range(200):
        stats = world.queue.stats()
        if not any(each.total or each.transferring for each in stats.partitions):
            break
        clients.lease(batch_size=1_000, request_timeout=1_000)
        world.run(world.now + 10_000)
    stats = world.queue.stats()
    assert not any(each.total or each.transferring for each in stats.partitions), "something is stuck"
    assert (stats.produce_waiting, stats.lease_waiting, stats.complete_waiting, stats.in_flight) == (0, 0, 0, 0)
    world.ledger.audit()


def main() -> None:
    first = int(sys.argv[1])
    if len(sys.argv) == 2:
        world = World(first)
        try:
            _live(world)
        except Exception:
            traceback.print_exc()
        print("\n".join(world.trace))
        return
    began, failed = time.monotonic(), 0
    for seed in range(first, first + int(sys.argv[2])):
        try:
            run_world(seed)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{failed} failed of {sys.argv[2]}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
