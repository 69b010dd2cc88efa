"""Pictures of a soak: what was measured over time, and each judged series with its slope and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.campaigns.blackbox.pictures import NAN, STYLE, draw_faults
from tests.campaigns.soak.drift import HOUR, Judgement, Point, shown
from tests.campaigns.soak.soak_record import Beat, Judged, SoakRecord

COLOURS: Final = ("#1f6feb", "#8250df", "#1b7c83", "#bf8700", "#2da44e")
VERDICTS: Final = {"within": "#2da44e", "over": "#cf222e", "undecided": "#bf8700"}
_KINDS: Final = ("produce", "lease", "complete", "retry", "stats")
_COLUMNS: Final = 3
_MAX_POINTS: Final = 200
"""Some, of a line."""
_Point = TypeVar("_Point")


def draw_course(record: SoakRecord, path: Path) -> None:
    """Everything over time; faults are bands, and what is not judged after a start is hatched."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 11), layout="constrained")
        above, rates, delays, memory, handles, disk, spent = figure.subplots(7, 1, sharex=True, height_ratios=(1, 1.4, 2, 2, 2, 1.6, 1.6))
        panels = (rates, delays, memory, handles, disk, spent)
        draw_faults(above, panels, record.faults, 0.0, record.length)
        for began in record.lives.values():
            for axes in panels:
                axes.axvspan(began, began + record.warm_up, facecolor="none", edgecolor="#8c959f55", hatch="//", linewidth=0)
        _rates(rates, record)
        _delays(delays, record)
        _lines(memory, record.beats, "MB", {"RSS": "resident", "anonymous": "anonymous", "PSS": "proportional"}, 1e6)
        _lines(handles, record.beats, "", {"handles": "handles", "sockets": "sockets", "threads": "threads", "files": "files"}, 1)
        _lines(disk, record.beats, "MB on disk", {"data directory": "stored"}, 1e6)
        _busy(spent, record)
        spent.set_xlabel("seconds")
        for axes in panels:
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(path, metadata={"Date": None})


def _rates(axes: Any, record: SoakRecord) -> None:
    times = [each.at for each in record.calls]
    width = times[1] - times[0] if len(times) > 1 else 1.0
    done = [sum(count for count, *_ in each.took.values()) / width for each in record.calls]
    axes.plot(times, done, color=COLOURS[0], linewidth=1.0, label="done")
    axes.plot(times, [each.failed / width for each in record.calls], color="#cf222e", linewidth=1.0, label="not done")
    axes.axhline(record.rate, color="#8c959f", linewidth=0.8, linestyle=":", label="half load")
    axes.set_ylabel("calls/s")


def _delays(axes: Any, record: SoakRecord) -> None:
    times = [each.at for each in record.calls]
    for kind, colour in zip(_KINDS, COLOURS, strict=True):
        found = [each.took.get(kind, (0, NAN, NAN)) for each in record.calls]
        axes.plot(times, [late for *_, late in found], color=colour, linewidth=1.0, label=f"{kind} p99")
        axes.plot(times, [median for _, median, _ in found], color=colour, linewidth=0.7, alpha=0.6)
    axes.set_yscale("log")
    axes.set_ylabel("ms (thin: median)")


def _lines(axes: Any, beats: Sequence[Beat], unit: str, what: dict[str, str], scale: float) -> None:
    for (label, name), colour in zip(what.items(), COLOURS, strict=False):
        seen = _thinned([(each.at, getattr(each, name) / scale, each.life) for each in beats if getattr(each, name) is not None])
        points = [(at, value) for at, value, _ in seen[:1]]
        for (_, _, before), (at, value, life) in pairwise(seen):
            points += [(at, NAN)] if life != before else []
            points.append((at, value))
        axes.plot([at for at, _ in points], [value for _, value in points], color=colour, linewidth=1.1, label=label)
    axes.set_ylabel(unit)


def _thinned(points: Sequence[_Point]) -> Sequence[_Point]:
    """Every so many of them, so that a picture of hours is not larger than one of minutes."""
    return points[:: max(1, len(points) // _MAX_POINTS)]


def _busy(axes: Any, record: SoakRecord) -> None:
    busy = _thinned([(each.at, each.machine) for each in record.beats])
    axes.plot([at for at, _ in busy], [share for _, share in busy], color="#8c959f", linewidth=0.6, label="machine busy")
    lags = [(each.at, each.gauges["lag sum"], each.gauges["lag count"]) for each in record.beats if "lag count" in each.gauges]
    lag = [(now[0], (now[1] - was[1]) / (now[2] - was[2])) for was, now in pairwise(lags) if now[2] > was[2]]
    axes.plot([at for at, _ in lag], [10 * seconds for _, seconds in lag], color=COLOURS[1], linewidth=0.9, label="loop's lag, × 100 ms")
    slow = _thinned([(each.at, each.yardstick) for each in record.beats if each.yardstick is not None])
    axes.plot([at for at, _ in slow], [took / 20 for _, took in slow], color=COLOURS[3], linewidth=0.6, label="fixed work, × 20 ms")
    items = [(each.at, each.gauges["items"]) for each in record.beats if "items" in each.gauges]
    most = max((count for _, count in items), default=0.0) or 1.0
    label = f"items, of {most:,.0f}"
    axes.plot([at for at, _ in items], [count / most for _, count in items], color=COLOURS[4], linewidth=0.9, label=label)
    axes.set_ylim(0, 1.05)


def draw_slopes(judged: Sequence[tuple[Judged, Judgement]], path: Path) -> None:
    """A panel for each series: its points, the slope as a line, and as a dashed one what was allowed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = -(-len(judged) // _COLUMNS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 2.1 * rows), layout="constrained")
        panels = figure.subplots(rows, _COLUMNS, squeeze=False)
        for number, (each, verdict) in enumerate(judged):
            _slope(panels[number // _COLUMNS][number % _COLUMNS], each, verdict)
        for number in range(len(judged), rows * _COLUMNS):
            panels[number // _COLUMNS][number % _COLUMNS].set_axis_off()
        figure.savefig(path, metadata={"Date": None})


def _slope(axes: Any, judged: Judged, verdict: Judgement) -> None:
    for stretch in filter(None, judged.stretches):
        minutes = [each.at / 60 for each in stretch]
        axes.plot(minutes, [each.value for each in stretch], ".", color="#8c959f", markersize=2.5)
        if verdict.slope is not None:
            axes.plot(minutes, _line(stretch, verdict.slope.per_hour), color=VERDICTS[verdict.verdict], linewidth=1.2)
            axes.plot(minutes, _line(stretch, verdict.allowed, from_start=True), color="#cf222e", linewidth=0.7, linestyle="--")
    values = sorted(each.value for stretch in judged.stretches for each in stretch)
    if values:
        # One late slice in a hundred is not to flatten the rest.
        top = max(values[int(0.98 * (len(values) - 1))] * 1.25, 1e-9)
        axes.set_ylim(min(values[0] * 0.9, 0.75 * top), top)
    unit = f", {judged.unit}" if judged.unit else ""
    told = "too few points" if verdict.slope is None else shown(verdict.slope, judged.unit, digits(verdict.slope.level))
    axes.set_title(f"{judged.name}{unit}\n{told}: {verdict.verdict}", fontsize=7.5, loc="left")
    axes.tick_params(labelsize=7)


def _line(stretch: Sequence[Point], per_hour: float, *, from_start: bool = False) -> list[float]:
    """Through the middle of the points, or from where such a line begins."""
    ranked = sorted(each.value for each in stretch)
    middle = stretch[len(stretch) // 2].at
    height = ranked[len(ranked) // 2]
    if from_start:
        middle, height = stretch[0].at, sorted(each.value for each in stretch[: max(1, len(stretch) // 5)])[max(1, len(stretch) // 5) // 2]
    return [height + per_hour * (each.at - middle) / HOUR for each in stretch]


def digits(level: float) -> int:
    """After the point, for figures of that size."""
    return 0 if level >= 100 else 1 if level >= 10 else 2
