"""Quotas of a queue's concurrency: owners over one record, whose partitions move, whose answers get lost, and who crash and freeze."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from sluiceway.core.group.group_records import Token
from sluiceway.core.queue.owned_queue import OwnedQueue
from sluiceway.core.queue.queue_slots import FRESH, LOOK, Decided, Held, QueueSlots, Share, SlotRecord, decide, targets
from sluiceway.core.queue.tickets import AdjustSlots, Effect, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Lease
from tests.core.queue_rig import LEASE_TIMEOUT, START, Rig, lease, settle

# ---- owners over one record -----------------------------------------------------------------------------------


class Store:
    """A partition's store: what is leased there, and until when; the highest fence may write."""

    def __init__(self) -> None:
        self.fence = Token(0, 0)
        self.leased: list[Millis] = []
        self.backlog = 0
        self.served = 0


class Serving:
    """An owner's view of a partition: `leased` and `durable` as an executor has them."""

    def __init__(self, token: Token) -> None:
        self.token = token
        self.is_open = False
        self.leased: list[Millis] = []
        self.durable = 0
        self.ends_at: Millis | None = None
        """When the commit in flight ends."""

    @property
    def count(self) -> int:
        return max(self.durable, len(self.leased))


class Owner:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.slots = QueueSlots(world.limit)
        self.serving: dict[int, Serving] = {}
        self.is_unsure = False
        self.read: tuple[int, SlotRecord] | None = None
        self.act_at: Millis | None = None
        self.writes: tuple[int, SlotRecord, Decided] | None = None
        self.frozen_until: Millis = 0

    def tokens(self) -> dict[int, Token]:
        return {number: each.token for number, each in self.serving.items()}

    def step(self) -> None:
        world = self.world
        if world.now < self.frozen_until:
            return
        if self.act_at is not None and self.act_at <= world.now:
            self._act()
        unmet = {}
        for number, each in self.serving.items():
            store = world.stores[number]
            if not each.is_open:
                if world.random.random() < 0.2:
                    # Opening it fences others off, and shows what is leased.
                    store.fence = max(store.fence, each.token)
                    if store.fence == each.token:
                        each.is_open, each.leased, each.durable = True, list(store.leased), len(store.leased)
                continue
            if each.ends_at is not None:
                if each.ends_at <= world.now:
                    self._commit(store, each)
                continue
            before = list(each.leased)
            each.leased = [end for end in each.leased if end > world.now]
            want = min(store.backlog, world.asks)
            most = max(0, self.slots.quota(number) - len(each.leased))
            if want > most:
                unmet[number] = want - most
            each.leased += [world.now + world.lasts()] * min(want, most)
            if each.leased != before:
                each.ends_at = world.now + world.random.randint(0, world.latency)
        for number, each in self.serving.items():
            self.slots.note(number, each.is_open, each.count, unmet.get(number, 0), world.now)
        if self.slots.wish(world.now):
            self.read, self.writes = None, None
            self.act_at = world.now + world.random.randint(0, world.latency)

    def _commit(self, store: Store, each: Serving) -> None:
        world, each.ends_at = self.world, None
        fails, is_lost = world.random.random() < world.fails, world.random.random() < world.fails
        if store.fence == each.token and not fails:
            new = [end for end in each.leased if end not in store.leased or each.leased.count(end) > store.leased.count(end)]
            store.backlog -= len(new)
            store.served += len(new)
            store.leased = list(each.leased)
            world.check()
        if fails or is_lost or store.fence != each.token:
            each.is_open = False
        else:
            each.durable = len(each.leased)

    def _act(self) -> None:
        """Read; or decide and send; or hear how it ended. Anything may happen between."""
        world = self.world
        if self.read is None:
            self.read = world.stamp, world.record
            stamp, before = self.read
            held = self.slots.held(self.tokens(), world.now)
            decided = world.decides(before, held, set(), world.now)
            self.slots.begin(before, decided, self.tokens())
            self.writes = stamp, decided.record, decided
            self.act_at = world.now + world.random.randint(0, world.latency)
            return
        assert self.writes is not None
        stamp, after, decided = self.writes
        self.act_at = None
        if not self.is_unsure and after == self.read[1]:
            self.slots.done(decided, self.tokens(), world.now)
            return
        chance = world.random.random()
        if chance < world.loses:
            # It may land now, later, or never.
            self.is_unsure = True
            self.slots.failed(world.now)
            if chance < world.loses / 2:
                world.stragglers.append((world.now + world.random.randint(0, 400), stamp, after))
        elif stamp != world.stamp:
            self.read = self.writes = None
            self.act_at = world.now
        else:
            world.write(after)
            self.is_unsure = False
            self.slots.done(decided, self.tokens(), world.now)

    def drop(self, number: int) -> None:
        del self.serving[number]
        self.slots.drop(number)


class World:
    def __init__(self, limit: int, owners: int, partitions: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.now: Millis = START
        self.limit, self.stamp, self.record = limit, 0, SlotRecord(limit)
        self.stores = {number: Store() for number in range(partitions)}
        self.owners = [Owner(self, chr(ord("a") + at)) for at in range(owners)]
        self.grants = 0
        self.stragglers: list[tuple[Millis, int, SlotRecord]] = []
        self.latency, self.asks, self.holds = 5, 10, (50, 200)
        self.fails = self.loses = 0.0
        self.used: list[int] = []
        self.allowed = limit
        self.decides = decide
        for number in self.stores:
            self.grant(number, self.owners[number % owners])

    def lasts(self) -> Millis:
        # Unlike any other, so that leases can be told apart.
        return self.random.randint(*self.holds)

    def grant(self, number: int, owner: Owner) -> None:
        self.grants += 1
        if number in owner.serving:
            owner.drop(number)
        owner.serving[number] = Serving(Token(1, self.grants))

    def write(self, record: SlotRecord) -> None:
        self.stamp, self.record = self.stamp + 1, record

    def check(self) -> None:
        """What the stores have leased, whether or not it has run out: nobody has said so there."""
        leased = sum(len(each.leased) for each in self.stores.values())
        assert leased <= self.allowed, f"{leased} items are leased, of {self.allowed}"

    def run(self, millis: Millis) -> None:
        for _ in range(millis):
            for at, stamp, record in self.stragglers:
                if at == self.now and stamp == self.stamp:
                    self.write(record)
            for each in self.random.sample(self.owners, len(self.owners)):
                each.step()
            self.used.append(sum(sum(end > self.now for end in each.leased) for each in self.stores.values()))
            self.now += 1

    def load(self, items: int, *numbers: int) -> None:
        for number in numbers or self.stores:
            self.stores[number].backlog += items


def share_used(world: World, millis: Millis) -> float:
    return sum(world.used[-millis:]) / millis / world.limit


@pytest.mark.parametrize(("limit", "owners", "partitions"), [(5, 1, 1), (5, 1, 4), (20, 1, 8), (20, 3, 6), (100, 3, 7), (8, 3, 8)])
def test_the_limit_is_used_under_load_and_never_exceeded(limit: int, owners: int, partitions: int) -> None:
    world = World(limit, owners, partitions, 1)
    world.load(1_000_000)
    world.run(10_000)
    assert share_used(world, 8_000) >= 0.9, "commits take their time, too"
    served = [each.served for each in world.stores.values()]
    assert min(served) >= sum(served) / partitions / 4, f"one starves: {served}"


@pytest.mark.parametrize(("limit", "owners", "partitions"), [(1, 1, 3), (1, 2, 4), (3, 3, 9)])
def test_with_fewer_slots_than_partitions_they_take_turns(limit: int, owners: int, partitions: int) -> None:
    world = World(limit, owners, partitions, 1)
    world.load(1_000_000)
    world.run(60_000)
    assert share_used(world, 50_000) >= 0.8
    served = [each.served for each in world.stores.values()]
    assert min(served) >= sum(served) / partitions / 5, f"one starves: {served}"


def test_items_of_one_partition_get_the_whole_limit() -> None:
    world = World(30, 3, 6, 2)
    world.load(10_000, 4)
    world.asks = 100
    world.run(3_000)
    assert share_used(world, 1_000) >= 0.9
    world.load(10_000, 0)
    world.run(4_000)
    ratio = sum(end > world.now for end in world.stores[0].leased) / 30
    assert 0.3 <= ratio <= 0.7


@pytest.mark.parametrize("seed", range(60))
def test_random_histories_keep_to_the_limit(seed: int) -> None:
    """Partitions move, owners crash and freeze, commits fail, answers get lost and writes land late. Then all of it is used again."""
    chance = random.Random(seed)
    world = World(chance.choice([1, 4, 20]), chance.randint(1, 4), chance.randint(1, 6), seed)
    run_wild(world, chance)
    settle_down(world)
    assert share_used(world, 3_000) >= 0.5, f"some of it is lost: {world.record}"


def run_wild(world: World, chance: random.Random) -> None:
    world.load(1_000_000)
    for _ in range(30):
        world.fails, world.loses = chance.choice([0, 0.1]), chance.choice([0, 0.3])
        world.latency, world.asks = chance.choice([0, 5, 100]), chance.choice([1, 10, 100])
        event = chance.random()
        owner = chance.choice(world.owners)
        if event < 0.4:
            # The former owner may hear of it later.
            number = chance.choice(sorted(world.stores))
            if chance.random() < 0.5:
                for each in world.owners:
                    if number in each.serving:
                        each.drop(number)
            world.grant(number, owner)
        elif event < 0.5:
            at = world.owners.index(owner)
            world.owners[at] = Owner(world, owner.name)
            for number in owner.serving:
                world.grant(number, chance.choice(world.owners))
        elif event < 0.6:
            owner.frozen_until = world.now + 1_500
            for number in list(owner.serving):
                world.grant(number, chance.choice(world.owners))
        elif event < 0.7:
            limit = chance.choice([1, 4, 20])
            world.limit, world.allowed = limit, max(world.allowed, limit)
            world.write(msgspec.structs.replace(world.record, limit=limit))
        world.run(chance.choice([10, 100, 500]))
        if world.record.free >= 0:
            world.allowed = max(world.limit, sum(len(each.leased) for each in world.stores.values()))


def settle_down(world: World) -> None:
    """From now on everything works, and each partition has one owner."""
    world.fails = world.loses = 0
    world.latency, world.asks = 5, 30
    for each in world.owners:
        each.frozen_until = 0
        for number in list(each.serving):
            each.drop(number)
    for number in world.stores:
        world.grant(number, world.random.choice(world.owners))
    world.run(FRESH + 6_000)
    assert sum(len(each.leased) for each in world.stores.values()) <= world.limit
    world.allowed = world.limit
    world.run(3_000)


def without_tokens(record: SlotRecord, held: dict[int, Held], gone: Any, now: Millis) -> Decided:
    """An earlier owner writes on."""
    return decide(
        msgspec.structs.replace(record, shares={n: msgspec.structs.replace(s, token=Token(0, 0)) for n, s in record.shares.items()}),
        held,
        gone,
        now,
    )


def below_what_is_leased(record: SlotRecord, held: dict[int, Held], gone: Any, now: Millis) -> Decided:
    """A quota is given away while its items are still leased."""
    decided = decide(record, held, gone, now)
    lower = {n: msgspec.structs.replace(s, quota=min(s.quota, decided.ceilings.get(n, s.quota))) for n, s in decided.record.shares.items()}
    return decided._replace(record=msgspec.structs.replace(decided.record, shares=lower))


def beyond_the_limit(record: SlotRecord, held: dict[int, Held], gone: Any, now: Millis) -> Decided:
    """Each takes what it wants."""
    decided = decide(record, held, gone, now)
    more = {
        n: msgspec.structs.replace(s, quota=max(s.quota, held[n].leased + held[n].wanted) if n in held else s.quota)
        for n, s in decided.record.shares.items()
    }
    return decided._replace(record=msgspec.structs.replace(decided.record, shares=more))


@pytest.mark.parametrize("mistake", [without_tokens, below_what_is_leased, beyond_the_limit])
def test_planted_mistakes_are_found(mistake: Any) -> None:
    def found(seed: int) -> bool:
        chance = random.Random(seed)
        world = World(chance.choice([1, 4, 20]), chance.randint(2, 4), chance.randint(2, 6), seed)
        world.decides = mistake
        try:
            run_wild(world, chance)
            settle_down(world)
        except AssertionError:
            return True
        return False

    assert any(found(seed) for seed in range(20))


# ---- single decisions -----------------------------------------------------------------------------------------

ME, OTHER, LATER = Token(1, 1), Token(1, 2), Token(1, 3)


def quotas(decided: Decided) -> dict[int, int]:
    return {number: share.quota for number, share in decided.record.shares.items()}


@pytest.mark.parametrize(
    ("limit", "needs", "found"),
    [
        (10, {0: 3}, {0: 10}),
        (10, {0: 3, 1: 0}, {0: 10, 1: 0}),
        (10, {0: 20, 1: 20}, {0: 5, 1: 5}),
        (10, {0: 2, 1: 20}, {0: 2, 1: 8}),
        (10, {0: 2, 1: 4}, {0: 4, 1: 6}),
        (11, {0: 9, 1: 9}, {0: 6, 1: 5}),
        (7, {0: 1, 1: 9, 2: 9}, {0: 1, 1: 3, 2: 3}),
        (5, {}, {}),
    ],
)
def test_the_limit_is_divided_by_need(limit: int, needs: dict[int, int], found: dict[int, int]) -> None:
    assert targets(limit, needs, START) == found


def test_turns_come_to_each() -> None:
    turns = [targets(2, dict.fromkeys(range(5), 1), START + 2_000 * turn) for turn in range(200)]
    assert all(sum(each.values()) == 2 for each in turns)
    count = Counter(number for each in turns for number, quota in each.items() if quota)
    assert min(count.values()) > 40


def test_an_owner_takes_what_is_free() -> None:
    decided = decide(SlotRecord(5), {0: Held(ME, True, 0, 1)}, (), START)
    assert quotas(decided) == {0: 5}
    assert decided.record.shares[0].token == ME


def test_a_later_owner_is_not_disturbed() -> None:
    record = SlotRecord(5, shares={0: Share(LATER, 3)})
    decided = decide(record, {0: Held(ME, True, 0, 9)}, (), START)
    assert decided.record == record


def test_who_has_too_much_gives_it_when_its_leases_end() -> None:
    record = SlotRecord(6, shares={0: Share(ME, 6), 1: Share(OTHER, 0, 6, START)})
    decided = decide(record, {0: Held(ME, True, 5, 9)}, (), START)
    assert quotas(decided) == {0: 5, 1: 0}
    assert decided.ceilings == {0: 3}
    decided = decide(decided.record, {0: Held(ME, True, 2, 9)}, (), START)
    assert quotas(decided) == {0: 3, 1: 0}


def test_a_need_that_is_not_renewed_is_forgotten() -> None:
    record = SlotRecord(6, shares={0: Share(ME, 6), 1: Share(OTHER, 0, 6, START)})
    decided = decide(record, {0: Held(ME, True, 2, 9)}, (), START + FRESH)
    assert decided.record == record


def test_what_is_not_used_is_given_back_and_what_is_leased_is_kept() -> None:
    record = SlotRecord(6, shares={0: Share(ME, 4), 1: Share(ME, 2)})
    decided = decide(record, {0: Held(ME, True, 0, 0), 1: Held(ME, True, 2, 0)}, (), START)
    assert quotas(decided) == {0: 0, 1: 2}


def test_no_quota_is_raised_before_all_leases_are_counted() -> None:
    record = SlotRecord(6, (0, 1))
    decided = decide(record, {0: Held(ME, True, 4, 9)}, (), START)
    assert decided.record.unclaimed == (1,)
    assert quotas(decided) == {0: 4}
    decided = decide(decided.record, {0: Held(ME, True, 4, 9), 1: Held(ME, False)}, (), START)
    assert decided.record.unclaimed == (1,), "it is not known before it is open"
    decided = decide(decided.record, {0: Held(ME, True, 4, 9), 1: Held(ME, True, 3, 9)}, (), START)
    assert quotas(decided) == {0: 4, 1: 3}, "more than the limit, until leases end"
    decided = decide(decided.record, {0: Held(ME, True, 2, 9), 1: Held(ME, True, 3, 9)}, (), START)
    assert quotas(decided) == {0: 3, 1: 3}


def test_a_partition_that_is_gone_leaves_its_quota() -> None:
    record = SlotRecord(6, (2,), {0: Share(ME, 6), 1: Share(OTHER, 0)})
    decided = decide(record, {1: Held(OTHER, True, 0, 9)}, {0, 2}, START)
    assert quotas(decided) == {1: 6}
    assert not decided.record.unclaimed


def test_a_record_is_read_as_it_was_written() -> None:
    record = SlotRecord(6, (2,), {0: Share(ME, 6, 3, START)})
    assert msgspec.json.decode(msgspec.json.encode(record), type=SlotRecord) == record


# ---- in a logical queue ---------------------------------------------------------------------------------------


class LimitedRig(Rig):
    """With a record of its own, which is looked at when the test says so."""

    def __init__(self, partitions: int = 1) -> None:
        self.looks: list[AdjustSlots] = []
        self.record = SlotRecord(0)
        super().__init__(partitions)

    def other(self, effect: Effect) -> bool:
        if isinstance(effect, AdjustSlots):
            self.looks.append(effect)
            return True
        return False

    def look(self) -> None:
        slots = self.looks.pop().slots
        tokens = dict.fromkeys(self.queue.executors, ME)
        decided = decide(self.record, slots.held(tokens, self.now), (), self.now)
        slots.begin(self.record, decided, tokens)
        self.record = decided.record
        slots.done(decided, tokens, self.now)
        self.cycle()


def limited(limit: int, items: int = 100, partitions: int = 1) -> LimitedRig:
    rig = LimitedRig(partitions)
    for number in range(partitions):
        rig.fill(number, items)
    rig.record = SlotRecord(limit)
    rig.configure(concurrency=limit)
    rig.look()
    return rig


def items_of(rig: Rig, ticket: Ticket) -> int:
    return sum(grant.items for grant in rig.grants(ticket))


def test_no_more_is_leased_than_the_limit_and_the_next_when_it_is_settled() -> None:
    rig = limited(3)
    first = rig.ask(lease(10))
    rig.look()
    rig.end_all()
    assert items_of(rig, first) == 3
    waits = rig.ask(lease(10, 20_000))
    rig.wait(1_000)
    assert waits not in rig.answers
    rig.ask(settle({0: [0, 1]}))
    rig.end(0)
    rig.end_all()
    assert items_of(rig, waits) == 2


def test_leases_in_flight_count_at_once() -> None:
    rig = limited(3)
    first = rig.ask(lease(2, 20_000))
    rig.look()
    second = rig.ask(lease(2, 20_000))
    rig.end_all()
    assert items_of(rig, first) + items_of(rig, second) == 3


def test_what_a_refused_commit_returns_is_leased_no_more() -> None:
    rig = limited(2)
    ticket = rig.ask(lease(2, 20_000))
    rig.look()
    rig.end(0, Outcome.REFUSED)
    rig.open(0)
    rig.end_all()
    assert items_of(rig, ticket) == 2


def test_a_quota_is_not_given_away_for_a_settlement_that_may_fail() -> None:
    rig = limited(2, partitions=2)
    ticket = rig.ask(Lease("c", 2, 0, partition=0))
    rig.look()
    rig.end_all()
    assert items_of(rig, ticket) == 2
    rig.ask(settle({0: [0, 1]}))
    waits = rig.ask(Lease("c", 2, 20_000, partition=1))
    rig.wait(200)
    rig.look()
    assert rig.record.shares[0].quota == 2, "the settlement is in flight"
    rig.end(0, Outcome.UNKNOWN, landed=False)
    rig.open(0)
    rig.wait(200)
    assert waits not in rig.answers
    rig.ask(settle({0: [0, 1]}))
    rig.end(0)
    while rig.looks:
        rig.look()
    rig.end_all()
    assert items_of(rig, waits) == 1, "each has a part while both want some"
    assert rig.record.free == 0


def test_a_lease_that_does_not_wait_gets_what_is_free_elsewhere() -> None:
    rig = limited(4, partitions=2)
    rig.ask(Lease("c", 1, 0, partition=0))
    rig.look()
    rig.end_all()
    other = rig.ask(Lease("c", 3, 0, partition=1))
    rig.wait(5)
    rig.look()
    rig.end_all()
    assert items_of(rig, other) == 3
    none = rig.ask(Lease("c", 1, 0, partition=1))
    while rig.looks:
        rig.look()
    assert rig.answers[none] == []


def test_the_limit_is_lowered_and_turned_off_live() -> None:
    rig = limited(5)
    rig.ask(lease(5))
    rig.look()
    rig.end_all()
    rig.record = msgspec.structs.replace(rig.record, limit=2)
    rig.configure(concurrency=2)
    waits = rig.ask(lease(5, 20_000))
    while rig.looks:
        rig.look()
    rig.ask(settle({0: [0, 1, 2]}))
    rig.end_all()
    rig.wait(200)
    rig.look()
    assert waits not in rig.answers
    rig.ask(settle({0: [3]}))
    rig.end_all()
    while rig.looks:
        rig.look()
    rig.end_all()
    assert items_of(rig, waits) == 1
    rig.configure()
    ticket = rig.ask(lease(50))
    rig.end_all()
    assert items_of(rig, ticket) == 50
    assert not rig.looks


def test_an_idle_queue_gives_its_quota_back_and_rests() -> None:
    rig = limited(5)
    ticket = rig.ask(lease(1))
    rig.look()
    rig.end_all()
    rig.ask(settle({0: [0]}))
    rig.end_all()
    assert items_of(rig, ticket) == 1
    for _ in range(4):
        rig.wait(LOOK)
        if rig.looks:
            rig.look()
    assert rig.record.free == 5
    rig.wait(10 * LOOK)
    assert not rig.looks
    assert rig.queue.wake_at() is None


def test_other_instances_hear_of_items_for_which_there_is_no_quota_yet() -> None:
    rig = limited(5)
    share = OwnedQueue("q", LEASE_TIMEOUT)
    share.slots, share.index, share.executors = rig.queue.slots, rig.queue.index, rig.queue.executors
    assert share.load().ready == 1
    rig.record = SlotRecord(5, shares={**rig.record.shares, 9: Share(LATER, 5)})
    waits = rig.ask(lease(1, 50))
    rig.look()
    rig.wait(2_000)
    while rig.looks:
        rig.look()
    assert rig.answers[waits] == []
    rig.wait(LOOK)
    assert share.load().ready == 1, "it may be otherwise by now"
