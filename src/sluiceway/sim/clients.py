"""Producers and consumers of one queue: they wait, repeat themselves, lose interest and vanish.

A consumer's calls about one lease follow each other; anything else overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from sluiceway.core.tickets import Result
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.requests import Extend, Extended, Fate, Lease, Produce, Produced, ProduceKey, Selection, Settle, Settled, Verdict
from sluiceway.sim.checks import check
from sluiceway.sim.items import Batch, Held, new_rows
from sluiceway.sim.queue import SimQueue

Answer = Result | SluicewayError | None


class Clients:
    """`numbers` names items, and is shared by all clients of a world."""

    def __init__(self, queue: SimQueue, numbers: Iterator[int]) -> None:
        self.queue = queue
        self.world = queue.world
        self.random = queue.world.random
        self.ledger = queue.ledger
        self.partitions = len(queue.stores)
        self.numbers = numbers
        self.keyed: dict[str, list[Batch]] = {}
        self.sequence = 0
        self.asked = 0
        self.draining = False

    def begin(self, requests: int, within: Millis, weights: list[int]) -> None:
        """Spread requests over that time; the weights are of produces, keyed produces, leases, and settles of anything."""
        calls = [self.produce, self.produce_keyed, self.lease, self.settle_anything]
        for call in self.random.choices(calls, weights, k=requests):
            self.world.after(self.random.randint(0, within), call)

    def refused(self, answer: Answer) -> str:
        """Why there is no answer: a code, or `unheard`."""
        check(answer is None or isinstance(answer, SluicewayError), "an answer to another question")
        code = answer.code if isinstance(answer, SluicewayError) else "unheard"
        check(code != "internal" or self.queue.mistaken, "the server made a mistake")
        check(code != "partition_damaged" or self.queue.hurt, "a sound partition is called damaged")
        return code

    # ---- producers --------------------------------------------------------------------------------------------

    def new_batch(self, key: ProduceKey | None) -> Batch:
        random, now = self.random, self.queue.now()
        dues = [now + random.randint(1, 4_000) if random.random() < 0.1 else None for _ in range(random.randint(1, 6))]
        items, rows = new_rows([next(self.numbers) for _ in dues], dues)
        return self.ledger.add(key, items, rows)

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
        self.queue.submit(Produce(batch.rows, timeout, batch.key), partial(self.produced, batch))

    def produced(self, batch: Batch, answer: Answer) -> None:
        batch.asking -= 1
        if isinstance(answer, Produced):
            self.ledger.produced(batch, answer)
            return
        code = self.refused(answer)
        if code in ("unheard", "outcome_unknown"):
            batch.unknown = True
        elif code == "key_conflict":
            check(batch.key is not None, "a conflict without a key")
            check(batch.answer is None, "a body that was taken is in conflict with itself")
            rivals = [other for other in self.ledger.batches[batch.key] if other is not batch]
            check(any(other.may_exist for other in rivals), "a conflict with nothing")
        elif code == "stale_sequence":
            check(batch.key is not None and batch.key.sequence < self.sequence, "a sequence is called stale that is the latest")
        else:
            check(code in ("unavailable", "internal"), f"a produce ended with {code}")
        if batch.key is not None and code in ("unheard", "outcome_unknown", "unavailable") and self.random.random() < 0.5:
            self.later(partial(self.ask, batch))

    def later(self, step: Callable[[], None]) -> None:
        self.world.after(self.random.randint(0, 300), step)

    # ---- consumers --------------------------------------------------------------------------------------------

    def lease(self) -> None:
        random = self.random
        self.asked += 1
        key = f"L{random.randint(0, 4)}" if random.random() < 0.4 else None
        size = 5 if key else random.choice([1, 3, 10])
        most = self.partitions if key else random.randint(1, self.partitions)
        client = "c" if key else f"c{self.asked}"
        request = Lease(client, size, random.choice([0, 0, 100, 3_000]), random.choice([None, 500, 5_000]), most, key)
        self.ask_lease(request)
        if key and random.random() < 0.6:
            self.world.after(random.randint(0, random.choice([300, 2_000])), partial(self.ask_lease, request))

    def drain(self) -> None:
        """Lease all that is there, and complete it."""
        self.draining = True
        self.asked += 1
        self.ask_lease(Lease(f"c{self.asked}", 1_000, 1_000, 60_000, self.partitions))

    def ask_lease(self, request: Lease) -> None:
        self.queue.submit(request, partial(self.leased, request, self.queue.now()))

    def leased(self, request: Lease, asked_at: Millis, answer: Answer) -> None:
        if isinstance(answer, list):
            for held in self.ledger.granted(request, answer, asked_at, self.queue.now()):
                self.world.after(self.random.randint(0, 600), partial(self.next_step, held, self.random.randint(1, 3)))
        else:
            code = self.refused(answer)
            check(code in ("unheard", "unavailable", "outcome_unknown", "partition_damaged", "internal"), f"a lease ended with {code}")
            check(code != "unavailable" or request.lease_key is not None, "a lease without a key is refused")
            # What it took, if it took anything, is there for whoever asks again.
            if request.lease_key is not None and self.random.random() < 0.7:
                self.later(partial(self.ask_lease, request))

    def next_step(self, held: Held, steps: int) -> None:
        """What the consumer does next with what it holds; at last it goes away and leaves the rest to the deadline."""
        if not held.items:
            return
        then = partial(self.next_step, held, steps - 1)
        if self.draining:
            self.settle_ids(held, sorted(held.items), "done", then)
        elif steps > 0:
            random = self.random
            some = sorted(random.sample(sorted(held.items), random.randint(1, len(held.items))))
            verdict: Verdict = random.choices(("done", "retry", "dead"), [5, 3, 2])[0]
            choice = random.choices(["ids", "all", "close", "stage", "extend", "abandon"], [3, 3, 3, 3, 2, 1])[0]
            if choice == "ids":
                self.settle_ids(held, some, verdict, then)
            elif choice == "all":
                self.settle_ids(held, sorted(held.items), "done", then)
            elif choice == "close":
                self.close(held, then)
            elif choice == "stage":
                self.stage(held, some, verdict, partial(self.close, held, then) if random.random() < 0.7 else then)
            elif choice == "extend":
                self.extend(held, then)

    def settle_ids(self, held: Held, offsets: list[int], verdict: Verdict, then: Callable[[], None]) -> None:
        verdicts = dict.fromkeys(offsets, verdict)
        after = self.random.choice([0, 0, 700])
        not_before = self.queue.now() + after
        self.ledger.settling(held, verdicts)

        def answered(answer: Answer) -> None:
            if isinstance(answer, Settled):
                self.ledger.check_counts(answer, len(verdicts))
                ignored = {int(name.rpartition(".")[2]) for name, _ in answer.ignored}
                self.ledger.settled(held, verdicts, ignored, not_before)
                for offset in ignored:
                    held.items.pop(offset, None)
                self.later(then)
            else:
                self.refused(answer)
                held.uncertain = True
                again = partial(self.settle_ids, held, offsets, verdict, then)
                self.later(again if self.random.random() < 0.5 else then)

        self.settle([Selection(fate_of(verdict, after), offsets=np.array(offsets, dtype=np.int64))], held, answered)

    def settle(self, selections: list[Selection], held: Held, answered: Callable[[Answer], None], stage: bool = False) -> None:
        self.queue.submit(Settle({held.partition: selections}, self.random.choice([100, 2_000]), stage), answered)

    def close(self, held: Held, then: Callable[[], None]) -> None:
        verdicts = {offset: held.staged.get(offset, "done") for offset in held.items}
        if held.uncertain:
            verdicts = dict.fromkeys(held.items, "done")
        self.ledger.settling(held, verdicts)

        def answered(answer: Answer) -> None:
            if isinstance(answer, Settled):
                ignored = {*verdicts} if answer.ignored else set()
                check(bool(ignored) or held.uncertain or answer.total == len(verdicts), "closing a lease settled other items than it had")
                self.ledger.settled(held, verdicts, ignored, 0)
                held.items.clear()
            else:
                self.refused(answer)
                held.uncertain = True
            self.later(then)

        self.settle([Selection(fate_of("done", 0), lease=held.number)], held, answered)

    def stage(self, held: Held, offsets: list[int], verdict: Verdict, then: Callable[[], None]) -> None:
        def answered(answer: Answer) -> None:
            if isinstance(answer, Settled) and not answer.ignored:
                check(answer.total == len(offsets), "staging counts other items than were sent")
                held.staged.update(dict.fromkeys(offsets, verdict))
            else:
                held.uncertain = True
            self.later(then)

        selection = Selection(fate_of(verdict, 0), offsets=np.array(offsets, dtype=np.int64))
        self.settle([selection], held, answered, stage=True)

    def extend(self, held: Held, then: Callable[[], None]) -> None:
        timeout = self.random.choice([200, 4_000])
        deadline = self.queue.now() + timeout
        held.deadline = min(held.deadline, deadline)

        def answered(answer: Answer) -> None:
            if isinstance(answer, Extended) and answer.leases:
                told = [(info.partition, info.number, info.lease_deadline) for info in answer.leases]
                check(told == [(*held.name, deadline)], "another lease, or to another time, was extended")
                lease = self.ledger.stores[held.partition].look().leases.get(held.number)
                check(lease is not None and lease.deadline == deadline, "extended before it was durable")
                held.deadline = deadline
            self.later(then)

        self.queue.submit(Extend([held.name], self.random.choice([100, 2_000]), timeout), answered)

    def settle_anything(self) -> None:
        """Ids of several partitions that were never given to anything, and of another queue."""
        stale = np.array([10**6], dtype=np.int64)
        selections = {n: [Selection(fate_of("done", 0), offsets=stale)] for n in range(self.partitions)}

        def answered(answer: Answer) -> None:
            if isinstance(answer, Settled):
                check(not answer.total, "an id that was never given is settled")
                check(
                    [why for _, why in answer.ignored] == ["unknown"] * (self.partitions + 1),
                    "an id that was never given is not called unknown",
                )

        self.queue.submit(Settle(selections, 1_000, foreign=["other.0.1"]), answered)


def fate_of(verdict: Verdict, after: Millis) -> Fate:
    if verdict == "retry":
        return Fate("retry", retry_after=after)
    return Fate("dead", reason="bad") if verdict == "dead" else Fate("done")
