"""Histories that cannot have been: recorded ones in which an event is missing, repeated, swapped or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from spec.partition_fences import ABSENT, READY
from spec.trace_check import Event, GaveUp, Heard, Opened, Opening, RanOut, Sent, Told

History = list[Event]


def _next_of(history: History, index: int, *, client: bool = False) -> int | None:
    """The next event of the same owner; with `client`, also what it tells."""
    at = getattr(history[index], "at")  # noqa: B009 - only some events have it
    for later in range(index + 1, len(history)):
        event = history[later]
        if getattr(event, "at", None) == at and (client or not isinstance(event, Told)):
            return later
    return None


def _followed(history: History, first: type, then: type) -> Iterator[int]:
    """Events of the first kind that the same owner follows by one of the other."""
    for index, event in enumerate(history):
        if isinstance(event, first) and (later := _next_of(history, index)) is not None and isinstance(history[later], then):
            yield index


def without_a_commit(history: History) -> Iterator[History]:
    for index in _followed(history, Sent, Heard):
        yield history[:index] + history[index + 1 :]


def without_an_outcome(history: History) -> Iterator[History]:
    for index in _followed(history, Heard, Sent):
        yield history[:index] + history[index + 1 :]


def without_an_opening(history: History) -> Iterator[History]:
    for index in _followed(history, Opening, Opened):
        yield history[:index] + history[index + 1 :]


def with_a_commit_twice(history: History) -> Iterator[History]:
    for index, event in enumerate(history):
        if isinstance(event, Sent):
            yield [*history[: index + 1], event, *history[index + 1 :]]


def with_an_outcome_twice(history: History) -> Iterator[History]:
    for index, event in enumerate(history):
        if isinstance(event, Heard):
            yield [*history[: index + 1], event, *history[index + 1 :]]


def with_an_outcome_before_its_commit(history: History) -> Iterator[History]:
    for index in _followed(history, Sent, Heard):
        later = _next_of(history, index)
        assert later is not None
        changed = [*history]
        changed[index], changed[later] = history[later], history[index]
        yield changed


def with_a_failure_for_done(history: History) -> Iterator[History]:
    """The owner opens the partition again, and finds that what was done is not."""
    for index in _followed(history, Heard, Opening):
        event = history[index]
        if isinstance(event, Heard) and event.outcome == "refused":
            again = _next_of(history, index)
            assert again is not None
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
    "a refusal is said to be done": with_a_failure_for_done,
    "an item that is stored is not found": with_an_item_missing,
    "an answer comes before its commit": with_an_answer_before_its_commit,
    "a lease has not run out": with_a_lease_that_has_not_run_out,
}
"""Each yields the histories in which that has been done at one place."""


def some(mutation: Callable[[History], Iterator[History]], history: History, count: int, random: Random) -> list[History]:
    """Up to so many of them."""
    found = list(mutation(history))
    return random.sample(found, min(count, len(found)))
