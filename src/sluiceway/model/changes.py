"""Stored form of a partition, and the change set of one cycle."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


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


@dataclass(slots=True)
class Snapshot:
    """A partition as last committed: header (None if never written), last `txn` (then 0), and all small records."""

    txn: int
    header: bytes | None
    records: dict[RecordKey, bytes]
