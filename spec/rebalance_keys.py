"""Specification of a rebalance of a queue with `order` (ADR 25 and 53): a slot of keys moves to another partition and back.

One key of the slot has all the items, numbered as its producer sends them, one after the other. Two coordinators may act at once, each by
the record as it has read it. Their requests to the partitions arrive late, and more than once: what was sent stays under way for ever.
Routers know any record that there ever was. A partition's own changes are atomic and durable (see `partition_fences`).

Invariants carry the numbers of docs/explanation/guarantees.md: 58 (order), 59 (stored once), 41 (nothing is lost). `python -m spec keys`
checks them, and that each rule is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spec.checker import Broken

MOVING = -1
"""The home of a slot that has none at the moment."""


@dataclass(frozen=True)
class Rules:
    """The bounds, and the rules, which can be left out one by one."""

    items: int = 2
    coordinators: int = 2
    rebalances: int = 2
    retries: int = 1
    closes_before_it_gives: bool = True
    keys_move_along: bool = True
    holds_back: bool = True
    waits_until_it_is_taken: bool = True
    waits_until_it_is_drained: bool = True
    partitions_check_cursors: bool = True


class Record(NamedTuple):
    """The queue's: `home` of the slot. `target`: where it is to be. `cursor` rises with every change of what partitions are for."""

    home: int = 0
    step: str = "done"
    target: int = 0
    cursor: int = 0
    version: int = 0


class Item(NamedTuple):
    number: int
    is_leased: bool = False


class Partition(NamedTuple):
    """`items`: of the key, in their order. `known`: those that it knows to be stored already. `is_closed`: it takes none of the slot.
    `is_held`: it leases none of it."""

    items: tuple[Item, ...] = ()
    known: frozenset[int] = frozenset()
    is_closed: bool = False
    is_held: bool = False
    given: int = 0
    taken: int = 0


class Request(NamedTuple):
    """To a partition: `give`, `take`, `look` or `serve` the slot."""

    what: str
    partition: int
    cursor: int
    known: frozenset[int] = frozenset()


class Coordinator(NamedTuple):
    """`seen`: the record that it acts by. What it has heard since: the keys `given`, whether the slot is `taken`, `drained`, `served`."""

    seen: Record
    given: frozenset[int] | None = None
    is_taken: bool = False
    is_drained: bool = False
    is_served: bool = False


class State(NamedTuple):
    """`homes`: all that the slot ever had. `next`: the item that the producer sends now. `settled`: items that are done."""

    record: Record
    partitions: tuple[Partition, Partition]
    coordinators: tuple[Coordinator, ...]
    net: frozenset[Request] = frozenset()
    homes: frozenset[int] = frozenset({0})
    next: int = 1
    settled: frozenset[int] = frozenset()
    retries: int = 0


Step = tuple[str, Callable[[], State]]


class RebalanceKeys:
    """The model under these rules."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def first(self) -> State:
        record = Record()
        return State(record, (Partition(), Partition(is_closed=False)), (Coordinator(record),) * self._rules.coordinators)

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._produces(state)
        for at, partition in enumerate(state.partitions):
            yield from self._consumes(state, at, partition)
        for at, coordinator in enumerate(state.coordinators):
            yield from self._coordinates(state, at, coordinator)
        for request in state.net:
            yield from self._arrivals(state, request)

    # ---- clients ----------------------------------------------------------------------------------------------

    def _produces(self, state: State) -> Iterator[Step]:
        if state.next > self._rules.items:
            return
        for at in state.homes:
            partition = state.partitions[at]
            if partition.is_closed:
                continue
            if state.next not in partition.known:
                stored = partition._replace(items=(*partition.items, Item(state.next)), known=partition.known | {state.next})
                yield (
                    f"item {state.next} is stored in {at}, and the producer does not hear",
                    lambda at=at, stored=stored: self._sound(put(state, at, stored)),  # type: ignore[misc]
                )
                yield (
                    f"item {state.next} is stored in {at}",
                    lambda at=at, stored=stored: self._sound(put(state._replace(next=state.next + 1), at, stored)),  # type: ignore[misc]
                )
            else:
                yield f"{at} has item {state.next} already", lambda: self._sound(state._replace(next=state.next + 1))

    def _consumes(self, state: State, at: int, partition: Partition) -> Iterator[Step]:
        if not partition.items:
            return
        item, *rest = partition.items
        if not item.is_leased:
            if not partition.is_held:
                leased = partition._replace(items=(Item(item.number, True), *rest))
                yield f"{at} leases item {item.number}", lambda: self._leases(state, at, leased, item.number)
            return
        yield (
            f"item {item.number} is settled",
            lambda: self._sound(put(state._replace(settled=state.settled | {item.number}), at, partition._replace(items=tuple(rest)))),
        )
        if state.retries < self._rules.retries:
            back = partition._replace(items=(Item(item.number), *rest))
            yield f"item {item.number} is retried", lambda: put(state._replace(retries=state.retries + 1), at, back)

    def _leases(self, state: State, at: int, leased: Partition, number: int) -> State:
        others = {item.number for partition in state.partitions for item in partition.items if item.number < number}
        if others:
            raise Broken(f"promise 58: item {number} is leased in {at} before item {min(others)}")
        return put(state, at, leased)

    # ---- coordinators -----------------------------------------------------------------------------------------

    def _coordinates(self, state: State, at: int, coordinator: Coordinator) -> Iterator[Step]:
        record = coordinator.seen
        if record != state.record:
            yield f"coordinator {at} takes up the record", lambda: _heard(state, at, Coordinator(state.record))
        if record.step == "done":
            if record.cursor < 2 * self._rules.rebalances:
                begun = Record(MOVING, "keys", 1 - record.target, record.cursor + 1, record.version + 1)
                yield from self._commits(state, at, begun, f"begins to move the slot to {begun.target}")
        elif record.step == "keys":
            yield from self._moves(state, at, coordinator)
        else:
            yield from self._drains(state, at, coordinator)

    def _moves(self, state: State, at: int, coordinator: Coordinator) -> Iterator[Step]:
        record = coordinator.seen
        yield from _sends(state, at, Request("give", 1 - record.target, record.cursor))
        if coordinator.given is not None:
            yield from _sends(state, at, Request("take", record.target, record.cursor, coordinator.given))
        if coordinator.is_taken or (not self._rules.waits_until_it_is_taken and coordinator.given is not None):
            moved = Record(record.target, "drain", record.target, record.cursor + 1, record.version + 1)
            yield from self._commits(state, at, moved, f"makes {record.target} the home")

    def _drains(self, state: State, at: int, coordinator: Coordinator) -> Iterator[Step]:
        record = coordinator.seen
        yield from _sends(state, at, Request("look", 1 - record.target, record.cursor))
        if coordinator.is_drained or not self._rules.waits_until_it_is_drained:
            yield from _sends(state, at, Request("serve", record.target, record.cursor))
        if coordinator.is_served:
            done = record._replace(step="done", version=record.version + 1)
            yield from self._commits(state, at, done, "is done")

    def _commits(self, state: State, at: int, record: Record, what: str) -> Iterator[Step]:
        if state.record != state.coordinators[at].seen:
            return
        homes = state.homes | {record.home} - {MOVING}
        yield f"coordinator {at} {what}", lambda: _heard(state._replace(record=record, homes=homes), at, Coordinator(record))

    # ---- partitions -------------------------------------------------------------------------------------------

    def _arrivals(self, state: State, request: Request) -> Iterator[Step]:
        """The request arrives, and whoever of the coordinators waits for its answer hears it, or none does."""
        after = self._answers(state.partitions[request.partition], request)
        if after is None:
            return
        what = f"“{request.what}” of cursor {request.cursor} arrives at {request.partition}"
        changed = put(state, request.partition, after)
        if changed != state:
            yield f"{what}, unheard", lambda: self._sound(changed)
        for at, coordinator in enumerate(state.coordinators):
            heard = self._hears(coordinator, request, after)
            if heard != coordinator:
                yield (
                    f"{what}, and coordinator {at} hears",
                    lambda at=at, heard=heard: self._sound(_heard(changed, at, heard)),  # type: ignore[misc]
                )

    def _answers(self, partition: Partition, request: Request) -> Partition | None:
        """The partition after the request; None: it refuses it as outdated."""
        cursor, checks = request.cursor, self._rules.partitions_check_cursors
        if request.what == "give":
            if checks and (cursor < partition.given or cursor <= partition.taken):
                return None
            return partition._replace(is_closed=self._rules.closes_before_it_gives or partition.is_closed, given=cursor)
        if request.what == "take":
            if checks and (cursor <= partition.taken or cursor < partition.given):
                return partition
            known = request.known if self._rules.keys_move_along else frozenset()
            return partition._replace(is_closed=False, is_held=self._rules.holds_back, known=known, taken=cursor)
        if request.what == "serve":
            return None if checks and cursor < partition.taken else partition._replace(is_held=False)
        return partition

    def _hears(self, coordinator: Coordinator, request: Request, after: Partition) -> Coordinator:
        if request.cursor != coordinator.seen.cursor:
            return coordinator
        if request.what == "give" and coordinator.seen.step == "keys":
            return coordinator._replace(given=after.known)
        if request.what == "take" and coordinator.seen.step == "keys":
            return coordinator._replace(is_taken=True)
        if request.what == "look" and coordinator.seen.step == "drain":
            return coordinator._replace(is_drained=not after.items)
        if request.what == "serve" and coordinator.seen.step == "drain":
            return coordinator._replace(is_served=True)
        return coordinator

    # ---- promises ---------------------------------------------------------------------------------------------

    def _sound(self, state: State) -> State:
        numbers = [item.number for partition in state.partitions for item in partition.items]
        for number in range(1, self._rules.items + 1):
            there = numbers.count(number) + (number in state.settled)
            if there > 1:
                raise Broken(f"promise 59: item {number} is stored twice")
            if not there and number < state.next:
                raise Broken(f"promise 41: item {number} was acknowledged, and is lost")
        return state


def _sends(state: State, at: int, request: Request) -> Iterator[Step]:
    if request not in state.net:
        what = f"coordinator {at} sends “{request.what}” of cursor {request.cursor} to {request.partition}"
        yield what, lambda: state._replace(net=state.net | {request})


def put(state: State, at: int, partition: Partition) -> State:
    first, second = state.partitions
    return state._replace(partitions=(partition, second) if at == 0 else (first, partition))


def _heard(state: State, at: int, coordinator: Coordinator) -> State:
    return state._replace(coordinators=(*state.coordinators[:at], coordinator, *state.coordinators[at + 1 :]))


ABLATIONS = {
    "the former home goes on to take items": Rules(closes_before_it_gives=False),
    "the keys of calls do not move along": Rules(keys_move_along=False),
    "the new home serves at once": Rules(holds_back=False),
    "the record names a home that has not taken the slot": Rules(waits_until_it_is_taken=False),
    "the new home serves before the former one is drained": Rules(waits_until_it_is_drained=False),
    "partitions follow outdated requests": Rules(partitions_check_cursors=False),
}
"""The rules without one, by what is missing."""
