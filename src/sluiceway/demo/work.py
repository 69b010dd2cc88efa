"""Folders of a run, and the notes in them by which its processes share their progress."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluiceway.demo.inputs import Input


class Job(msgspec.Struct, frozen=True):
    """Job of a run, constant over restarts of its processes."""

    input: Input
    queue: str

    @property
    def dead_queue(self) -> str:
        return f"{self.queue}-dead"


@dataclass(frozen=True, slots=True)
class Work:
    """`root` holds the server's data and Spark's checkpoint, `results` the files that the user keeps."""

    root: Path
    results: Path

    @property
    def server_data(self) -> Path:
        return self.root / "server"

    @property
    def scratch(self) -> Path:
        return self.root / "spark"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def table(self) -> Path:
        return self.results / "table"

    @property
    def dead_letters(self) -> Path:
        return self.results / "dead-letters"

    @property
    def delays(self) -> Path:
        return self.results / "delays.png"

    @property
    def rates(self) -> Path:
        return self.results / "rates.png"

    @property
    def logs(self) -> Path:
        return self.results / "logs"

    def make(self) -> None:
        for folder in (self.root, self.scratch, self._notes, self.results, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def _notes(self) -> Path:
        return self.root / "notes"

    def note(self, name: str, facts: object) -> None:
        """Write a note atomically."""
        part = self._notes / f".{name}.{os.getpid()}"
        part.write_text(json.dumps(facts))
        part.replace(self._notes / f"{name}.json")

    def read(self, name: str) -> Any:
        """Return the note's facts; None if it has not been written."""
        try:
            return json.loads((self._notes / f"{name}.json").read_text())
        except FileNotFoundError:
            return None

    def began(self, stage: str) -> None:
        """Note the start of a stage. Only the first one counts, so that the stage's duration includes interruptions."""
        if self.read(f"{stage}-began") is None:
            self.note(f"{stage}-began", time.time())

    def ended(self, stage: str) -> None:
        self.note(f"{stage}-ended", time.time())

    def is_done(self, stage: str) -> bool:
        return self.read(f"{stage}-ended") is not None

    def seconds(self, stage: str) -> float:
        """Duration of a completed stage, in seconds."""
        return max(0.001, float(self.read(f"{stage}-ended")) - float(self.read(f"{stage}-began")))

    def log_batch(self, event: str, batch: int, items: int = 0) -> None:
        """Log a batch's event: `begin`, or `end` with its items. One short append, which a kill cannot tear."""
        with (self._notes / "batches.log").open("a") as log:
            log.write(f"{event} {batch} {items} {time.time()}\n")

    def batches(self) -> Batches:
        try:
            lines = (self._notes / "batches.log").read_text().split("\n")
        except FileNotFoundError:
            return Batches(())
        events = (line.split() for line in lines if line)
        return Batches(tuple((event, int(batch), int(items), float(at)) for event, batch, items, at in events))


@dataclass(frozen=True, slots=True)
class Batches:
    """Events of the micro-batches, in order: (`begin` or `end`, batch, items of a batch that ends, time in seconds)."""

    events: tuple[tuple[str, int, int, float], ...]

    @property
    def begun(self) -> list[int]:
        return [batch for event, batch, *_ in self.events if event == "begin"]

    @property
    def rate(self) -> float:
        """Items a second after the first batch, which waits for much that Spark does once. 0 with a single batch."""
        ends = [(items, at) for event, _, items, at in self.events if event == "end"]
        if len(ends) < 2:
            return 0.0
        return sum(items for items, _ in ends[1:]) / max(0.001, ends[-1][1] - ends[0][1])

    @property
    def count(self) -> int:
        return len(set(self.begun))

    @property
    def replayed(self) -> int:
        """Number of runs beyond each batch's first."""
        return len(self.begun) - self.count

    @property
    def redelivered(self) -> int:
        """Items of repeated batches, once per extra run. A repetition reads the same items, so the batch's end has their number."""
        size = {batch: items for event, batch, items, _ in self.events if event == "end"}
        return sum(size.get(batch, 0) for batch in self.begun) - sum(size.get(batch, 0) for batch in set(self.begun))

    @property
    def is_open(self) -> bool:
        """Whether a batch has begun and not ended."""
        return bool(self.events) and self.events[-1][0] == "begin"
