"""What a partition consists of in a store, and what one turn changes in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class PartitionRef(NamedTuple):
    """Names a partition for good: an incarnation is never used twice, a partition number never reused within it."""

    incarnation: str
    partition: int


class Fence(NamedTuple):
    """Who may write. Compared as a tuple; a store refuses everything below the highest it has opened with.

    `era` grows when the way of assigning ownership changes, `grant` with each change of owner, `opening` each time the
    same owner opens the partition again after an unknown outcome.
    """

    era: int
    grant: int
    opening: int


class Least(NamedTuple):
    """What a partition has at least, if it is the one that was acknowledged: the fence it was opened with, and the turn it had applied."""

    fence: Fence
    txn: int = 0


class RecordKind(StrEnum):
    """The small records of a partition; `core/partition/partition.py` says what each holds."""

    EXTENT = "extent"
    LEASE = "lease"
    DUE = "due"
    BLOB = "blob"
    KEY = "key"


RecordKey = tuple[RecordKind, str]


@dataclass(slots=True)
class Changes:
    """All that one turn changes in one partition: applied whole or not at all.

    `txn` is the number of the turn: the partition's last one plus one. `header` replaces the header. A key occurs
    once, in `puts` or in `deletes`; putting replaces; deleting what is not there is no error. `blobs` are new and
    never put again under the same number; `compacted_blobs` are there already, and these bytes take the place of theirs.
    """

    txn: int
    header: bytes
    puts: dict[RecordKey, bytes] = field(default_factory=dict)
    deletes: set[RecordKey] = field(default_factory=set)
    blobs: dict[int, bytes] = field(default_factory=dict)
    dropped_blobs: set[int] = field(default_factory=set)
    compacted_blobs: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Snapshot:
    """A partition as last committed: header (None if it was never written), last `txn` (0), all small records."""

    txn: int
    header: bytes | None
    records: dict[RecordKey, bytes]
