"""Lease loading: the records of plain leases, decoded many at once into columns. The other records are left to their own decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sluiceway.core.partition.lease_columns import NO_TEXT, LeaseRows
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.records import LeaseRecord, pack
from sluiceway.model.changes import PackedRecords
from sluiceway.model.requests import Offsets

MIN_PACKED = 1_000
"""From this many lease records on, columns are worth their making."""

_Bytes = npt.NDArray[np.uint8]
_NOTHING = LeaseRecord([], "", 0, None, None, b"", [])
_HEAD = pack(_NOTHING)[:1] + pack([(0, 0)])[:2]
"""The first bytes of a record with one range: it is an array of so many fields, of which the first is an array of one pair."""
_TAIL = pack(msgspec.structs.astuple(_NOTHING)[4:])[1:]
"""The bytes of a plain record after its range, client, deadline and lease key."""
_NIL = 0xC0
_NUMBERS = ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))
"""MessagePack's forms of numbers from 128 on: the first byte, and how many follow."""
_PADDING = bytes(32)
"""After the last record, so that what is no plain record can be looked at like one."""


def packed_records(records: Sequence[tuple[int, bytes]]) -> PackedRecords:
    """Records, given by number, in the form in which a store reads many."""
    numbers = np.array([number for number, _ in records], np.int64)
    return PackedRecords(numbers, np.cumsum([len(data) for _, data in records], dtype=np.int64), b"".join(data for _, data in records))


def load_plain(partition: Partition, batches: Iterable[PackedRecords]) -> list[tuple[int, bytes]]:
    """Restore the plain leases among the records, before any others. Returns the other records. The extents must be there."""
    loading = _Loading(partition)
    others: list[tuple[int, bytes]] = []
    for batch in batches:
        others += loading.add(batch)
    loading.restore()
    return others


class _Loading:
    """The plain leases of a partition that is being loaded."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._places: dict[bytes, int] = {}
        """The texts of leases, by which each is kept once."""
        self._extents = list(partition.log.extents.values())
        self._firsts = np.array([extent.first for extent in self._extents], np.int64)
        self._ends = np.array([extent.first + extent.count for extent in self._extents], np.int64)
        self._found: list[tuple[npt.NDArray[Any], ...]] = []
        """Numbers, first offsets, deadlines, numbers of items, extents, clients and keys, batch by batch."""

    def add(self, batch: PackedRecords) -> list[tuple[int, bytes]]:
        """Add the plain ones of these records. Returns the others.

        Reads each record from its start to its end: what is in between is then known, whatever bytes its texts or bit maps have.
        """
        data, starts = np.frombuffer(batch.data + _PADDING, np.uint8), batch.ends - batch.lengths
        is_plain = np.ones(len(starts), np.bool_)
        for at, byte in enumerate(_HEAD):
            is_plain &= data[starts + at] == byte
        rows = np.flatnonzero(is_plain)
        firsts, after = _numbers(data, starts[rows] + len(_HEAD))
        counts, after = _numbers(data, after)
        clients, after = self._texts(batch.data, data, after)
        deadlines, after = _numbers(data, after)
        keys, after = self._texts(batch.data, data, after)
        is_whole = after + len(_TAIL) == batch.ends[rows]
        for at, byte in enumerate(_TAIL):
            is_whole &= data[after + at] == byte
        is_whole &= (firsts >= 0) & (counts > 0) & (clients != NO_TEXT) & (deadlines >= 0)
        extents = self._firsts.searchsorted(firsts, "right") - 1
        is_whole &= extents >= 0
        is_whole[is_whole] = (firsts + counts)[is_whole] <= self._ends[extents[is_whole]]
        is_plain[rows[~is_whole]] = False
        large, small = (batch.numbers[rows], firsts, deadlines), (counts, extents, clients, keys)
        # As small as they can be: there are several copies of a million rows in the end.
        self._found.append((*(each[is_whole] for each in large), *(each[is_whole].astype(np.int32) for each in small)))
        return batch.chosen(~is_plain)

    def _texts(self, raw: bytes, data: _Bytes, at: Offsets) -> tuple[Offsets, Offsets]:
        """The place of the text that begins at each of these places (NO_TEXT: none does, or a long one), and the place after it."""
        lead, second = data[at].astype(np.int64), data[at + 1].astype(np.int64)
        lengths = np.select([lead >> 5 == 0b101, lead == 0xD9, lead == 0xDA], [lead & 0x1F, second, second << 8 | data[at + 2]], -1)
        begins = at + np.select([lead >> 5 == 0b101, lead == 0xD9, lead == 0xDA], [1, 2, 3], 1)
        ends = begins + np.maximum(lengths, 0)
        found = np.full(len(at), NO_TEXT, np.int64)
        there, places = np.flatnonzero(lengths >= 0), self._places
        spans = zip(begins[there].tolist(), ends[there].tolist(), strict=True)
        found[there] = [places.setdefault(raw[begin:end], len(places)) for begin, end in spans]
        return found, np.minimum(ends, len(raw))

    def restore(self) -> None:
        """Restore what was added."""
        if not self._found:
            return
        columns = [np.concatenate(each) for each in zip(*self._found, strict=True)]
        self._found.clear()
        order = np.argsort(columns[0], kind="stable")
        for at, column in enumerate(columns):
            columns[at] = column[order]
        numbers, firsts, deadlines, counts, extents, clients, keys = columns
        for extent, items in enumerate(np.bincount(extents, counts, len(self._extents)).astype(np.int64).tolist()):
            if items:
                self._extents[extent].open += items
                self._extents[extent].blob.open += items
        leased_at = np.full(len(numbers), self._partition.log.header.now, np.int64)
        rows = LeaseRows(numbers, firsts, counts, self._firsts[extents], deadlines, leased_at, clients, keys)
        self._partition.restore_rows(rows, [text.decode() for text in self._places])


def _numbers(data: _Bytes, at: Offsets) -> tuple[Offsets, Offsets]:
    """The number that begins at each of these places (-1: none does), and the place after it."""
    lead = data[at].astype(np.int64)
    values, after = np.where(lead < 0x80, lead, -1), at + 1
    for byte, size in _NUMBERS:
        rows = np.flatnonzero(lead == byte)
        read = np.zeros(len(rows), np.int64)
        for step in range(size):
            read = read << 8 | data[at[rows] + 1 + step]
        values[rows] = read
        after[rows] += size
    return values, after
