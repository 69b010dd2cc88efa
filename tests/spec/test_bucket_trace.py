"""The trace check of partitions in a bucket accepts what the product and the specification do, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from simulation.planting import planted
from simulation.runner import BUGS
from spec import bucket_journals
from spec.bucket_histories import RecordedBucketWorld, bucket_histories
from spec.bucket_journals import ABLATIONS, Rules, first_state
from spec.bucket_trace import (
    BucketTraceCheck,
    Created,
    Cycle,
    Deleted,
    Discarded,
    Event,
    Head,
    Headed,
    Heard,
    Opened,
    Part,
    Saved,
    Sent,
)
from spec.histories import main
from tests.spec.walks import counterexample, walk

History = list[Event]


def rejected(history: Sequence[Event]) -> bool:
    return BucketTraceCheck().check(history) is not None


# ---- the simulator's --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated() -> list[History]:
    return [history for seed in range(12) for history in bucket_histories(seed).values()]


def test_histories_of_the_simulator_are_accepted(simulated: Sequence[History]) -> None:
    found = [verdict for history in simulated if (verdict := BucketTraceCheck().check(history)) is not None]
    assert not found, str(found[0])
    events = [event for history in simulated for event in history]
    assert {type(event) for event in events} == {Sent, Heard, Opened, Created, Deleted, Headed, Saved, Discarded}
    assert {event.outcome for event in events if isinstance(event, Heard)} == {"done", "refused"}
    entries = [event.entry for event in events if isinstance(event, Created)]
    assert "end" in entries
    assert "other" in entries


def without_a_cycle(history: History) -> Iterator[History]:
    """An entry whose cycle was acknowledged is not there."""
    done = {event.cycle for event in history if isinstance(event, Heard) and event.outcome == "done"}
    for at, event in enumerate(history):
        if isinstance(event, Created) and event.entry in done:
            yield history[:at] + history[at + 1 :]


def without_an_ending_entry(history: History) -> Iterator[History]:
    """A journal is taken over that has not ended."""
    for at, event in enumerate(history):
        if isinstance(event, Created) and event.entry == "end" and _is_taken_over(history, at):
            yield history[:at] + history[at + 1 :]


def _is_taken_over(history: History, at: int) -> bool:
    """Whether the next head closes a range at that ending entry, the only one of its journal, which another process writes."""
    ending = history[at]
    assert isinstance(ending, Created)
    heads = [event for event in history if isinstance(event, Headed)]
    following = next((event for event in history[at:] if isinstance(event, Headed)), None)
    if following is None:
        return False
    before = heads[heads.index(following) - 1].head if heads.index(following) else None
    attached = None if before is None else before.attached
    writer = next((event.by for event in heads if attached is not None and attached in event.head.tail), "")
    ends = [event for event in history if isinstance(event, Created) and event.entry == "end" and event.journal == ending.journal]
    return attached is not None and attached.journal == ending.journal and writer != following.by and len(ends) == 1


def with_a_cycle_deleted_too_soon(history: History) -> Iterator[History]:
    for at, event in enumerate(history):
        if isinstance(event, Created) and isinstance(event.entry, Cycle):
            yield [*history[: at + 1], Deleted(event.journal, event.number), *history[at + 1 :]]


def with_an_ending_entry_deleted(history: History) -> Iterator[History]:
    for at, event in enumerate(history):
        if isinstance(event, Created) and event.entry == "end":
            yield [*history[: at + 1], Deleted(event.journal, event.number), *history[at + 1 :]]


def with_an_earlier_head_again(history: History) -> Iterator[History]:
    heads = [at for at, event in enumerate(history) if isinstance(event, Headed)]
    for before, after in itertools.pairwise(heads):
        yield [*history[: after + 1], history[before], *history[after + 1 :]]


def with_a_head_of_a_former_owner(history: History) -> Iterator[History]:
    heads = [(at, event) for at, event in enumerate(history) if isinstance(event, Headed)]
    for (_, before), (at, after) in itertools.pairwise(heads):
        if before.head.fence and before.head.fence < after.head.fence:
            late = before._replace(head=before.head._replace(nonce="late"))
            yield [*history[: at + 1], late, *history[at + 1 :]]


def with_a_checkpoint_that_covers_too_much(history: History) -> Iterator[History]:
    """The head names a checkpoint, and nothing else; it has not all cycles."""
    for at, event in enumerate(history):
        if isinstance(event, Headed) and any(_has_cycles(history[:at], part) for part in event.head.tail):
            yield [*history[:at], event._replace(head=event.head._replace(tail=())), *history[at + 1 :]]


def _has_cycles(history: History, part: Part) -> bool:
    """Whether the range has cycles that no checkpoint has."""
    saved = {cycle for event in history if isinstance(event, Saved) for cycle in event.cycles}
    entries = [event for event in history if isinstance(event, Created) and part.has(event.journal, event.number)]
    ends = [event.number for event in entries if event.entry == "end"]
    return any(
        isinstance(event.entry, Cycle) and event.entry not in saved and event.number < min(ends, default=1 << 60) for event in entries
    )


def without_an_attachment(history: History) -> Iterator[History]:
    """A partition is not attached where its next cycles go."""
    for at, event in enumerate(history):
        if not isinstance(event, Headed) or event.head.attached is None:
            continue
        following = next((each for each in history[at + 1 :] if isinstance(each, Headed | Created)), None)
        if isinstance(following, Created) and isinstance(following.entry, Cycle) and following.entry.fence == event.head.fence:
            yield [*history[:at], event._replace(head=event.head._replace(tail=event.head.tail[:-1])), *history[at + 1 :]]


def with_a_refusal_of_what_was_done(history: History) -> Iterator[History]:
    for at, event in enumerate(history):
        if isinstance(event, Heard) and event.outcome == "done":
            yield [*history[:at], event._replace(outcome="refused"), *history[at + 1 :]]


def with_done_for_a_refusal(history: History) -> Iterator[History]:
    for at, event in enumerate(history):
        if isinstance(event, Heard) and event.outcome == "refused":
            yield [*history[:at], event._replace(outcome="done"), *history[at + 1 :]]


def with_an_answer_before_the_entry(history: History) -> Iterator[History]:
    for at, event in enumerate(history):
        if isinstance(event, Heard) and event.outcome == "done":
            sent = history.index(Sent(event.cycle))
            yield [*history[: sent + 1], event, *history[sent + 1 : at], *history[at + 1 :]]


def with_a_cycle_less_found(history: History) -> Iterator[History]:
    for at, event in enumerate(history):
        if isinstance(event, Opened) and event.known:
            yield [*history[:at], event._replace(known=event.known[:-1]), *history[at + 1 :]]


def with_the_named_checkpoint_discarded(history: History) -> Iterator[History]:
    for at, event in enumerate(history):
        if isinstance(event, Headed) and event.head.checkpoint:
            yield [*history[: at + 1], Discarded(event.head.checkpoint), *history[at + 1 :]]


MUTATIONS = {
    each.__name__: each
    for each in (
        without_a_cycle,
        without_an_ending_entry,
        with_a_cycle_deleted_too_soon,
        with_an_ending_entry_deleted,
        with_an_earlier_head_again,
        with_a_head_of_a_former_owner,
        with_a_checkpoint_that_covers_too_much,
        without_an_attachment,
        with_a_refusal_of_what_was_done,
        with_done_for_a_refusal,
        with_an_answer_before_the_entry,
        with_a_cycle_less_found,
        with_the_named_checkpoint_discarded,
    )
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_histories_that_cannot_have_been_are_rejected(name: str, simulated: Sequence[History]) -> None:
    random, tried, accepted = Random(name), 0, 0
    for history in simulated:
        mutated = list(MUTATIONS[name](history))
        for changed in random.sample(mutated, min(3, len(mutated))):
            tried += 1
            accepted += not rejected(changed)
    assert tried >= 10
    assert not accepted, f"{accepted} of {tried}"


@pytest.mark.parametrize(
    "name",
    [
        "opens_without_an_ending_entry",
        "collects_ending_entries",
        "reads_the_former_journal_only_so_far",
        "a_former_owner_replaces_the_head",
        "tags_that_come_back",
        "a_checkpoint_covers_what_came_after_it",
        "collects_entries_of_the_tail",
        "collects_before_the_head_names_the_checkpoint",
        "takes_a_lost_answer_for_a_refusal",
    ],
)
def test_histories_with_a_planted_bug_are_rejected(name: str) -> None:
    for seed in range(120):
        with planted(BUGS["buckets", name]):
            world = RecordedBucketWorld(seed)
            # The simulator finds it, too, but perhaps later.
            with contextlib.suppress(Exception):
                world.live()
        if any(rejected(history) for history in world.histories().values()):
            return
    pytest.fail(f"no history with {name} is rejected")


def test_the_command_checks_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "buckets", "--seeds", "1"]) == 0
    assert capsys.readouterr().out.startswith("buckets: 1 histories of ")


# ---- the specification's ----------------------------------------------------------------------------------------------


class Unchecked(bucket_journals.Journals):
    """The specification without its promises: what breaks one goes on."""

    def _opens(self, state: bucket_journals.State, at: int, owner: bucket_journals.Owner) -> bucket_journals.State:
        return bucket_journals._put(state, at, owner)

    def _acknowledges(
        self, state: bucket_journals.State, at: int, owner: bucket_journals.Owner, cycle: bucket_journals.Cycle
    ) -> bucket_journals.State:
        return state._replace(acknowledged=state.acknowledged | {cycle})

    def _refuses(
        self, state: bucket_journals.State, at: int, owner: bucket_journals.Owner, cycle: bucket_journals.Cycle
    ) -> bucket_journals.State:
        return state._replace(refused=state.refused | {cycle})


def events_between(before: bucket_journals.State, after: bucket_journals.State) -> Iterator[Event]:
    """What a step of the specification is in a history."""
    for request in after.net - before.net:
        if len(request) == 4 and request[3] is not None:
            yield Sent(_cycle(request[3]))
    for journal, (old, new) in enumerate(zip(before.journals, after.journals, strict=True)):
        for number, (was, now) in enumerate(zip(old, new, strict=True), 1):
            if was != now and now is None:
                yield Deleted(str(journal), number)
            elif was != now:
                yield Created(str(journal), str(journal), number, "end" if now == "end" else _cycle(now))  # type: ignore[arg-type]
    if after.head != before.head:
        yield from _headed(after.head)
    for at, (old_owner, new_owner) in enumerate(zip(before.owners, after.owners, strict=True)):
        if old_owner.phase == "walks" and new_owner.phase == "open":
            yield Opened((at,), tuple(map(_cycle, new_owner.known)))
    for cycle in after.acknowledged - before.acknowledged:
        yield Heard(_cycle(cycle), "done")
    for cycle in after.refused - before.refused:
        yield Heard(_cycle(cycle), "refused")


def _headed(head: bucket_journals.Head) -> Iterator[Event]:
    checkpoint = str(head.saved) if head.saved else ""
    if checkpoint:
        yield Saved(checkpoint, tuple(map(_cycle, head.saved)))
    tail = tuple(Part(str(part.owner), part.start, part.end) for part in head.tail)
    fence = (head.fence,) if head.fence >= 0 else ()
    yield Headed(str(head.nonce[0]), Head(str(head.nonce), fence, checkpoint, tail))


def _cycle(cycle: bucket_journals.Cycle) -> Cycle:
    return Cycle((cycle.owner,), cycle.txn, str(cycle.attempt))


FIRST: History = [Headed("", Head("first"))]


def test_the_steps_of_the_specification_are_accepted() -> None:
    random, kinds, rules = Random(5), set[type](), Rules(owners=3, numbers=4, cycles=3, heads=6)
    for _ in range(400):
        taken = walk(bucket_journals.Journals(rules).steps, first_state(rules), random, 60)
        history = [*FIRST, *(event for each in taken for event in events_between(each.before, each.after))]
        kinds |= {type(event) for event in history}
        verdict = BucketTraceCheck().check(history)
        assert verdict is None, str(verdict)
    assert kinds == {Sent, Heard, Opened, Created, Deleted, Headed, Saved}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_what_the_specification_does_without_one_of_its_rules_is_rejected(ablation: str) -> None:
    rules = ABLATIONS[ablation]
    taken = counterexample(bucket_journals.Journals(rules).steps, Unchecked(rules).steps, first_state(rules))
    history = [*FIRST, *(event for each in taken for event in events_between(each.before, each.after))]
    assert rejected(history), "\n".join(each.what for each in taken)
