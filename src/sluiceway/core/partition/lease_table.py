"""Lease table: the live leases of a partition, by number, by offset and by deadline.

Leases that were made lately are objects. The plain ones among the others are packed into columns, a bounded number at a time, so a million
small leases take some 60 MB. What is returned of these is made for the caller, to be read.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, ValuesView
from itertools import chain, islice

import numpy as np

from sluiceway.core.partition.lease_columns import LeaseColumns, LeaseRows, is_plain, rows_of
from sluiceway.core.partition.lease_spans import Place, Spans
from sluiceway.core.partition.records import Extent, LeaseState
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import PACKED_AT_ONCE, UNPACKED_LEASES
from sluiceway.model.requests import Offsets

_ROWS = 16_384
"""Rows of one set of columns: sorting them by deadline takes a millisecond."""


class _States(ValuesView[LeaseState]):
    def __init__(self, table: LeaseTable) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[LeaseState]:
        return self._table.states()


class LeaseTable(Mapping[int, LeaseState]):
    """The live leases by number, ascending: the oldest first.

    A packed lease is returned as a copy. To end it whole needs no more (`remove`); before a part of it is changed, `unpack` it.
    """

    def __init__(self, extents: dict[int, Extent]) -> None:
        self._extents = extents
        self._new: dict[int, LeaseState] = {}
        """Those with numbers above all that were ever packed."""
        self._old: dict[int, LeaseState] = {}
        """The other ones that are not packed."""
        self.spans = Spans()
        """The parts of those that are not packed."""
        self._deadlines: list[tuple[Millis, int]] = []
        """Deadline heap of these. May name leases that are gone, packed or extended."""
        self._columns: list[LeaseColumns] = []
        self._names: list[int] = []
        """Of each of the columns. All their numbers are below the next name."""
        self._begins: list[int] = []
        """The first offset of each of the columns."""
        self._found: tuple[int, LeaseColumns, int] | None = None
        """The packed lease that was looked up last, which is mostly ended next: its number, columns and row."""
        self._first: tuple[Millis, int] | None = None
        """The first deadline, if it is known."""
        self._growing: LeaseColumns | None = None
        """Those to which leases are added. Loaded ones do not grow: they share their texts, which may be many."""
        self._packed_to = 0
        """The highest number that was ever packed."""
        self._packed_deadlines: list[tuple[Millis, int]] = []
        """Deadline heap of the columns: what each has noted."""
        self._is_in_order = True
        """Whether the columns follow each other by offset, too."""
        self.packed = 0
        """Packed leases."""
        self.unpacked_leases = UNPACKED_LEASES
        self.packed_at_once = PACKED_AT_ONCE

    def __len__(self) -> int:
        return len(self._new) + len(self._old) + self.packed

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.find(number) is not None

    def __getitem__(self, number: int) -> LeaseState:
        lease = self.find(number)
        if lease is None:
            raise KeyError(number)
        return lease

    def find(self, number: int) -> LeaseState | None:
        """The live lease of that number; None: there is none."""
        lease = self._object(number)
        if lease is None and number <= self._packed_to and (place := self._place_of(number)) is not None:
            columns, row = place
            lease = columns.state(row)
        return lease

    def _object(self, number: int) -> LeaseState | None:
        return self._new.get(number) or self._old.get(number)

    def __iter__(self) -> Iterator[int]:
        if not self._columns and not self._old:
            return iter(self._new)
        packed = chain.from_iterable(columns.numbers() for columns in self._columns)
        return chain(heapq.merge(sorted(self._old), packed), self._new)

    def values(self) -> ValuesView[LeaseState]:
        return _States(self)

    def states(self) -> Iterator[LeaseState]:
        """The live leases by number. Valid until the next change."""
        if not self._columns and not self._old:
            return iter(self._new.values())
        old = (lease for _, lease in sorted(self._old.items()))
        packed = chain.from_iterable(columns.states() for columns in self._columns)
        return chain(heapq.merge(old, packed, key=_number), self._new.values())

    def objects(self) -> list[LeaseState]:
        """The leases that are not packed."""
        return [*self._old.values(), *self._new.values()]

    @property
    def columns(self) -> tuple[LeaseColumns, ...]:
        """The packed leases."""
        return tuple(self._columns)

    # ---- changes ----------------------------------------------------------------------------------------------

    def enter(self, lease: LeaseState) -> None:
        """Add a lease."""
        self._first = None
        (self._new if lease.number > self._packed_to else self._old)[lease.number] = lease
        self.spans.add(lease)
        self._note_deadline(lease)

    def remove(self, number: int) -> None:
        """A live lease has ended."""
        self._first = None
        lease = self._new.pop(number, None) or self._old.pop(number, None)
        if lease is not None:
            self.spans.remove(lease)
        else:
            self._end(*self._packed(number))

    def unpack(self, number: int) -> LeaseState:
        """A live lease, to change a part of it."""
        lease = self._object(number)
        if lease is None:
            columns, row = self._packed(number)
            lease = columns.state(row)
            self._end(columns, row)
            self.enter(lease)
        return lease

    def extend(self, number: int, deadline: Millis) -> None:
        """Set a live lease's deadline."""
        self._first = None
        lease = self._object(number)
        if lease is not None:
            lease.deadline = deadline
            self._note_deadline(lease)
            return
        columns, row = self._packed(number)
        columns.extend(row, deadline)
        if columns.noted is None or (deadline, number) < columns.noted:
            self._note_packed(columns, (deadline, number))

    def pack(self) -> None:
        """Pack some of the oldest leases if there are many. One call costs little, however many there are."""
        if len(self._new) < self.unpacked_leases + self.packed_at_once:
            return
        plain = []
        for lease in list(islice(self._new.values(), self.packed_at_once)):
            del self._new[lease.number]
            self._packed_to = lease.number
            if is_plain(lease) and self._extents.get(lease.parts[0].extent.first) is lease.parts[0].extent:
                self.spans.remove(lease)
                plain.append(lease)
            else:
                self._old[lease.number] = lease
        if plain:
            self._append(*rows_of(plain))

    def restore(self, rows: LeaseRows, texts: list[str]) -> None:
        """Add plain leases that were loaded, before any others."""
        for start in range(0, len(rows.numbers), _ROWS):
            self._add(rows.chosen(slice(start, start + _ROWS)), texts)
        self._packed_to = int(rows.numbers[-1]) if len(rows.numbers) else 0

    def _append(self, rows: LeaseRows, texts: list[str]) -> None:
        """Add rows to the last columns, if these grow, and are small."""
        last = self._growing
        if last is None or last is not self._columns[-1] or last.taken + len(rows.numbers) > _ROWS:
            self._growing = self._add(rows, texts)
            return
        last.append(rows, texts)
        self._found = None
        self.packed += len(rows.numbers)
        self._is_in_order &= len(self._columns) == 1 or self._columns[-2].stop <= last.begin
        self._begins[-1] = last.begin
        if last.noted is None or last.first_deadline() < last.noted:
            self._note_packed(last, last.first_deadline())

    def _add(self, rows: LeaseRows, texts: list[str]) -> LeaseColumns:
        columns = LeaseColumns(rows, texts, self._extents)
        self._is_in_order &= not self._columns or self._columns[-1].stop <= columns.begin
        self._columns.append(columns)
        self._names.append(columns.name)
        self._begins.append(columns.begin)
        self.packed += columns.live
        self._note_packed(columns, columns.first_deadline())
        return columns

    def _end(self, columns: LeaseColumns, row: int) -> None:
        columns.end(row)
        self._found = None
        self.packed -= 1
        if columns.live and not columns.is_sparse:
            return
        at = bisect_right(self._names, columns.name) - 1
        if columns.live:
            columns.shrink()
            self._begins[at] = columns.begin
        else:
            if columns is self._growing:
                self._growing = None
            del self._columns[at], self._names[at], self._begins[at]
            self._is_in_order |= not self._columns

    # ---- by number and offset ---------------------------------------------------------------------------------

    def _packed(self, number: int) -> tuple[LeaseColumns, int]:
        place = self._place_of(number)
        assert place is not None, "a lease that is not live"
        return place

    def _place_of(self, number: int) -> tuple[LeaseColumns, int] | None:
        if self._found is not None and self._found[0] == number:
            return self._found[1:]
        columns = self._columns_of(number)
        row = None if columns is None else columns.row_of(number)
        if columns is None or row is None:
            return None
        self._found = number, columns, row
        return columns, row

    def _columns_of(self, number: int) -> LeaseColumns | None:
        """The columns that would have that number."""
        at = bisect_right(self._names, number) - 1
        return self._columns[at] if at >= 0 else None

    def at(self, offset: int) -> Place | None:
        """The live lease and its part that have the offset; None: none has."""
        return self.spans.at(offset) or self._packed_at(offset)

    def _packed_at(self, offset: int) -> Place | None:
        for columns in self._around(offset):
            if columns.begin <= offset < columns.stop and (row := columns.row_at(offset)) is not None:
                lease = columns.state(row)
                return lease, lease.parts[0]
        return None

    def _around(self, offset: int) -> list[LeaseColumns]:
        """The columns that may have the offset."""
        if not self._is_in_order:
            return self._columns
        at = bisect_right(self._begins, offset) - 1
        return self._columns[at : at + 1] if at >= 0 else []

    def split(self, offsets: Offsets) -> Iterator[tuple[Offsets, Place | None]]:
        """Split the sorted offsets into runs, each with its lease and part (None: no lease). Costs per run, not per offset."""
        for run, place in self.spans.split(offsets):
            if place is None and self._columns:
                yield from self._split_packed(run)
            else:
                yield run, place

    def _split_packed(self, offsets: Offsets) -> Iterator[tuple[Offsets, Place | None]]:
        at = 0
        while at < len(offsets):
            offset = int(offsets[at])
            place = self._packed_at(offset)
            limit = self._next_start(offset) if place is None else place[1].end
            end = len(offsets) if limit is None else at + int(np.searchsorted(offsets[at:], limit))
            yield offsets[at:end], place
            at = end

    def _next_start(self, offset: int) -> int | None:
        """An offset above this one, below which no packed lease begins; None: none begins above it."""
        found = [start for columns in self._around(offset) if (start := columns.next_start(offset)) is not None]
        if self._is_in_order and not found:
            found = self._begins[(at := bisect_right(self._begins, offset)) : at + 1]
        return min(found, default=None)

    def places_from(self, offset: int) -> Iterator[Place]:
        """The parts of live leases by offset, from the one that has the offset on, or the last before it. Valid until the next change."""
        if not self._columns:
            return self.spans.places_from(offset)
        at = max(0, bisect_right(self._begins, offset) - 1) if self._is_in_order else 0
        each = (columns.states_from(offset) for columns in self._columns[at:])
        states = chain.from_iterable(each) if self._is_in_order else heapq.merge(*each, key=_first)
        return heapq.merge(self.spans.places_from(offset), ((lease, lease.parts[0]) for lease in states), key=_start)

    @property
    def parts(self) -> int:
        """The number of parts of all live leases."""
        return len(self.spans) + self.packed

    def packed_offsets(self, begin: int, end: int) -> Offsets:
        """The offsets from `begin` to before `end` that packed leases have, in no order."""
        low, high = 0, len(self._columns)
        if self._is_in_order:
            low, high = max(0, bisect_right(self._begins, begin) - 1), bisect_left(self._begins, end)
        those = [each for each in self._columns[low:high] if each.begin < end and begin < each.stop]
        return np.concatenate([np.zeros(0, np.int64), *(columns.offsets_within(begin, end) for columns in those)])

    # ---- deadlines --------------------------------------------------------------------------------------------

    def next_deadline(self) -> tuple[Millis, int] | None:
        """The first deadline, and the lowest number of a lease that has it; None: there is no lease."""
        if self._first is None:
            self._first = self._look_for_deadline()
        return self._first

    def _look_for_deadline(self) -> tuple[Millis, int] | None:
        heap = self._deadlines
        while heap and not self._is_deadline(*heap[0]):
            heapq.heappop(heap)
        packed = self._next_packed_deadline() if self._columns else None
        if packed is None or (heap and heap[0] < packed):
            return heap[0] if heap else None
        return packed

    def _is_deadline(self, deadline: Millis, number: int) -> bool:
        lease = self._object(number)
        return lease is not None and lease.deadline == deadline

    def _next_packed_deadline(self) -> tuple[Millis, int] | None:
        heap = self._packed_deadlines
        while heap:
            columns = self._columns_of(heap[0][1])
            if columns is None or columns.noted != heap[0]:
                heapq.heappop(heap)  # Of columns that are gone, or that have noted another since.
                continue
            first = columns.first_deadline()
            if first == heap[0]:
                return first
            columns.noted = first
            heapq.heapreplace(heap, first)
        return None

    def _note_packed(self, columns: LeaseColumns, deadline: tuple[Millis, int]) -> None:
        columns.noted = deadline
        heapq.heappush(self._packed_deadlines, deadline)

    def _note_deadline(self, lease: LeaseState) -> None:
        if len(self._deadlines) > 2 * (len(self._new) + len(self._old)) + 1_000:
            # Entries of closed or extended leases pile up behind a long-lived one.
            self._deadlines = [(each.deadline, each.number) for each in self.objects() if each.deadline is not None]
            heapq.heapify(self._deadlines)
        elif lease.deadline is not None:
            heapq.heappush(self._deadlines, (lease.deadline, lease.number))


def _number(lease: LeaseState) -> int:
    return lease.number


def _first(lease: LeaseState) -> int:
    return lease.parts[0].first


def _start(place: Place) -> int:
    return place[1].first
