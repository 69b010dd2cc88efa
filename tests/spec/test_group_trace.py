"""The specifications of groups accept what simulated groups do, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from simulation.planting import planted
from simulation.runner import BUGS
from sluiceway.core.group.group_records import Strategy
from spec.group_claims import Store as ClaimStore
from spec.group_histories import RecordedGroup, group_histories, member_histories
from spec.group_rounds import Commit
from spec.group_trace import (
    Changed,
    Decided,
    Defined,
    Event,
    GroupHistory,
    Landed,
    Looked,
    RanOut,
    check_claims,
    check_rounds,
)
from spec.histories import main
from spec.rejected import Rejected
from tests.spec.real_groups import play

SEEDS = range(24)


def verdict(name: str, history: GroupHistory) -> Rejected[Event] | None:
    return check_rounds(history) if name == "rounds" else check_claims(history)


@pytest.fixture(scope="module")
def recorded() -> list[tuple[str, GroupHistory]]:
    return [each for seed in SEEDS for each in group_histories(seed).items()]


def test_histories_of_members_with_real_drivers_are_accepted() -> None:
    played = [each for seed in range(12) for each in member_histories(seed).items()]
    rejected = [found for name, history in played if (found := verdict(name, history)) is not None]
    assert not rejected, str(rejected[0])
    kinds = {(name.partition(" ")[0], type(event)) for name, history in played for event in history.events}
    assert kinds == {(of, kind) for of in ("rounds", "claims") for kind in (Looked, Decided, Landed, Changed, RanOut)}


def test_histories_of_simulated_groups_are_accepted(recorded: list[tuple[str, GroupHistory]]) -> None:
    rejected = [found for name, history in recorded if (found := verdict(name, history)) is not None]
    assert not rejected, str(rejected[0])
    # Histories in which nothing happens would be accepted, too.
    for of in ("rounds", "claims"):
        events = [event for name, history in recorded if name.startswith(of) for event in history.events]
        assert {type(event) for event in events} == {Looked, Decided, Landed, Changed, RanOut}
        assert any(event.serves for event in events if isinstance(event, Looked))
        assert any(found for event in events if isinstance(event, Decided) for found in _gives_up(event))


def _gives_up(event: Decided) -> list[object]:
    """The members that a commit gives up."""
    return [*event.commit.given_up] if isinstance(event.commit, Commit) else [event.commit.other] if event.commit.other is not None else []


# -- histories that cannot have been ----------------------------------------------------------------------------------


def without_a_decision(events: list[Event]) -> Iterator[list[Event]]:
    landed = {event.number for event in events if isinstance(event, Landed)}
    for index, event in enumerate(events):
        if isinstance(event, Decided) and event.number in landed:
            yield events[:index] + events[index + 1 :]


def with_a_commit_that_lands_twice(events: list[Event]) -> Iterator[list[Event]]:
    for index, event in enumerate(events):
        if isinstance(event, Landed):
            yield [*events[: index + 1], event, *events[index + 1 :]]


def without_a_commit(events: list[Event]) -> Iterator[list[Event]]:
    """What the next commit finds is not what was there."""
    landed = [index for index, event in enumerate(events) if isinstance(event, Landed)]
    for index in landed[:-1]:
        yield events[:index] + events[index + 1 :]


def with_a_refused_commit_that_lands(events: list[Event]) -> Iterator[list[Event]]:
    """A commit that did not land is said to have: the group is as it was."""
    landed = {event.number: event for event in events if isinstance(event, Landed)}
    last: Landed | None = None
    for index, event in enumerate(events):
        if isinstance(event, Landed):
            last = event
        elif isinstance(event, Decided) and event.number not in landed and last is not None:
            yield [*events[: index + 1], last._replace(number=event.number), *events[index + 1 :]]


def with_a_beat_too_many(events: list[Event]) -> Iterator[list[Event]]:
    for index, event in enumerate(events):
        if isinstance(event, Decided):
            commit = event.commit
            ahead = _with_beat(commit, 1)
            if ahead is not None:
                yield [*events[:index], event._replace(commit=ahead), *events[index + 1 :]]


def _with_beat(commit: object, more: int) -> object | None:
    if isinstance(commit, Commit):
        return None if commit.record is None else commit._replace(record=commit.record._replace(beat=commit.record.beat + more))
    beat = getattr(commit, "beat")  # noqa: B009 - the other specification's
    return None if beat is None else commit._replace(beat=beat + more)  # type: ignore[attr-defined]


def with_items_of_another(events: list[Event]) -> Iterator[list[Event]]:
    """A member serves what it has not been given, or under another grant."""
    for index, event in enumerate(events):
        if isinstance(event, Looked) and event.serves:
            more = event.serves + 1 if isinstance(event.serves, int) else tuple((item, grant + 1) for item, grant in event.serves)
            yield [*events[:index], event._replace(serves=more), *events[index + 1 :]]


def with_an_item_that_is_placed_elsewhere(events: list[Event]) -> Iterator[list[Event]]:
    """An item is placed under another grant, or at a member that is given none."""
    before: Any = None
    for index, event in enumerate(events):
        if isinstance(event, Changed):
            after = event.after
            if isinstance(after, ClaimStore):
                wrong = after._replace(claim=after.claim._replace(grant=after.claim.grant + 1))
                yield [*events[:index], event._replace(after=wrong), *events[index + 1 :]]
            elif before is not None and after.plan != before.plan and after.plan.owners:
                name, grants = after.plan.owners[0]
                more = tuple((item, grant + 1) for item, grant in grants)
                plan = after.plan._replace(owners=((name, more), *after.plan.owners[1:]))
                yield [*events[:index], event._replace(after=after._replace(plan=plan)), *events[index + 1 :]]
        if isinstance(event, Landed | Changed):
            before = event.after


def with_a_lease_that_is_over(events: list[Event]) -> Iterator[list[Event]]:
    """The lease of a member that serves is over before it looks."""
    for index, event in enumerate(events):
        if isinstance(event, Looked) and event.serves:
            yield [*events[:index], RanOut(event.at, 1_000_000), *events[index:]]


def with_members_given_up_before_their_leases_are_over(events: list[Event]) -> Iterator[list[Event]]:
    """No lease is ever over: nobody may be given up."""
    if any(isinstance(event, Decided) and _gives_up_the_living(event) for event in events):
        yield [event for event in events if not isinstance(event, RanOut)]


def _gives_up_the_living(event: Decided) -> bool:
    """Whether the commit gives up a member by its silence: a claim of what was a member's that has gone needs none."""
    commit = event.commit
    return bool(commit.given_up) if isinstance(commit, Commit) else commit.other is not None and commit.claim is None


MUTATIONS: dict[str, Callable[[list[Event]], Iterator[list[Event]]]] = {
    each.__name__: each
    for each in (
        without_a_decision,
        with_a_commit_that_lands_twice,
        without_a_commit,
        with_a_refused_commit_that_lands,
        with_a_beat_too_many,
        with_items_of_another,
        with_an_item_that_is_placed_elsewhere,
        with_a_lease_that_is_over,
        with_members_given_up_before_their_leases_are_over,
    )
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_histories_that_cannot_have_been_are_rejected(name: str, recorded: list[tuple[str, GroupHistory]]) -> None:
    random, tried, accepted = Random(name), 0, []
    for of, history in recorded:
        mutated = list(MUTATIONS[name](history.events))
        for events in random.sample(mutated, min(2, len(mutated))):
            tried += 1
            if verdict(of, history._replace(events=events)) is None:
                accepted.append(of)
    assert tried >= 8
    assert not accepted, f"{len(accepted)} of {tried}"


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_histories_of_real_groups_are_accepted(tmp_path: Path, strategy: Strategy) -> None:
    played = play(tmp_path, 1, strategy, seconds=8)
    assert played
    for name, history in played.items():
        assert (found := verdict(name, history)) is None, str(found)
        assert {type(event) for event in history.events} == {Looked, Decided, Landed, Defined, RanOut}
        # What nobody saw landed is checked by what others saw: a history without a commit is rejected here, too.
        changed = next(without_a_commit(history.events))
        assert verdict(name, history._replace(events=changed)) is not None


@pytest.mark.parametrize(
    "name",
    [
        "serves_beyond_its_lease",
        "gives_members_up_too_soon",
        "says_too_soon_that_it_has_stopped",
        "does_not_wait_for_the_old_owner_to_stop",
        "keeps_the_grant_when_the_owner_changes",
        "claims_without_looking_whose_it_is",
        "claims_without_a_new_grant",
        "serves_what_it_gives_back",
    ],
)
def test_histories_of_groups_with_a_planted_bug_are_rejected(name: str) -> None:
    for seed in range(60):
        with planted(BUGS["groups", name]):
            world = RecordedGroup(seed)
            # The simulator finds it, too, but perhaps later.
            with world.recorder.recording(), contextlib.suppress(Exception):
                world.live()
        if any(verdict(of, history) is not None for of, history in world.recorder.histories().items()):
            return
    pytest.fail(f"no history with {name} is rejected")


def test_the_command_checks_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "groups", "--seeds", "2"]) == 0
    assert capsys.readouterr().out.startswith("groups: 2 histories of ")
