"""Specification of how a rebalance removes a partition (ADR 25): it is shut, its items are moved or consumed, it is sealed, and removed.

Partition 0 is to go, and partition 1 takes its items; if the rebalance is cancelled, it is the other way round. Two coordinators may act
at once, each by the record as it has read it. Requests to partitions and moved items arrive late, and more than once: what was sent stays
under way for ever. Routers know any record that there ever was. A partition's own changes are atomic and durable (see
`partition_fences`).

Promise 41 of docs/explanation/guarantees.md: nothing is lost, and nothing is there twice. `python -m spec removal` checks it, and that
each rule is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spec.checker import Broken

OPEN, SHUT, SEALED = 0, 1, 2


@dataclass(frozen=True)
class Rules:
    """The bounds, and the rules, which can be left out one by one."""

    items: int = 1
    coordinators: int = 2
    moves: int = 2
    shuts_in_the_store: bool = True
    seals_only_what_is_empty: bool = True
    items_on_their_way_count: bool = True
    targets_remember_moves: bool = True
    cancels_wait_for_moves: bool = True
    partitions_check_cursors: bool = True
    removes_only_what_is_sealed: bool = True
    commits_check_versions: bool = True


class Record(NamedTuple):
    """`drains`: the partition that is to go. `there`: those that the queue has. `cursor` rises with each change of what they are for."""

    step: str = "begin"
    drains: int = 0
    there: frozenset[int] = frozenset({0, 1})
    cursor: int = 0
    version: int = 0


class Move(NamedTuple):
    """An item on its way from a partition, under a number of its own, which its target remembers."""

    item: int
    source: int
    number: int


class Partition(NamedTuple):
    """`moving`: items that wait until their target has them. `taken`: moves whose items it has taken."""

    items: frozenset[int] = frozenset()
    admits: int = OPEN
    cursor: int = 0
    moving: frozenset[Move] = frozenset()
    taken: frozenset[Move] = frozenset()


class Request(NamedTuple):
    """To a partition: to be open, shut or sealed, if `admits` is given; otherwise to move an item out."""

    partition: int
    cursor: int
    admits: int | None = None


class Coordinator(NamedTuple):
    """`seen`: the record that it acts by. What it has heard since: partitions that are shut, open again without moves, and sealed."""

    seen: Record
    shut: frozenset[int] = frozenset()
    opened: frozenset[int] = frozenset()
    sealed: frozenset[int] = frozenset()


class State(NamedTuple):
    """`sent`: moved items under way. `next`: the item that is produced next. `settled`: items that are done."""

    record: Record
    partitions: tuple[Partition, Partition]
    coordinators: tuple[Coordinator, ...]
    net: frozenset[Request] = frozenset()
    sent: frozenset[Move] = frozenset()
    next: int = 1
    settled: frozenset[int] = frozenset()


Step = tuple[str, Callable[[], State]]


class PartitionRemoval:
    """The model under these rules."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def first(self) -> State:
        record = Record()
        return State(record, (Partition(), Partition()), (Coordinator(record),) * self._rules.coordinators)

    def steps(self, state: State) -> Iterator[Step]:
        for at in state.record.there:
            yield from self._serves(state, at, state.partitions[at])
        for at, coordinator in enumerate(state.coordinators):
            yield from self._coordinates(state, at, coordinator)
        for request in state.net:
            if request.partition in state.record.there:
                yield from self._arrives(state, request)
        for move in state.sent:
            yield from self._moves_on(state, move)

    # ---- clients ----------------------------------------------------------------------------------------------

    def _serves(self, state: State, at: int, partition: Partition) -> Iterator[Step]:
        if state.next <= self._rules.items and (partition.admits == OPEN or not self._rules.shuts_in_the_store):
            stored = _put(state._replace(next=state.next + 1), at, partition._replace(items=partition.items | {state.next}))
            yield f"item {state.next} is stored in {at}", lambda: stored
        for item in partition.items:
            done = _put(state._replace(settled=state.settled | {item}), at, partition._replace(items=partition.items - {item}))
            yield f"item {item} is settled in {at}", lambda done=done: self._sound(done)  # type: ignore[misc]

    # ---- coordinators -----------------------------------------------------------------------------------------

    def _coordinates(self, state: State, at: int, coordinator: Coordinator) -> Iterator[Step]:
        record = coordinator.seen
        if record != state.record:
            yield f"coordinator {at} takes up the record", lambda: _heard(state, at, Coordinator(state.record))
        goes, stays, cursor = record.drains, 1 - record.drains, record.cursor
        if record.step == "begin":
            yield from self._commits(state, at, record._replace(step="shut", cursor=cursor + 1), "begins")
            return
        if goes not in record.there:
            return
        if record.step == "shut":
            yield from _sends(state, at, Request(goes, cursor, SHUT))
            if goes:
                yield from _sends(state, at, Request(stays, cursor, OPEN))
            reopened = not goes or stays in coordinator.opened or not self._rules.cancels_wait_for_moves
            if goes in coordinator.shut and reopened:
                yield from self._commits(state, at, record._replace(step="drain"), f"has {goes} drained")
        else:
            yield from _sends(state, at, Request(goes, cursor))
            yield from _sends(state, at, Request(goes, cursor, SEALED))
            if goes in coordinator.sealed or not self._rules.removes_only_what_is_sealed:
                yield from self._commits(state, at, record._replace(there=record.there - {goes}), f"removes {goes}")
        if not goes:
            yield from self._commits(state, at, record._replace(step="shut", drains=1, cursor=cursor + 1), "cancels")

    def _commits(self, state: State, at: int, record: Record, what: str) -> Iterator[Step]:
        if self._rules.commits_check_versions and state.record != state.coordinators[at].seen:
            return
        after = record._replace(version=state.record.version + 1)
        yield f"coordinator {at} {what}", lambda: self._sound(_heard(state._replace(record=after), at, Coordinator(after)))

    # ---- partitions -------------------------------------------------------------------------------------------

    def _arrives(self, state: State, request: Request) -> Iterator[Step]:
        partition = state.partitions[request.partition]
        if self._rules.partitions_check_cursors and request.cursor < partition.cursor:
            return
        if request.admits is None:
            yield from self._moves_out(state, request, partition)
            return
        after = self._shut(partition, request.cursor, request.admits)
        what = f"{_text(request)} arrives"
        changed = _put(state, request.partition, after)
        if changed != state:
            yield f"{what}, unheard", lambda: changed
        for at, coordinator in enumerate(state.coordinators):
            heard = self._hears(coordinator, request, after)
            if heard != coordinator:
                yield f"{what}, and coordinator {at} hears", lambda at=at, heard=heard: _heard(changed, at, heard)  # type: ignore[misc]

    def _shut(self, partition: Partition, cursor: int, admits: int) -> Partition:
        empty = not partition.items and not (partition.moving and self._rules.items_on_their_way_count)
        if admits == SEALED and not empty and self._rules.seals_only_what_is_empty:
            admits = partition.admits
        if cursor == partition.cursor:
            admits = max(admits, partition.admits)
        return partition._replace(admits=admits, cursor=cursor)

    def _hears(self, coordinator: Coordinator, request: Request, after: Partition) -> Coordinator:
        if request.cursor != coordinator.seen.cursor:
            return coordinator
        this = frozenset({request.partition})
        if after.admits == OPEN:
            return coordinator if after.moving else coordinator._replace(opened=coordinator.opened | this)
        sealed = coordinator.sealed | this if after.admits == SEALED else coordinator.sealed
        return coordinator._replace(shut=coordinator.shut | this, sealed=sealed)

    # ---- moves ------------------------------------------------------------------------------------------------

    def _moves_out(self, state: State, request: Request, partition: Partition) -> Iterator[Step]:
        if partition.moving or len(state.sent) == self._rules.moves:
            return
        for item in partition.items:
            move = Move(item, request.partition, len(state.sent))
            after = partition._replace(items=partition.items - {item}, moving=frozenset({move}), cursor=request.cursor)
            begun = _put(state._replace(sent=state.sent | {move}), request.partition, after)
            yield f"item {item} is to move from {request.partition}", lambda begun=begun: begun  # type: ignore[misc]

    def _moves_on(self, state: State, move: Move) -> Iterator[Step]:
        """Its item arrives at the target, which may have it already. The source hears of it, or that there is no such partition."""
        to = 1 - move.source
        source, target = state.partitions[move.source], state.partitions[to]
        waits = move in source.moving and move.source in state.record.there
        if to not in state.record.there:
            if waits:
                back = source._replace(items=source.items | {move.item}, moving=frozenset())
                yield f"item {move.item} has nowhere to go", lambda: self._sound(_put(state, move.source, back))
            return
        known = move in target.taken and self._rules.targets_remember_moves
        if not known and target.admits != SEALED:
            arrived = _put(state, to, target._replace(items=target.items | {move.item}, taken=target.taken | {move}))
            yield f"item {move.item} arrives at {to}", lambda: self._sound(arrived)
        if waits and move in target.taken:
            yield (
                f"{move.source} hears that item {move.item} has moved",
                lambda: _put(state, move.source, source._replace(moving=frozenset())),
            )

    # ---- promises ---------------------------------------------------------------------------------------------

    def _sound(self, state: State) -> State:
        there = [state.partitions[at] for at in state.record.there]
        for item in range(1, state.next):
            found = sum(item in partition.items for partition in there) + (item in state.settled)
            if found > 1:
                raise Broken(f"promise 41: item {item} is there twice")
            if not found and not any(move.item == item for partition in there for move in partition.moving):
                raise Broken(f"promise 41: item {item} was acknowledged, and is lost")
        return state


def _text(request: Request) -> str:
    what = "move" if request.admits is None else ("open", "shut", "sealed")[request.admits]
    return f"“{what}” of cursor {request.cursor} to {request.partition}"


def _sends(state: State, at: int, request: Request) -> Iterator[Step]:
    if request not in state.net:
        yield f"coordinator {at} sends {_text(request)}", lambda: state._replace(net=state.net | {request})


def _put(state: State, at: int, partition: Partition) -> State:
    first, second = state.partitions
    return state._replace(partitions=(partition, second) if at == 0 else (first, partition))


def _heard(state: State, at: int, coordinator: Coordinator) -> State:
    return state._replace(coordinators=(*state.coordinators[:at], coordinator, *state.coordinators[at + 1 :]))


ABLATIONS = {
    "a partition is shut in the record alone": Rules(shuts_in_the_store=False, coordinators=1),
    "a partition is sealed whatever is in it": Rules(seals_only_what_is_empty=False, coordinators=1),
    "items on their way do not count": Rules(items_on_their_way_count=False, coordinators=1),
    "a target forgets which moves it has taken": Rules(targets_remember_moves=False, coordinators=1),
    "a cancellation does not wait for items on their way": Rules(cancels_wait_for_moves=False, coordinators=1),
    "partitions follow outdated requests": Rules(partitions_check_cursors=False, coordinators=1),
    "a partition is removed before it is sealed": Rules(removes_only_what_is_sealed=False, coordinators=1),
    "a coordinator commits what it decided from an outdated record": Rules(commits_check_versions=False, moves=1),
}
"""The rules without one, by what is missing."""
