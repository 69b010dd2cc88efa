"""The trace check of keys on the move accepts what the product and the specification do, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import pytest

from simulation.planting import planted
from simulation.runner import BUGS
from spec.checker import Broken
from spec.histories import main
from spec.keys_histories import RecordedKeys, keys_histories
from spec.keys_trace import Contents, Event, Item, KeysTraceCheck, Recorded, Stored
from spec.rebalance_keys import ABLATIONS, MOVING, Partition, RebalanceKeys, Record, Rules, State, put
from tests.spec.walks import Taken, assert_rejected, counterexample, walk

History = list[Event]


def rejected(history: Sequence[Event]) -> bool:
    return KeysTraceCheck().check(history) is not None


# ---- the simulator's --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated() -> list[History]:
    return [history for seed in range(4, 8) for history in keys_histories(seed).values()]


def test_histories_of_the_simulator_are_accepted(simulated: Sequence[History]) -> None:
    for history in simulated:
        verdict = KeysTraceCheck().check(history)
        assert verdict is None, str(verdict)
    events = [event for history in simulated for event in history]
    assert any(isinstance(event, Recorded) and MOVING in event.homes for event in events)
    stored = [event.contents for event in events if isinstance(event, Stored)]
    assert any(each.items & {item for item in each.items if item.slot in each.closed} for each in stored), "a home that is to be drained"
    assert any({item.slot for item in each.items} & each.held for each in stored), "a new home that waits"
    assert any(each.moving for each in stored)


def _stored(history: History) -> Iterator[tuple[int, Stored, Stored]]:
    """Each commit but the first of each partition, with the one before it."""
    last: dict[int, Stored] = {}
    for at, event in enumerate(history):
        if isinstance(event, Stored):
            if event.partition in last:
                yield at, last[event.partition], event
            last[event.partition] = event


def _with(history: History, at: int, contents: Contents) -> History:
    event = history[at]
    assert isinstance(event, Stored)
    return [*history[:at], event._replace(contents=contents), *history[at + 1 :]]


def with_a_new_item_in_a_former_home(history: History) -> Iterator[History]:
    for at, before, after in _stored(history):
        for slot in sorted(before.contents.closed & after.contents.closed)[:1]:
            yield _with(history, at, after.contents._replace(items=after.contents.items | {Item("new", slot)}))


def with_a_lease_of_what_is_held_back(history: History) -> Iterator[History]:
    for at, before, after in _stored(history):
        held = before.contents.held & after.contents.held
        for item in sorted(each for each in after.contents.items - before.contents.leased if each.slot in held)[:1]:
            yield _with(history, at, after.contents._replace(leased=after.contents.leased | {item}))


def with_a_slot_served_too_early(history: History) -> Iterator[History]:
    """The former home still has an item."""
    for at, before, after in _stored(history):
        for slot in sorted(before.contents.held - after.contents.held)[:1]:
            former = next(
                (
                    (place, event)
                    for place, event in reversed(list(enumerate(history[:at])))
                    if isinstance(event, Stored) and event.partition != after.partition and slot in event.contents.closed
                ),
                None,
            )
            if former is not None:
                place, event = former
                yield _with(history, place, event.contents._replace(items=event.contents.items | {Item("left", slot)}))


def with_an_item_in_two_partitions(history: History) -> Iterator[History]:
    """An item that is produced to a new home is in the former one, too."""
    for at, before, after in _stored(history):
        for item in sorted(after.contents.items - before.contents.items)[:1]:
            other = next(
                (
                    place
                    for place, event in enumerate(history[:at])
                    if isinstance(event, Stored) and event.partition != after.partition and item not in event.contents.moving
                ),
                None,
            )
            if other is not None:
                event = history[other]
                assert isinstance(event, Stored)
                for place in range(other, at):
                    later = history[place]
                    if isinstance(later, Stored) and later.partition == event.partition:
                        history = _with(history, place, later.contents._replace(items=later.contents.items | {item}))
                yield history


def with_a_settled_item_again(history: History) -> Iterator[History]:
    for at, before, after in _stored(history):
        settled = before.contents.items - after.contents.items - after.contents.moving
        if settled:
            yield [*history[: at + 1], after._replace(contents=after.contents._replace(items=after.contents.items | {min(settled)}))]


def with_a_home_that_has_taken_nothing(history: History) -> Iterator[History]:
    """What a partition stores from when it takes slots is missing, up to the record that names their homes."""
    began = None
    for at, event in enumerate(history):
        if not isinstance(event, Recorded):
            continue
        if MOVING in event.homes:
            began = at if began is None else began
        elif began is not None:
            for take, was, now in _stored(history[:at]):
                if take > began and now.contents.taken > was.contents.taken:
                    late = range(take, at)
                    yield [each for place, each in enumerate(history[: at + 1]) if place not in late or not _is_of(each, now.partition)]
            began = None


def _is_of(event: Event, partition: int) -> bool:
    return isinstance(event, Stored) and event.partition == partition


def with_slots_that_nobody_has_given(history: History) -> Iterator[History]:
    """All records of a rebalance that say that slots move are missing."""
    records = [(at, event) for at, event in enumerate(history) if isinstance(event, Recorded)]
    for moves, run in itertools.groupby(records, key=lambda each: MOVING in each[1].homes):
        left_out = {at for at, _ in run}
        if moves:
            yield [event for at, event in enumerate(history) if at not in left_out]


def with_an_outdated_request(history: History) -> Iterator[History]:
    for at, before, after in _stored(history):
        if after.contents.given > before.contents.given:
            late = after._replace(contents=after.contents._replace(given=before.contents.given))
            yield [*history[: at + 1], late]


def with_an_outdated_record(history: History) -> Iterator[History]:
    for before, after in itertools.pairwise(at for at, event in enumerate(history) if isinstance(event, Recorded)):
        old, new = history[before], history[after]
        assert isinstance(old, Recorded)
        assert isinstance(new, Recorded)
        if old.cursor < new.cursor:
            yield [*history[: after + 1], old, *history[after + 1 :]]


MUTATIONS = {
    each.__name__: each
    for each in (
        with_a_new_item_in_a_former_home,
        with_a_lease_of_what_is_held_back,
        with_a_slot_served_too_early,
        with_an_item_in_two_partitions,
        with_a_settled_item_again,
        with_a_home_that_has_taken_nothing,
        with_slots_that_nobody_has_given,
        with_an_outdated_request,
        with_an_outdated_record,
    )
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_histories_that_cannot_have_been_are_rejected(name: str, simulated: Sequence[History]) -> None:
    assert_rejected(name, MUTATIONS[name], simulated, rejected)


FIRST_SEEDS = {
    "serves_before_the_former_home_is_drained": 0,
    "forgets_what_it_holds_back": 7,
    "hands_over_no_parts": 5,
    "each_instance_has_its_own_homes": 1,
}
"""Planted bugs, each with a seed from which a history is soon rejected."""


@pytest.mark.parametrize("name", FIRST_SEEDS)
def test_histories_with_a_planted_bug_are_rejected(name: str) -> None:
    for seed in range(FIRST_SEEDS[name], FIRST_SEEDS[name] + 20):
        with planted(BUGS["keys", name]):
            world = RecordedKeys(seed)
            # The simulator finds it, too.
            with contextlib.suppress(Exception):
                world.live()
        if rejected(world.events):
            return
    pytest.fail(f"no history with {name} is rejected")


def test_the_command_checks_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "keys", "--seeds", "1", "--first", "7"]) == 0
    assert capsys.readouterr().out.startswith("keys: 1 histories of ")


# ---- the specification's ----------------------------------------------------------------------------------------------


class Unchecked(RebalanceKeys):
    """The specification without its promises: what breaks them goes on."""

    def _sound(self, state: State) -> State:
        return state

    def _leases(self, state: State, at: int, leased: Partition, number: int) -> State:
        return put(state, at, leased)


def history_of(first: State, taken: Iterable[Taken]) -> History:
    return [_recorded(first.record), *(event for each in taken for event in _events(each.before, each.after))]


def _events(before: State, after: State) -> Iterator[Event]:
    if after.record != before.record:
        yield _recorded(after.record)
    for at, (was, now) in enumerate(zip(before.partitions, after.partitions, strict=True)):
        if was != now:
            yield Stored(at, _contents(now))


def _recorded(record: Record) -> Recorded:
    return Recorded((record.home,), frozenset({0, 1}), record.cursor)


def _contents(partition: Partition) -> Contents:
    items = {Item(str(item.number), 0): item.is_leased for item in partition.items}
    if len(items) < len(partition.items):
        # A simulated history would have ended here, as it does in `simulation.scene`.
        raise Broken("promise 59: an item is twice in one partition")
    closed, held = (frozenset({0}) if is_so else frozenset[int]() for is_so in (partition.is_closed, partition.is_held))
    leased = frozenset(item for item, is_leased in items.items() if is_leased)
    return Contents(frozenset(items), leased, frozenset(), closed, held, partition.given, partition.taken)


def test_the_steps_of_the_specification_are_accepted() -> None:
    random, rules = Random(5), Rules(items=3, rebalances=3)
    model, events = RebalanceKeys(rules), []
    for _ in range(500):
        history = history_of(model.first(), walk(model.steps, model.first(), random, 80))
        verdict = KeysTraceCheck().check(history)
        assert verdict is None, str(verdict)
        events += history
    assert any(isinstance(event, Recorded) and event.homes == (1,) for event in events)
    assert any(isinstance(event, Stored) and event.contents.held and event.contents.items for event in events)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_what_the_specification_does_without_one_of_its_rules_is_rejected(ablation: str) -> None:
    rules = ABLATIONS[ablation]
    model = RebalanceKeys(rules)
    taken = counterexample(model.steps, Unchecked(rules).steps, model.first())
    try:
        history = history_of(model.first(), taken)
    except Broken:
        return
    assert rejected(history), "\n".join(each.what for each in taken)
