"""Histories that cannot have been: recorded ones in which an event is missing, repeated, swapped or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from spec.partition_fences import ABSENT, READY
from spec.trace_check import Event, GaveUp, Heard, Opened, Opening, RanOut, Sent, Told

History = list[Event]


def _next_of(history: History, index: int) -> int | None:
    """The next event of the same owner but for what it tells."""
    at = getattr(history[index], "at")  # noqa: B009 - only some events have it
    for later in range(index + 1, len(history)):
        if getattr(history[later], "at", None) == at and not isinstance(history[later], Told):
            return later
    return None


def _answered(history: History) -> Iterator[tuple[int, int]]:
    """Commits whose owners hear of them next: where they are, and where the outcomes are."""
    for index, event in enumerate(history):
        later = _next_of(history, index) if isinstance(event, Sent) else None
        if later is not None and isinstance(event, Sent):
            heard = history[later]
            if isinstance(heard, Heard) and heard.fence == event.fence:
                yield index, later


def without_a_commit(history: History) -> Iterator[History]:
    for index, _ in _answered(history):
        yield history[:index] + history[index + 1 :]


def without_an_outcome(history: History) -> Iterator[History]:
    for _, index in _answered(history):
        if (later := _next_of(history, index)) is not None and isinstance(history[later], Sent):
            yield history[:index] + history[index + 1 :]


def without_an_opening(history: History) -> Iterator[History]:
    for index, event in enumerate(history):
        if isinstance(event, Opening) and (later := _next_of(history, index)) is not None and isinstance(history[later], Opened):
            yield history[:index] + history[index + 1 :]


def with_a_commit_twice(history: History) -> Iterator[History]:
    for index, event in enumerate(history):
        if isinstance(event, Sent):
            yield [*history[: index + 1], event, *history[index + 1 :]]


def with_an_outcome_twice(history: History) -> Iterator[History]:
    for _, index in _answered(history):
        yield [*history[: index + 1], history[index], *history[index + 1 :]]


def with_an_outcome_before_its_commit(history: History) -> Iterator[History]:
    for index, later in _answered(history):
        changed = [*history]
        changed[index], changed[later] = history[later], history[index]
        yield changed


def with_done_for_a_refusal(history: History) -> Iterator[History]:
    """The owner opens the partition again, and finds that what was done is not."""
    for _, index in _answered(history):
        event, again = history[index], _next_of(history, index)
        if not isinstance(event, Heard) or event.outcome != "refused" or again is None or not isinstance(history[again], Opening):
            continue
        if any(isinstance(each, Opened) for each in history[again:]):
            yield [*history[:index], event._replace(outcome="done"), *history[index + 1 :]]


def with_an_item_missing(history: History) -> Iterator[History]:
    for index, event in enumerate(history):
        if isinstance(event, Opened) and event.alive:
            yield [*history[:index], event._replace(alive=event.alive - {min(event.alive, key=str)}), *history[index + 1 :]]


def with_an_answer_before_its_commit(history: History) -> Iterator[History]:
    """A client is told that its item is stored before its owner sends it to the store."""
    for index, event in enumerate(history):
        if isinstance(event, Sent) and any(change.before == ABSENT for change in event.changes):
            item = next(change.item for change in event.changes if change.before == ABSENT)
            if not any(isinstance(each, Sent | Opened) and item in _items(each) for each in history[:index]):
                yield [*history[:index], Told(event.at, (item,), READY), *history[index:]]


def _items(event: Sent | Opened) -> set[int]:
    return {change.item for change in event.changes} if isinstance(event, Sent) else {item for item, _ in event.alive}


def with_a_lease_that_has_not_run_out(history: History) -> Iterator[History]:
    """An item is taken from a client that was told of its lease, has not given it up, and whose time is not over."""
    for index, event in enumerate(history):
        if isinstance(event, RanOut) and _matters(history, index, event.lease):
            yield history[:index] + history[index + 1 :]


def _matters(history: History, index: int, lease: int) -> bool:
    told = {item for each in history[:index] if isinstance(each, Told) and each.place == lease for item in each.items}
    given_up = {item for each in history if isinstance(each, GaveUp) and each.lease == lease for item in each.items}
    taken = {change.item for each in history[index:] if isinstance(each, Sent) for change in each.changes if change.before == lease}
    return bool((told - given_up) & taken)


MUTATIONS: dict[str, Callable[[History], Iterator[History]]] = {
    "a commit is missing": without_a_commit,
    "an outcome is missing": without_an_outcome,
    "an opening is missing": without_an_opening,
    "a commit is there twice": with_a_commit_twice,
    "an outcome is there twice": with_an_outcome_twice,
    "an outcome comes before its commit": with_an_outcome_before_its_commit,
    "a refusal is said to be done": with_done_for_a_refusal,
    "an item that is stored is not found": with_an_item_missing,
    "an answer comes before its commit": with_an_answer_before_its_commit,
    "a lease has not run out": with_a_lease_that_has_not_run_out,
}
"""Each yields the histories in which that has been done at one place."""


def some(mutation: Callable[[History], Iterator[History]], history: History, count: int, random: Random) -> list[History]:
    """Up to so many of them."""
    found = list(mutation(history))
    return random.sample(found, min(count, len(found)))
