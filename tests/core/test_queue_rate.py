"""Tokens of a queue's rate: instances over one record, whose answers get lost, that crash, and whose clocks differ."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from sluiceway.contract.queue_settings import Rate
from sluiceway.core.queue.owned_queue import OwnedQueue
from sluiceway.core.queue.queue_rate import HORIZON, KEEP, REMOTE, TOKEN, WRONG_CLOCK, QueueRate, RateRecord, Reservation, take
from sluiceway.core.queue.tickets import Effect, TakeTokens, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Lease
from tests.core.queue_rig import LEASE_TIMEOUT, START, Rig, lease

# ---- instances over one record --------------------------------------------------------------------------------


class Instance:
    """One that leases what it may, as a logical queue does: it acts when something happened, or its `wake_at` has come."""

    def __init__(self, world: World, name: str, ahead: Millis = 0) -> None:
        self.world, self.name, self.ahead = world, name, ahead
        self.rate = QueueRate(world.rate, 1)
        self.backlog = 0
        self.leased: list[Millis] = []
        self.answer_at: Millis | None = None
        self.wanted: tuple[int, Millis] = (0, 0)
        self.stamp: int | None = -1
        self.known: RateRecord | None = None

    def step(self, happened: bool) -> None:
        now = self.world.now + self.ahead
        if self.answer_at is not None and self.answer_at <= self.world.now:
            self.answer_at = None
            self._change(now)
            happened = True
        if not happened and (self.rate.wake_at is None or self.rate.wake_at > now):
            return
        # Not always at once: the event loop has other work.
        if self.world.random.random() < self.world.sluggish:
            return
        count = min(self.backlog, self.rate.available(now))
        if count:
            self.rate.use(count, now)
            self.backlog -= count
            self.leased += [self.world.now] * count
        want = self.rate.wish(self.backlog, self.backlog, now + 20_000, now)
        if want:
            self.wanted = want, now + 20_000
            self.answer_at = self.world.now + self.world.random.randint(0, self.world.latency)

    def _change(self, now: Millis) -> None:
        """Compare and swap, from what was last seen."""
        world = self.world
        if world.random.random() < world.fails:
            self.stamp = -1
            self.rate.failed(now)
            return
        if self.stamp != world.stamp:
            self.known, self.stamp = world.record, world.stamp
        taken = take(self.known, self.rate.rate, self.rate.version, self.name, *self.wanted, now)
        assert taken is not None
        if taken.tokens is not None:
            world.stamp += 1
            world.record, self.known, self.stamp = taken.record, taken.record, world.stamp
            if world.random.random() < world.loses:
                self.rate.failed(now)
                return
        self.rate.taken(taken.record, taken.tokens, self.name, now)

    def crash(self) -> None:
        """It forgets everything, and begins anew."""
        self.rate, self.stamp, self.known, self.answer_at = QueueRate(self.world.rate, 1), -1, None, None


class World:
    def __init__(self, rate: Rate, seed: int, names: str = "a", *, latency: Millis = 3, ahead: Millis = 0) -> None:
        self.rate, self.random = rate, random.Random(seed)
        self.now: Millis = START
        self.record: RateRecord | None = None
        self.stamp = 0
        self.latency = latency
        self.fails = self.loses = self.sluggish = 0.0
        self.instances = [Instance(self, name, ahead * at) for at, name in enumerate(names)]

    def run(self, millis: Millis, produce: float = 0.0) -> None:
        """`produce`: items that come to each instance in a millisecond, on average."""
        for _ in range(millis):
            for each in self.random.sample(self.instances, len(self.instances)):
                more = int(produce) + (self.random.random() < produce % 1)
                each.backlog += more
                each.step(more > 0)
            self.now += 1

    def load(self, items: int) -> None:
        for each in self.instances:
            each.backlog += items
            each.step(True)

    @property
    def leased(self) -> list[Millis]:
        return sorted(at for each in self.instances for at in each.leased)

    def check(self, late: Millis = KEEP) -> None:
        """In no span of time were more items leased than the rate allows for it and `late` ms more."""
        speed, found = self.rate.per_second / 1_000, self.leased
        # For each begin, how far the leases are ahead of the rate: a maximum over spans in one pass.
        lead = lowest = 0.0
        for at, time in enumerate(found):
            lowest = min(lowest, at - speed * (time - START))
            lead = max(lead, at + 1 - speed * (time - START) - lowest)
        assert lead <= self.rate.burst + speed * late + 1e-6, f"{lead} at once"


RATES = [Rate(1), Rate(10), Rate(100), Rate(1_000), Rate(10, 50), Rate(300, 1_000), Rate(20_000, 10)]


@pytest.mark.parametrize("rate", RATES, ids=str)
@pytest.mark.parametrize("names", ["a", "abc", "abcdefgh"])
def test_the_rate_is_used_under_load_and_never_exceeded(rate: Rate, names: str) -> None:
    world = World(rate, 1, names)
    world.load(1_000_000)
    world.run(20_000)
    world.check(late=world.latency + 1)
    since = [at for at in world.leased if at >= START + 2_000]
    assert len(since) >= 0.95 * rate.per_second * 18
    shares = Counter({each.name: len(each.leased) for each in world.instances})
    fair = len(world.leased) / len(names)
    assert min(shares.values()) >= max(1, fair / 4), f"one starves: {shares}"


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_keep_to_the_rate(seed: int) -> None:
    """Answers get lost, writes fail, instances crash, are slow, and have more or less to do."""
    chance = random.Random(seed)
    rate = Rate(chance.choice([0.5, 5, 50, 500, 5_000]), chance.choice([1, 10, 1_000]))
    world = World(rate, seed, "abcd"[: chance.randint(1, 4)], latency=chance.choice([0, 5, 100]))
    for _ in range(20):
        world.fails, world.loses = chance.choice([0, 0, 0.3]), chance.choice([0, 0, 0.3])
        world.sluggish = chance.choice([0, 0, 0.9])
        if chance.random() < 0.3:
            chance.choice(world.instances).crash()
        world.run(chance.choice([10, 300, 1_000]), chance.choice([0, 0.1, 1]) * rate.per_second / 1_000)
    world.check()
    # Nothing is left behind that would hold the rate up: all of it is used again.
    world.fails = world.loses = world.sluggish = 0
    world.load(1_000_000)
    world.run(3_000)
    before = len(world.leased)
    world.run(8_000)
    world.check()
    assert len(world.leased) - before >= 0.95 * 8 * rate.per_second - 1


def test_with_clocks_that_differ_the_rate_holds_in_the_long_run() -> None:
    world = World(Rate(100, 10), 3, "abc", ahead=700)
    world.load(100_000)
    world.run(30_000)
    world.check(late=KEEP + 1_400)
    assert len(world.leased) >= 0.95 * 3_000


def test_a_control_group_that_counts_nothing_is_found() -> None:
    """Without the record, each instance has the whole rate."""
    world = World(Rate(100), 1, "ab")
    world.load(10_000)
    for _ in range(2_000):
        world.record = None
        world.run(1)
    with pytest.raises(AssertionError, match="at once"):
        world.check()


# ---- single decisions -----------------------------------------------------------------------------------------


def tokens(record: RateRecord | None, want: int, rate: Rate, version: int = 1, name: str = "a", until: Millis = START + 20_000) -> tuple:  # type: ignore[type-arg]
    taken = take(record, rate, version, name, want, until, START)
    assert taken is not None
    return taken.record, taken.tokens


def test_a_new_bucket_is_full_and_is_not_emptied_twice() -> None:
    rate = Rate(1, 50)
    record, held = tokens(None, 80, rate)
    assert held.left == 50
    assert held.available(START) == 50
    assert record.level == 0
    assert tokens(record, 1, rate, name="b")[1] is None, "the next comes in a second"


def test_tokens_are_released_one_after_the_other_and_not_kept() -> None:
    record, held = tokens(None, 5, Rate(10))
    assert [held.available(START + at) for at in (0, 99, 100, 399, 400)] == [1, 1, 2, 4, 5]
    held.use(1)
    assert held.next_at == START + 100
    assert [held.available(START + at) for at in (400 + KEEP - 1, 400 + KEEP)] == [1, 0]
    assert not held.left
    assert record.level == -4 * TOKEN


def test_no_tokens_are_reserved_for_leases_that_will_have_ended() -> None:
    record, held = tokens(None, 5, Rate(10), until=START + 150)
    assert held.left == 2
    assert tokens(record, 5, Rate(10), until=START)[1] is None


def test_the_instance_that_took_last_lets_others_go_first() -> None:
    record, _ = tokens(None, 100, Rate(10))
    later, held = tokens(record, 100, Rate(10), name="b")
    assert held is None, "all of the next 400 ms are taken"
    record = msgspec.structs.replace(record, level=-2 * TOKEN, takers=(("b", START - 9), ("a", START - 1)))
    assert tokens(record, 1, Rate(10), name="a")[1] is None
    later, held = tokens(record, 1, Rate(10), name="b")
    assert held.left == 1
    assert later.takers == (("a", START - 1), ("b", START))


def test_a_change_of_the_rate_drops_reservations_and_keeps_what_is_in_the_bucket() -> None:
    record, _ = tokens(None, 1_000_000, Rate(1_000_000))
    assert record.level < 0
    record, held = tokens(record, 5, Rate(10, 5), version=2)
    assert held.left == 4, "none is there, four come within the horizon"
    full = RateRecord(1, Rate(10, 50), 50 * TOKEN, START)
    assert tokens(full, 100, Rate(1, 8), version=2)[1].available(START) == 8
    assert tokens(full, 100, Rate(1, 100), version=2)[1].available(START) == 50


def test_an_instance_that_does_not_know_the_settings_yet_takes_nothing() -> None:
    record, _ = tokens(None, 1, Rate(10), version=2)
    assert take(record, Rate(1_000), 1, "b", 1, START, START) is None
    unchanged, _ = tokens(record, 1, Rate(10), version=3)
    assert unchanged.version == 3


def test_a_record_from_a_wrong_clock_does_not_stop_the_queue() -> None:
    record = RateRecord(1, Rate(10), 0, START + WRONG_CLOCK + 1)
    assert tokens(record, 9, Rate(10))[0].at == START
    near = RateRecord(1, Rate(10), 0, START + WRONG_CLOCK)
    assert tokens(near, 9, Rate(10))[0].at == START + WRONG_CLOCK


def test_a_record_is_read_as_it_was_written() -> None:
    record, _ = tokens(None, 1, Rate(0.5, 3))
    assert msgspec.json.decode(msgspec.json.encode(record), type=RateRecord) == record


# ---- in a logical queue ---------------------------------------------------------------------------------------


class RatedRig(Rig):
    """With a record of its own, from which tokens come when the test says so."""

    def __init__(self, partitions: int = 1) -> None:
        self.takes: list[TakeTokens] = []
        self.record: RateRecord | None = None
        super().__init__(partitions)

    def other(self, effect: Effect) -> bool:
        if isinstance(effect, TakeTokens):
            self.takes.append(effect)
            return True
        return False

    def give(self) -> None:
        """Answer the wish for tokens."""
        effect = self.takes.pop()
        rate = effect.rate
        taken = take(self.record, rate.rate, rate.version, "instance", effect.want, effect.until, self.now)
        assert taken is not None
        self.record = taken.record
        rate.taken(taken.record, taken.tokens, "instance", self.now)
        self.cycle()


def rated(rate: Rate, items: int = 100, partitions: int = 1) -> RatedRig:
    rig = RatedRig(partitions)
    for number in range(partitions):
        rig.fill(number, items)
    rig.configure(rate=rate)
    return rig


def items_of(rig: Rig, ticket: Ticket) -> int:
    return sum(grant.items for grant in rig.grants(ticket))


def test_leases_of_all_partitions_take_from_one_rate() -> None:
    rig = rated(Rate(1, 7), partitions=3)
    ticket = rig.ask(Lease("c", 100, 0, None, 3))
    assert ticket not in rig.answers, "its tokens are being taken"
    rig.give()
    rig.end_all()
    assert items_of(rig, ticket) == 7
    assert not rig.queue.lease_scheduler.waiters


def test_a_lease_that_waits_gets_its_item_when_the_token_comes() -> None:
    rig = rated(Rate(10))
    first, second = rig.ask(lease(5, 5_000)), rig.ask(lease(5, 5_000))
    rig.give()
    rig.end_all()
    assert items_of(rig, first) == 1
    assert second not in rig.answers
    rig.wait(100)
    rig.end_all()
    assert items_of(rig, second) == 1


def test_a_lease_that_does_not_wait_is_answered_empty_while_the_rate_is_used_up() -> None:
    rig = rated(Rate(1))
    rig.ask(lease(1))
    rig.give()
    rig.end_all()
    late = rig.ask(lease(1))
    assert not rig.takes, "it is known that there is none"
    assert rig.answers[late] == []
    rig.wait(1_000)
    again = rig.ask(lease(1))
    rig.give()
    rig.end_all()
    assert items_of(rig, again) == 1


def test_no_tokens_are_taken_while_nothing_can_be_leased() -> None:
    rig = rated(Rate(10), items=0)
    rig.ask(lease(1, 60_000))
    rig.wait(5_000)
    assert not rig.takes
    rig = rated(Rate(10), partitions=2)
    rig.configure(rate=Rate(10), paused=("lease",))
    rig.ask(lease(1, 60_000))
    rig.wait(5_000)
    assert not rig.takes


def test_tokens_of_items_that_were_not_leased_are_wasted() -> None:
    """A refused commit: the partition did not change, and nobody leases on the same tokens."""
    rig = rated(Rate(1, 5))
    ticket = rig.ask(lease(5, 20_000))
    rig.give()
    rig.end(0, Outcome.REFUSED)
    rig.open(0)
    assert ticket not in rig.answers
    rig.wait(3_000)
    rig.give()
    rig.wait(1_000)
    rig.end_all()
    assert items_of(rig, ticket) in (3, 4)


def test_after_a_failure_the_record_is_tried_again() -> None:
    rig = rated(Rate(10))
    ticket = rig.ask(lease(1, 5_000))
    rig.takes.pop().rate.failed(rig.now)
    rig.cycle()
    assert not rig.takes
    rig.wait(200)
    rig.give()
    rig.end_all()
    assert items_of(rig, ticket) == 1


def test_the_rate_is_changed_and_turned_off_live() -> None:
    rig = rated(Rate(0.001))
    rig.ask(lease(1))
    rig.give()
    rig.end_all()
    waits = rig.ask(lease(100, 20_000))
    rig.configure(rate=Rate(10, 5), version=2)
    rig.give()
    rig.wait(100)
    rig.end_all()
    assert items_of(rig, waits) == 1
    waits = rig.ask(lease(90, 20_000))
    rig.configure(version=3)
    rig.end_all()
    assert items_of(rig, waits) == 90


def test_a_queue_without_a_rate_does_nothing_for_it() -> None:
    rig = rated(Rate(10))
    rig.configure()
    assert rig.queue.rate is None
    rig.ask(lease(5))
    rig.end_all()
    assert not rig.takes


def test_other_instances_are_offered_what_the_rate_allows_soon() -> None:
    rig = rated(Rate(5, 5))
    share = OwnedQueue("q", LEASE_TIMEOUT)
    share.rate, share.index, share.executors = rig.queue.rate, rig.queue.index, rig.queue.executors
    assert share.load().ready == 10, "what there is, and what comes within a second"
    rig.ask(lease(5))
    rig.give()
    rig.end_all()
    assert share.load().ready == 5, "those of the next second"
    assert rig.queue.rate is not None
    assert rig.record is not None
    empty = msgspec.structs.replace(rig.record, level=-20 * TOKEN, at=rig.now)
    rig.queue.rate.taken(empty, None, "instance", rig.now)
    rig.cycle()
    assert share.load().ready == 0
    assert rig.queue.wake_at() == rig.now + 4_200 - REMOTE
    rig.wait(4_200 - REMOTE)
    assert share.load().ready == 1


def test_a_reservation_ends_where_the_horizon_does() -> None:
    assert tokens(None, 1_000_000, Rate(1_000))[1].left == HORIZON + 1
    assert isinstance(tokens(None, 1, Rate(1))[1], Reservation)
