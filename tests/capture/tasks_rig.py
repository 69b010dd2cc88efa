"""A change stream by script, a ledger of what was handed on, and a world of members in virtual time.

`Script` is what the stream has, `ScriptedStream` one process's way to it, `Ledger` what there is at the other end, and `LedgerSink` one
process's way to that. With a `Link` the ways are as bad as that; without one they are good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import pyarrow as pa

from simulation.network_link import Link, NoAnswerError, NotSentError
from simulation.promises import check
from sluiceway.model.task_records import CHANGES, AnnouncedPartition
from sluiceway.ports.change_stream import Barrier, Batch, BrokenOffError, End, SeedsUpto, StaleBatchError, UnknownPositionError

T = TypeVar("T")
PATIENCE = 2_000
"""Milliseconds after which a call of a stream or a sink is given up."""
BASE = 1_700_000_000_000


@dataclass
class Part:
    """A partition: so many records, then its end, once it may end."""

    token: str
    parents: tuple[str, ...]
    records: int
    point: int = 0
    """Of a seed: with which point it is known."""
    children: list[str] = field(default_factory=list)
    safe: int = 0
    """The stream was told that everything up to there is safe, and has dropped it."""
    given: set[tuple[str, str]] = field(default_factory=set)
    """The batches that it gave: from where to where."""
    gives: dict[int, set[str]] = field(default_factory=dict)
    """By the number of records before it, a barrier: partitions to which key ranges go."""
    takes: dict[int, set[str]] = field(default_factory=dict)
    """The same, for those from which they come."""

    def barrier(self, start: int, crossed: bool) -> int | None:
        """Number of records before the next barrier."""
        return min((at for at in self.gives.keys() | self.takes.keys() if at > start or (at == start and not crossed)), default=None)

    @property
    def born(self) -> AnnouncedPartition:
        return AnnouncedPartition(self.token, self.parents, f"{self.token}:0", BASE)

    def payload(self, index: int) -> bytes:
        return f"{self.token}/{index}".encode()


class Script:
    """What a stream has. Partitions without children do not end while `held`, and seeds of later points are not known before `points`."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts: dict[str, Part] = {}
        self.held = False
        self.points = 1
        self.alone = True
        """It has given all batches itself: no other process has a script of its own of the same stream."""
        self.left: list[str] = []
        """Partitions that somebody said to have left, in order."""
        for part in parts:
            self.add(part)

    def add(self, part: Part) -> Part:
        """Its parents have been added before."""
        self.parts[part.token] = part
        for parent in part.parents:
            self.parts[parent].children.append(part.token)
        return part

    @classmethod
    def random(cls, random: Random, steps: int = 8, most: int = 40) -> Script:
        """Seeds that split, merge and follow one another, `steps` times; some of them are known later."""
        script = cls()
        leaves: list[Part] = []

        def new(parents: Iterable[Part] = (), point: int = 0) -> Part:
            token = f"p{len(script.parts) + 1}"
            return script.add(Part(token, tuple(each.token for each in parents), random.choice([0, 1, most // 4, most]), point))

        leaves += [new(point=1) for _ in range(random.choice([1, 2, 4]))]
        leaves += [new(point=2) for _ in range(random.choice([0, 0, 2]))]
        for _ in range(steps):
            random.shuffle(leaves)
            merged = 1 if random.random() < 0.6 else random.randrange(2, 4)
            parents, leaves = leaves[:merged], leaves[merged:]
            leaves += [new(parents) for _ in range(1 if len(parents) > 1 and random.random() < 0.7 else random.randrange(1, 4))]
        return script

    @classmethod
    def crossing(cls, random: Random, count: int = 4, records: int = 40) -> Script:
        """Partitions without children, between which key ranges pass after as many records of each."""
        script = cls([Part(f"p{number}", (), records, 1) for number in range(count)])
        for _ in range(random.choice([4, 12, 24])):
            source, target = random.sample(list(script.parts), 2)
            at = random.randrange(1, records + 1)
            script.parts[source].gives.setdefault(at, set()).add(target)
            script.parts[target].takes.setdefault(at, set()).add(source)
        return script

    def ancestors(self, token: str) -> set[str]:
        above = set(self.parts[token].parents)
        return above.union(*(self.ancestors(parent) for parent in above))

    @property
    def payloads(self) -> list[bytes]:
        return [part.payload(index) for part in self.parts.values() for index in range(part.records)]

    # ---- as it answers ------------------------------------------------------------------------------------------------

    def seeds(self, after: str) -> SeedsUpto:
        known = int(after or 0)
        new = tuple(part.born for part in self.parts.values() if part.point and known < part.point <= self.points)
        return SeedsUpto(str(self.points), new)

    def read(self, token: str, position: str, upto: str | None, limit: int) -> Batch:
        part, start = self.parts[token], self._index(token, position)
        if start < part.safe:
            raise UnknownPositionError(f"{token} was told that everything up to {part.safe} is safe, and is asked for {start}")
        held = part.barrier(start, position.endswith("+")) if upto is None else None
        most = part.records if held is None else min(held, part.records)
        stop = min(most, start + limit) if upto is None else self._index(token, upto)
        if upto is not None and self.alone:
            check((position, upto) in part.given, f"{token} never gave a batch from {position} to {upto}")
        children = tuple(self.parts[child].born for child in part.children)
        barrier = self._barrier(part, stop) if stop == held else None
        ends = stop == part.records and (bool(children) or not self.held) and barrier is None
        end = End(children, BASE + part.records) if ends else None
        if stop > start:
            part.given.add((position, f"{token}:{stop}"))
        now = f"{token}:{stop}" if stop > start else None
        return Batch(_records(part, start, stop), now, BASE + stop, 0, () if end else children, end, barrier)

    def _barrier(self, part: Part, at: int) -> Barrier:
        gives = tuple(f"{part.token}>{target}@{at}" for target in sorted(part.gives.get(at, ())))
        takes = tuple(f"{source}>{part.token}@{at}" for source in sorted(part.takes.get(at, ())))
        return Barrier(at, gives, takes, f"{part.token}:{at}+")

    def keep(self, token: str, position: str) -> None:
        self.parts[token].safe = max(self.parts[token].safe, self._index(token, position))

    def _index(self, token: str, position: str) -> int:
        of, _, index = position.removesuffix("+").rpartition(":")
        if of != token or not index.isdigit() or int(index) > self.parts[token].records:
            raise UnknownPositionError(f"{token} has no position {position!r}")
        return int(index)


def _records(part: Part, start: int, stop: int) -> pa.RecordBatch:
    numbers = range(start, stop)
    columns: dict[str, list[object]] = {
        "position": [f"{part.token}:{number + 1}" for number in numbers],
        "at": [BASE + number for number in numbers],
        "kind": ["insert"] * len(numbers),
        "key": [str(number) for number in numbers],
        "payload": [part.payload(number) for number in numbers],
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[each.name], each.type) for each in CHANGES], schema=CHANGES)


async def _over(link: Link | None, work: Callable[[], Awaitable[T]]) -> T:
    if link is None:
        return await work()
    try:
        return await link.call(work, PATIENCE)
    except (NotSentError, NoAnswerError) as error:
        raise BrokenOffError(type(error).__name__) from error


class ScriptedStream:
    """A `ChangeStream`. A `random` makes batches of any of those sizes, and answers that have nothing although there is something."""

    def __init__(self, script: Script, link: Link | None = None, random: Random | None = None, sizes: tuple[int, ...] = (1, 3, 10)) -> None:
        self._script, self._link, self._random, self._sizes = script, link, random, sizes
        self._reading: set[str] = set()

    async def seeds(self, after: str) -> SeedsUpto:
        return await _over(self._link, lambda: _soon(lambda: self._script.seeds(after)))

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        self._begins(partition)
        try:
            if upto is None and self._random is not None:
                limit = min(limit, self._random.choice(self._sizes))
                if self._random.random() < 0.1:
                    return Batch(_records(self._script.parts[partition], 0, 0), None)
            batch = await _over(self._link, lambda: _soon(lambda: self._script.read(partition, position, upto, limit)))
            if not batch.records.num_rows and batch.end is None:
                await asyncio.sleep(0.1)
            return batch
        finally:
            self._reading.discard(partition)

    async def kept(self, partition: str, position: str) -> None:
        self._begins(partition)
        try:
            await _over(self._link, lambda: _soon(lambda: self._script.keep(partition, position)))
        finally:
            self._reading.discard(partition)

    def left(self, partition: str) -> None:
        check(partition not in self._reading, f"{partition} is left while it is read")
        self._script.left.append(partition)

    def _begins(self, partition: str) -> None:
        check(partition not in self._reading, f"two calls for {partition} at once in one process")
        self._reading.add(partition)

    async def close(self) -> None:
        """There is nothing to release."""


async def _soon(work: Callable[[], T]) -> T:
    return work()


class Ledger:
    """What has arrived, as a queue with one partition takes it: by keys, of which a group remembers those of its last batch.

    It refuses at once what must never come: a record for the second time or out of order, and one of a child before all of its parents'.
    """

    def __init__(self, script: Script, chunk: int = 4) -> None:
        self._script, self.chunk = script, chunk
        self.payloads: list[bytes] = []
        self.counts: dict[str, int] = {}
        self._groups: dict[str, tuple[int, dict[int, tuple[bytes, ...]]]] = {}
        self.deduplicated = self.stale = 0

    async def land(self, token: str, batch: int, number: int, chunk: tuple[bytes, ...]) -> None:
        last, seen = self._groups.get(token, (-1, {}))
        if batch < last:
            self.stale += 1
            raise StaleBatchError(f"batch {batch} of {token}, after {last}")
        if batch > last:
            seen = {}
            self._groups[token] = batch, seen
        if number in seen:
            check(seen[number] == chunk, f"chunk {number} of batch {batch} of {token} comes with other records")
            self.deduplicated += 1
            return
        seen[number] = chunk
        part = self._script.parts[token]
        for payload in chunk:
            index = self.counts.get(token, 0)
            check(index < part.records and payload == part.payload(index), f"{payload!r} comes as record {index} of {token}")
            if index == 0:
                late = [each for each in self._script.ancestors(token) if self.counts.get(each, 0) < self._script.parts[each].records]
                check(not late, f"{token} is handed on before all of {late}")
            self._check_sources(part, index)
            self.counts[token] = index + 1
            self.payloads.append(payload)

    def _check_sources(self, part: Part, index: int) -> None:
        for at, sources in part.takes.items():
            late = [each for each in sources if at <= index and self.counts.get(each, 0) < at]
            check(not late, f"record {index} of {part.token} is handed on before what was in {late} up to {at}")

    def stand(self, token: str, batch: int) -> None:
        """Somebody has written that batch."""
        self._groups[token] = batch, {}

    @property
    def whole(self) -> bool:
        return len(self.payloads) == len(self._script.payloads)


class LedgerSink:
    """A `ChangeSink`."""

    def __init__(self, ledger: Ledger, link: Link | None = None) -> None:
        self._ledger, self._link = ledger, link

    async def write(self, partition: str, batch: int, records: pa.RecordBatch) -> None:
        payloads = records.column("payload").to_pylist()
        size = self._ledger.chunk
        for number, start in enumerate(range(0, len(payloads), size)):
            chunk = tuple(payloads[start : start + size])
            await _over(self._link, lambda number=number, chunk=chunk: self._ledger.land(partition, batch, number, chunk))  # type: ignore[misc]


def from_options(name: str, options: Mapping[str, str]) -> ScriptedStream:
    """A stream that each process has of its own and that is the same in all: `partitions` with `records`, each with one child as long."""
    count, size = int(options["partitions"]), int(options["records"])
    seeds = [Part(f"p{number}", (), size, 1) for number in range(count)]
    script = Script([*seeds, *(Part(f"c{number}", (f"p{number}",), size) for number in range(count))])
    script.alone = False
    return ScriptedStream(script)
