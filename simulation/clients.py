"""Producers and consumers of one queue: they wait, retry, lose interest and vanish.

A consumer's calls about one lease are sequential; all others overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from simulation.known_items import Batch, Held, new_rows
from simulation.promises import check
from simulation.simulated_queue import SimQueue
from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.core.partition.queries import ready_slices
from sluiceway.core.queue.tickets import Result, TakeOut, TransferBegun
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.requests import (
    DONE,
    RELEASE,
    Clear,
    Cleared,
    Disposition,
    Extend,
    Extended,
    Lease,
    Produce,
    Produced,
    ProduceKey,
    Selection,
    Settle,
    Settled,
    Verdict,
)

Answer = Result | SluicewayError | None

TIMEOUTS = [None, 500, 5_000]
"""Lease timeouts, in milliseconds. None: the queue's."""


class Clients:
    """All clients of one queue. `numbers` yields unique item numbers for all clients of a world."""

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
        """Spread requests over `within` milliseconds. `weights`: of produces, keyed produces, leases, settles of arbitrary ids, and
        clears."""
        calls = [self.produce, self.produce_keyed, self.lease, self.settle_anything, self.clear]
        for call in self.random.choices(calls, weights, k=requests):
            self.world.after(self.random.randint(0, within), call)

    def refused(self, answer: Answer) -> str:
        """Return the error code of an answer that is a failure, or `unheard`."""
        check(answer is None or isinstance(answer, SluicewayError), "an answer to another question")
        code = answer.code if isinstance(answer, SluicewayError) else "unheard"
        check(code != "internal" or self.queue.mistaken, "the server made a mistake")
        check(code != "partition_damaged" or self.queue.hurt, "a sound partition is called damaged")
        return code

    # ---- producers --------------------------------------------------------------------------------------------

    def new_batch(self, key: ProduceKey | None) -> Batch:
        random, now = self.random, self.queue.now()
        dues = [now + random.randint(1, 4_000) if random.random() < 0.1 else None for _ in range(random.randint(1, 6))]
        items, rows = new_rows(self.queue.incarnation, [next(self.numbers) for _ in dues], dues)
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
            check(code in ("unavailable", "internal", "queue_paused"), f"a produce ended with {code}")
        if batch.key is not None and code in ("unheard", "outcome_unknown", "unavailable", "queue_paused") and self.random.random() < 0.5:
            self.later(partial(self.ask, batch))

    def later(self, step: Callable[[], None]) -> None:
        self.world.after(self.random.randint(0, 300), step)

    # ---- consumers --------------------------------------------------------------------------------------------

    def lease(self) -> None:
        random = self.random
        self.asked += 1
        if random.random() < 0.4:
            # A client repeats a lease key only with the same parameters.
            timeout: Millis | None = random.choice(TIMEOUTS)
            key = f"L{random.randint(0, 2)}" if self.asked % 4 else f"new {self.asked}"
            request = Lease(f"k{timeout}", 5, random.choice([0, 0, 100, 3_000]), timeout, self.partitions, key)
        else:
            most, size = random.randint(1, self.partitions), random.choice([1, 3, 10])
            request = Lease(f"c{self.asked}", size, random.choice([0, 0, 100, 3_000]), random.choice(TIMEOUTS), most)
        self.ask_lease(request)
        if request.lease_key is not None and random.random() < 0.6:
            self.world.after(random.randint(0, random.choice([300, 2_000])), partial(self.ask_lease, request))

    def drain(self) -> None:
        """Lease every item and complete it."""
        self.draining = True
        for side in self.queue.sides:
            self.asked += 1
            self.ask_lease(Lease(f"c{self.asked}", 1_000, 1_000, 60_000, len(side)), side[0])

    def ask_lease(self, request: Lease, partition: int | None = None) -> None:
        self.queue.submit(request, partial(self.leased, request, self.queue.now()), partition)

    def leased(self, request: Lease, asked_at: Millis, answer: Answer) -> None:
        if isinstance(answer, list):
            for held in self.ledger.granted(request, answer, asked_at, self.queue.now()):
                self.world.after(self.random.randint(0, 600), partial(self.next_step, held, self.random.randint(1, 3)))
        else:
            code = self.refused(answer)
            check(code in ("unheard", "unavailable", "outcome_unknown", "partition_damaged", "internal"), f"a lease ended with {code}")
            check(code != "unavailable" or request.lease_key is not None, "a lease without a key is refused")
            # Any leases that the call took are still there for its repetition.
            if request.lease_key is not None and self.random.random() < 0.7:
                self.later(partial(self.ask_lease, request))

    def next_step(self, held: Held, steps: int) -> None:
        """Run the consumer's next call on its lease. After `steps` calls the consumer leaves the rest to the deadline."""
        if not held.items:
            return
        then = partial(self.next_step, held, steps - 1)
        if self.draining:
            self.settle_ids(held, sorted(held.items), DONE, then)
        elif steps > 0:
            random = self.random
            some = sorted(random.sample(sorted(held.items), random.randint(1, len(held.items))))
            calls: list[Callable[[], None]] = [
                partial(self.settle_ids, held, some, self.some_disposition(), then),
                partial(self.settle_ids, held, sorted(held.items), DONE, then),
                partial(self.close, held, then),
                partial(
                    self.stage, held, some, self.some_disposition(), partial(self.close, held, then) if random.random() < 0.7 else then
                ),
                partial(self.extend, held, then),
                partial(self.release, held, then),
                partial(self.interfere, held, then),
                lambda: None,
            ]
            random.choices(calls, [4, 3, 3, 3, 2, 1, 1, 1])[0]()

    def some_disposition(self) -> Disposition:
        verdict: Verdict = self.random.choices(("done", "retry", "dead", "release"), [5, 3, 2, 1])[0]
        if verdict == "retry":
            when = self.random.choice(["back-off", "after", "at", "now"])
            if when == "at":
                return Disposition("retry", retry_at=self.queue.now() + 700)
            return Disposition("retry") if when == "back-off" else Disposition("retry", retry_after=700 if when == "after" else 0)
        return Disposition(verdict, reason="bad" if verdict == "dead" else "")

    def whose(self, held: Held) -> str | None:
        """Return the client id that a call carries: the lease's, or None."""
        return held.client_id if self.random.random() < 0.3 else None

    def settle_ids(self, held: Held, offsets: list[int], disposition: Disposition, then: Callable[[], None]) -> None:
        held.loose = True
        self.ledger.asks.settle(held.partition, offsets, disposition)
        client_id = self.whose(held)

        def answered(answer: Answer) -> None:
            if isinstance(answer, Settled):
                ignored = {int(name.rpartition(".")[2]) for name, _ in answer.ignored}
                check(len(ignored) == len(answer.ignored) and ignored <= {*offsets}, "other ids are ignored than were sent")
                self.ledger.check_ignored(held.partition, client_id, answer.ignored)
                self.ledger.settled(held, {offset: {disposition.verdict} for offset in offsets}, answer, ignored)
                for offset in ignored:
                    held.items.pop(offset, None)
                self.later(then)
            else:
                self.refused(answer)
                held.uncertain = True
                again = partial(self.settle_ids, held, offsets, disposition, then)
                self.later(again if self.random.random() < 0.5 else then)

        self.settle(Selection(disposition, offsets=np.array(offsets, dtype=np.int64)), held, answered, client_id)

    def settle(
        self, selection: Selection, held: Held, answered: Callable[[Answer], None], client_id: str | None, stage: bool = False
    ) -> None:
        request = Settle({held.partition: [selection]}, self.random.choice([100, 2_000]), stage, client_id=client_id)
        self.queue.submit(request, answered)

    def close(self, held: Held, then: Callable[[], None]) -> None:
        held.loose = True
        outcomes = {offset: {held.staged.get(offset, DONE)} for offset in held.items}
        if held.uncertain:
            outcomes = {offset: {DONE} | held.maybe_staged.get(offset, set()) for offset in held.items}
        self.ledger.asks.close(held.name, outcomes)
        verdicts = {offset: {disposition.verdict for disposition in dispositions} for offset, dispositions in outcomes.items()}
        self.end(held, Selection(DONE, lease=held.number), verdicts, then)

    def release(self, held: Held, then: Callable[[], None]) -> None:
        """Release the whole lease, unread."""
        held.loose = True
        self.ledger.asks.releasing.add(held.name)
        self.end(held, Selection(RELEASE, lease=held.number), {offset: {"release"} for offset in held.items}, then)

    def end(self, held: Held, selection: Selection, verdicts: Mapping[int, set[Verdict]], then: Callable[[], None]) -> None:
        client_id = self.whose(held)

        def answered(answer: Answer) -> None:
            if isinstance(answer, Settled):
                for _, reason in answer.ignored:
                    self.ledger.check_lease_ignored(held, client_id, reason)
                self.ledger.settled(held, verdicts, answer, {*verdicts} if answer.ignored else set())
                held.items.clear()
            else:
                self.refused(answer)
                held.uncertain = True
            self.later(then)

        self.settle(selection, held, answered, client_id)

    def stage(self, held: Held, offsets: list[int], disposition: Disposition, then: Callable[[], None]) -> None:
        for offset in offsets:
            held.maybe_staged.setdefault(offset, set()).add(disposition)

        def answered(answer: Answer) -> None:
            if isinstance(answer, Settled) and not answer.ignored:
                check(answer.total == len(offsets), "staging counts other items than were sent")
                held.staged.update(dict.fromkeys(offsets, disposition))
            else:
                held.uncertain = True
            self.later(then)

        self.settle(Selection(disposition, offsets=np.array(offsets, dtype=np.int64)), held, answered, self.whose(held), stage=True)

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
            elif isinstance(answer, Extended):
                check(bool(answer.ignored), "a lease is neither extended nor ignored")
            self.later(then)

        if self.random.random() < 0.5:
            request = Extend([held.name], self.random.choice([100, 2_000]), timeout, client_id=self.whose(held))
        else:
            some = np.array(sorted(held.items), dtype=np.int64)
            request = Extend([], self.random.choice([100, 2_000]), timeout, offsets={held.partition: some}, client_id=self.whose(held))
        self.queue.submit(request, answered)

    def interfere(self, held: Held, then: Callable[[], None]) -> None:
        """Try to end the lease as another client."""

        def answered(answer: Answer) -> None:
            if isinstance(answer, Settled):
                check(not answer.total, "a client has settled what another one has leased")
                for _, reason in answer.ignored:
                    self.ledger.check_lease_ignored(held, "stranger", reason)
            self.later(then)

        disposition = self.random.choice([DONE, RELEASE])
        self.settle(Selection(disposition, lease=held.number), held, answered, "stranger")

    # ---- other requests ---------------------------------------------------------------------------------------

    def settle_anything(self) -> None:
        """Settle random ids of one partition or one side, plus an id not yet given and one of another queue."""
        side = self.random.choice(self.queue.sides)
        side = [self.random.choice(side)] if self.random.random() < 0.7 else side
        selections = {}
        for number in side:
            end = self.ledger.stores[number].scene().header.next
            some = self.random.sample(range(end), min(end, 5))
            selections[number] = [Selection(DONE, offsets=np.array([*sorted(some), 10**6], dtype=np.int64))]

        def answered(answer: Answer) -> None:
            if isinstance(answer, Settled):
                check(not answer.total, "a client has settled what another one has leased, or nobody")
                asked = 1 + sum(len(each[0].offsets) for each in selections.values() if each[0].offsets is not None)
                check(len(answer.ignored) == asked, "an id was neither settled nor ignored")
                check(("other.0.1", "unknown") in answer.ignored, "an id of another queue is not called unknown")
                # Answers of several partitions reflect different moments.
                for number in side if len(side) == 1 else ():
                    mine: list[tuple[str, IgnoredReason]] = [each for each in answer.ignored if not each[0].startswith("other")]
                    self.ledger.check_ignored(number, "stranger", mine)

        self.queue.submit(Settle(selections, 1_000, foreign=["other.0.1"], client_id="stranger"), answered)

    def clear(self) -> None:
        """Clear one side."""
        side = self.random.choice(self.queue.sides)
        request = Clear(1_000, self.random.random() < 0.8, self.random.random() < 0.4)
        self.ledger.asks.clearing.append(request)

        def answered(answer: Answer) -> None:
            if isinstance(answer, Cleared):
                # From now on it can no longer be the cause of an effect.
                self.ledger.asks.clearing.remove(request)
                self.ledger.tally["cleared"] += answer.ready + answer.scheduled
            else:
                self.refused(answer)

        self.queue.submit(request, answered, side[0])

    def redrive(self, targets: list[str]) -> None:
        """Redrive dead items to their source queue, another queue, or one that no longer exists."""
        partition = self.random.randrange(self.partitions)
        target = self.random.choice(targets)
        executor = None if self.queue.owner is None else self.queue.owner.executors[partition]
        if executor is None or not executor.takes_work:
            return
        offsets = [offset for piece in ready_slices(executor.partition, 100) for offset in piece.offsets.tolist()]
        if not offsets:
            return
        # A former queue of the same name is not a valid target.
        incarnation = target if self.random.random() < 0.8 else f"{target}, long ago"
        some = sorted(self.random.sample(offsets, self.random.randint(1, len(offsets))))
        self.ledger.asks.redrive(partition, some, target)

        def answered(answer: Answer) -> None:
            if isinstance(answer, TransferBegun):
                check(answer.items <= len(some), "more items are redriven than were asked for")
                self.ledger.tally["redriven"] += answer.items
            else:
                self.refused(answer)

        self.queue.submit(TakeOut(partition, np.array(some, dtype=np.int64), target, 2_000, None, incarnation), answered)
