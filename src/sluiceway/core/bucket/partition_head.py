"""Partition head: the one object of a partition that changes. It says from what the partition's state is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from sluiceway.model.changes import Fence


class Range(NamedTuple):
    """Entries of a journal that may have cycles of the partition: from `start` on, and before `end`; None: up to the journal's end."""

    journal: str
    start: int
    end: int | None = None


class Head(msgspec.Struct, array_like=True, frozen=True):
    """A version of a partition's head. The order of the fields is on disk: append only.

    The state is what `checkpoint` holds, changed by the cycles in `tail`. While the last range of the tail has no end, the partition is
    *attached*: its owner writes to that journal. `nonce`: random, so that no two versions are equal, and a tag, which may be a hash, never
    comes back. `life`: a new one whenever the partition is created; empty once it was dropped. `fence`: that it was opened with last.
    `journals`: those with blobs that the checkpoint refers to.
    """

    nonce: bytes
    life: str = ""
    fence: Fence | None = None
    checkpoint: str = ""
    tail: list[Range] = []
    journals: list[str] = []

    @property
    def attached(self) -> Range | None:
        """Where the owner writes."""
        return self.tail[-1] if self.tail and self.tail[-1].end is None else None

    @property
    def named(self) -> set[str]:
        """The journals that the partition's state needs."""
        return {*self.journals, *(each.journal for each in self.tail)}

    def opened(self, nonce: bytes, fence: Fence, tail: list[Range]) -> Head:
        return replace(self, nonce=nonce, fence=fence, tail=tail)

    def attach(self, nonce: bytes, journal: str, start: int) -> Head:
        """Cycles go to that journal from that number on. It must not be attached."""
        assert self.attached is None
        return replace(self, nonce=nonce, tail=[*self.tail, Range(journal, start)])

    def detach(self, nonce: bytes, end: int) -> Head:
        """The attached journal has no cycles of it from that number on."""
        attached = self.attached
        assert attached is not None
        ended = [] if end <= attached.start else [attached._replace(end=end)]
        return replace(self, nonce=nonce, tail=[*self.tail[:-1], *ended])

    def checkpointed(self, nonce: bytes, checkpoint: str, journals: Iterable[str], covered: list[Range]) -> Head:
        """A checkpoint has all cycles of the covered ranges; the last may be covered in part, up to its end."""
        return replace(
            self,
            nonce=nonce,
            checkpoint=checkpoint,
            journals=sorted(journals),
            tail=[left for each in self.tail if (left := _left(each, covered))],
        )


def _left(found: Range, covered: list[Range]) -> Range | None:
    """What is left of the range."""
    for each in covered:
        if each.end is not None and (each.journal, each.start) == (found.journal, found.start):
            left = found._replace(start=each.end)
            return left if left.end is None or left.start < left.end else None
    return found
