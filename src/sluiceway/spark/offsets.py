"""Offset of the stream source: the leases that a micro-batch reads, and their division among tasks.

Spark logs an offset before it runs the batch and compares offsets as JSON text, so equal offsets must be equal text. Everything that
decides what a replay reads is in the offset, not in options that may change between runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

LEAST_TASK = 10_000
"""Items of a task, if the batch has that many and `minPartitions` asks for no smaller ones: a task costs Spark as much processor time as
10,000 items."""
LEAST_TASKS = 4
"""Tasks of a large batch from fewer partitions."""


class Part(NamedTuple):
    """What a batch leases from: a queue, or one partition of it. `alone`: since the queue as a whole could not be leased from."""

    queue: str
    partition: int | None = None
    alone: bool = False

    @property
    def shown(self) -> str:
        """Its name for people."""
        return self.queue if self.partition is None else f"partition {self.partition} of {self.queue}"

    @property
    def text(self) -> str:
        """Its name in an offset. A queue's name has neither of the marks."""
        return self.queue if self.partition is None else f"{self.queue}{'/' if self.alone else ':'}{self.partition}"

    @classmethod
    def parse(cls, text: str) -> Part:
        for mark in "/:":
            queue, found, number = text.partition(mark)
            if found:
                return cls(queue, int(number), mark == "/")
        return cls(text)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease of the batch. `queue` is empty if the query reads only one queue."""

    lease_id: str
    count: int
    queue: str = ""

    @property
    def partition(self) -> int:
        return int(self.lease_id.split(".")[1])


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` items of a lease, starting at position `start`."""

    lease_id: str
    start: int
    count: int
    queue: str = ""

    def pieces(self, most: int) -> Iterator[Slice]:
        """The same items in order, up to `most` in each."""
        for start in range(0, self.count, most):
            yield replace(self, start=self.start + start, count=min(most, self.count - start))


@dataclass(frozen=True, slots=True)
class Offset:
    """One micro-batch. `nonce` distinguishes two checkpoints of one consumer; `sequence` counts a checkpoint's batches from 1.

    With `runs` no lease is divided among tasks: its items of a key have to be handled in order. `unanswered`: the batches whose keys may
    have leases at a part that no batch has. `unclosed`: leases of earlier batches, whose partitions were away when they were to be closed.
    """

    nonce: str
    sequence: int = 0
    leases: tuple[HeldLease, ...] = ()
    rows_per_task: int = LEAST_TASK
    runs: bool = False
    unanswered: tuple[tuple[Part, tuple[int, ...]], ...] = ()
    unclosed: tuple[HeldLease, ...] = ()

    @classmethod
    def parse(cls, offset: dict[str, object]) -> Offset:
        rows_per_task, runs = int(str(offset["rows_per_task"])), bool(offset.get("runs", False))
        unanswered = json.loads(str(offset.get("unanswered", "{}")))
        return cls(
            str(offset["nonce"]),
            int(str(offset["sequence"])),
            _parse_leases(str(offset["leases"])),
            rows_per_task,
            runs,
            tuple((Part.parse(text), tuple(numbers)) for text, numbers in unanswered.items()),
            _parse_leases(str(offset.get("unclosed", "[]"))),
        )

    def to_dict(self) -> dict[str, object]:
        """Keys in alphabetical order; the leases as one string, since Spark takes no lists. Leases of several queues are grouped by
        queue. `runs`, `unanswered` and `unclosed` are there only if they say something, so that other offsets are those of earlier
        releases."""
        runs = {"runs": True} if self.runs else {}
        unanswered = {part.text: numbers for part, numbers in self.unanswered}
        return {
            "leases": _leases_text(self.leases),
            "nonce": self.nonce,
            "rows_per_task": self.rows_per_task,
            **runs,
            "sequence": self.sequence,
            **({"unanswered": json.dumps(unanswered, separators=(",", ":"))} if unanswered else {}),
            **({"unclosed": _leases_text(self.unclosed)} if self.unclosed else {}),
        }

    def following(self, leases: Sequence[HeldLease], min_partitions: int, runs: bool = False) -> Offset:
        """The offset of the next batch, cut into at least `min_partitions` tasks if it has that many items (with `runs`: leases).

        A large batch has as many tasks as partitions, as Spark readers of other systems do.
        """
        items = sum(lease.count for lease in leases)
        usual = items // max(LEAST_TASKS, len({(lease.queue, lease.partition) for lease in leases}))
        rows_per_task = min(max(LEAST_TASK, usual), items // min_partitions)
        return Offset(self.nonce, self.sequence + 1, tuple(leases), max(1, rows_per_task), runs)

    @property
    def batch_id(self) -> int:
        """The id that `foreachBatch` gets for this batch, if the query has no other source."""
        return self.sequence - 1

    @property
    def lease_ids(self) -> list[str]:
        return [lease.lease_id for lease in self.leases]

    def without(self, gone: Collection[str]) -> Offset:
        """The same batch without these leases."""
        return replace(self, leases=tuple(lease for lease in self.leases if lease.lease_id not in gone))

    def tasks(self) -> Iterator[tuple[Slice, ...]]:
        """Each task's slices: `rows_per_task` items, fewer in the last. Small leases share a task, large ones are split, unless they have
        `runs`."""
        task: list[Slice] = []
        room = self.rows_per_task
        for lease in self.leases:
            start = 0
            if self.runs:
                if task and lease.count > room:
                    yield tuple(task)
                    task, room = [], self.rows_per_task
                room = max(room, lease.count)
            while start < lease.count:
                count = min(room, lease.count - start)
                task.append(Slice(lease.lease_id, start, count, lease.queue))
                start += count
                room -= count
                if not room:
                    yield tuple(task)
                    task, room = [], self.rows_per_task
        if task:
            yield tuple(task)


def _leases_text(leases: Iterable[HeldLease]) -> str:
    by_queue: dict[str, list[list[object]]] = {}
    for lease in leases:
        by_queue.setdefault(lease.queue, []).append([lease.lease_id, lease.count])
    return json.dumps(by_queue.get("", []) if by_queue.keys() <= {""} else by_queue, separators=(",", ":"))


def _parse_leases(text: str) -> tuple[HeldLease, ...]:
    named = json.loads(text)
    by_queue = named if isinstance(named, dict) else {"": named}
    return tuple(HeldLease(lease_id, count, queue) for queue, some in by_queue.items() for lease_id, count in some)
