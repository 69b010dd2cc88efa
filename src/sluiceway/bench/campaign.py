"""The cases of `make bench`, and the systems of each: few enough that all of it takes less than 25 minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sluiceway.bench.harness import groups
from sluiceway.bench.work import Work

SINGLES = ("single-produce-c64", "single-cycle-c64", "single-latency-c1")
FULL = ("arrow-1000x100-c8", "json-1000x100-c8", "protobuf-1000x100-c8", *SINGLES)
"""Cases in which every system takes part."""
SOME = ("sluiceway", "redis-everysec", "postgres")
"""Systems that take part in all cases: the usual choice, and the one nearest in its guarantees."""
MORE = {
    "arrow-1x100-c8": ("nats",),
    "arrow-100x100-c8": ("nats",),
    "arrow-10000x100-c8": ("nats", "in-process", "disk"),
    "arrow-1000x100-c1": ("in-process",),
}
CASES = (
    *FULL,
    *(f"arrow-{batch}x{payload}-c{clients}" for batch in (1, 100, 1_000, 10_000) for payload in (100, 1_000) for clients in (1, 8)),
    *(f"{form}-100x100-c8" for form in ("json", "protobuf")),
)
ROUNDS = 3
SECONDS, FEWER_SECONDS = 2.0, 1.0
"""Duration of a slice: in the cases of every system and in named cases; in the others."""


class Part(NamedTuple):
    """Cases measured together, and the systems that alternate in them."""

    works: list[Work]
    systems: list[str]
    seconds: float


def parts(cases: Sequence[str] | None, systems: Sequence[str]) -> list[Part]:
    """Plan the parts: without named cases all cases, each with its systems; otherwise the named cases with all systems."""
    works = [Work.named(name) for name in dict.fromkeys(cases or CASES)]
    return [_part(group, systems, full=bool(cases)) for group in groups(works).values()]


def _part(group: list[Work], systems: Sequence[str], full: bool) -> Part:
    names = {work.name for work in group}
    if full or names & set(FULL):
        return Part(group, list(systems), SECONDS)
    wanted = {*SOME, *(name for case in names for name in MORE.get(case, ()))}
    return Part(group, [name for name in systems if name in wanted], FEWER_SECONDS)
