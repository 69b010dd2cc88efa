"""Pictures of a run, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_GREY = "#5c6670"
_BIN = 2.0
"""Seconds over which a rate is taken: about a micro-batch, whose items are settled at once."""
_IN, _OUT, _KILL = "#1f6f8b", "#d1603d", "#8a1c1c"


class Sample(NamedTuple):
    """Items in and out, `at` seconds after the start."""

    at: float
    produced: int
    settled: int


def draw_delays(delays: Sequence[tuple[str, int, float, int]], path: Path) -> None:
    """Draw a heat map of (airline, month, mean arrival delay in minutes, flights), with the longest delays on top."""
    total: dict[str, list[float]] = {}
    for airline, _, mean, flights in delays:
        sums = total.setdefault(airline, [0.0, 0.0])
        sums[0] += mean * flights
        sums[1] += flights
    year = {airline: minutes / flights for airline, (minutes, flights) in total.items()}
    airlines = sorted(year, key=lambda airline: -year[airline])
    months = sorted({month for _, month, _, _ in delays})
    grid = np.full((len(airlines), len(months)), np.nan)
    for airline, month, mean, _ in delays:
        grid[airlines.index(airline), months.index(month)] = mean
    figure, axes = plt.subplots(figsize=(2.9 + 0.62 * max(len(months), 6), 1.9 + 0.4 * len(airlines)), layout="constrained")
    image = axes.imshow(grid, cmap="RdBu_r", vmin=-40, vmax=40, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        text, shade = ("–", _GREY) if np.isnan(value) else (_minutes(value), "white" if abs(value) > 24 else "#222222")
        axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=shade)
    axes.set_xticks(range(len(months)), [_MONTHS[month - 1][:3] for month in months])
    axes.set_yticks(range(len(airlines)), [f"{airline}  ({total[airline][1]:,.0f})" for airline in airlines])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(len(months) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(airlines) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    bar = figure.colorbar(image, ax=axes, extend="both", shrink=0.7, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("mean arrival delay, minutes (blue: early)", color=_GREY)
    figure.suptitle(_finding(delays), x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes.set_title(
        "Mean arrival delay in minutes, flights out of New York 2013; arrived flights in brackets", loc="left", fontsize=9.5, color=_GREY
    )
    _save(figure, path)


def _finding(delays: Sequence[tuple[str, int, float, int]]) -> str:
    """Summarise the picture in a line: the months with the longest and the shortest delays."""
    sums: dict[int, list[float]] = {}
    for _, month, mean, flights in delays:
        pair = sums.setdefault(month, [0.0, 0.0])
        pair[0] += mean * flights
        pair[1] += flights
    means = {month: minutes / flights for month, (minutes, flights) in sums.items()}
    worst, best = max(means, key=lambda month: means[month]), min(means, key=lambda month: means[month])
    return f"Worst in {_MONTHS[worst - 1]}, {_late(means[worst])}; best in {_MONTHS[best - 1]}, {_late(means[best])}"


def _late(minutes: float) -> str:
    return f"{abs(minutes):.0f} minutes {'late' if minutes >= 0 else 'early'} on average"


def _minutes(value: float) -> str:
    # Avoids minus zero.
    return f"{round(value) + 0:d}"


def draw_rates(samples: Sequence[Sample], kills: Sequence[tuple[float, str]], path: Path) -> None:
    """Draw items in and out over time, and beneath them their rates, with the crashes. Time begins with the first item."""
    moved = [at for at, (one, other) in enumerate(pairwise(samples)) if one[1:] != other[1:]]
    seen = samples[moved[0] : moved[-1] + 2] if moved else samples
    first = seen[0].at if seen else 0.0
    shown = [Sample(sample.at - first, sample.produced, sample.settled) for sample in seen]
    figure, (above, below) = plt.subplots(2, figsize=(8.6, 6.2), sharex=True, height_ratios=(3, 2), layout="constrained")
    at = [sample.at for sample in shown]
    produced, settled = [sample.produced for sample in shown], [sample.settled for sample in shown]
    above.fill_between(at, produced, settled, color=_IN, alpha=0.10, linewidth=0, label="waiting or leased")
    above.plot(at, produced, color=_IN, linewidth=2, label="produced")
    above.plot(at, settled, color=_OUT, linewidth=2, label="completed or dead")
    above.set_ylabel("items")
    for counts, colour in ((produced, _IN), (settled, _OUT)):
        below.plot(*_rates(at, counts), color=colour, linewidth=2, drawstyle="steps-post")
    below.set_ylabel("items a second")
    below.set_xlabel("seconds")
    for axes in (above, below):
        for when, _ in kills:
            axes.axvline(when - first, color=_KILL, linewidth=1, linestyle="--")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e8ea")
    for when, what in kills:
        above.annotate(
            f" {what} killed", (when - first, 0.02), xycoords=("data", "axes fraction"), fontsize=8, color=_KILL, rotation=90, va="bottom"
        )
    figure.legend(frameon=False, loc="outside upper right", ncols=3)
    most = max(produced, default=0)
    above.set_title(f"{most:,} items through the queue", loc="left", fontweight="bold")
    _save(figure, path)


def _rates(at: Sequence[float], counts: Sequence[int]) -> tuple[list[float], list[float]]:
    """The edges of the bins, and the items a second that follow each. Between two samples the rate is even."""
    if not at:
        return [], []
    edges = np.arange(0.0, at[-1] + _BIN, _BIN)
    rates = np.diff(np.interp(edges, at, counts)) / _BIN
    return edges.tolist(), [*rates.tolist(), 0.0]


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
