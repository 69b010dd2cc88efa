"""The history of a round: what clients asked for and were told, which faults there were, and what the server counted.

It is kept as lines of JSON, so that the checkers can judge it again later: `make campaign ARGS='judge FOLDER'`.
"""

from __future__ import annotations

import gzip
import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.campaigns.blackbox.waits import Wait

Outcome = Literal["done", "refused", "unknown"]
"""Refused: it surely had no effect."""
Counters = Mapping[str, Mapping[str, int]]
"""By queue, what its partitions count, added up."""


def are_away(counters: Counters) -> bool:
    """Whether a partition was not available, and so was not counted."""
    return any(each.get("unavailable") for each in counters.values())


@dataclass(slots=True, frozen=True)
class Operation:
    """One call of one client. Times are seconds since the epoch, by the clock of the machine on which everything runs."""

    client: str
    call: str
    queue: str
    began: float
    ended: float | None
    """None: the client never got an answer, nor was its connection closed."""
    outcome: Outcome
    given: dict[str, Any] = field(default_factory=dict)
    got: dict[str, Any] = field(default_factory=dict)
    """Of an operation that is done."""
    problem: str = ""
    """The error's code, or `no answer`: none came within the time that the call had, or `broken`: the connection ended."""
    at: str = ""
    """The member of the target that was called."""


@dataclass(slots=True, frozen=True)
class Fault:
    """What was done to the target, from its beginning to its end."""

    kind: str
    at: str
    """The member that it struck; empty: all."""
    began: float
    ended: float
    hangs: bool = False
    """Whether calls may get no answer while it lasts."""


@dataclass(slots=True)
class Round:
    """What the checkers judge: load with faults, then every queue emptied without them."""

    operations: list[Operation] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    """For a processor."""
    before: dict[str, dict[str, int]] = field(default_factory=dict)
    after: dict[str, dict[str, int]] = field(default_factory=dict)
    observed: list[str] = field(default_factory=list)
    """What a fault's own examination found wrong."""
    is_drained: bool = False
    """Whether all queues were empty at the end."""
    began: float = 0.0
    ended: float = 0.0

    def calls(self, *names: str) -> list[Operation]:
        return [each for each in self.operations if each.call in names]


class RoundLog:
    """Keeps a round in memory and in a file, line by line, so that a campaign that is killed leaves its history."""

    def __init__(self, path: Path) -> None:
        self.round = Round()
        self._path = path
        self._file = path.open("w")

    def operation(self, operation: Operation) -> None:
        self.round.operations.append(operation)
        self._write("operation", asdict(operation))

    def fault(self, fault: Fault) -> None:
        self.round.faults.append(fault)
        self._write("fault", asdict(fault))

    def wait(self, wait: Wait) -> None:
        self.round.waits.append(wait)
        self._write("wait", wait._asdict())

    def close(self) -> Path:
        """Note the rest of the round, and compress the file; its path."""
        rest = {name: getattr(self.round, name) for name in _REST}
        self._write("rest", rest)
        self._file.close()
        packed = self._path.with_name(f"{self._path.name}.gz")
        with self._path.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        self._path.unlink()
        return packed

    def _write(self, kind: str, value: dict[str, Any]) -> None:
        self._file.write(json.dumps({kind: value}, separators=(",", ":")) + "\n")


_REST = ("before", "after", "observed", "is_drained", "began", "ended")


def read_round(path: Path) -> Round:
    """A round as `RoundLog` has kept it, also one that was not closed."""
    found = Round()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            ((kind, value),) = json.loads(line).items()
            if kind == "operation":
                found.operations.append(Operation(**value))
            elif kind == "fault":
                found.faults.append(Fault(**value))
            elif kind == "wait":
                found.waits.append(Wait(**value))
            else:
                for name in _REST:
                    setattr(found, name, value[name])
    return found


# ---- what items are, so that each can be told from all others ----------------------------------------------------------


def payload_of(name: str) -> str:
    """The name, and a filler that follows from it, so that torn or swapped bytes show."""
    mark = zlib.crc32(name.encode())
    return f"{name}|" + f"{mark:08x}" * (200 if mark % 16 == 0 else mark % 16)


def name_of(payload: str) -> str | None:
    """The name; None if these are not the bytes that were sent under it."""
    name = payload.partition("|")[0]
    return name if payload == payload_of(name) else None
