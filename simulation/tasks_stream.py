"""Change stream for simulated tasks, whose partitions split, merge and succeed one another, and a position store with fencing.

Keys belong to partitions. Children get those of their parents; and in some streams keys pass between partitions that both go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple

from simulation.promises import check
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import AnnouncedPartition

POINTS = ("", "first", "late")


class Barrier(NamedTuple):
    """A point of a partition, after so many records, at which keys come or go. Its mark is the time."""

    records: int
    mark: Millis
    gives: tuple[str, ...]
    takes: tuple[str, ...]


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
    alone_from: Millis = 0
    """When the last of its ancestors has ended. It has keys of theirs, and handoffs, from then on."""
    barriers: list[Barrier] = field(default_factory=list)
    earlier: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By record: the partition and the index of its key's last record before, where that is in another partition."""

    @property
    def end(self) -> Millis:
        return self.base + self.records

    @property
    def over(self) -> Millis:
        """When it and all of its ancestors have ended."""
        return max(self.end, self.alone_from)

    @property
    def born(self) -> AnnouncedPartition:
        return AnnouncedPartition(self.token, self.parents, f"{self.token}:0", self.base if self.point else 0)


class Stream:
    """Finite tree of partitions. `held`: partitions without children do not end yet."""

    def __init__(self, random: Random, early: float = 0.2, steps: int = 0, moves: Random | None = None) -> None:
        """`moves`: keys pass between partitions that go on, which are longer then."""
        self.early = early
        self._stretch = 1 if moves is None else moves.choice([2, 3])
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
        if moves is not None:
            keys_pass(self.parts, moves)

    def _new(self, random: Random, parents: tuple[Part, ...] | list[Part], point: str) -> Part:
        base = min((parent.end for parent in parents), default=random.randrange(1_000, 1_010)) + random.randrange(3)
        token = f"p{next(self._names)}"
        part = Part(
            token,
            tuple(parent.token for parent in parents),
            random.choice([0, 1, 3, 6]) * self._stretch,
            base,
            point,
            early=random.random() < self.early,
            alone_from=max([base, *(parent.over for parent in parents)]),
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


def keys_pass(parts: dict[str, Part], random: Random) -> None:
    """Let keys pass between partitions, with barriers at both ends, and give each record a key."""
    passes: dict[Millis, set[tuple[str, str]]] = {}
    end = max(part.end for part in parts.values())
    late = _late(parts)
    for _ in range(random.choice([2, 6, 12, 24])):
        at = random.randrange(1_000, end + 1)
        there = [token for token, part in parts.items() if part.alone_from <= at < part.end]
        for _ in range(random.choice([1, 1, 2, 4]) if len(there) > 1 else 0):
            source, target = random.sample(there, 2)
            # Nothing waits for what is known late: the group could not come to rest before.
            if source not in late or target in late:
                passes.setdefault(at, set()).add((source, target))
    for at in sorted(passes):
        for token in sorted({token for pair in passes[at] for token in pair}):
            gives = tuple(sorted(_handoff(*pair, at) for pair in passes[at] if pair[0] == token))
            takes = tuple(sorted(_handoff(*pair, at) for pair in passes[at] if pair[1] == token))
            parts[token].barriers.append(Barrier(at - parts[token].base + 1, at, gives, takes))
    _give_keys(parts, passes, random)


def _late(parts: dict[str, Part]) -> set[str]:
    """Seeds that are known late, and their descendants."""
    late: set[str] = set()
    for token, part in parts.items():
        if part.point == POINTS[2] or late.intersection(part.parents):
            late.add(token)
    return late


def _handoff(source: str, target: str, at: Millis) -> str:
    return f"{source}>{target}@{at}"


def _give_keys(parts: dict[str, Part], passes: dict[Millis, set[tuple[str, str]]], random: Random) -> None:
    """Follow the keys through time. Whatever is read of a key follows its last record before."""
    owned = {token: {f"{token}-{number}" for number in range(4)} if part.point else set[str]() for token, part in parts.items()}
    last: dict[str, tuple[str, int]] = {}
    for at in range(1_000, max(part.over for part in parts.values()) + 1):
        for token, part in parts.items():
            if part.over == at:
                for key in sorted(owned.pop(token)):
                    if part.children:
                        owned[random.choice(part.children)].add(key)
            elif part.alone_from <= at < part.end and owned[token]:
                key, index = random.choice(sorted(owned[token])), at - part.base
                if key in last and last[key][0] != token:
                    part.earlier[index] = last[key]
                last[key] = token, index
        moving = {pair: random.choice(sorted(owned[pair[0]])) for pair in sorted(passes.get(at, ())) if owned[pair[0]]}
        for (source, target), key in moving.items():
            if key in owned[source]:
                owned[source].discard(key)
                owned[target].add(key)


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
