"""Lease columns: plain live leases as arrays of numbers, at some 60 bytes a lease. An object with its indexes takes a kilobyte.

A lease is *plain* while it has one run of items of which none is settled or staged. Most small leases are plain until they end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from sluiceway.core.partition.records import Extent, LeaseState, Part
from sluiceway.kernel.clock import Millis
from sluiceway.model.requests import Offsets

NO_TEXT = -1
"""The place of a lease key that there is not."""

_STEP = 256
"""Rows among which the next live one is looked for at once."""


class LeaseRows(NamedTuple):
    """Plain leases, a row each, in order of their numbers. `firsts` and `counts`: their runs; `extents`: the first offset of the extent of
    each run; `clients` and `keys`: places in a list of texts."""

    numbers: Offsets
    firsts: Offsets
    counts: npt.NDArray[np.int32]
    extents: Offsets
    deadlines: Offsets
    leased_at: Offsets
    clients: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int32]

    def chosen(self, rows: Any) -> Self:
        """Those rows, copied."""
        return type(self)(*(np.array(column[rows]) for column in self))


class ClientTally(NamedTuple):
    """The live leases of a client: their number, their items, and the first deadline."""

    client_id: str
    leases: int
    items: int
    deadline: Millis


def is_plain(lease: LeaseState) -> bool:
    """Whether columns can hold all that is known of that live lease."""
    return (
        len(lease.parts) == 1
        and lease.deadline is not None
        and lease.transfer is None
        and not (lease.settled or lease.staged or lease.dispositions or lease.probe)
    )


def rows_of(leases: Sequence[LeaseState]) -> tuple[LeaseRows, list[str]]:
    """Plain leases, sorted by number, as rows and their texts."""
    places: dict[str, int] = {}
    parts = [lease.parts[0] for lease in leases]
    rows = LeaseRows(
        np.array([lease.number for lease in leases], np.int64),
        np.array([part.first for part in parts], np.int64),
        np.array([part.count for part in parts], np.int32),
        np.array([part.extent.first for part in parts], np.int64),
        np.array([lease.deadline for lease in leases], np.int64),
        np.array([lease.leased_at for lease in leases], np.int64),
        np.array([places.setdefault(lease.client_id, len(places)) for lease in leases], np.int32),
        np.array([place_of(places, lease.lease_key) for lease in leases], np.int32),
    )
    return rows, list(places)


def place_of(places: dict[str, int], text: str | None) -> int:
    """The place of a text among those that there are, to which it is added."""
    return NO_TEXT if text is None else places.setdefault(text, len(places))


class LeaseColumns:
    """Some plain leases. `extents`: the partition's extents by first offset, where that of a live lease always is."""

    def __init__(self, rows: LeaseRows, texts: list[str], extents: dict[int, Extent]) -> None:
        self._texts, self._extents = texts, extents
        self.name = int(rows.numbers[0])
        """The number of the first lease that it began with."""
        self.noted: tuple[Millis, int] | None = None
        """Lower bound of `first_deadline`, as its table has noted it."""
        self.taken = len(rows.numbers)
        """Leases that it has ever had."""
        self._take(rows)

    def append(self, rows: LeaseRows, texts: Sequence[str]) -> None:
        """Add leases with higher numbers than all that it has had. Rows of leases that have ended are dropped."""
        places = {text: place for place, text in enumerate(self._texts)}
        new = np.array([*(place_of(places, text) for text in texts), NO_TEXT], np.int32)
        self._texts = list(places)
        rows = rows._replace(clients=new[rows.clients], keys=new[rows.keys])
        self.taken += len(rows.numbers)
        both: Iterator[tuple[Any, Any]] = zip(self._rows.chosen(self._is_live), rows, strict=True)
        self._take(LeaseRows(*map(np.concatenate, both)))

    def _take(self, rows: LeaseRows) -> None:
        self._rows = rows
        self._is_live = np.ones(len(rows.numbers), np.bool_)
        self.live = len(rows.numbers)
        self._lowest = int(rows.numbers[0])
        self._is_dense = int(rows.numbers[-1]) - self._lowest + 1 == self.live
        """Whether the numbers follow each other, so that each tells its row."""
        self._by_first: Offsets | None = None
        """The rows by offset; None: in their own order, as wherever the oldest items are leased first."""
        if (np.diff(rows.firsts) < 0).any():
            self._by_first = np.argsort(rows.firsts)
        self._starts = rows.firsts if self._by_first is None else rows.firsts[self._by_first]
        self.begin, self.stop = int(self._starts[0]), int((rows.firsts + rows.counts).max())
        self._sort()

    def _sort(self) -> None:
        """Sort the rows by deadline, and by number where it is the same."""
        self._by_deadline: Offsets | None = np.argsort(self._rows.deadlines, kind="stable")
        self._next = 0
        """Rows before it in that order have ended."""
        self._first: tuple[Millis, int] | None = None
        """The first deadline, where it is known although the rows are not sorted."""

    # ---- one lease --------------------------------------------------------------------------------------------

    def row_of(self, number: int) -> int | None:
        """The row of a live lease; None: it is not here."""
        numbers = self._rows.numbers
        row = number - self._lowest if self._is_dense else int(numbers.searchsorted(number))
        return row if 0 <= row < len(numbers) and numbers.item(row) == number and self._is_live.item(row) else None

    def row_at(self, offset: int) -> int | None:
        """The row of the live lease that has the offset; None: none has."""
        index = int(self._starts.searchsorted(offset, "right")) - 1
        if index < 0:
            return None
        row = index if self._by_first is None else self._by_first.item(index)
        return row if self._is_live.item(row) and offset < self._rows.firsts.item(row) + self._rows.counts.item(row) else None

    def next_start(self, offset: int) -> int | None:
        """An offset above this one, below which no lease begins; None: none begins above it."""
        index = int(self._starts.searchsorted(offset, "right"))
        return self._starts.item(index) if index < len(self._starts) else None

    def state(self, row: int) -> LeaseState:
        """The lease of a live row, to read: changes of it are not kept."""
        rows = self._rows
        extent = self._extents[rows.extents.item(row)]
        count, key = rows.counts.item(row), rows.keys.item(row)
        return LeaseState(
            rows.numbers.item(row),
            [Part(extent, rows.firsts.item(row) - extent.first, count, 0)],
            count,
            self._texts[rows.clients.item(row)],
            rows.deadlines.item(row),
            None if key == NO_TEXT else self._texts[key],
            leased_at=rows.leased_at.item(row),
        )

    def end(self, row: int) -> None:
        """A live lease is here no more."""
        self._is_live[row] = False
        self.live -= 1
        if self._by_deadline is None and self._first is not None and self._first[1] == self._rows.numbers.item(row):
            # The next ones will probably be asked for in turn.
            self._sort()

    def extend(self, row: int, deadline: Millis) -> None:
        """Set a live lease's deadline."""
        self._rows.deadlines[row] = deadline
        # Sorted when it matters: consumers extend their leases again and again.
        self._by_deadline = self._first = None

    # ---- all --------------------------------------------------------------------------------------------------

    def first_deadline(self) -> tuple[Millis, int]:
        """The first deadline of the live leases, and the lowest number that has it. There must be one."""
        rows = self._rows
        if self._by_deadline is None:
            if self._first is None:
                live = np.flatnonzero(self._is_live)
                row = int(live[rows.deadlines[live].argmin()])
                self._first = rows.deadlines.item(row), rows.numbers.item(row)
            return self._first
        is_live, by_deadline = self._is_live.item, self._by_deadline.item
        # Mostly the next one lives.
        if not is_live(by_deadline(self._next)):
            self._next += 1
        while not is_live(by_deadline(self._next)):
            # Many have ended before their time.
            ahead = self._is_live[self._by_deadline[self._next + 1 : self._next + _STEP]]
            self._next += 1 + (int(ahead.argmax()) if ahead.any() else len(ahead))
        row = by_deadline(self._next)
        return rows.deadlines.item(row), rows.numbers.item(row)

    def numbers(self) -> list[int]:
        """The numbers of the live leases, ascending."""
        numbers: list[int] = self._rows.numbers[self._is_live].tolist()
        return numbers

    def states(self) -> Iterator[LeaseState]:
        """The live leases by number, to read."""
        return map(self.state, np.flatnonzero(self._is_live).tolist())

    def states_from(self, offset: int) -> Iterator[LeaseState]:
        """The live leases by offset, to read, from the one that has the offset on."""
        index = max(0, int(self._starts.searchsorted(offset, "right")) - 1)
        rows = np.arange(index, len(self._starts)) if self._by_first is None else self._by_first[index:]
        return map(self.state, rows[self._is_live[rows]].tolist())

    def offsets_within(self, begin: int, end: int) -> Offsets:
        """The leased offsets from `begin` to before `end`, ascending."""
        low, high = (int(each) for each in self._starts.searchsorted([begin, end]))
        rows = np.arange(max(0, low - 1), high) if self._by_first is None else self._by_first[max(0, low - 1) : high]
        rows = rows[self._is_live[rows]]
        firsts, counts = self._rows.firsts[rows], self._rows.counts[rows]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets: Offsets = np.repeat(firsts, counts) + within
        return offsets[(offsets >= begin) & (offsets < end)]

    def tally(self) -> list[ClientTally]:
        """The live leases by client."""
        rows = self._rows.chosen(self._is_live)
        order = np.argsort(rows.clients, kind="stable")
        places, at, leases = np.unique(rows.clients[order], return_index=True, return_counts=True)
        if not len(places):
            return []
        items, deadlines = np.add.reduceat(rows.counts[order], at, dtype=np.int64), np.minimum.reduceat(rows.deadlines[order], at)
        columns = (each.tolist() for each in (places, leases, items, deadlines))
        return [ClientTally(self._texts[place], *figures) for place, *figures in zip(*columns, strict=True)]

    @property
    def is_sparse(self) -> bool:
        """Whether most of its leases have ended."""
        return 4 * self.live < len(self._is_live)

    def shrink(self) -> None:
        """Drop the rows of leases that have ended. There must be live ones."""
        self._take(self._rows.chosen(self._is_live))
