"""Latencies of requests, counted by duration."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Upper bounds of the buckets, the same for every kind of request, so that they can be compared; the last bucket has none."""


class Latencies:
    """A histogram. Plain numbers: the metrics library's, each with a lock, take three times as long."""

    __slots__ = ("buckets", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(SECONDS) + 1)
        """Number of requests by duration, not cumulative."""
        self.seconds = 0.0
        """Total duration."""

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(SECONDS, seconds)] += 1
        self.seconds += seconds
