"""Change stream for simulated tasks, whose partitions split, merge and succeed one another, and a position store with fencing."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple

from simulation.promises import check
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import AnnouncedPartition

POINTS = ("", "first", "late")


@dataclass
class Part:
    """True content of a partition: `records` records, one per millisecond from `base` on, then the end."""

    token: str
    parents: tuple[str, ...]
    records: int
    base: Millis
    point: str = ""
    """The point of a seed at which it becomes known. Empty for a partition with parents."""
    children: list[str] = field(default_factory=list)
    early: bool = False
    """Whether its children are known before it ends."""

    @property
    def end(self) -> Millis:
        return self.base + self.records

    @property
    def born(self) -> AnnouncedPartition:
        return AnnouncedPartition(self.token, self.parents, f"{self.token}:0", self.base if self.point else 0)


class Stream:
    """Finite tree of partitions. `held`: partitions without children do not end yet."""

    def __init__(self, random: Random, early: float = 0.2, steps: int = 0) -> None:
        self.early = early
        self.parts: dict[str, Part] = {}
        self.held = True
        self.late = random.random() < 0.3
        """Whether some seeds become known late."""
        self.late_known = False
        self._names = count(1)
        leaves = [self._new(random, (), POINTS[1]) for _ in range(random.choice([1, 2, 2, 4, 8]))]
        if self.late:
            leaves += [self._new(random, (), POINTS[2]) for _ in range(random.randrange(1, 4))]
        for _ in range(max(steps, random.choice([0, 2, 4, 8, 12]))):
            random.shuffle(leaves)
            merged = 1 if random.random() < 0.6 else random.randrange(2, 4)
            parents, leaves = leaves[:merged], leaves[merged:]
            children = 1 if merged > 1 and random.random() < 0.7 else random.randrange(1, 4)
            leaves += [self._new(random, parents, "") for _ in range(children)]

    def _new(self, random: Random, parents: tuple[Part, ...] | list[Part], point: str) -> Part:
        base = min((parent.end for parent in parents), default=random.randrange(1_000, 1_010)) + random.randrange(3)
        token = f"p{next(self._names)}"
        part = Part(
            token, tuple(parent.token for parent in parents), random.choice([0, 1, 3, 6]), base, point, early=random.random() < self.early
        )
        for parent in parents:
            parent.children.append(token)
        self.parts[token] = part
        return part

    def seeds(self, after: str) -> tuple[str, tuple[AnnouncedPartition, ...]]:
        """Return the next point, and the seeds up to it."""
        point = POINTS[1] if after == "" else POINTS[2] if after == POINTS[1] and self.late_known else after
        return point, tuple(part.born for part in self.parts.values() if part.point == point and point != after)

    def children(self, token: str) -> tuple[AnnouncedPartition, ...]:
        return tuple(self.parts[child].born for child in self.parts[token].children)

    def ends(self, token: str) -> bool:
        return bool(self.parts[token].children) or not self.held


def index_of(position: str) -> int:
    return int(position.rpartition(":")[2])


class Fence(NamedTuple):
    grant: int
    opening: int


class Positions:
    """Position store: fence and committed index of each partition."""

    def __init__(self) -> None:
        self.fences: dict[str, Fence] = {}
        self.committed: dict[str, int] = {}

    def open(self, token: str, grant: int) -> Fence | None:
        """Return the fence for commits, None if the grant is refused. An opening ends all earlier ones, also of the same grant."""
        fence = Fence(grant, self.fences.get(token, Fence(0, 0)).opening + 1)
        if self.refuses(token, fence):
            return None
        self.fences[token] = max(fence, self.fences.get(token, fence))
        return fence

    def position(self, token: str) -> str | None:
        return f"{token}:{self.committed[token]}" if token in self.committed else None

    def refuses(self, token: str, fence: Fence) -> bool:
        return fence < self.fences.get(token, Fence(0, 0))

    def commit(self, token: str, fence: Fence, index: int) -> bool:
        if self.refuses(token, fence):
            return False
        # Checked here, because a planted bug may replace `refuses`.
        holds = self.fences[token]
        check(fence.grant == holds.grant, f"S2: {token} is committed under {fence.grant}, after {holds.grant} was opened")
        check(index >= self.committed.get(token, 0), f"S13: {token} goes back from {self.committed.get(token)} to {index}")
        self.committed[token] = index
        return True
