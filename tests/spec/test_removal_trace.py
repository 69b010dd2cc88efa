"""The trace check of rebalances accepts what the product and the specification do, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import pytest

from spec.histories import main
from spec.partition_removal import ABLATIONS, OPEN, SEALED, Partition, PartitionRemoval, Record, Rules, State
from spec.removal_histories import removal_histories
from spec.removal_trace import Contents, Event, Move, Recorded, RemovalTraceCheck, Stored
from tests.spec.walks import Taken, assert_rejected, counterexample, walk

History = list[Event]


def rejected(history: Sequence[Event]) -> bool:
    return RemovalTraceCheck().check(history) is not None


# ---- the simulator's --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated() -> list[History]:
    return [history for seed in range(6) for history in removal_histories(seed).values()]


def test_histories_of_the_simulator_are_accepted(simulated: Sequence[History]) -> None:
    for history in simulated:
        verdict = RemovalTraceCheck().check(history)
        assert verdict is None, str(verdict)
    events = [event for history in simulated for event in history]
    assert any(isinstance(event, Stored) and event.contents.moving for event in events)
    assert any(isinstance(event, Stored) and event.contents.admits == SEALED for event in events)
    assert sum(len(before.there - after.there) for before, after in _records(events)) > 4


def _records(events: Iterable[Event]) -> Iterator[tuple[Recorded, Recorded]]:
    records = [event for event in events if isinstance(event, Recorded)]
    return itertools.pairwise(records)


def _stored(history: History) -> Iterator[tuple[int, Stored, Stored]]:
    """Each commit but the first of each partition, with the one before it."""
    last: dict[int, Stored] = {}
    for at, event in enumerate(history):
        if isinstance(event, Stored):
            if event.partition in last:
                yield at, last[event.partition], event
            last[event.partition] = event


def without_a_sealing(history: History) -> Iterator[History]:
    """A partition is removed that is shut, and not sealed."""
    removed = {number for before, after in _records(history) for number in before.there - after.there - before.preparing}
    for number in removed:
        changed = [
            event._replace(contents=event.contents._replace(admits=1))
            if isinstance(event, Stored) and event.partition == number and event.contents.admits == SEALED
            else event
            for event in history
        ]
        if changed != history:
            yield changed


def with_an_item_sealed_in(history: History) -> Iterator[History]:
    for at, before, after in _stored(history):
        if after.contents.admits == SEALED != before.contents.admits:
            contents = after.contents._replace(others=frozenset({"left"}))
            yield [*history[:at], after._replace(contents=contents), *history[at + 1 :]]


def with_a_new_item_in_a_shut_partition(history: History) -> Iterator[History]:
    for at, before, after in _stored(history):
        if before.contents.admits == after.contents.admits == 1:
            contents = after.contents._replace(items=after.contents.items | {"new"})
            yield [*history[:at], after._replace(contents=contents), *history[at + 1 :]]


def with_an_outdated_request(history: History) -> Iterator[History]:
    for at, before, after in _stored(history):
        if after.contents.cursor > before.contents.cursor:
            late = after._replace(contents=after.contents._replace(cursor=before.contents.cursor, admits=before.contents.admits))
            yield [*history[: at + 1], late, *history[at + 1 :]]


def with_an_outdated_record(history: History) -> Iterator[History]:
    records = [at for at, event in enumerate(history) if isinstance(event, Recorded)]
    for before, after in itertools.pairwise(records):
        old, new = history[before], history[after]
        assert isinstance(old, Recorded)
        assert isinstance(new, Recorded)
        if old.cursor < new.cursor:
            yield [*history[: after + 1], old, *history[after + 1 :]]


def with_an_item_lost_on_its_way(history: History) -> Iterator[History]:
    """A move is over although its target never had the item."""
    for at, before, after in _stored(history):
        for move in after.contents.moving - before.contents.moving:
            contents = after.contents._replace(moving=after.contents.moving - {move})
            yield [*history[: at + 1], after._replace(contents=contents), *history[at + 1 :]]


def with_an_item_in_two_partitions(history: History) -> Iterator[History]:
    """An item stays where it was when it has arrived."""
    for at, before, after in _stored(history):
        for move in before.contents.moving - after.contents.moving:
            contents = after.contents._replace(items=after.contents.items | {move.item})
            if move.item not in after.contents.items:
                yield [*history[:at], after._replace(contents=contents), *history[at + 1 :]]


def with_a_settled_item_again(history: History) -> Iterator[History]:
    for at, before, after in _stored(history):
        settled = before.contents.items - after.contents.items - after.contents.others - after.contents.on_their_way
        if settled:
            contents = after.contents._replace(items=after.contents.items | {min(settled)})
            yield [*history[: at + 1], after._replace(contents=contents), *history[at + 1 :]]


MUTATIONS = {
    each.__name__: each
    for each in (
        without_a_sealing,
        with_an_item_sealed_in,
        with_a_new_item_in_a_shut_partition,
        with_an_outdated_request,
        with_an_outdated_record,
        with_an_item_lost_on_its_way,
        with_an_item_in_two_partitions,
        with_a_settled_item_again,
    )
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_histories_that_cannot_have_been_are_rejected(name: str, simulated: Sequence[History]) -> None:
    assert_rejected(name, MUTATIONS[name], simulated, rejected)


def test_the_command_checks_rebalances(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "removal", "--seeds", "1"]) == 0
    assert capsys.readouterr().out.startswith("removal: 1 histories of ")


# ---- the specification's ----------------------------------------------------------------------------------------------


class Unchecked(PartitionRemoval):
    """The specification without its promise: what breaks it goes on."""

    def _sound(self, state: State) -> State:
        return state


def history_of(first: State, taken: Iterable[Taken]) -> History:
    return [_recorded(first.record), *(event for each in taken for event in _events(each.before, each.after))]


def _events(before: State, after: State) -> Iterator[Event]:
    if after.record != before.record:
        yield _recorded(after.record)
    for at, (was, now) in enumerate(zip(before.partitions, after.partitions, strict=True)):
        if was != now:
            yield Stored(at, _contents(now))


def _recorded(record: Record) -> Recorded:
    draining = frozenset[int]() if record.step == "begin" else frozenset({record.drains})
    return Recorded(record.there, draining, record.cursor)


def _contents(partition: Partition) -> Contents:
    moving = frozenset(Move(str(move.item), move.source, move.number, 1 - move.source) for move in partition.moving)
    return Contents(frozenset(map(str, partition.items)), moving, frozenset(), partition.admits, partition.cursor)


def test_the_steps_of_the_specification_are_accepted() -> None:
    random, rules = Random(5), Rules(items=3, moves=4)
    model, events = PartitionRemoval(rules), []
    for _ in range(500):
        history = history_of(model.first(), walk(model.steps, model.first(), random, 80))
        verdict = RemovalTraceCheck().check(history)
        assert verdict is None, str(verdict)
        events += history
    assert any(isinstance(event, Recorded) and len(event.there) == 1 for event in events)
    assert any(isinstance(event, Stored) and event.contents.admits == OPEN and event.contents.cursor > 1 for event in events)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_what_the_specification_does_without_one_of_its_rules_is_rejected(ablation: str) -> None:
    rules = ABLATIONS[ablation]
    model = PartitionRemoval(rules)
    taken = counterexample(model.steps, Unchecked(rules).steps, model.first())
    assert rejected(history_of(model.first(), taken)), "\n".join(each.what for each in taken)
