"""The trace check of a capture's tasks accepts what the product and the specification do, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import pytest

from simulation.planting import planted
from simulation.runner import BUGS
from sluiceway.core.group.task_state import Assign, Finish, Join, Release, Term, decode, encode
from spec.capture_tasks import ABLATIONS, CHILD, MEMBERS, START, TOKENS, CaptureTasks, Reader, Rules, State, _with, facts
from spec.checker import Broken
from spec.histories import main
from spec.task_histories import RecordedTasks, task_histories
from spec.task_trace import Arrived, Begins, Event, Fenced, Kept, Knows, Reads, Rests, Said, TaskHistory, TaskTraceCheck
from tests.spec.walks import Taken, counterexample, walk

Events = list[Event]


def rejected(history: TaskHistory) -> bool:
    return TaskTraceCheck(history.parents, history.records).check(history.events) is not None


# ---- the simulator's --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated() -> list[TaskHistory]:
    return [task_histories(seed)["tasks"] for seed in range(15)]


def test_histories_of_the_simulator_are_accepted(simulated: Sequence[TaskHistory]) -> None:
    for history in simulated:
        verdict = TaskTraceCheck(history.parents, history.records).check(history.events)
        assert verdict is None, str(verdict)
    events = [event for history in simulated for event in history.events]
    assert {type(event) for event in events} == {Said, Arrived, Knows, Begins, Reads, Rests, Fenced, Kept}
    said = {type(event.record).__name__ for event in events if isinstance(event, Said)}
    assert said >= {"Join", "Leave", "Term", "Seeds", "Assign", "Move", "Release", "Finish", "Reach"}


def without_a_record_that_counts(events: Events) -> Iterator[Events]:
    """A record that gave a grant is not in the log: the grants after it have other numbers."""
    for at, event in enumerate(events):
        if isinstance(event, Arrived) and isinstance(event.record, Assign):
            yield events[:at] + events[at + 1 :]


def with_a_record_that_nobody_has_said(events: Events) -> Iterator[Events]:
    for at, event in enumerate(events):
        if isinstance(event, Arrived) and isinstance(event.record, Term):
            yield [*events[:at], Arrived(Term(event.record.term, event.record.leader, ())), *events[at + 1 :]]


def with_a_record_before_it_was_said(events: Events) -> Iterator[Events]:
    for at, event in enumerate(events):
        if isinstance(event, Said) and event not in events[:at] and Arrived(event.record) in events[at:]:
            yield [*events[:at], Arrived(event.record), *events[at:]]


def with_a_decision_of_another_member(events: Events) -> Iterator[Events]:
    names = sorted({event.name for event in events if isinstance(event, Said)})
    for at, event in enumerate(events):
        if isinstance(event, Said) and isinstance(event.record, Assign) and len(names) > 1:
            other = next(name for name in names if name != event.name)
            yield [*events[:at], event._replace(name=other), *events[at + 1 :]]


def without_a_stop(events: Events) -> Iterator[Events]:
    """A partition is released by a reader that has not stopped."""
    for at, event in enumerate(events):
        if isinstance(event, Rests) and any(
            isinstance(later, Said) and later == Said(event.name, Release(event.token, event.grant)) for later in events[at:]
        ):
            yield events[:at] + events[at + 1 :]


def without_the_last_commit(events: Events) -> Iterator[Events]:
    """A partition finishes whose end is not committed."""
    finished = {event.record.token for event in events if isinstance(event, Arrived) and isinstance(event.record, Finish)}
    for token in finished:
        commits = [at for at, event in enumerate(events) if isinstance(event, Kept) and event.token == token]
        if commits:
            last = events[commits[-1]]
            assert isinstance(last, Kept)
            # Of an empty partition nothing has to be committed.
            if last.records:
                yield [event for event in events if not (isinstance(event, Kept) and (event.token, event.records) == (token, last.records))]


def with_a_commit_under_an_earlier_grant(events: Events) -> Iterator[Events]:
    for at, event in enumerate(events):
        before = [each for each in events[:at] if isinstance(each, Kept)]
        if isinstance(event, Fenced):
            yield from (
                [*events[: at + 1], kept, *events[at + 1 :]]
                for kept in before[-8:]
                if kept.token == event.token and kept.grant < event.grant
            )


def without_an_opening(events: Events) -> Iterator[Events]:
    for at, event in enumerate(events):
        if (
            isinstance(event, Fenced)
            and events.count(event) == 1
            and any(isinstance(later, Reads) and (later.token, later.grant) == event for later in events[at:])
        ):
            yield events[:at] + events[at + 1 :]


def with_a_reader_of_anothers_partition(events: Events) -> Iterator[Events]:
    names = sorted({event.name for event in events if isinstance(event, Said)})
    for at, event in enumerate(events):
        if isinstance(event, Begins) and len(names) > 1:
            other = next(name for name in names if name != event.name)
            yield [*events[:at], event._replace(name=other), *events[at + 1 :]]


def with_a_child_that_is_read_too_soon(events: Events, history: TaskHistory) -> Iterator[Events]:
    """The last record of a parent comes after its child was begun."""
    for at, event in enumerate(events):
        if isinstance(event, Reads) and history.parents[event.token]:
            parents = history.parents[event.token]
            yield [
                each
                for each in events[:at]
                if not (isinstance(each, Arrived) and isinstance(each.record, Finish) and each.record.token in parents)
            ] + events[at:]


def with_knowledge_of_what_is_to_come(events: Events) -> Iterator[Events]:
    for at, event in enumerate(events):
        if isinstance(event, Knows):
            arrivals = [place for place in range(at) if isinstance(events[place], Arrived)]
            if len(arrivals) == event.seq:
                yield [*events[: arrivals[-1]], event, *events[arrivals[-1] : at], *events[at + 1 :]]


MUTATIONS = {
    each.__name__: each
    for each in (
        without_a_record_that_counts,
        with_a_record_that_nobody_has_said,
        with_a_record_before_it_was_said,
        with_a_decision_of_another_member,
        without_a_stop,
        without_the_last_commit,
        with_a_commit_under_an_earlier_grant,
        without_an_opening,
        with_a_reader_of_anothers_partition,
        with_knowledge_of_what_is_to_come,
    )
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_histories_that_cannot_have_been_are_rejected(name: str, simulated: Sequence[TaskHistory]) -> None:
    random, tried, accepted = Random(name), 0, 0
    for history in simulated:
        mutated = list(MUTATIONS[name](history.events))
        for events in random.sample(mutated, min(2, len(mutated))):
            tried += 1
            accepted += not rejected(history._replace(events=events))
    assert tried >= 3
    assert not accepted, f"{accepted} of {tried}"


def test_a_child_that_is_read_before_its_parents_have_finished_is_rejected(simulated: Sequence[TaskHistory]) -> None:
    tried = [
        history._replace(events=events) for history in simulated for events in with_a_child_that_is_read_too_soon(history.events, history)
    ]
    assert len(tried) >= 8
    assert all(map(rejected, tried))


@pytest.mark.parametrize(
    "name",
    [
        "no_fence",
        "takes_broken_off_for_finished",
        "releases_before_it_has_stopped",
    ],
)
def test_histories_with_a_planted_bug_are_rejected(name: str) -> None:
    for seed in range(30):
        with planted(BUGS["tasks", name]):
            world = RecordedTasks(seed)
            # The simulator finds it, too, but perhaps later.
            with world.recorder.recording(), contextlib.suppress(Exception):
                world.live()
        # By the fold as it should be.
        if rejected(world.history()):
            return
    pytest.fail(f"no history with {name} is rejected")


def test_the_command_checks_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "tasks", "--seeds", "1"]) == 0
    assert capsys.readouterr().out.startswith("tasks: 1 histories of 1 groups")


# ---- the specification's ----------------------------------------------------------------------------------------------

PARENTS = {token: CHILD.parents if token == CHILD.token else () for token in TOKENS}


class Unchecked(CaptureTasks):
    """The specification without its promises: what breaks one goes on."""

    def _arrives(self, state: State, record: bytes) -> State:
        return state._replace(log=(*state.log, record))

    def _sound(self, state: State, at: int, place: int) -> State:
        return state

    def _commits(self, state: State, at: int, place: int, reader: Reader) -> State:
        try:
            return super()._commits(state, at, place, reader)
        except Broken:
            return _with(state, at, place, reader._replace(phase="ended"))


def events_between(rules: Rules, taken: Taken) -> Iterator[Event]:
    """What a step of the specification is in a history."""
    what, before, after = taken
    name = what.partition(" ")[0]
    for record in after.late - before.late:
        yield Said(name, decode(record))
    for data in after.log[len(before.log) :]:
        if what.startswith(f"{name} appends"):
            yield Said(name, decode(data))
        yield Arrived(decode(data))
    for at, (was, now) in enumerate(zip(before.folded, after.folded, strict=True)):
        if was != now:
            yield Knows(MEMBERS[at], now, facts(rules, after.log[:now]).state)
    for at, member in enumerate(MEMBERS):
        for place, token in enumerate(TOKENS):
            yield from _of_reader(member, token, before.readers[at][place], after.readers[at][place])


def _of_reader(member: str, token: str, was: Reader | None, now: Reader | None) -> Iterator[Event]:
    if was == now:
        return
    if was is None and now is not None and now.phase != "stopped":
        yield Begins(member, token, now.grant)
        yield Fenced(token, now.grant)
        yield Reads(member, token, now.grant)
    if now is not None and now.phase == "ended" and was is not None and was.phase == "reads":
        yield Kept(token, now.grant, 1)
    if now is not None and now.phase == "ended":
        yield Rests(member, token, now.grant, "ended")
    elif was is not None and was.phase == "reads":
        yield Rests(member, token, was.grant, "stopped")


def first_events() -> Iterator[Event]:
    """How the log comes to begin as it does."""
    log = tuple(encode(record) for record in START)
    for number, record in enumerate(START):
        name = record.member if isinstance(record, Join) else MEMBERS[0]
        yield Knows(name, number, facts(Rules(), log[:number]).state)
        yield Said(name, record)
        yield Arrived(record)
    for name in MEMBERS:
        yield Knows(name, len(START), facts(Rules(), log).state)


def history_of(rules: Rules, taken: Iterable[Taken]) -> TaskHistory:
    events = [*first_events(), *(event for each in taken for event in events_between(rules, each))]
    return TaskHistory(PARENTS, dict.fromkeys(TOKENS, 1), events)


def test_the_steps_of_the_specification_are_accepted() -> None:
    random, kinds, rules = Random(5), set[type](), Rules(records=8, terms=4, late=2)
    model = CaptureTasks(rules)
    for _ in range(300):
        history = history_of(rules, walk(model.steps, model.first(), random, 60))
        kinds |= {type(event) for event in history.events}
        verdict = TaskTraceCheck(history.parents, history.records).check(history.events)
        assert verdict is None, str(verdict)
    assert kinds == {Said, Arrived, Knows, Begins, Reads, Rests, Fenced, Kept}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_what_the_specification_does_without_one_of_its_rules_is_rejected(ablation: str) -> None:
    rules = ABLATIONS[ablation]
    model = CaptureTasks(rules)
    taken = counterexample(model.steps, Unchecked(rules).steps, model.first())
    history = history_of(rules, taken)
    # A rule of the fold is missed where a member goes by what it makes of the log.
    log = taken[-1].after.log
    history.events.append(Knows(MEMBERS[0], len(log), facts(rules, log).state))
    assert rejected(history), "\n".join(each.what for each in taken)
