"""Stored form of a partition, and the change set of one cycle."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class PartitionRef(NamedTuple):
    """Permanent name of a partition: incarnations are never reused, nor partition numbers within one."""

    incarnation: str
    partition: int


class Fence(NamedTuple):
    """Write permission. Compared as a tuple; a store refuses any fence below the highest it has opened with.

    `era` rises when the way of assigning ownership changes, `grant` with each change of owner, `opening` each time the
    same owner opens the partition again after an unknown outcome.
    """

    era: int
    grant: int
    opening: int


class Least(NamedTuple):
    """Lower bound on an acknowledged partition's state: the fence it was opened with, and the last cycle applied then."""

    fence: Fence
    txn: int = 0


class RecordKind(StrEnum):
    """Kinds of a partition's small records; `core/partition/partition.py` documents their contents."""

    EXTENT = "extent"
    LEASE = "lease"
    DUE = "due"
    BLOB = "blob"
    KEY = "key"
    FAILURE = "failure"
    BUNDLE = "bundle"


RecordKey = tuple[RecordKind, str]


@dataclass(slots=True)
class Changes:
    """Change set of one cycle in one partition: applied whole or not at all.

    `txn`: number of the cycle, the partition's last one plus one. `header` replaces the header. A key occurs once, in `puts` or in
    `deletes`. A put replaces; deleting an absent key is no error. `blobs` are new, and a number is never put twice; `compacted_blobs` exist
    already, and these bytes replace theirs.
    """

    txn: int
    header: bytes
    puts: dict[RecordKey, bytes] = field(default_factory=dict)
    deletes: set[RecordKey] = field(default_factory=set)
    blobs: dict[int, bytes] = field(default_factory=dict)
    dropped_blobs: set[int] = field(default_factory=set)
    compacted_blobs: dict[int, bytes] = field(default_factory=dict)


class PackedRecords(NamedTuple):
    """Records of one kind with numbers for keys, one after the other: in a dict, each takes some 300 bytes more. `ends`: where each ends in
    `data`."""

    numbers: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    data: bytes

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def chosen(self, chosen: npt.NDArray[np.bool_]) -> list[tuple[int, bytes]]:
        """The chosen records by number."""
        rows = np.flatnonzero(chosen)
        starts, ends = (self.ends - self.lengths)[rows].tolist(), self.ends[rows].tolist()
        return [(number, self.data[start:end]) for number, start, end in zip(self.numbers[rows].tolist(), starts, ends, strict=True)]


@dataclass(slots=True)
class Snapshot:
    """A partition as last committed: header (None if never written), last `txn` (then 0), and all small records.

    Where there are many leases, `PartitionStore.open` may give their records as `leases` instead; see `whole`.
    """

    txn: int
    header: bytes | None
    records: dict[RecordKey, bytes]
    leases: list[PackedRecords] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of records."""
        return len(self.records) + sum(len(batch.numbers) for batch in self.leases)

    def whole(self) -> Snapshot:
        """The same with all records in `records`."""
        records = dict(self.records)
        for batch in self.leases:
            records |= {(RecordKind.LEASE, str(number)): data for number, data in batch.chosen(np.ones(len(batch.numbers), np.bool_))}
        return Snapshot(self.txn, self.header, records)
