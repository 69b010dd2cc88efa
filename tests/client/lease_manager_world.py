"""A consumer's keeper against a model of the server: who holds what until when, under a clock that only the test moves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sluiceway.client import CallError, Ignored, Lease, Leased, LeasedItem, Retry
from sluiceway.client.lease_manager import Abandon, Ask, Effect, Extend, HangUp, LeaseManager, Lost, Outcome, Settle

LEASE_TIMEOUT = 900
AT = datetime(2026, 1, 31, tzinfo=UTC)
AWAY = CallError("unavailable", "nobody is there")


@dataclass
class Held:
    """What the server knows of a lease."""

    lease_deadline: int
    open: set[str]


def outcomes(settle: Settle) -> dict[str, Outcome]:
    told: dict[str, Outcome] = {each.id: each for each in settle.retries}
    told |= dict.fromkeys(settle.done, "done")
    told |= dict.fromkeys(settle.released, "released")
    assert len(told) == len(settle.done) + len(settle.released) + len(settle.retries)
    return told


@dataclass
class World:
    keeper: LeaseManager
    now: int = 1_000
    leases: dict[str, Held] = field(default_factory=dict)
    outcome: dict[str, Outcome] = field(default_factory=dict)
    """What the server was told first, of each item whose lease was alive."""
    ended: dict[str, Outcome] = field(default_factory=dict)
    """What the handlers said."""
    received: list[str] = field(default_factory=list)
    handling: deque[str] = field(default_factory=deque)
    lost: set[str] = field(default_factory=set)
    calls: dict[type[Effect], Effect] = field(default_factory=dict)
    made: int = 0
    items: int = 0

    # -- the server

    def lease(self, count: int) -> Leased:
        items, leases = [], []
        while count:
            size = min(count, 3)
            count -= size
            lease_id = f"k7f3q2ma.0.L{self.made}"
            self.made += 1
            ids = [f"k7f3q2ma.0.{self.items + n}" for n in range(size)]
            self.items += size
            self.leases[lease_id] = Held(self.now + LEASE_TIMEOUT, set(ids))
            leases.append(Lease(lease_id=lease_id, partition=0, count=size, lease_deadline=AT))
            items += [LeasedItem(id=each, origin=each, partition=0, lease_id=lease_id) for each in ids]
        return Leased(queue_name="q", partition=0, leases=leases, items=items)

    def lease_of(self, item_id: str) -> Held | None:
        return next((lease for lease in self.leases.values() if item_id in lease.open), None)

    def apply(self, settle: Settle) -> list[Ignored]:
        ignored = []
        for item_id, outcome in outcomes(settle).items():
            lease = self.lease_of(item_id)
            if item_id in self.outcome:
                assert self.outcome[item_id] == outcome, "two outcomes for one item"
                ignored.append(Ignored(id=item_id, reason="settled"))
            elif lease is None:
                ignored.append(Ignored(id=item_id, reason="expired"))
            else:
                lease.open.remove(item_id)
                self.outcome[item_id] = outcome
        return ignored

    def prolong(self, extend: Extend) -> list[str]:
        alive = [lease_id for lease_id in extend.lease_ids if lease_id in self.leases and self.leases[lease_id].open]
        for lease_id in alive:
            self.leases[lease_id].lease_deadline = self.now + LEASE_TIMEOUT
        return alive

    def run_out(self) -> None:
        for lease_id in [lease_id for lease_id, lease in self.leases.items() if lease.lease_deadline <= self.now]:
            del self.leases[lease_id]

    # -- what happens

    def pump(self) -> None:
        for effect in self.keeper.decide(self.now):
            if isinstance(effect, HangUp):
                assert self.keeper.stopping
                assert Ask in self.calls
            elif isinstance(effect, Lost):
                assert set(effect.ids) <= set(self.handling)
                assert not self.lost & set(effect.ids)
                self.lost |= set(effect.ids)
            elif isinstance(effect, Abandon):
                assert self.keeper.stopping
                assert sorted(effect.ids) == sorted(self.handling)
                self.handling.clear()
            else:
                assert type(effect) not in self.calls, "two calls of one kind at once"
                assert not (isinstance(effect, Ask) and self.keeper.stopping)
                self.calls[type(effect)] = effect

    def tick(self, millis: int) -> None:
        self.now += millis
        self.run_out()

    def answer_ask(self, count: int, heard: bool = True) -> None:
        effect = self.calls.pop(Ask, None)
        if isinstance(effect, Ask):
            answer = self.lease(min(count, effect.batch_size))
            if heard:
                self.received += answer.ids
                self.keeper.leased(answer, self.now)
            else:
                self.keeper.ask_failed(CallError("outcome_unknown", "?"), self.now, 0.5)

    def answer_extend(self, done: bool = True, heard: bool = True) -> None:
        effect = self.calls.pop(Extend, None)
        if isinstance(effect, Extend):
            alive = self.prolong(effect) if done else []
            if done and heard:
                self.keeper.extended(effect.lease_ids, alive, self.now, self.now)
            else:
                self.keeper.extend_failed(AWAY, self.now, 0.5)

    def answer_settle(self, done: bool = True, heard: bool = True) -> None:
        effect = self.calls.pop(Settle, None)
        if isinstance(effect, Settle):
            ignored = self.apply(effect) if done else []
            if done and heard:
                self.keeper.settled(ignored, self.now)
            else:
                self.keeper.settle_failed(AWAY, self.now, 0.5)

    def begin(self) -> None:
        item = self.keeper.take(self.now)
        if item is not None:
            assert item.id in self.received
            assert item.id not in self.ended
            self.handling.append(item.id)
        assert len(self.handling) <= self.keeper.concurrency

    def finish(self, retry: bool = False) -> None:
        if self.handling:
            item_id = self.handling.popleft()
            outcome: Outcome = Retry(item_id, reason="no") if retry else "done"
            self.ended[item_id] = outcome
            self.keeper.finish(item_id, outcome, self.now)

    def to_the_end(self) -> None:
        """Stop, with a server that answers everything at once."""
        self.keeper.stop()
        for _ in range(10_000):
            self.pump()
            self.finish()
            self.answer_ask(0)
            self.answer_extend()
            self.answer_settle()
            if self.keeper.ended:
                return
            self.tick(10)
        raise AssertionError("it does not end")
