"""Recorder: turns what is seen of a real partition into a history for the trace check.

An item is known by the offset that its row was given first in the partition, which is never given to another stored item. Items in a
transfer count as leased by the partition itself, which tells no client of it; those that have left count as settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from simulation.scene import scene_of
from sluiceway.core.partition.partition import Partition
from sluiceway.kernel.clock import Millis
from spec.partition_fences import ABSENT, READY, SETTLED, Change, Fence, Place
from spec.trace_check import Event, GaveUp, Heard, Opened, Opening, RanOut, Sent, Told


class View(NamedTuple):
    """The items of a partition with their places, and the deadlines of its leases; None: never."""

    places: Mapping[int, Place]
    deadlines: Mapping[int, Millis | None]


NOTHING = View({}, {})


def view_of(partition: Partition) -> View:
    """The items of this state of a partition."""
    scene = scene_of(partition, lambda blob, row: str(blob + row))
    places: dict[int, Place] = {place.first: place.lease or READY for place in scene.alive.values()}
    places |= {place.first: place.lease for place in scene.leaving.values()}
    return View(places, {number: lease.deadline for number, lease in (*scene.leases.items(), *scene.transfers.items())})


class Recorder:
    """The history of one partition so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._views: dict[int, View] = {}
        """Of each owner: what it knows, its commit included."""
        self._over: set[int] = set()
        self._told: dict[int, set[int]] = {}
        """The items that the client of each lease was told of."""

    def opening(self, at: int, fence: Fence) -> None:
        self.events.append(Opening(at, fence))

    def opened(self, at: int, fence: Fence, txn: int, view: View) -> None:
        self._views[at] = view
        self.events.append(Opened(at, fence, txn, frozenset(view.places.items())))

    def sent(self, at: int, fence: Fence, txn: int, view: View, now: Millis) -> None:
        """`now`: the owner's time in that cycle."""
        before, self._views[at] = self._views.get(at, NOTHING), view
        for lease, deadline in before.deadlines.items():
            if deadline is not None and deadline <= now and lease not in self._over:
                self._over.add(lease)
                self.events.append(RanOut(lease))
        self.events.append(Sent(at, fence, txn, tuple(_changes(before.places, view.places))))

    def heard(self, at: int, fence: Fence, outcome: Literal["done", "refused", "unknown"]) -> None:
        self.events.append(Heard(at, fence, outcome))

    def told(self, at: int | None, items: Iterable[int], place: Place) -> None:
        """A client hears it from owner number `at`; None: from one of them."""
        found = tuple(items)
        if found:
            if isinstance(place, int):
                self._told.setdefault(place, set()).update(found)
            self.events.append(Told(at, found, place))

    def gave_up(self, lease: int, items: Iterable[int] | None = None) -> None:
        """The lease's client asks to settle these items of it or to put them back; None: all that it was told of."""
        found = tuple(sorted(self._told.get(lease, ()))) if items is None else tuple(items)
        if found:
            self.events.append(GaveUp(found, lease))


def _changes(before: Mapping[int, Place], after: Mapping[int, Place]) -> Iterator[Change]:
    for item in sorted(before.keys() | after.keys()):
        was, now = before.get(item, ABSENT), after.get(item, SETTLED)
        if was == now:
            continue
        # One commit may take an item through several places.
        if was == ABSENT and now != READY:
            yield Change(item, ABSENT, READY)
            was = READY
        elif isinstance(was, int) and isinstance(now, int):
            yield Change(item, was, READY)
            was = READY
        yield Change(item, was, now)
