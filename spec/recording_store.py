"""A partition store that notes what it is asked and what it answers, for the trace check, and may lose answers on purpose.

Clients may note in the same place what they hear and ask for. In a file, a line is one JSON object, written at once, so that the file of a
killed server ends with a whole one.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from sluiceway.adapters import system
from sluiceway.core.partition.queries import load
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, Least, PartitionRef, PartitionStore, Snapshot
from spec.history_recorder import Recorder, View, view_of
from spec.partition_fences import Place
from spec.trace_check import Event

MAX_DELAY = 0.2
"""Seconds by which a commit that was not answered may come late."""


class Line(msgspec.Struct, omit_defaults=True):
    """What happened to a partition: a store's `opening`, `opened`, `sent` or `heard`, or a client's `told` or `gave_up`."""

    partition: str
    what: str
    fence: tuple[int, int, int] = (0, 0, 0)
    txn: int = 0
    now: Millis = 0
    places: list[tuple[int, Place]] = []
    deadlines: list[tuple[int, Millis | None]] = []
    outcome: str = ""
    items: list[int] = []
    place: Place = 0


Note = Callable[[Line], None]


class HistoryFile:
    """Lines on disk, appended by all that take part."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, line: Line) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of such a file."""
    for text in path.read_bytes().splitlines():
        yield msgspec.json.decode(text, type=Line)


def histories(lines: Iterable[Line]) -> dict[str, list[Event]]:
    """The history of each partition, by its name."""
    recorders: dict[str, Recorder] = defaultdict(Recorder)
    owners: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    for line in lines:
        recorder, numbers = recorders[line.partition], owners[line.partition]
        view = View(dict(line.places), dict(line.deadlines))
        at = numbers.setdefault(line.fence[:2], len(numbers)) if any(line.fence) else None
        if line.what == "told":
            recorder.told(None, line.items, line.place)
        elif line.what == "gave_up":
            assert isinstance(line.place, int), "a client gives up what it has leased"
            recorder.gave_up(line.place, line.items)
        elif at is not None:
            _of_store(recorder, at, line, view)
    return {name: recorder.events for name, recorder in recorders.items()}


def _of_store(recorder: Recorder, at: int, line: Line, view: View) -> None:
    if line.what == "opening":
        recorder.opening(at, line.fence)
    elif line.what == "opened":
        recorder.opened(at, line.fence, line.txn, view)
    elif line.what == "sent":
        recorder.sent(at, line.fence, line.txn, view, line.now)
    else:
        recorder.heard(at, line.fence, Outcome(line.outcome).value)


class RecordingStore:
    """A PartitionStore that passes all calls on and notes them. `lost`: the part of the commits that end unknown, of which some landed,
    some land later, and some never."""

    def __init__(self, store: PartitionStore, note: Note, lost: float = 0.0) -> None:
        self._store = store
        self._note = note
        self._lost = lost
        self._random = Random(system.now())
        self._stored: dict[PartitionRef, Snapshot] = {}
        """As its owner here knows it."""
        self._late: set[asyncio.Task[Any]] = set()

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        self._note(Line(_name(ref), "opening", fence))
        snapshot = await self._store.open(ref, fence, least)
        self._stored[ref] = snapshot.whole()
        self._note(_line(ref, "opened", fence, self._stored[ref]))
        return snapshot

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        after = _with(self._stored[ref], changes)
        self._note(_line(ref, "sent", fence, after))
        outcome = Outcome.UNKNOWN
        try:
            outcome = await self._carry_out(ref, changes, fence)
        finally:
            self._note(Line(_name(ref), "heard", fence, outcome=outcome.value))
        if outcome is Outcome.DONE:
            self._stored[ref] = after
        return outcome

    async def _carry_out(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        if self._random.random() >= self._lost:
            return await self._store.apply(ref, changes, fence)
        fate = self._random.choice(["landed", "late", "never"])
        if fate == "landed":
            await self._store.apply(ref, changes, fence)
        elif fate == "late":
            self._spawn(self._apply_late(ref, changes, fence))
        return Outcome.UNKNOWN

    async def _apply_late(self, ref: PartitionRef, changes: Changes, fence: Fence) -> None:
        await asyncio.sleep(self._random.uniform(0, MAX_DELAY))
        await self._store.apply(ref, changes, fence)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def identify(self, new: str | None) -> str | None:
        return await self._store.identify(new)

    def at_once(self, ref: PartitionRef) -> bool:
        return self._store.at_once(ref)

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        return await self._store.read(ref, blobs)

    async def browse(self, ref: PartitionRef) -> Snapshot:
        return await self._store.browse(ref)

    async def drop(self, ref: PartitionRef) -> None:
        await self._store.drop(ref)

    async def release(self, ref: PartitionRef) -> None:
        await self._store.release(ref)

    async def close(self) -> None:
        await asyncio.gather(*self._late)
        await self._store.close()


def _name(ref: PartitionRef) -> str:
    return f"{ref.incarnation}.{ref.partition}"


def _line(ref: PartitionRef, what: str, fence: Fence, snapshot: Snapshot) -> Line:
    view = view_of(load(snapshot))
    return Line(_name(ref), what, fence, snapshot.txn, system.now(), list(view.places.items()), list(view.deadlines.items()))


def _with(snapshot: Snapshot, changes: Changes) -> Snapshot:
    records = snapshot.records | changes.puts
    for key in changes.deletes:
        records.pop(key, None)
    return Snapshot(changes.txn, changes.header, records)
