"""A logical queue on a bench: every commit and every opening waits until the test says how it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from simulation.store import Store
from sluiceway.core.queue.logical_queue import LogicalQueue
from sluiceway.core.queue.tickets import Commit, Effect, Fault, Open, Reply, Request, Result, Ticket, Transfer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import (
    DONE,
    Disposition,
    Lease,
    LeaseInfo,
    Offsets,
    Produce,
    Produced,
    ProduceKey,
    Selection,
    Settle,
    Settled,
)

START: Millis = 1_000_000_000_000
LEASE_TIMEOUT = 60_000


def produce(
    count: int = 1, timeout: Millis = 5_000, key: ProduceKey | None = None, *, due: Millis | None = None, text: str = "x"
) -> Produce:
    when = {} if due is None else {"enqueue_at": due}
    return Produce(batch_from_rows([{"payload": f"{text}{n}".encode(), **when} for n in range(count)]), timeout, key)


def lease(
    count: int = 1,
    timeout: Millis = 0,
    *,
    client: str = "c",
    key: str | None = None,
    most: int = 1,
    lease_timeout: Millis | None = None,
) -> Lease:
    return Lease(client, count, timeout, lease_timeout, most, key)


def array(offsets: Iterable[int]) -> Offsets:
    return np.array(sorted(offsets), dtype=np.int64)


def settle(
    offsets: Mapping[int, Iterable[int]],
    disposition: Disposition = DONE,
    timeout: Millis = 5_000,
    *,
    stage: bool = False,
    client: str | None = None,
) -> Settle:
    return Settle({n: [Selection(disposition, offsets=array(those))] for n, those in offsets.items()}, timeout, stage, client_id=client)


class Rig:
    def __init__(
        self, partitions: int | Sequence[int] = 1, *, opened: bool = True, max_attempts: int = 0, keeps_dead: bool = False
    ) -> None:
        numbers = range(partitions) if isinstance(partitions, int) else partitions
        self.now = START
        self.queue = LogicalQueue("q", numbers, LEASE_TIMEOUT)
        self.stores = {number: Store() for number in numbers}
        self.commits: dict[int, Commit] = {}
        self.opens: dict[int, Open] = {}
        self.transfers: list[Transfer] = []
        self.faults: list[Fault] = []
        self.answers: dict[Ticket, Result | SluicewayError] = {}
        self.commit_count = 0
        self.is_pressed = False
        if max_attempts or keeps_dead:
            self.configure(max_attempts=max_attempts, dead_queue="dead" if keeps_dead else None)
        self.cycle()
        if opened:
            for number in numbers:
                self.open(number)

    # ---- what happens -----------------------------------------------------------------------------------------

    def cycle(self) -> None:
        for effect in self.queue.cycle(self.now, is_pressed=self.is_pressed):
            if isinstance(effect, Reply):
                assert effect.ticket not in self.answers, "two answers"
                self.answers[effect.ticket] = effect.result
            elif isinstance(effect, Commit):
                assert effect.partition not in self.commits, "two transactions in flight"
                self.commits[effect.partition] = effect
                self.commit_count += 1
            elif isinstance(effect, Open):
                self.opens[effect.partition] = effect
            elif isinstance(effect, Transfer):
                self.transfers.append(effect)
            elif not self.other(effect):
                assert isinstance(effect, Fault)
                self.faults.append(effect)
        assert not self.queue.index.overlooked()
        landed = [ticket for ticket in self.queue._routed.values() if not ticket.awaiting]
        assert not landed, "a produce that has landed is kept with its payload"

    def other(self, effect: Effect) -> bool:
        """Carry out an effect of which this rig does not know. False: nor does this one."""
        return False

    def wait(self, millis: Millis) -> None:
        """Let time pass, with a turn whenever the queue asks for one."""
        until = self.now + millis
        for _ in range(10_000):
            wake = self.queue.wake_at()
            if wake is None or wake > until:
                self.now = until
                self.cycle()
                return
            self.now = max(self.now, wake)
            self.cycle()
        raise AssertionError("the queue turns without end")

    def configure(self, **settings: Any) -> None:
        """The queue's settings are now these, and the defaults. `dead_incarnation` is that of the dead queue, if it is known."""
        dead_incarnation = settings.pop("dead_incarnation", None)
        record = QueueRecord("q", "q", START, START, (), lease_timeout=LEASE_TIMEOUT)
        self.queue.configure(msgspec.structs.replace(record, **settings), dead_incarnation)
        self.cycle()

    def open(self, number: int, error: Exception | None = None, *, final: bool = False) -> None:
        """End the opening that waits."""
        effect = self.opens.pop(number)
        store = self.stores[number]
        store.fence = (1, effect.opening)
        self.queue.opened(number, effect.opening, error or store.load(), self.now, final)
        self.cycle()

    def land(self, number: int) -> None:
        """The commit becomes durable, and nobody has heard of it yet."""
        effect = self.commits[number]
        assert self.stores[number].apply(effect.changes, (1, effect.opening))

    def end(self, number: int, outcome: Outcome = Outcome.DONE, *, landed: bool | None = None, at_once: bool = False) -> None:
        """End the commit in flight; it landed if DONE, unless said otherwise."""
        if outcome is Outcome.DONE if landed is None else landed:
            self.land(number)
        effect = self.commits.pop(number)
        self.queue.committed(number, effect.opening, outcome, self.now, at_once=at_once)
        self.cycle()

    def end_all(self) -> None:
        while self.commits:
            self.end(min(self.commits))

    # ---- what clients do --------------------------------------------------------------------------------------

    def ask(self, request: Request) -> Ticket:
        ticket = self.submit(request)
        self.cycle()
        return ticket

    def submit(self, request: Request) -> Ticket:
        ticket = Ticket(request, self.now + request.request_timeout)
        self.queue.submit(ticket)
        return ticket

    def fill(self, partition: int, count: int) -> None:
        """Put ready items into that very partition, durably."""
        ticket = Ticket(produce(count), self.now + 1_000)
        self.queue.executors[partition].put(ticket, produce(count))
        self.cycle()
        self.end_all()
        assert self.produced(ticket).partition == partition

    def take(self, partition: int, count: int, **options: Any) -> LeaseInfo:
        """A durable lease of fresh items of that partition, which has no others."""
        self.fill(partition, count)
        ticket = self.ask(lease(count, **options))
        self.end_all()
        (info,) = self.grants(ticket)
        assert (info.partition, info.items) == (partition, count)
        return info

    # ---- what they were told ----------------------------------------------------------------------------------

    def produced(self, ticket: Ticket) -> Produced:
        answer = self.answers[ticket]
        assert isinstance(answer, Produced), answer
        return answer

    def settled(self, ticket: Ticket) -> Settled:
        answer = self.answers[ticket]
        assert isinstance(answer, Settled), answer
        return answer

    def grants(self, ticket: Ticket) -> list[LeaseInfo]:
        answer = self.answers[ticket]
        assert isinstance(answer, list), answer
        return [grant.info for grant in answer]

    def offsets(self, ticket: Ticket) -> list[int]:
        """The offsets of the leased items, partition by partition."""
        answer = self.answers[ticket]
        assert isinstance(answer, list), answer
        return [offset for grant in answer for piece in grant.slices for offset in piece.offsets.tolist()]

    def code(self, ticket: Ticket) -> str:
        answer = self.answers[ticket]
        assert isinstance(answer, SluicewayError), answer
        return answer.code

    def durable(self, number: int) -> tuple[int, int, int]:
        """Ready, leased and scheduled items that are durable in that partition."""
        partition = self.stores[number].look()
        return partition.log.ready_count, partition.leased_count, partition.log.scheduled_count
