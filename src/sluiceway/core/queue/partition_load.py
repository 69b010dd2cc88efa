"""Load of partitions: what each costs its instance, from the counts of its requests, items and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from sluiceway.core.queue.scaling_policy import ITEMS, REQUESTS
from sluiceway.kernel.clock import Millis

AVERAGE: Final[Millis] = 30_000
"""Window over which loads are averaged: short bursts are no reason to move a partition."""
BYTES: Final = 500_000_000
"""Bytes written per second of processor time of one instance, from encoding to the storage's call. Weighs large items against small
ones."""
LEAST: Final = 500
"""Millionths of an instance. Less, about a small request a second, counts as nothing."""


class Counts(NamedTuple):
    """What a partition has done since it was opened here: requests answered, items produced, leased and completed, bytes of items
    written."""

    requests: int
    items: int
    bytes: int


class Rates(NamedTuple):
    """The same per second."""

    requests: float
    items: float
    bytes: float

    @property
    def load(self) -> float:
        """In millionths of what an instance can do, as measured."""
        return 1e6 * (self.requests / REQUESTS + self.items / ITEMS + self.bytes / BYTES)


class PartitionMeter:
    """Moving averages of an instance's partitions. A partition begins with the first rate that was measured here."""

    def __init__(self) -> None:
        self._at: Millis | None = None
        self._before: Mapping[str, Counts] = {}
        self._rates: dict[str, Rates] = {}

    def note(self, now: Millis, counts: Mapping[str, Counts]) -> None:
        """Add the counts of all partitions that are here, by name; `now` in ms."""
        if self._at is not None and now > self._at:
            seconds, weight = (now - self._at) / 1_000, -math.expm1((self._at - now) / AVERAGE)
            rates = {}
            for name, count in counts.items():
                if (before := self._before.get(name)) is not None:
                    # One that was opened again here counts from 0.
                    rate = [max(0, after - earlier) / seconds for after, earlier in zip(count, before, strict=True)]
                    known = self._rates.get(name, rate)
                    rates[name] = Rates(*[was + (now_ - was) * weight for was, now_ in zip(known, rate, strict=True)])
            self._rates = rates
        self._at, self._before = now, dict(counts)

    def loads(self, most: int) -> dict[str, int]:
        """The loads of the busiest partitions, up to `most`, in millionths of what an instance can do."""
        found = {name: round(rates.load) for name, rates in self._rates.items()}
        busy = sorted((name for name, load in found.items() if load >= LEAST), key=lambda name: (-found[name], name))[:most]
        return {name: found[name] for name in sorted(busy)}

    def total(self) -> Rates:
        """All of them together."""
        return Rates(*(sum(column) for column in zip(*self._rates.values(), strict=True))) if self._rates else Rates(0, 0, 0)
