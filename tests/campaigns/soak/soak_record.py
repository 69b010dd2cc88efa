"""What a soak has measured, as lines of JSON, so that it can be judged again; and the series that are judged, made of it. Pure but for the
file.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.campaigns.blackbox.operation_log import Fault
from tests.campaigns.soak.drift import Limit, Point

SLICE: Final = 5.0
"""Seconds that a point of a series stands for: the median of what was measured in them."""
HANGOVER: Final = 6.0
"""Seconds after a fault in which latencies are those of its end: clients go on at once, and the server has to catch up."""


@dataclass(slots=True, frozen=True)
class Beat:
    """What was seen at one moment. Times are seconds since the soak began. None: it was not looked at."""

    at: float
    life: int
    """Which process of the server it was; the first is 1."""
    resident: int
    anonymous: int
    handles: int
    sockets: int
    threads: int
    processor: float
    calls: int
    """Done so far, by all clients."""
    machine: float
    """The share of the processors that were busy since the beat before, with everything."""
    yardstick: float | None = None
    """Milliseconds that a fixed piece of work took the clients' process."""
    proportional: int | None = None
    files: int | None = None
    stored: int | None = None
    gauges: dict[str, float] = field(default_factory=dict)
    """Of the server's own metrics."""


@dataclass(slots=True, frozen=True)
class Calls:
    """What ended in one slice. `took`: by kind of call, how many were done, their median and their 99th percentile in milliseconds."""

    at: float
    took: dict[str, tuple[int, float, float]]
    failed: int


@dataclass(slots=True)
class SoakRecord:
    rate: float = 0.0
    """Calls a second that the clients were to make."""
    full_rate: float = 0.0
    """Calls a second that were done when the clients did not pause."""
    seed: int = 0
    warm_up: float = 0.0
    """Seconds after each start that are not judged."""
    length: float = 0.0
    load: float = 0.0
    """The machine's load average at the end."""
    items: int = 0
    lives: dict[int, float] = field(default_factory=dict)
    """When each process of the server took calls."""
    beats: list[Beat] = field(default_factory=list)
    calls: list[Calls] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """What was wrong beside what grows."""


class RecordFile:
    """Keeps a record in memory, and line by line in a file, so that a soak that is killed leaves what it has measured."""

    def __init__(self, path: Path) -> None:
        self.record = SoakRecord()
        self._file = path.open("w")

    def add(self, entry: Beat | Calls | Fault) -> None:
        kept: list[Any] = getattr(self.record, _LISTS[type(entry)])
        kept.append(entry)
        self._write({_LISTS[type(entry)]: asdict(entry)})

    def close(self) -> None:
        self._write({"rest": {name: getattr(self.record, name) for name in _REST}})
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


_LISTS: Final[dict[type, str]] = {Beat: "beats", Calls: "calls", Fault: "faults"}
_TYPES: Final[dict[str, Callable[..., Any]]] = {"beats": Beat, "calls": Calls, "faults": Fault}
_REST: Final = ("rate", "full_rate", "seed", "warm_up", "length", "load", "items", "lives", "findings")


def read_record(path: Path) -> SoakRecord:
    """A record as `RecordFile` has kept it."""
    found = SoakRecord()
    for line in path.read_text().splitlines():
        ((kind, value),) = json.loads(line).items()
        if kind == "rest":
            for name in _REST:
                setattr(found, name, value[name])
        else:
            getattr(found, kind).append(_TYPES[kind](**value))
    # JSON has neither whole numbers as keys nor tuples.
    found.lives = {int(life): at for life, at in found.lives.items()}
    found.calls = [replace(each, took={kind: (took[0], took[1], took[2]) for kind, took in each.took.items()}) for each in found.calls]
    return found


# ---- series -------------------------------------------------------------------------------------------------------------


class Measure(NamedTuple):
    """What is judged. `of`: its value in a beat, or None."""

    name: str
    unit: str
    limit: Limit
    of: Callable[[Beat], float | None]
    is_process: bool = True
    """It begins anew with each process. Otherwise it goes on, and the whole run is one stretch; without the warm-ups, in which logs grow
    again."""


def _gauge(name: str) -> Callable[[Beat], float | None]:
    return lambda beat: beat.gauges.get(name)


def _megabytes(value: int | None) -> float | None:
    return None if value is None else value / 1e6


MEMORY: Final = "memory"
HANDLES: Final = "handles"
FILES: Final = "files"
PROCESSOR: Final = "processor time a call"
SERIES: Final = "metric series"
MEASURES: Final = (
    # Caches, 1,000 closed leases and failed attempts of each partition, and idempotency keys still fill: see docs/project/soak.md.
    Measure(MEMORY, "MB", Limit(once=25.0, per_hour=10.0), lambda beat: _megabytes(beat.anonymous)),
    Measure(HANDLES, "", Limit(once=12.0, per_hour=3.0), lambda beat: beat.handles),
    Measure("sockets", "", Limit(once=8.0, per_hour=2.0), lambda beat: beat.sockets),
    Measure("threads", "", Limit(once=6.0, per_hour=1.0), lambda beat: beat.threads),
    # A rebalance has partitions of both kinds for a while, and each has up to three files.
    Measure(FILES, "", Limit(once=15.0, per_hour=4.0), lambda beat: beat.files, is_process=False),
    # Each partition has a log of up to 4 MiB, and files keep the space of their longest backlog.
    Measure("data directory", "MB", Limit(once=80.0, per_hour=10.0), lambda beat: _megabytes(beat.stored), is_process=False),
    Measure(SERIES, "", Limit(once=60.0, per_hour=20.0), _gauge("series")),
)
LATE: Final = Limit(once=1.0, per_hour=0.2, relative=True)
"""Of a 99th percentile: on a machine that others use it may double."""
TYPICAL: Final = Limit(once=0.4, per_hour=0.1, relative=True)
"""Of a median."""
SPENT: Final = Limit(once=0.2, per_hour=0.05, relative=True)
"""Of the server's processor time for a call, which other work on the machine changes least."""
JUDGED_CALLS: Final = ("produce", "lease", "complete", "retry")
"""Calls that do not wait for anything but the server."""

Stretches = list[list[Point]]


def series(record: SoakRecord, of: Callable[[Beat], float | None], *, is_process: bool = True) -> Stretches:
    """Medians over slices, without warm-ups. A stretch for each process, or one in all."""
    found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for beat in record.beats:
        value = of(beat)
        if value is not None and _is_warm(record, beat.at, beat.life):
            found[beat.life if is_process else 1][int(beat.at // SLICE)].append(value)
    return [[Point(SLICE * number, statistics.median(found[life][number])) for number in sorted(found[life])] for life in sorted(found)]


def _is_warm(record: SoakRecord, at: float, life: int) -> bool:
    return at >= record.lives.get(life, 0.0) + record.warm_up


def latencies(record: SoakRecord, kind: str, which: int) -> Stretches:
    """Medians (`which` 1) or 99th percentiles (2) of calls of that kind, in milliseconds, outside of faults."""
    found: dict[int, list[Point]] = defaultdict(list)
    for each in record.calls:
        life = life_at(record, each.at)
        if kind in each.took and _is_warm(record, each.at, life) and not is_disturbed(record.faults, each.at, each.at + SLICE):
            found[life].append(Point(each.at, each.took[kind][which]))
    return [found[life] for life in sorted(found)]


def life_at(record: SoakRecord, at: float) -> int:
    return max((life for life, began in record.lives.items() if began <= at), default=1)


def is_disturbed(faults: Iterable[Fault], began: float, ended: float) -> bool:
    """Whether the server stood still or was away for a part of that time, or a moment before."""
    return any(each.hangs and each.began <= ended and began <= each.ended + HANGOVER for each in faults)


def processor_a_call(record: SoakRecord) -> Stretches:
    """The server's processor time for a call, in milliseconds, over slices that no fault has disturbed."""
    edges: dict[tuple[int, int], list[Beat]] = defaultdict(list)
    for beat in record.beats:
        if _is_warm(record, beat.at, beat.life):
            edges[beat.life, int(beat.at // SLICE)].append(beat)
    found: dict[int, list[Point]] = defaultdict(list)
    for (life, number), beats in sorted(edges.items()):
        first, last = beats[0], beats[-1]
        if last.calls > first.calls and not is_disturbed(record.faults, first.at, last.at):
            spent = 1_000 * (last.processor - first.processor) / (last.calls - first.calls)
            found[life].append(Point(SLICE * number, spent))
    return [found[life] for life in sorted(found)]


class Judged(NamedTuple):
    """A series, and the limit that it has."""

    name: str
    unit: str
    limit: Limit
    stretches: Stretches
    is_latency: bool = False
    """The machine may be the reason for what it shows."""


def slowness(record: SoakRecord) -> Stretches:
    """How long a fixed piece of work took, in milliseconds."""
    return series(record, lambda beat: beat.yardstick)


def all_series(record: SoakRecord) -> list[Judged]:
    found = [Judged(each.name, each.unit, each.limit, series(record, each.of, is_process=each.is_process)) for each in MEASURES]
    found.append(Judged(PROCESSOR, "ms", SPENT, processor_a_call(record)))
    for kind in JUDGED_CALLS:
        found.append(Judged(f"{kind}: median", "ms", TYPICAL, latencies(record, kind, 1), is_latency=True))
        found.append(Judged(f"{kind}: p99", "ms", LATE, latencies(record, kind, 2), is_latency=True))
    return found
