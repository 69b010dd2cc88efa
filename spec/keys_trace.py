"""Trace check of keys on the move: whether a recorded history of a queue that keeps the items of a key together follows the rules of
`rebalance_keys`.

A history has what each partition of the queue has stored after each of its commits, and the records of the queue, in the order in which
they took effect. What coordinators ask for and hear is not seen, and need not be: partitions and records say what came of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spec.checker import Broken
from spec.rebalance_keys import MOVING
from spec.rejected import Rejected, first_rejected


class Item(NamedTuple):
    """An item, and the slot of its key."""

    name: str
    slot: int


class Contents(NamedTuple):
    """What a partition has stored.

    `moving`: items on their way to other partitions of the queue. `closed`: slots whose items it refuses. `held`: slots whose items it does
    not lease yet. `given`, `taken`: the cursors of the latest requests to give and to take slots.
    """

    items: frozenset[Item] = frozenset()
    leased: frozenset[Item] = frozenset()
    moving: frozenset[Item] = frozenset()
    closed: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    given: int = 0
    taken: int = 0


class Stored(NamedTuple):
    """A commit of the partition has taken effect."""

    partition: int
    contents: Contents


class Recorded(NamedTuple):
    """The queue's record: the home of each slot, the partitions that there are, and the cursor."""

    homes: tuple[int, ...]
    there: frozenset[int]
    cursor: int


Event = Stored | Recorded


class KeysTraceCheck:
    """Checks the history of one queue."""

    def __init__(self) -> None:
        self._record: Recorded | None = None
        self._partitions: defaultdict[int, Contents] = defaultdict(Contents)
        self._homes: defaultdict[int, set[int]] = defaultdict(set)
        """All that each slot ever had."""
        self._moved_by: dict[int, int] = {}
        """By slot that has no home at the moment, the cursor by which it lost it."""
        self._gone: set[Item] = set()
        """Items that were settled, or have left the queue."""

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
        if before is not None and record.cursor < before.cursor:
            raise Broken("a coordinator commits what it decided from an outdated record")
        for slot, home in enumerate(record.homes):
            was = home if before is None else before.homes[slot]
            if home == MOVING != was:
                self._moved_by[slot] = record.cursor
            elif was == MOVING != home:
                self._check_new_home(record, slot, home)
            elif was != home:
                raise Broken(f"slot {slot} changes its home from {was} to {home} without a move")
            if home != MOVING:
                self._homes[slot].add(home)

    def _check_new_home(self, record: Recorded, slot: int, home: int) -> None:
        taken = self._partitions[home]
        if taken.taken < self._moved_by.pop(slot) or slot in taken.closed:
            raise Broken(f"slot {slot} is said to be at home in {home}, which has not taken it")
        for former in (self._homes[slot] & record.there) - {home}:
            if slot not in self._partitions[former].closed:
                raise Broken(f"slot {slot} is said to be at home in {home}, and {former} goes on to take its items")

    # ---- partitions -----------------------------------------------------------------------------------------------

    def _store(self, at: int, before: Contents, after: Contents) -> None:
        self._check_cursors(before, after)
        self._partitions[at] = after
        for item in after.items - before.items - before.moving:
            self._check_new(at, item, before, after)
        for slot in (before.held - after.held) - after.closed:
            self._check_alone(at, slot, "is served")
        for item in after.leased - before.leased:
            if item.slot in before.held & after.held:
                raise Broken(f"promise 58: {item} is leased, and its slot is held back")
            if item.slot not in after.closed:
                self._check_alone(at, item.slot, f"{item.name} is leased")
        self._gone |= {item for item in (before.items | before.moving) - after.items - after.moving if self._place_of(item, at) is None}

    def _check_cursors(self, before: Contents, after: Contents) -> None:
        if after.given < before.given or after.taken < before.taken:
            raise Broken("the partition follows an outdated request")
        if after.given > before.given and after.given <= before.taken:
            raise Broken("the partition gives slots at a cursor older than the one it took them at")
        if after.taken > before.taken and after.taken < before.given:
            raise Broken("the partition takes slots at a cursor older than the one it gave them at")
        if after.closed - before.closed and after.given == before.given:
            raise Broken("the partition closes slots without a request to give them")
        if (before.closed - after.closed or after.held - before.held) and after.taken == before.taken:
            raise Broken("the partition opens or holds slots without a request to take them")

    def _check_new(self, at: int, item: Item, before: Contents, after: Contents) -> None:
        """An item is stored that the partition had not: it is produced, or moved here."""
        if at not in self._homes[item.slot]:
            raise Broken(f"{item} is stored in {at}, where its slot was never at home")
        if item.slot in before.closed & after.closed:
            raise Broken(f"{item} is stored in {at}, which has given its slot away")
        if item in self._gone:
            raise Broken(f"promise 59: {item} is there again")
        if (other := self._place_of(item, at)) is not None:
            raise Broken(f"promise 59: {item} is there twice, in {other}")

    def _check_alone(self, at: int, slot: int, what: str) -> None:
        """What other partitions have of a slot comes first: only the former home has some, and the new one waits for that."""
        for number, contents in self._partitions.items():
            if number != at and (left := _of(slot, contents.items | contents.moving)):
                raise Broken(f"promise 58: slot {slot}: {what} in {at}, and {number} has {min(left)}")

    def _place_of(self, item: Item, but: int) -> int | None:
        """Another partition that has the item, but not on its way."""
        return next((number for number, each in self._partitions.items() if number != but and item in each.items), None)


def _of(slot: int, items: Iterable[Item]) -> list[Item]:
    return [item for item in items if item.slot == slot]
