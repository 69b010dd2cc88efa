"""Ledger of a queue whose items are unique: who holds each unique key, checked against what is durable."""

from __future__ import annotations

from collections.abc import Iterable

from simulation.item_history import Cycle
from simulation.key_ledger import KeyHistory, KeyLedger
from simulation.known_items import Batch, Item
from simulation.promises import check
from simulation.scene import LEASED, Place, Scene
from sluiceway.kernel.ids import ItemId
from sluiceway.model.requests import Produced, ProducedByKey

Name = tuple[str, str | None]
"""A unique key, and the key that it is unique among."""


def name_of(item: Item) -> Name | None:
    return None if item.unique_key is None else (item.unique_key, item.key)


class UniqueHistory(KeyHistory):
    """Follows the durable steps of one partition, and who holds which unique key."""

    _ledger: UniqueLedger

    def follow(self, old: Scene, new: Scene, cycle: Cycle) -> None:
        born = {payload for payload in new.alive if payload not in old.alive and self._is_new(payload)}
        super().follow(old, new, cycle)
        self._ledger.steps += 1
        until_settled = cycle.record.unique == "until_settled"
        for payload in born:
            self._check_unheld(self.items[payload], born, until_settled)
        for payload, place in new.alive.items():
            if until_settled or place.kind != LEASED:
                self._ledger.held.pop(payload, None)
            elif (was := old.alive.get(payload)) is None or (was.kind, was.lease) != (LEASED, place.lease):
                # It has waited before it was leased, be it within the cycle, after another lease.
                self._ledger.held[payload] = self._ledger.steps
            else:
                self._ledger.held.setdefault(payload, self._ledger.steps)
        for payload in old.alive.keys() - new.alive.keys():
            self._ledger.held.setdefault(payload, self._ledger.steps)

    def _check_sorted(self, born: Iterable[str], new: Scene) -> None:
        """With order, items without a key are stored by their unique keys' slots, and have no order among each other."""
        super()._check_sorted((each for each in born if self.record.order is None or self.items[each].key is not None), new)

    def _check_unheld(self, item: Item, born: set[str], until_settled: bool) -> None:
        """Check that no other item held the key when this one was stored: in its cycle, after what was settled, before what was leased."""
        name = name_of(item)
        for payload, place in self.new.alive.items() if name is not None else ():
            was = self.old.alive.get(payload)
            if payload == item.payload or name_of(self.items[payload]) != name or (was is None and payload not in born):
                continue  # One that was moved here in the same cycle may have come later.
            is_leased = was is not None and was.kind == LEASED and (place.kind, place.lease) == (LEASED, was.lease)
            check(not until_settled and is_leased, f"{item.payload} is stored while {payload} holds its unique key")

    def _is_born(self, item: Item, place: Place) -> None:
        super()._is_born(item, place)
        name = name_of(item)
        if name is not None and self._ledger.unique_homes is not None:
            home = self._ledger.unique_homes.setdefault(name, self.partition)
            check(home == self.partition, f"{item.payload} of {name} is in partition {self.partition}, and others are in {home}")


class UniqueLedger(KeyLedger):
    """KeyLedger of a queue whose items are unique from beginning to end. `has_homes`: each unique key stays in one partition."""

    def __init__(self, queue: str, items: dict[str, Item], *, has_homes: bool) -> None:
        super().__init__(queue, items, record=None)
        self.steps = 0
        """Change sets that have become durable."""
        self.held: dict[str, int] = {}
        """The last step at which an item held its unique key; one that still does is not here."""
        self.unique_homes: dict[Name, int] | None = {} if has_homes else None
        self.begun: dict[int, int] = {}
        """By batch, the step at which it was first sent."""

    def _history(self, incarnation: str, partition: int) -> UniqueHistory:
        return UniqueHistory(incarnation, partition, self)

    def sends(self, batch: Batch) -> None:
        """The batch is sent, perhaps again."""
        self.begun.setdefault(id(batch), self.steps)

    def produced(self, batch: Batch, answer: Produced) -> None:
        """Check in addition that what was not stored is there, or was when the call was made, and that it is not stored later."""
        duplicates = {row for row, _ in answer.duplicates}
        if batch.answer is not None or not duplicates:
            check(batch.answer is None or batch.answer.duplicates == answer.duplicates, f"a repetition has other duplicates: {answer}")
            super().produced(batch, answer)
            return
        check(answer.items == len(batch.items), "the answer counts other items than were sent")
        check(isinstance(answer, ProducedByKey), "an answer with duplicates has no places")
        assert isinstance(answer, ProducedByKey)
        by_origin = {item.origin: item for item in self.items.values() if item.origin is not None}
        for row, (item, place) in enumerate(zip(batch.items, answer.places, strict=True)):
            told = str(ItemId(self.incarnation, *place))
            if row not in duplicates:
                check(item.origin == told, f"{item.payload} is {item.origin}, and its producer was told {told}")
                continue
            check(item.origin is None, f"{item.payload} is durable, and its producer was told that it was not stored")
            other = by_origin.get(told)
            check(other is not None and name_of(other) == name_of(item), f"{item.payload} is said to be there as {told}, which is {other}")
            assert other is not None
            since = self.held.get(other.payload)
            check(since is None or since >= self.begun[id(batch)], f"{item.payload} was not stored, although {other.payload} was gone")
            item.ended = True
        batch.answer = answer
        self.tally["left out"] += len(duplicates)
        self.tally["produced"] += answer.items
