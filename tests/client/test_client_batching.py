"""When a producer sends what: the machine, under a clock that only the test moves."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.client import CallError, Item, Produced, SluicewayError, producer_common
from sluiceway.client.batching import ITEM_COST, MAX_FAILED, Batch, Batching, BatchLimits

LIMITS = BatchLimits(linger=10, max_batch=3, max_bytes=100, max_in_flight=1, max_buffered=10_000)


def batching(**changes: int) -> Batching[None]:
    return Batching(LIMITS._replace(**changes), lambda: None)


def item(number: int) -> Item:
    return Item(b"%d" % number)


def busy(**changes: int) -> tuple[Batching[None], Batch[None]]:
    """A machine with a batch under way, and that batch."""
    machine = batching(**{"max_in_flight": 2} | changes)
    machine.add(item(0), 1, 0)
    machine.flush(0)
    under_way = machine.take(0)
    assert under_way is not None
    return machine, under_way


def stored(batch: Batch[None], first: int = 0) -> None:
    batch.produced = Produced(queue_name="q", partition=0, first_id=f"k7f3q2ma.0.{first}", count=len(batch.left))


def test_while_nothing_is_under_way_an_item_goes_at_once_with_those_beside_it() -> None:
    machine = batching()
    machine.add(item(1), 1, 100)
    machine.add(item(2), 1, 100)
    batch = machine.take(100)
    assert batch is not None
    assert batch.left == [item(1), item(2)]


def test_what_gathers_while_batches_are_under_way_goes_when_the_last_of_them_ends() -> None:
    machine, first = busy(max_in_flight=3)
    machine.add(item(1), 1, 0)
    machine.flush(0)
    second = machine.take(0)
    assert second is not None
    machine.add(item(2), 1, 0)
    machine.add(item(3), 1, 5)
    machine.ended(first)
    assert machine.take(5) is None
    machine.ended(second)
    batch = machine.take(5)
    assert batch is not None
    assert batch.left == [item(2), item(3)]


def test_while_a_batch_is_under_way_an_item_waits_for_others_until_its_time_is_over() -> None:
    machine, _ = busy()
    machine.add(item(1), 1, 100)
    machine.add(item(2), 1, 109)
    assert (machine.wake_at(), machine.take(109)) == (110, None)
    batch = machine.take(110)
    assert batch is not None
    assert batch.left == [item(1), item(2)]


@pytest.mark.parametrize("sizes", [[1, 1, 1], [60, 40], [100], [5_000], [60, 50]])
def test_what_is_full_goes_at_once(sizes: list[int]) -> None:
    machine, _ = busy()
    for number, size in enumerate(sizes):
        assert machine.take(0) is None
        machine.add(item(number), size, 0)
    assert machine.is_due(0)


def test_what_is_flushed_goes_at_once_and_what_comes_after_it_waits() -> None:
    machine, _ = busy(max_in_flight=3)
    machine.add(item(1), 1, 0)
    assert machine.take(0) is None
    machine.flush(0)
    assert machine.take(0) is not None
    machine.add(item(2), 1, 0)
    assert machine.take(9) is None


def test_no_more_calls_are_under_way_than_may_be() -> None:
    machine = batching(max_batch=1, max_in_flight=2)
    for number in range(3):
        machine.add(item(number), 1, 0)
    first, second = machine.take(0), machine.take(0)
    assert first is not None
    assert second is not None
    assert (machine.take(1_000), machine.wake_at()) == (None, None)
    machine.ended(first)
    assert machine.take(0) is not None


def test_a_buffer_has_room_for_its_bytes_and_for_one_item_of_any_size() -> None:
    machine = batching(max_buffered=2 * ITEM_COST + 10)
    assert machine.has_room(1_000_000)
    machine.add(item(1), 6, 0)
    assert machine.has_room(4)
    assert not machine.has_room(5)


def test_a_refused_item_leaves_its_place_and_the_others_their_ids() -> None:
    machine = batching(max_batch=5)
    for number in range(5):
        batch, _ = machine.add(item(number), 1, 0)
    assert machine.take(0) is batch
    assert batch.refuse(1, ValueError("one"))
    assert batch.left == [item(0), item(2), item(3), item(4)]
    assert batch.refuse(2, ValueError("three"))
    stored(batch, 70)
    machine.ended(batch)
    assert [batch.id_of(at) for at in (0, 2, 4)] == [f"k7f3q2ma.0.{offset}" for offset in (70, 71, 72)]
    for at, text in ((1, "one"), (3, "three")):
        with pytest.raises(ValueError, match=text):
            batch.id_of(at)


def test_a_failure_is_told_once_unless_everybody_has_asked() -> None:
    machine = batching()
    batch, _ = machine.add(item(1), 1, 0)
    machine.add(item(2), 1, 0)
    machine.flush(0)
    machine.take(0)
    batch.error = ValueError("no")
    machine.ended(batch)
    batch.asked.add(0)
    assert isinstance(machine.unheard(), ValueError)
    assert machine.unheard() is None

    batch, _ = machine.add(item(1), 1, 0)
    machine.flush(0)
    machine.take(0)
    batch.refuse(0, ValueError("no"))
    machine.ended(batch)
    batch.asked.add(0)
    assert machine.unheard() is None


def failed(machine: Batching[None], asks: bool) -> weakref.ref[Exception]:
    """Let a batch of one item fail. Returns a reference to its error that keeps nothing."""
    batch, _ = machine.add(item(1), 1, 0)
    assert machine.take(0) is batch
    if asks:
        batch.asked.add(0)
    batch.error = CallError("unavailable", "nobody is there")
    machine.ended(batch)
    return weakref.ref(batch.error)


def test_failures_that_were_asked_for_are_not_kept() -> None:
    """A program that never flushes kept each of its failed calls, with their items."""
    machine = batching()
    references = [failed(machine, asks=True) for _ in range(100)]
    assert sum(each() is not None for each in references) == 1
    assert machine.unheard() is None


def test_of_failures_that_nobody_asks_for_the_first_ones_are_kept() -> None:
    machine = batching()
    references = [failed(machine, asks=False) for _ in range(100)]
    assert [each() is not None for each in references] == [True] * (MAX_FAILED - 1) + [False] * (100 - MAX_FAILED) + [True]
    assert machine.unheard() is references[0]()


def test_an_error_does_not_grow_with_those_who_ask_for_it() -> None:
    """All items of a batch raise it: the traceback of the last one had the frames of all others."""
    machine = batching(max_batch=1_000)
    for number in range(100):
        batch, _ = machine.add(item(number), 1, 0)
    machine.take(0)
    try:
        raise CallError("unavailable", "nobody is there")
    except CallError as error:
        batch.error = error
    machine.ended(batch)
    depths = []
    for at in range(100):
        with pytest.raises(CallError) as raised:
            batch.id_of(at)
        depths.append(len(raised.traceback))
    assert len({*depths}) == 1


def test_the_last_item_that_is_refused_ends_the_batch() -> None:
    batch = batching().add(item(1), 1, 0)[0]
    posting = producer_common.Posting("q", None, 30)
    assert not posting.failed(batch, CallError("invalid_request", "no", "items[0].kind"))
    assert (batch.left, batch.error) == ([], None)


@pytest.mark.parametrize(
    "error",
    [
        CallError("invalid_request", "no", "queue_name"),
        CallError("invalid_request", "no"),
        CallError("invalid_request", "no", "items[7]"),
        CallError("outcome_unknown", "?", "items[0]"),
        ValueError("a bug"),
    ],
)
def test_what_is_not_the_fault_of_one_item_fails_the_batch(error: Exception) -> None:
    batch = batching().add(item(1), 1, 0)[0]
    assert not producer_common.Posting("q", None, 30).failed(batch, error)
    with pytest.raises(type(error)):
        batch.id_of(0)


@pytest.mark.parametrize(
    ("name", "value"), [("max_batch", 0), ("max_batch", 1_001), ("max_bytes", 17 << 20), ("max_in_flight", 0), ("max_buffered", 0)]
)
def test_an_option_out_of_range_is_named(name: str, value: int) -> None:
    options = {"max_batch": 1, "max_bytes": 1, "max_in_flight": 1, "max_buffered": 1} | {name: value}
    with pytest.raises(SluicewayError, match=name) as raised:
        producer_common.limits("5ms", **options)
    assert raised.value.field == name


# -- any history --------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A producer whose batches all are stored, in the order in which they end."""

    limits: BatchLimits
    machine: Batching[None] = field(init=False)
    now: int = 0
    added: int = 0
    in_flight: deque[Batch[None]] = field(default_factory=deque)
    taken: list[int] = field(default_factory=list)
    added_at: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = Batching(self.limits, lambda: None)

    def add(self, size: int) -> None:
        if self.machine.has_room(size):
            self.machine.add(item(self.added), size, self.now)
            self.added_at[self.added], self.sizes[self.added] = self.now, size
            self.added += 1

    def pump(self) -> None:
        while (batch := self.machine.take(self.now)) is not None:
            numbers = [int(each.payload) for each in batch.left]
            assert numbers
            assert len(numbers) <= self.limits.max_batch
            assert sum(self.sizes[number] for number in numbers) <= self.limits.max_bytes or len(numbers) == 1
            self.taken += numbers
            self.in_flight.append(batch)
        assert len(self.in_flight) <= self.limits.max_in_flight

    def end(self) -> None:
        if self.in_flight:
            batch = self.in_flight.popleft()
            stored(batch)
            self.machine.ended(batch)

    def check(self) -> None:
        assert self.taken == sorted(self.taken)
        waiting = range(len(self.taken), self.added)
        if waiting and len(self.in_flight) < self.limits.max_in_flight:
            assert self.in_flight, "nothing is under way, and an item waits"
            assert self.now < self.added_at[waiting[0]] + self.limits.linger
            assert self.machine.wake_at() == self.added_at[waiting[0]] + self.limits.linger
        held = [*waiting, *(int(each.payload) for batch in self.in_flight for each in batch.left)]
        used = sum(self.sizes[number] + ITEM_COST for number in held)
        assert used <= self.limits.max_buffered or len(held) == 1
        assert self.machine.has_room(1) == (not held or used + 1 + ITEM_COST <= self.limits.max_buffered)


STEPS = st.lists(st.one_of(st.tuples(st.just("add"), st.integers(0, 60)), st.tuples(st.sampled_from(["tick", "end"]), st.integers(1, 12))))
ANY_LIMITS = st.builds(
    BatchLimits, st.integers(0, 20), st.integers(1, 4), st.integers(1, 100), st.integers(1, 3), st.integers(1, 6 * ITEM_COST)
)


@given(ANY_LIMITS, STEPS)
def test_items_leave_in_order_in_time_and_within_the_limits(limits: BatchLimits, steps: list[tuple[str, int]]) -> None:
    world = World(limits)
    for step, value in steps:
        if step == "add":
            world.add(value)
        elif step == "tick":
            world.now += value
        else:
            world.end()
        world.pump()
        world.check()
    world.machine.flush(world.now)
    while world.machine.unfinished:
        world.pump()
        world.end()
    assert world.taken == list(range(world.added))
