"""Trace check of rebalances that remove partitions: whether a recorded history follows the rules of `partition_removal`.

A history has what each partition of a queue has stored after each of its commits, and the queue's records, in the order in which they took
effect. What coordinators ask for and hear is not seen, and need not be: partitions and records say what came of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from spec.checker import Broken
from spec.partition_removal import OPEN, SEALED
from spec.rejected import Rejected, first_rejected


class Move(NamedTuple):
    """An item on its way from a partition to another one of its queue, under the number of its transfer."""

    item: str
    source: int
    number: int
    target: int


class Contents(NamedTuple):
    """What a partition has stored: its items, those on their way from it, what it admits, and by which cursor. `others`: items on their way
    to another queue."""

    items: frozenset[str] = frozenset()
    moving: frozenset[Move] = frozenset()
    others: frozenset[str] = frozenset()
    admits: int = OPEN
    cursor: int = 0

    @property
    def on_their_way(self) -> frozenset[str]:
        """The items that move within the queue."""
        return frozenset(move.item for move in self.moving)


class Stored(NamedTuple):
    """A commit of the partition has taken effect."""

    partition: int
    contents: Contents


class Recorded(NamedTuple):
    """The queue's record: its partitions, those of them that are to go, the cursor, and those that take nothing yet."""

    there: frozenset[int]
    draining: frozenset[int]
    cursor: int
    preparing: frozenset[int] = frozenset()


Event = Stored | Recorded


class RemovalTraceCheck:
    """Checks the history of one queue."""

    def __init__(self) -> None:
        self._record: Recorded | None = None
        self._partitions: defaultdict[int, Contents] = defaultdict(Contents)
        self._taken: set[Move] = set()
        """Moves whose items their targets have taken."""
        self._gone: set[str] = set()
        """Items that were settled, or have left for another queue."""

    def check(self, history: Sequence[Event]) -> Rejected[Event] | None:
        """Return None if the history is accepted. A check is for one history."""
        return first_rejected(history, self._take)

    def _take(self, event: Event) -> None:
        if isinstance(event, Recorded):
            self._follow(event)
        else:
            self._store(event.partition, self._partitions[event.partition], event.contents)

    # ---- the record -----------------------------------------------------------------------------------------------

    def _follow(self, record: Recorded) -> None:
        before, self._record = self._record, record
        if before is None:
            return
        if record.cursor < before.cursor:
            raise Broken("a coordinator commits what it decided from an outdated record")
        if record.draining - before.draining and record.cursor == before.cursor:
            raise Broken("partitions are to go under the cursor of before")
        for gone in before.there - record.there:
            contents = self._partitions[gone]
            unused = gone in before.preparing and not (contents.items or contents.moving or contents.others)
            if contents.admits != SEALED and not unused:
                raise Broken(f"partition {gone} is removed before it is sealed")

    # ---- partitions -----------------------------------------------------------------------------------------------

    def _store(self, at: int, before: Contents, after: Contents) -> None:
        self._check_admission(before, after)
        self._partitions[at] = after
        for item in after.items - before.items - before.others - before.on_their_way:
            self._check_new(at, item, is_open=OPEN in (before.admits, after.admits))
        for move in before.moving - after.moving:
            self._check_ended(after, move)
        if never := after.on_their_way - before.items - before.others - before.on_their_way:
            raise Broken(f"promise 41: item {min(never)} moves, and was not there")
        self._gone |= (before.items | before.others) - after.items - after.others - after.on_their_way

    def _check_admission(self, before: Contents, after: Contents) -> None:
        if after.cursor < before.cursor:
            raise Broken("the partition follows an outdated request")
        if after.cursor == before.cursor and after.admits < before.admits:
            raise Broken("it opens again under the same cursor")
        if after.admits == SEALED and (after.items or after.moving or after.others):
            raise Broken("it is sealed, and not empty")

    def _check_new(self, at: int, item: str, *, is_open: bool) -> None:
        """An item is stored that the partition had not: it is produced, or moved here."""
        if item in self._gone:
            raise Broken(f"promise 41: item {item} is there again")
        if other := next((number for number, each in self._partitions.items() if number != at and item in each.items), None):
            raise Broken(f"promise 41: item {item} is there twice, in {other}")
        coming = [move for each in self._partitions.values() for move in each.moving if move.item == item and move.target == at]
        if not coming:
            if not is_open:
                raise Broken("it takes new items, and is shut")
            return
        fresh = next((move for move in coming if move not in self._taken), None)
        if fresh is None:
            raise Broken(f"promise 41: item {item} was taken before")
        self._taken.add(fresh)

    def _check_ended(self, after: Contents, move: Move) -> None:
        """A move is over: its target has the item; or there is no such partition, and the item stays, or goes to another."""
        if move.item in after.items | after.on_their_way:
            if move in self._taken:
                raise Broken(f"promise 41: item {move.item} stays, and has moved")
            if self._record is not None and move.target in self._record.there:
                raise Broken(f"item {move.item} stays, though partition {move.target} is there")
        elif move not in self._taken:
            raise Broken(f"promise 41: item {move.item} is lost on its way to {move.target}")
