"""Records that would be too large for a log, cut into parts: an assignment, all seeds of a stream, a snapshot.

Every member cuts the same content at the same places, so parts of one whole may come from several members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from sluiceway.core.group.task_state import Snapshot, State
from sluiceway.model.task_records import AnnouncedPartition

T = TypeVar("T")
Record = TypeVar("Record")

RECORD_BYTES = 400_000
"""Of the entries in one record. Every log takes records of 1,000,000 bytes."""


def cut(entries: Iterable[T], size: Callable[[T], int], most: int = RECORD_BYTES) -> list[list[T]]:
    """Divide entries into parts of at most that size; at least one, and one larger entry is a part by itself."""
    parts: list[list[T]] = [[]]
    room = most
    for entry in entries:
        cost = size(entry)
        if cost > room and parts[-1]:
            parts.append([])
            room = most
        parts[-1].append(entry)
        room -= cost
    return parts


def encoded_size(entry: Any) -> int:
    """Bytes of an entry in a record, with its comma."""
    return len(msgspec.json.encode(entry)) + 1


def cut_owners(owners: Mapping[str, str], most: int = RECORD_BYTES) -> Iterator[dict[str, str]]:
    """Divide an assignment; nothing for an empty one."""
    return (dict(part) for part in cut(owners.items(), encoded_size, most) if part)


def cut_tokens(tokens: Sequence[str], most: int = RECORD_BYTES) -> Iterator[tuple[str, ...]]:
    return (tuple(part) for part in cut(tokens, encoded_size, most) if part)


def cut_seeds(partitions: Sequence[AnnouncedPartition], most: int = RECORD_BYTES) -> list[tuple[AnnouncedPartition, ...]]:
    """Divide the seeds between two points, in their order; one part at least."""
    return [tuple(part) for part in cut(partitions, encoded_size, most)]


def cut_snapshot(state: State, most: int = RECORD_BYTES) -> list[Snapshot]:
    """The snapshot of that state: each part has some of the partitions, and all else."""
    parts = cut(sorted(state.partitions.items()), lambda entry: encoded_size(entry[1]) + encoded_size(entry[0]), most)
    return [Snapshot(replace(state, partitions=dict(part)), number, len(parts)) for number, part in enumerate(parts)]
