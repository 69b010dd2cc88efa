"""The folders of a run, and the notes in them by which its processes know how far the others have come."""

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
    """What is to be done. It stays the same however often the processes are started again."""

    input: Input
    queue: str

    @property
    def dead_queue(self) -> str:
        return f"{self.queue}-dead"


@dataclass(frozen=True, slots=True)
class Work:
    """`root` holds the server's data and Spark's checkpoint, `results` what a user wants to keep."""

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
    def picture(self) -> Path:
        return self.results / "picture.png"

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
        """Written whole or not at all."""
        part = self._notes / f".{name}.{os.getpid()}"
        part.write_text(json.dumps(facts))
        part.replace(self._notes / f"{name}.json")

    def read(self, name: str) -> Any:
        """The note's facts; None if it has not been written."""
        try:
            return json.loads((self._notes / f"{name}.json").read_text())
        except FileNotFoundError:
            return None

    def began(self, stage: str) -> None:
        """Note when a stage began. The first beginning counts, so that a stage's time has its interruptions in it."""
        if self.read(f"{stage}-began") is None:
            self.note(f"{stage}-began", time.time())

    def ended(self, stage: str) -> None:
        self.note(f"{stage}-ended", time.time())

    def is_done(self, stage: str) -> bool:
        return self.read(f"{stage}-ended") is not None

    def seconds(self, stage: str) -> float:
        """How long a stage that is done took."""
        return max(0.001, float(self.read(f"{stage}-ended")) - float(self.read(f"{stage}-began")))

    def log_batch(self, event: str, batch: int, items: int = 0) -> None:
        """`event` is `begin`, or `end` with the batch's items. One short append, so a kill cannot tear it."""
        with (self._notes / "batches.log").open("a") as log:
            log.write(f"{event} {batch} {items}\n")

    def batches(self) -> Batches:
        try:
            lines = (self._notes / "batches.log").read_text().split("\n")
        except FileNotFoundError:
            return Batches(())
        return Batches(tuple((event, int(batch), int(items)) for event, batch, items in (line.split() for line in lines if line)))


@dataclass(frozen=True, slots=True)
class Batches:
    """What the micro-batches noted, in order: (`begin` or `end`, batch, items of a batch that ends)."""

    events: tuple[tuple[str, int, int], ...]

    @property
    def begun(self) -> list[int]:
        return [batch for event, batch, _ in self.events if event == "begin"]

    @property
    def count(self) -> int:
        return len(set(self.begun))

    @property
    def replayed(self) -> int:
        """Runs of a batch beyond its first."""
        return len(self.begun) - self.count

    @property
    def redelivered(self) -> int:
        """Items of the batches that were run again, once for each run beyond the first. A replay reads the same items, so its end tells."""
        size = {batch: items for event, batch, items in self.events if event == "end"}
        return sum(size.get(batch, 0) for batch in self.begun) - sum(size.get(batch, 0) for batch in set(self.begun))

    @property
    def is_open(self) -> bool:
        """A batch has begun and not ended."""
        return bool(self.events) and self.events[-1][0] == "begin"
