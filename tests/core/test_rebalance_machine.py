"""The steps of a rebalance: with coordinators that die after every action, two of them at once, and everything late."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluiceway.contract.rebalances import DrainMode
from sluiceway.core.rebalance import steps as machine
from sluiceway.core.rebalance.steps import AskFor
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_KEYS_BYTES
from sluiceway.model.peers import MoveOut, ServeSlots, Shut
from sluiceway.model.queue import MOVING, PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Rebalance
from tests.core.rebalance_world import Coordinator, Partition, World, small_queue, with_state

PLANS: dict[str, tuple[tuple[str, ...], int, dict[str, float]]] = {
    "grow": (("a", "a"), 5, {"a": 1}),
    "shrink": (("a", "a", "a", "a"), 2, {"a": 1}),
    "move": (("a", "a"), 2, {"a": 0, "b": 1}),
    "spread": (("a", "a", "a"), 4, {"a": 1, "b": 1}),
    "in order": (("a",), 1, {"b": 1}),
    "grow by key": (("a", "a"), 5, {"a": 1}),
    "shrink by key": (("a", "a", "a", "a"), 2, {"a": 1}),
    "move by key": (("a", "a"), 2, {"a": 0, "b": 1}),
    "spread by key": (("a", "a", "a"), 4, {"a": 1, "b": 1}),
    "one by key": (("a",), 1, {"b": 1}),
}
BY_KEY = [name for name in PLANS if name.endswith("by key")]


def filled(backends: tuple[str, ...], *, by_key: bool = False) -> World:
    """With some of everything in each partition."""
    world = World(small_queue(*backends, by_key=by_key))
    for slot in range(len(world.record.slots)) if by_key else ():
        assert world.produce_in_slot("first", slot, world.record)
        assert world.produce_in_slot("later", slot, world.record, scheduled=True)
        assert world.produce_in_slot("second", slot, world.record)
    for number in world.partitions:
        for each in range(3):
            world.produce(f"ready {number}.{each}", world.record, number)
        world.produce(f"due {number}", world.record, number, scheduled=True)
        world.produce(f"held {number}", world.record, number)
        world.partitions[number].leased.append(world.partitions[number].ready.pop())
    for each in range(20):
        assert world.produce_keyed(f"keyed {each}", f"key {each}", world.record)
    return world


@pytest.mark.parametrize("drain", ["natural", "copy"])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_carried_out(name: str, drain: DrainMode) -> None:
    backends, requested, affinities = PLANS[name]
    world = filled(backends, by_key=name in BY_KEY)
    assert world.begin(requested, affinities, drain)
    world.finish(world.elect())
    assert world.rebalance is not None
    kinds = [each.kind for each in world.rebalance.done if each.partition is None]
    assert [kind for kind in kinds if kind != "keys"] == ["create", "flip", "shut", "drain", "finish"]


@pytest.mark.parametrize("drain", ["natural", "copy"])
@pytest.mark.parametrize("name", PLANS)
def test_the_coordinator_may_die_after_every_action(name: str, drain: DrainMode) -> None:
    backends, requested, affinities = PLANS[name]
    alive = 0
    while True:
        world = filled(backends, by_key=name in BY_KEY)
        world.one_at_a_time = True
        world.begin(requested, affinities, drain)
        first = world.elect()
        for _ in range(alive):
            if not world.step(first):
                break
            world.consume()
        assert world.rebalance is not None
        if not world.rebalance.is_open:
            break
        world.finish(world.elect())
        alive += 1
    assert alive > 5


@pytest.mark.parametrize("name", [name for name in PLANS if name not in BY_KEY])
def test_a_cancellation_after_every_action_brings_back_what_was(name: str) -> None:
    backends, requested, affinities = PLANS[name]
    cancelled = 0
    for alive in range(60):
        world = filled(backends)
        world.begin(requested, affinities, "copy")
        first = world.elect()
        for _ in range(alive):
            world.step(first)
            if alive % 3:
                # Otherwise what is leased keeps the drains from their end, and there is much to be brought back.
                world.consume()
            else:
                for there in world.partitions.values():
                    world.arrive(there)
        assert world.rebalance is not None
        if not world.rebalance.is_open:
            continue
        cancelled += world.cancel()
        world.finish(first if alive % 2 else world.elect())
    assert cancelled >= 2


@pytest.mark.parametrize("most", [MAX_KEYS_BYTES, 150])
@pytest.mark.parametrize("name", ["grow", "move", "spread"])
def test_the_coordinator_may_die_after_every_action_of_a_cancellation(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when some of the slots have gone and others are on their way."""
    monkeypatch.setattr(machine, "MAX_KEYS_BYTES", most)
    monkeypatch.setattr(Partition, "most_bytes", most)
    backends, requested, affinities = PLANS[name]
    for before in range(4, 18):
        for after in range(16):
            world = filled(backends)
            world.begin(requested, affinities, "copy")
            first = world.elect()
            for _ in range(before):
                world.step(first)
            world.cancel()
            second = world.elect()
            for _ in range(after):
                world.step(second)
            world.finish(world.elect())


@pytest.mark.parametrize("late", range(1, 40, 4))
def test_a_move_that_is_under_way_when_it_is_cancelled_arrives(late: int) -> None:
    """Its target is not removed before, however empty it is."""
    for alive in range(6, 16):
        world = filled(("a", "a"))
        world.begin(2, {"b": 1}, "copy")
        first = world.elect()
        for _ in range(alive):
            world.step(first)
        world.cancel()
        second = world.elect()
        for _ in range(late):
            world.step(second)
        world.finish(second)


def test_a_backlog_is_copied_without_any_consumer() -> None:
    world = filled(("a", "a", "a"))
    for there in world.partitions.values():
        world.done.update(there.leased)
        there.leased.clear()
    world.begin(1, {"a": 1}, "copy")
    world.finish(world.elect(), consuming=False)
    assert not world.consumed


def test_scheduled_items_go_in_a_natural_drain_too_and_ready_ones_do_not() -> None:
    world = filled(("a", "a"))
    world.begin(1, {"a": 1}, "natural")
    coordinator = world.elect()
    for _ in range(60):
        world.step(coordinator)
        for there in world.partitions.values():
            world.arrive(there)
    drained = world.partitions[1]
    assert not drained.scheduled
    assert drained.ready
    assert world.rebalance is not None
    assert world.rebalance.step == "drain"


def test_a_queue_in_order_stays_in_order() -> None:
    world = World(small_queue("a"))
    for each in range(40):
        world.produce(f"{each:03}", world.record, 0)
    world.begin(1, {"b": 1}, "natural")
    coordinator = world.elect()
    made = 40
    while world.step(coordinator):
        for number in list(world.partitions):
            if world.produce(f"{made:03}", world.record, number):
                made += 1
                break
        offered = [number for number in world.partitions if world.lease(world.record, number)]
        assert len(offered) <= 1
        for number in offered:
            world.complete(number)
    world.consume()
    assert world.consumed == sorted(world.consumed)
    assert len(world.consumed) == made > 43


@pytest.mark.parametrize("name", BY_KEY)
def test_what_is_produced_meanwhile_is_served_after_what_waited(name: str) -> None:
    """Of each slot, in the order in which it was produced, with a coordinator that dies now and then."""
    backends, requested, affinities = PLANS[name]
    world = World(small_queue(*backends, by_key=True))
    slots = range(len(world.record.slots))
    made = 0

    def produce() -> None:
        nonlocal made
        for slot in slots:
            made += world.produce_in_slot(f"{made:05}", slot, world.record)

    for _ in range(4):
        produce()
    world.begin(requested, affinities, "natural")
    coordinator = world.elect()
    for turn in range(2_000):
        if not world.step(coordinator):
            break
        if turn % 7 == 0:
            coordinator = world.elect()
        if turn < 60:
            produce()
        for number in list(world.partitions):
            while world.lease(world.record, number):
                pass
            if world.partitions[number].leased:
                world.complete(number)
    world.check_ended()
    assert len({*world.record.slots}) == requested
    world.consume()
    for slot in slots:
        mine = [item for item in world.consumed if item.startswith(f"slot {slot}:")]
        assert mine == sorted(mine)
        assert len(mine) > 4, "some were produced meanwhile"


@pytest.mark.parametrize("name", BY_KEY)
def test_keys_that_have_begun_to_move_do_not_go_back(name: str) -> None:
    """Their new homes may have items that come after those of the former ones, and before any to come."""
    backends, requested, affinities = PLANS[name]
    world = filled(backends, by_key=True)
    world.begin(requested, affinities, "natural")
    coordinator = world.elect()
    while coordinator.rebalance.step in ("create", "flip"):
        world.step(coordinator)
        world.read(coordinator)
    assert not world.cancel()
    world.finish(world.elect())


def test_a_late_word_serves_no_slot_of_a_later_rebalance() -> None:
    world = filled(("a", "a"), by_key=True)
    world.begin(3, {"a": 1}, "natural")
    coordinator = world.elect()
    late: list[AskFor] = []
    while world.step(coordinator):
        world.consume()
        asks = machine.asks(coordinator.rebalance, coordinator.record, coordinator.heard)
        late += [ask for ask in asks if isinstance(ask.request, ServeSlots)]
    world.check_ended()
    world.begin(1, {"a": 1}, "natural")
    world.finish(world.elect())
    world.begin(3, {"a": 1}, "natural")
    coordinator = world.elect()
    while coordinator.rebalance.step != "drain":
        world.step(coordinator)
        world.read(coordinator)
    before = {number: set(there.held) for number, there in world.partitions.items()}
    assert late
    for ask in late:
        world.deliver(ask.request)
    assert {number: there.held for number, there in world.partitions.items()} == before
    world.finish(world.elect())


def test_a_paused_partition_is_paused_again_when_its_drain_is_cancelled() -> None:
    world = World(small_queue("a", "a"))
    world.record = with_state(world.record, 1, "paused")
    world.begin(1, {"a": 1}, "natural")
    coordinator = world.elect()
    for _ in range(4):
        world.step(coordinator)
    assert [each.state for each in world.record.partitions] == ["available", "draining"]
    assert world.cancel()
    world.finish(world.elect())
    assert [each.state for each in world.record.partitions] == ["available", "paused"]


def test_more_keys_than_a_message_holds_go_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_KEYS_BYTES", 150)
    monkeypatch.setattr(Partition, "most_bytes", 100)
    world = filled(("a", "a"))
    world.begin(1, {"b": 1}, "copy")
    world.finish(world.elect())
    assert world.rebalance is not None
    assert 0 < world.rebalance.slots_at_once <= 6
    assert sum(each.kind == "keys" for each in world.rebalance.done) == 1


@pytest.mark.parametrize("name", ["move", "move by key"])
def test_more_keys_of_a_slot_than_a_message_holds_go_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the coordinator dies after any of them. `finish` checks that each key is remembered at its new home."""
    monkeypatch.setattr(Partition, "most_bytes", 40)
    backends, requested, affinities = PLANS[name]
    alive = 0
    while True:
        world = filled(backends, by_key=name in BY_KEY)
        for each in range(20, 60):
            assert world.produce_keyed(f"keyed {each}", f"key {each}", world.record)
        world.begin(requested, affinities, "natural")
        first = world.elect()
        for _ in range(alive):
            world.step(first)
        assert world.rebalance is not None
        if not world.rebalance.is_open or world.rebalance.step == "drain":
            break
        world.finish(world.elect())
        alive += 1
    assert alive > 50
    assert world.rebalance.slots_at_once == 1


def test_a_commit_removes_no_more_than_it_can_hold() -> None:
    """Although all are sealed by then, as after a time in which the meta store did not answer."""
    many = 4 * machine.MAX_REMOVED + 50
    world = World(QueueRecord("orders", "aaaaaaaa", 0, 0, tuple(PartitionRecord(number, "a") for number in range(many))))
    world.begin(1, {"a": 1}, "natural")
    coordinator = world.elect()
    sizes = []
    while world.rebalance is not None and world.rebalance.is_open:
        before = len(world.record.partitions)
        assert world.step(coordinator)
        sizes.append(before - len(world.record.partitions))
    assert [size for size in sizes if size > 0] == [machine.MAX_REMOVED] * 4 + [49]
    assert len(world.record.partitions) == 1


def test_homes_that_stay_and_homes_that_come_back_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some slots were handed over when it is cancelled, others not: what is asked again after a crash must be what was asked before it."""
    for after in range(14):
        with monkeypatch.context() as few:
            few.setattr(machine, "MAX_KEYS_BYTES", 150)
            world = filled(("a", "a"))
            world.begin(2, {"b": 1}, "copy")
            first = world.elect()
            while not {*world.record.slots} >= {MOVING, 2}:
                world.step(first)
        world.cancel()
        assert world.rebalance is not None
        # As by one that can say more at once.
        world.rebalance = msgspec.structs.replace(world.rebalance, slots_at_once=0)
        second = world.elect()
        for _ in range(after):
            world.step(second)
        world.finish(world.elect())


def test_one_that_waits_is_cancelled_at_once_and_an_ended_one_never() -> None:
    world = World(small_queue("a"))
    world.begin(2, {"a": 1}, "natural")
    assert world.rebalance is not None
    waiting = msgspec.structs.replace(world.rebalance, state="waiting")
    ended = machine.cancelled(None, waiting, 5).rebalance
    assert (ended.state, ended.ended_at) == ("cancelled", 5)
    with pytest.raises(SluicewayError, match="it has ended"):
        machine.cancelled(world.record, ended, 6)


def test_before_the_flip_a_cancellation_asks_nobody() -> None:
    """Or it would wait for ever for a backend that is down, which may be why it is cancelled."""
    world = World(small_queue("a"))
    world.begin(1, {"b": 1}, "natural")
    assert world.cancel()
    world.check_ended()


# ---- any history -----------------------------------------------------------------------------------------------------


class Rebalances(RuleBasedStateMachine):
    """Everything may come late, twice or from one that is coordinator no more. At the end somebody carries it out undisturbed."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinators: list[Coordinator] = []
        self.sent: list[tuple[Coordinator, AskFor, Any]] = []
        self.answers: list[tuple[Coordinator, object, AskFor, Any]] = []
        self.made = 0

    @initialize(name=st.sampled_from(sorted(PLANS)), drain=st.sampled_from(["natural", "copy"]))
    def start(self, name: str, drain: DrainMode) -> None:
        backends, requested, affinities = PLANS[name]
        self.world = filled(backends, by_key=name in BY_KEY)
        self.world.begin(requested, affinities, drain)
        self.coordinators.append(self.world.elect())

    @property
    def rebalance(self) -> Rebalance:
        assert self.world.rebalance is not None
        return self.world.rebalance

    def _any(self, data: st.DataObject) -> Coordinator:
        # Mostly the one that is elected.
        index = data.draw(st.integers(0, 2 * len(self.coordinators)))
        return self.coordinators[index] if index < len(self.coordinators) else self.coordinators[-1]

    @precondition(lambda self: self.rebalance.is_open)
    @rule(steps=st.integers(1, 6))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if not self.world.step(self.coordinators[-1]):
                break

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.world.read(self._any(data))

    @precondition(lambda self: self.rebalance.is_open)
    @rule()
    def elect(self) -> None:
        self.coordinators.append(self.world.elect())

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        one = self._any(data)
        if one.rebalance.is_open:
            change = machine.change(one.rebalance, one.record, one.heard, 0, one.name)
            if change is not None and self.world.commit(one, change):
                self.world.read(one)

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        one = self._any(data)
        for ask in machine.asks(one.rebalance, one.record, one.heard) if one.rebalance.is_open else ():
            self.sent.append((one, ask, one.heard))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.sent) - 1))
        one, ask, heard = self.sent[index] if again else self.sent.pop(index)
        answer = self.world.deliver(ask.request)
        self.answers.append((one, heard, ask, answer))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        one, heard, ask, answer = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        if one.heard is heard:
            self.world.hear(one, ask, answer)

    @rule(data=st.data(), settle=st.booleans())
    def arrive(self, data: st.DataObject, settle: bool) -> None:
        self.world.arrive(self._partition(data), settle)

    def _partition(self, data: st.DataObject) -> Any:
        return self.world.partitions[data.draw(st.sampled_from(sorted(self.world.partitions)))]

    @precondition(lambda self: self.rebalance.is_open)
    @rule()
    def cancel(self) -> None:
        self.world.cancel()

    @precondition(lambda self: not self.rebalance.is_open)
    @rule(requested=st.integers(1, 5), affinities=st.sampled_from([{"a": 1.0}, {"b": 1.0}, {"a": 1.0, "b": 1.0}]))
    def begin_another(self, requested: int, affinities: dict[str, float]) -> None:
        if self.world.begin(requested, affinities, "copy"):
            self.coordinators.append(self.world.elect())

    @rule(data=st.data(), scheduled=st.booleans())
    def produce(self, data: st.DataObject, scheduled: bool) -> None:
        record = data.draw(st.sampled_from(self.world.records))
        self.made += 1
        self.world.produce(f"new {self.made}", record, data.draw(st.sampled_from(record.partitions)).partition, scheduled=scheduled)

    @rule(data=st.data(), key=st.integers(0, 40))
    def produce_keyed(self, data: st.DataObject, key: int) -> None:
        record = data.draw(st.sampled_from(self.world.records))
        self.made += 1
        self.world.produce_keyed(f"new {self.made}", f"key {key}", record)

    @precondition(lambda self: self.world.record.order)
    @rule(data=st.data(), scheduled=st.booleans())
    def produce_in_slot(self, data: st.DataObject, scheduled: bool) -> None:
        record = data.draw(st.sampled_from(self.world.records))
        self.made += 1
        self.world.produce_in_slot(f"new {self.made}", data.draw(st.integers(0, len(record.slots) - 1)), record, scheduled=scheduled)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.world.records))
        self.world.lease(record, data.draw(st.sampled_from(record.partitions)).partition)

    @rule(data=st.data(), back=st.booleans())
    def settle(self, data: st.DataObject, back: bool) -> None:
        there = self._partition(data)
        if there.leased and back:
            there.ready.append(there.leased.pop(0))
        elif there.leased:
            self.world.complete(there.number)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.rebalance.is_open:
            self.world.finish(self.world.elect())
        self.world.check_ended()
        for _, ask, _ in self.sent:
            # Also afterwards: nothing that was meant for then does harm now.
            self.world.deliver(ask.request)
        self.world.check_ended()


TestRebalances = Rebalances.TestCase
TestRebalances.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def test_requests_of_an_earlier_coordinator_are_known_for_it() -> None:
    """Whatever it still asks: a partition that was opened again stays open, and gives nothing away to one that has gone."""
    world = filled(("a", "a"))
    world.begin(2, {"b": 1}, "copy")
    coordinator = world.elect()
    while world.rebalance is not None and world.rebalance.step != "drain":
        world.step(coordinator)
    world.step(coordinator)
    late = [ask.request for ask in machine.asks(coordinator.rebalance, coordinator.record, coordinator.heard)]
    assert any(isinstance(each, MoveOut) for each in late)
    late += [Shut(number, "read_only", coordinator.record.cursor, 0) for number in (0, 1)]
    assert world.cancel()
    world.finish(world.elect())
    for request in late:
        assert isinstance(world.deliver(request), SluicewayError)
    world.check_ended()
