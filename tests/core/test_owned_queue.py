"""A share: partitions that come and go while requests are under way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from sluiceway.adapters.storage.memory import MemoryPartitionStore
from sluiceway.contract.rebalances import PartitionState
from sluiceway.core.partition.key_slots import slot
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.queries import load
from sluiceway.core.queue.owned_queue import OwnedQueue
from sluiceway.core.queue.partition_executor import ExecutorState
from sluiceway.core.queue.tickets import Commit, Effect, Open, Reply, Request, Ticket, TransferEnd
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.changes import Snapshot
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.peers import GiveKeys, Load, Shut
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import DONE, Lease, MovedItem, Produce, Produced, ProduceKey, Selection, Settle
from sluiceway.ports.partition_store import Fence, FencedError, PartitionRef

TIMEOUT = 5_000
GRACE = 300
REF = PartitionRef("q", 0)


class World:
    """A share of a queue of three partitions, its effects and answers."""

    def __init__(self, *numbers: int, grace: int = 0) -> None:
        self.now = 1_000_000
        self.share = OwnedQueue("q", 60_000, grace)
        self.configure("available", "available", "available")
        self.commits: dict[int, Commit] = {}
        self.opens: dict[int, Open] = {}
        self.answers: dict[Ticket, object] = {}
        for number in numbers:
            self.gain(number)

    def configure(self, *states: PartitionState) -> None:
        partitions = tuple(PartitionRecord(number, state=state) for number, state in enumerate(states))
        self.share.configure(QueueRecord("q", "q", 0, 0, partitions))

    def gain(self, number: int, partition: Partition | None = None) -> None:
        self.share.gain(number)
        self.cycle()
        self.share.opened(number, self.opens.pop(number).opening, partition or Partition(), self.now)
        self.cycle()

    def cycle(self) -> None:
        effects: list[Effect] = self.share.cycle(self.now)
        for effect in effects:
            if isinstance(effect, Reply):
                self.answers[effect.ticket] = effect.result
            elif isinstance(effect, Commit):
                self.commits[effect.partition] = effect
            elif isinstance(effect, Open):
                self.opens[effect.partition] = effect
        assert not self.share.index.overlooked()

    def ask(self, request: Request) -> Ticket:
        ticket = Ticket(request, self.now + request.request_timeout)
        self.share.submit(ticket)
        self.cycle()
        return ticket

    def land(self, number: int, outcome: Outcome = Outcome.DONE) -> None:
        commit = self.commits.pop(number)
        self.share.committed(number, commit.opening, outcome, self.now)
        self.cycle()

    def code(self, ticket: Ticket) -> str:
        found = self.answers[ticket]
        assert isinstance(found, SluicewayError)
        return found.code


def produce(partition: int | None = None, key: ProduceKey | None = None) -> Produce:
    return Produce(batch_from_rows([{"payload": b"a"}]), TIMEOUT, key, partition)


def complete(*numbers: int) -> Settle:
    return Settle({number: [Selection(DONE, offsets=np.array([0]))] for number in numbers}, TIMEOUT)


def test_what_is_asked_of_a_partition_that_is_elsewhere_is_refused() -> None:
    world = World(0)
    assert world.code(world.ask(produce(1))) == "not_here"
    assert world.code(world.ask(complete(2))) == "not_here"


def test_a_share_of_nothing_takes_leases_that_wait_and_nothing_else() -> None:
    world = World()
    assert world.code(world.ask(produce())) == "not_here"
    waiting = world.ask(Lease("c", 1, TIMEOUT))
    assert waiting not in world.answers
    world.now += TIMEOUT
    world.cycle()
    assert world.answers[waiting] == []


def test_a_keyed_produce_goes_to_its_home_among_all_partitions() -> None:
    """Not among those that happen to be here: a repetition must find it wherever it is asked."""
    refused = set()
    for name in "abcdef":
        world = World(0)
        ticket = world.ask(produce(key=ProduceKey(name)))
        refused.add(ticket in world.answers)
    assert refused == {True, False}


def test_a_partition_that_is_idle_goes_at_once_and_takes_its_waiting_produces_elsewhere() -> None:
    world = World(0, 1)
    assert world.share.lose(0)
    ticket = world.ask(produce())
    world.land(1)
    assert isinstance(world.answers[ticket], Produced)


def test_a_commit_in_flight_ends_before_its_partition_goes() -> None:
    world = World(0)
    ticket = world.ask(produce())
    assert not world.share.lose(0)
    late = world.ask(produce())
    world.land(0)
    assert isinstance(world.answers[ticket], Produced)
    assert world.code(late) == "not_here"
    assert 0 not in world.share.executors


def test_after_a_drop_nobody_knows_what_became_of_a_commit() -> None:
    world = World(0)
    ticket = world.ask(produce())
    world.share.drop(0)
    world.cycle()
    assert world.code(ticket) == "outcome_unknown"
    world.land(0)
    assert world.code(ticket) == "outcome_unknown"


@pytest.mark.parametrize("lands_first", [True, False])
def test_a_lease_hands_out_what_is_durable_though_another_of_its_partitions_goes(lands_first: bool) -> None:
    """Its items waited for the end of a lease that nobody knew."""
    world = World(0, 1)
    for number in (0, 1):
        world.ask(produce(number))
        world.land(number)
    ticket = world.ask(Lease("c", 2, TIMEOUT, None, 2))
    if lands_first:
        world.land(0)
    world.share.drop(1)
    if not lands_first:
        world.land(0)
    world.cycle()
    granted = world.answers[ticket]
    assert isinstance(granted, list)
    assert [grant.info.partition for grant in granted] == [0]


def test_a_lease_with_a_key_is_unknown_if_one_of_its_partitions_goes() -> None:
    """A repetition finds all of it."""
    world = World(0, 1)
    for number in (0, 1):
        world.ask(produce(number))
        world.land(number)
    ticket = world.ask(Lease("c", 2, TIMEOUT, None, 2, "k"))
    world.land(0)
    world.share.drop(1)
    world.cycle()
    assert world.code(ticket) == "outcome_unknown"


def test_what_waits_for_a_partition_that_goes_is_told_that_it_may_be_done_in_part() -> None:
    """Not `not_here`, with which all of it would be asked of others again."""
    world = World(0, 1)
    world.ask(produce(0))
    ticket = world.ask(complete(0, 1))
    world.share.lose(0)
    world.cycle()
    assert ticket not in world.answers or world.code(ticket) == "unavailable"
    if 1 in world.commits:
        world.land(1)
    assert world.code(ticket) == "unavailable"


def test_under_one_grant_no_opening_is_used_twice() -> None:
    world = World(0)
    first = world.share.executors[0].opening
    world.share.drop(0)
    world.gain(0)
    assert world.share.executors[0].opening > first


def test_late_events_of_a_partition_that_has_gone_are_nobodys() -> None:
    world = World(0)
    opening = world.share.executors[0].opening
    world.share.drop(0)
    world.share.committed(0, opening, Outcome.DONE, world.now)
    world.share.opened(0, opening, Partition(), world.now)
    world.share.transferred(0, 1, TransferEnd(done=True), world.now)
    world.share.give_back(0, 1)
    world.share.stop_executor(0, "damaged", world.now)
    world.share.retry_now([0], world.now)
    world.gain(0)
    world.share.committed(0, opening, Outcome.UNKNOWN, world.now)
    assert world.share.executors[0].state is ExecutorState.READY


@pytest.mark.parametrize("outcome", [*Outcome])
def test_a_commit_that_ends_after_its_partition_went_and_came_does_not_open_it(outcome: Outcome) -> None:
    """After a freeze, an instance may hear all at once that its lease ran out, that it has the partition again under the same grant, and
    that its commit has landed. It then served an empty partition, and acknowledged what nothing stored."""
    world = World(0)
    world.ask(produce())
    late = world.commits[0]
    world.share.drop(0)
    world.share.gain(0)
    world.share.committed(0, late.opening, outcome, world.now)
    world.cycle()
    assert world.share.executors[0].state is ExecutorState.OPENING
    assert world.opens[0].opening > late.opening


def test_an_opening_that_ends_after_its_partition_went_and_came_is_not_used() -> None:
    world = World()
    world.share.gain(0)
    world.cycle()
    late = world.opens[0]
    world.share.drop(0)
    world.share.gain(0)
    world.share.opened(0, late.opening, Partition(), world.now)
    world.cycle()
    assert world.share.executors[0].state is ExecutorState.OPENING
    assert world.opens[0].opening > late.opening


def test_a_commit_that_ends_when_its_partition_is_to_be_read_again_does_not_keep_that_from_happening() -> None:
    world = World(0)
    ticket = world.ask(produce())
    late = world.commits[0]
    world.share.retry_now([0], world.now, anew=True)
    world.share.committed(0, late.opening, Outcome.DONE, world.now)
    world.cycle()
    assert world.opens[0].opening > late.opening
    # What has come of it is known from what the store holds.
    world.share.opened(0, world.opens[0].opening, load(Snapshot(0, None, {})), world.now)
    world.cycle()
    assert ticket not in world.answers


@pytest.mark.parametrize("has_items", [True, False])
def test_a_lease_can_be_withdrawn_until_it_is_given_something(has_items: bool) -> None:
    world = World(0)
    if has_items:
        world.ask(produce())
        world.land(0)
    ticket = world.ask(Lease("c", 1, TIMEOUT))
    assert world.share.withdraw(ticket) is not has_items
    assert ticket not in world.answers
    if has_items:
        world.land(0)
        assert ticket in world.answers
    else:
        assert world.share.stats().lease_waiting == 0


def test_no_lease_runs_out_just_after_its_partition_came_here() -> None:
    """The client may have had nobody to ask for a longer one. Later openings of the same owner have no grace of their own."""
    world = World(grace=GRACE)
    before = Partition()
    before.produce(batch_from_rows([{"payload": b"a"}]), world.now)
    before.lease(1, "c", world.now + 10, world.now, None, 1e9, True)
    taken = before.take_changes()
    assert taken is not None
    changes = taken[0]
    world.now += 100
    world.gain(0, load(Snapshot(changes.txn, changes.header, dict(changes.puts))))
    assert world.share.executors[0].partition.leased_count == 1
    assert world.share.wake_at() == world.now + GRACE
    opened_at, world.now = world.now, world.now + 200
    world.share.retry_now([0], world.now, anew=True)
    world.cycle()
    world.share.opened(0, world.opens[0].opening, load(Snapshot(changes.txn, changes.header, dict(changes.puts))), world.now)
    world.cycle()
    assert world.share.wake_at() == opened_at + GRACE
    world.now = opened_at + GRACE
    world.cycle()
    assert world.share.executors[0].partition.leased_count == 0


def test_the_load_tells_what_nobody_here_waits_for() -> None:
    world = World(0, 1)
    assert world.share.load()[:2] == (0, 0)
    world.ask(produce(0))
    world.land(0)
    assert world.share.load()[:2] == (1, 0)
    world.ask(produce(1))
    world.land(1)
    assert world.share.load()[:2] == (2, 1)
    assert World().share.load()[:2] == (0, None)


def test_a_share_says_whether_it_will_serve_a_lease_in_a_moment() -> None:
    world = World(0, 1)
    world.ask(produce(0))
    first = world.ask(Lease("c", 1, TIMEOUT))
    assert world.share.will_serve(first), "an item is being written"
    second = world.ask(Lease("c", 1, TIMEOUT))
    assert not world.share.will_serve(first), "it is one item, and two wait"
    assert world.share.withdraw(second)
    world.share.executors[0].degraded = True
    assert not world.share.will_serve(first), "its partition hangs"
    world.share.executors[0].degraded = False
    world.land(0)
    assert first not in world.answers
    assert world.share.will_serve(first), "it is being written itself"
    world.land(0)
    assert first in world.answers
    assert not world.share.will_serve(world.ask(Lease("c", 1, TIMEOUT))), "there is nothing"


def test_what_is_written_in_a_partition_that_goes_is_not_for_who_waits_here() -> None:
    world = World(0, 1)
    world.ask(produce(0))
    ticket = world.ask(Lease("c", 1, TIMEOUT))
    assert world.share.will_serve(ticket)
    world.share.lose(0)
    assert not world.share.will_serve(ticket)


# ---- partitions that take or give nothing ---------------------------------------------------------------------


def key_of(number: int) -> ProduceKey:
    return next(key for n in range(100) if slot(key := ProduceKey(f"k{n}"), 3) == number)


def test_who_has_only_partitions_that_take_nothing_says_that_others_may() -> None:
    world = World(0, 1)
    world.configure("draining", "draining", "available")
    assert world.code(world.ask(produce())) == "not_here"
    assert world.share.load().emptiest is None
    whole = World(0, 1, 2)
    whole.configure("draining", "paused", "preparing")
    waiting = whole.ask(produce())
    assert waiting not in whole.answers
    whole.configure("draining", "paused", "available")
    whole.cycle()
    whole.land(2)
    assert whole.answers[waiting] == Produced(2, 0, 1, False)


def test_a_home_that_is_here_no_more_is_asked_for_elsewhere() -> None:
    world = World(0)
    key = key_of(0)
    giving = world.ask(GiveKeys(0, (0, 1, 2), 3, 1, TIMEOUT))
    world.land(0)
    assert giving in world.answers
    assert world.code(world.ask(produce(key=key))) == "not_here"
    whole = World(0, 1, 2)
    whole.ask(GiveKeys(0, (0, 1, 2), 3, 1, TIMEOUT))
    whole.land(0)
    assert whole.ask(produce(key=key)) not in whole.answers, "nobody else has it: the record must change"


def test_what_is_paused_here_is_waited_for_here() -> None:
    world = World(0)
    world.configure("paused", "available", "available")
    keyed, named = world.ask(produce(key=key_of(0))), world.ask(produce(0))
    assert not world.answers
    world.configure("available", "available", "available")
    world.cycle()
    world.land(0)
    assert {world.answers[keyed], world.answers[named]} == {Produced(0, 0, 1, False), Produced(0, 1, 1, False)}


def test_what_is_held_back_is_not_there_for_others() -> None:
    world = World(0)
    world.ask(produce(0))
    world.land(0)
    assert world.share.load() == Load(1, 1)
    world.configure("paused", "available", "available")
    assert world.share.load() == Load(0, None)
    waiting = world.ask(Lease("c", 1, TIMEOUT))
    assert not world.share.will_serve(waiting)
    assert not world.commits
    world.configure("draining", "available", "available")
    assert world.share.load().emptiest is None
    world.cycle()
    world.land(0)
    assert waiting in world.answers


def test_a_partition_that_is_gained_follows_the_record() -> None:
    world = World(1)
    world.configure("paused", "draining", "available")
    world.gain(0)
    assert world.code(world.ask(produce())) == "not_here"
    assert [executor.shown for executor in world.share.executors.values()] == ["draining", "paused"]


def test_a_shut_partition_is_not_offered() -> None:
    world = World(0)
    world.ask(Shut(0, "read_only", 1, TIMEOUT))
    world.land(0)
    assert world.share.load() == Load(0, None)
    assert world.code(world.ask(produce())) == "not_here"


def test_a_lease_is_not_waited_for_where_nothing_is_given_out() -> None:
    world = World(0)
    world.ask(produce(0))
    world.land(0)
    world.configure("paused", "available", "available")
    world.ask(Shut(0, "read_only", 1, TIMEOUT))
    assert world.share.executors[0].state is ExecutorState.COMMITTING
    assert not world.share.will_serve(world.ask(Lease("c", 1, TIMEOUT)))


def test_moved_items_wait_for_their_partition_though_it_is_sealed() -> None:
    """Nobody else can take them, nor say that they have not arrived."""
    world = World(0)
    world.ask(Shut(0, "sealed", 1, TIMEOUT))
    world.land(0)
    key = ProduceKey("move/q.1/1", "move/q.1", 1)
    ticket = world.ask(Produce(batch_from_rows([{"payload": b"a"}]), TIMEOUT, key, 0, (MovedItem(1, 0),)))
    assert ticket not in world.answers
    world.now += TIMEOUT
    world.cycle()
    assert world.code(ticket) == "unavailable"


def queued(world: World) -> bool:
    return world.share.is_queued


def test_a_share_is_queued_while_requests_wait_behind_a_commit_in_each_of_its_partitions() -> None:
    world = World(0, 1)
    rows = batch_from_rows([{"payload": b"x"}])
    assert not queued(world)
    for number in (0, 1):
        world.ask(Produce(rows, TIMEOUT, partition=number))
    assert not queued(world), "nothing waits behind them"
    world.ask(Produce(rows, TIMEOUT, partition=0))
    assert not queued(world), "the other could take more"
    world.ask(Produce(rows, TIMEOUT, partition=1))
    assert queued(world)
    world.land(0)
    assert not queued(world)


class Walk(World):
    """A share of one partition, over a store whose answers come in any order, also after the partition went and came again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = MemoryPartitionStore()
        self.late: list[Callable[[], None]] = []
        super().__init__()
        self.share.gain(0)

    def cycle(self) -> None:
        super().cycle()
        for commit in self.commits.values():
            outcome = asyncio.run(self.store.apply(REF, commit.changes, Fence(1, 1, commit.opening)))
            self.late.append(partial(self.share.committed, 0, commit.opening, outcome, self.now))
        for each in self.opens.values():
            try:
                loaded: Partition | Exception = load(asyncio.run(self.store.open(REF, Fence(1, 1, each.opening))))
            except FencedError as error:
                loaded = error
            self.late.append(partial(self.share.opened, 0, each.opening, loaded, self.now))
        self.commits.clear()
        self.opens.clear()

    def step(self) -> None:
        match self.random.randrange(6):
            case 0:
                self.share.drop(0)
            case 1:
                if 0 not in self.share.executors:
                    self.share.gain(0)
            case 2:
                self.cycle()
            case 3:
                self.share.submit(Ticket(produce(), self.now + TIMEOUT))
            case _:
                if self.late:
                    self.late.pop(self.random.randrange(len(self.late)))()
        executor, stored = self.share.executors.get(0), self.store._partitions.get(REF)
        if executor is not None and executor.takes_work and stored is not None and stored.fence.opening == executor.opening:
            assert executor.partition.txn >= stored.txn, "what is in memory is behind the store"


@pytest.mark.parametrize("seed", range(60))
def test_what_is_acknowledged_is_stored_in_whatever_order_late_answers_come(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(400):
        walk.step()
    stored = load(asyncio.run(walk.store.browse(REF))).log.header.next
    offsets = [answer.first_offset for answer in walk.answers.values() if isinstance(answer, Produced)]
    assert len({*offsets}) == len(offsets) <= stored
    assert all(offset < stored for offset in offsets)
