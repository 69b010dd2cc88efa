"""How much a figure grows in an hour, how certain that is, and whether it is within its limit. Pure.

The slope is the median of the slopes between all pairs of points (Theil-Sen): points that a fault has disturbed hardly move it, as long as
they are few. A process that is started again begins anew, so pairs are taken only within a *stretch*: one process after its warm-up. The
interval of the slope is that of Kendall's test over several seasons (Gilbert, Statistical Methods for Environmental Pollution Monitoring,
1987, chapter 17), here stretches, with ties. It assumes that points are independent of one another; where neighbours are alike beyond the
slope, as memory is, the variance is that of as many fewer points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

HOUR = 3_600.0
CONFIDENCE = 0.95
_NORMAL = 1.96
"""The quantile of the normal distribution for that confidence, on both sides."""
MIN_POINTS = 8
"""Of a stretch that is judged."""
MAX_ALIKE = 0.9
"""Upper bound of the correlation of neighbours: the variance is then that of a nineteenth of the points."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Point(NamedTuple):
    """`at`: in seconds."""

    at: float
    value: float


class Slope(NamedTuple):
    """Growth in an hour, and the interval that has it with a confidence of `CONFIDENCE`."""

    per_hour: float
    low: float
    high: float
    level: float
    """The median of all values."""
    hours: float
    """The length of the longest stretch."""
    points: int


class Limit(NamedTuple):
    """What may grow: `once` in each stretch, such as what caches still take after the warm-up, and `per_hour`.

    So a longer run has a stricter limit: `per_hour` and `once` divided by the hours of a stretch. `relative`: both are shares of the level.
    """

    once: float
    per_hour: float
    relative: bool = False

    def allowed(self, hours: float, level: float) -> float:
        """In an hour, for stretches of that length."""
        return (self.per_hour + self.once / hours) * (level if self.relative else 1.0)


Verdict = Literal["within", "over", "undecided"]
"""Over: it surely grows faster than the limit. Undecided: its interval has the limit, or there are too few points."""


class Judgement(NamedTuple):
    slope: Slope | None
    allowed: float
    verdict: Verdict


def judge(stretches: Sequence[Sequence[Point]], limit: Limit) -> Judgement:
    found = slope(stretches)
    if found is None:
        return Judgement(None, 0.0, "undecided")
    allowed = limit.allowed(found.hours, found.level)
    verdict: Verdict = "over" if found.low > allowed else "within" if found.high <= allowed else "undecided"
    return Judgement(found, allowed, verdict)


def slope(stretches: Sequence[Sequence[Point]]) -> Slope | None:
    """None if every stretch has fewer than `MIN_POINTS`."""
    judged = [np.array(each, dtype=np.float64) for each in stretches if len(each) >= MIN_POINTS]
    if not judged:
        return None
    pairs = np.sort(np.concatenate([_pair_slopes(each) for each in judged]))
    middle = float(np.median(pairs))
    spread = _NORMAL * np.sqrt(sum(_variance(each[:, 1]) for each in judged) * _fewer(judged, middle))
    # Ranks of the bounds among the slopes, which are counted from 0.
    low, high = int(np.floor((len(pairs) - spread) / 2)) - 1, int(np.ceil((len(pairs) + spread) / 2))
    last = len(pairs) - 1
    return Slope(
        HOUR * middle,
        HOUR * float(pairs[max(low, 0)]),
        HOUR * float(pairs[min(high, last)]),
        float(np.median(np.concatenate([each[:, 1] for each in judged]))),
        max(float(each[-1, 0] - each[0, 0]) for each in judged) / HOUR,
        sum(map(len, judged)),
    )


def _pair_slopes(points: Numbers) -> Numbers:
    """Of all pairs of points at different times."""
    first, second = np.triu_indices(len(points), 1)
    apart = points[second, 0] - points[first, 0]
    rise = points[second, 1] - points[first, 1]
    found: Numbers = rise[apart > 0] / apart[apart > 0]
    return found


def _variance(values: Numbers) -> float:
    """Of Kendall's S: by how many the pairs that rise may outnumber those that fall, if nothing grows."""
    count = len(values)
    _, ties = np.unique(values, return_counts=True)
    tied = float(np.sum(ties * (ties - 1.0) * (2.0 * ties + 5.0)))
    return (count * (count - 1) * (2 * count + 5) - tied) / 18.0


def _fewer(stretches: Sequence[Numbers], middle: float) -> float:
    """Points divided by those that count, because neighbours are alike: by the correlation of what the slope leaves."""
    products = squares = 0.0
    for each in stretches:
        left = each[:, 1] - middle * each[:, 0]
        left = left - left.mean()
        products += float(np.sum(left[1:] * left[:-1]))
        squares += float(np.sum(left * left))
    alike = min(max(products / squares, 0.0), MAX_ALIKE) if squares else 0.0
    return (1.0 + alike) / (1.0 - alike)


def shown(slope: Slope, unit: str, digits: int = 1) -> str:
    """In words: `+1.2 MB/h (0.8 to 1.6)`."""
    return f"{slope.per_hour:+,.{digits}f}{' ' if unit else ''}{unit}/h ({slope.low:,.{digits}f} to {slope.high:,.{digits}f})"
