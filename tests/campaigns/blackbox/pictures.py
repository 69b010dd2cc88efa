"""Pictures of a round, of a campaign and of one item: what was done, what was wrong, and what happened at that moment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaigns.blackbox.checkers import Anomaly
from tests.campaigns.blackbox.item_stories import Delivery, Settlement, Story
from tests.campaigns.blackbox.operation_log import Fault, Operation, Round

COLOURS = {"done": "#2da44e", "refused": "#d4a72c", "unknown": "#cf222e"}
LINES = {"produce": "#1f6feb", "lease": "#8250df", "complete": "#1b7c83"}
VERDICTS = {"complete": ("o", "#2da44e"), "retry": ("v", "#bf8700"), "dead": ("X", "#cf222e"), "release": ("^", "#57606a")}
_FAMILIES = {
    "kill": "#ff818266",
    "restart": "#ff818244",
    "other release": "#ff818244",
    "freeze": "#54aeff55",
    "disk": "#d2a8ff66",
    "syncs": "#d2a8ff66",
    "clock": "#7ee78766",
    "PostgreSQL": "#ffa65766",
    "bucket": "#ffa65766",
    "bit": "#f692ce66",
    "lost": "#f692ce66",
    "older": "#f692ce66",
}
_OTHER = "#8c959f44"
"""Of the faults of connections."""
NAN = float("nan")
STYLE: Any = {"svg.hashsalt": "sluiceway", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


class Slice(NamedTuple):
    """What ended within some seconds. Latencies are of calls that are done, in seconds, by kind: the median and the 99th percentile."""

    at: float
    outcomes: Counter[str]
    latencies: dict[str, tuple[float, float]]


def slices(operations: Iterable[Operation], width: float = 1.0) -> list[Slice]:
    """The operations by the time at which they ended, without gaps."""
    found: dict[int, list[Operation]] = defaultdict(list)
    for each in operations:
        if each.ended is not None:
            found[int(each.ended // width)].append(each)
    return [_slice(number * width, found[number]) for number in range(min(found, default=0), max(found, default=-1) + 1)]


def _slice(at: float, operations: Sequence[Operation]) -> Slice:
    latencies = {}
    for kind in LINES:
        if times := sorted((each.ended or 0.0) - each.began for each in operations if each.call == kind and each.outcome == "done"):
            latencies[kind] = times[len(times) // 2], times[min(len(times) - 1, int(0.99 * len(times)))]
    return Slice(at, Counter(each.outcome for each in operations), latencies)


def draw_timeline(parts: Sequence[Slice], faults: Sequence[Fault], anomalies: Sequence[Anomaly], path: Path, width: float = 1.0) -> None:
    """Operations by outcome, and latencies, over time; faults are bands, anomalies are lines."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    if not parts:
        return
    start = parts[0].at
    times = [each.at - start for each in parts]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        above, rates, delays = figure.subplots(3, 1, sharex=True, height_ratios=(1.3, 2, 2))
        draw_faults(above, (rates, delays), faults, start, times[-1])
        rates.stackplot(
            times,
            [[each.outcomes[outcome] / width for each in parts] for outcome in COLOURS],
            colors=list(COLOURS.values()),
            labels=list(COLOURS),
            step="post",
        )
        rates.set_ylabel("calls/s")
        for kind, colour in LINES.items():
            # Where nothing is done, a gap.
            both = [each.latencies.get(kind, (NAN, NAN)) for each in parts]
            delays.plot(times, [1000 * p99 for _, p99 in both], color=colour, label=f"{kind} p99", linewidth=1.2, marker=".", markersize=2)
            delays.plot(times, [1000 * median for median, _ in both], color=colour, linewidth=0.7, alpha=0.6)
        delays.set_yscale("log")
        delays.set_ylabel("ms (thin: median)")
        delays.set_xlabel("seconds")
        for at in {each.at - start for each in anomalies if each.at}:
            for axes in (above, rates, delays):
                axes.axvline(at, color="#cf222e", linewidth=1.0, linestyle="--")
        for axes in (rates, delays):
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(path, metadata={"Date": None})


def draw_faults(above: Any, below: Sequence[Any], faults: Sequence[Fault], start: float, length: float) -> None:
    """Each fault as a band over all panels, and as a bar with its name in the uppermost."""
    rows = 4
    above.set_ylim(-0.6, rows - 0.2)
    above.set_yticks([])
    above.spines["left"].set_visible(False)
    above.set_title("faults", fontsize=9, loc="left")
    for number, each in enumerate(faults):
        began, ended, colour = each.began - start, each.ended - start, colour_of(each.kind)
        row = rows - 1 - number % rows
        above.barh(row, ended - began, left=began, height=0.5, color=colour, edgecolor="#57606a", linewidth=0.4)
        if length < 200:
            above.text(began, row + 0.3, " · ".join(filter(None, (each.kind, each.at))), fontsize=6.5, va="bottom")
        for axes in below:
            axes.axvspan(began, ended, color=colour, linewidth=0)


def colour_of(kind: str) -> str:
    return next((colour for family, colour in _FAMILIES.items() if kind.startswith(family)), _OTHER)


def draw_story(story: Story, anomaly: Anomaly, round: Round, path: Path) -> None:
    """One item: the calls that sent it, its leases as bars, how it was settled; with the faults at that time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    calls: list[Operation | Delivery | Settlement] = [*story.produces, *story.deliveries, *story.settlements]
    times = [each.began for each in calls] or [round.began]
    start, end = min(times) - 1.0, max(*times, anomaly.at, *(each.deadline for each in story.deliveries), 0.0) + 2.0
    clients = list(dict.fromkeys(each.client for each in calls))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 1.4 + 0.42 * max(1, len(clients))), layout="constrained")
        axes = figure.subplots()
        for each in round.faults:
            if each.began < end and each.ended > start:
                axes.axvspan(each.began - start, each.ended - start, color=colour_of(each.kind), linewidth=0)
                axes.text(max(each.began, start) - start, len(clients) - 0.45, each.kind, fontsize=7)
        rows = {client: row for row, client in enumerate(clients)}
        for sent in story.produces:
            axes.plot(sent.began - start, rows[sent.client], "D", color=COLOURS[sent.outcome], label=f"produce, {sent.outcome}")
        for held in story.deliveries:
            row, since = rows[held.client], held.ended - start
            length = max(min(held.deadline, story.given_up(held)) - held.ended, 0.01 * (end - start))
            axes.barh(row, length, left=since, height=0.35, color="#8250df55", label="lease")
            axes.text(since, row + 0.2, held.id, fontsize=6.5)
        for done in story.settlements:
            marker, colour = VERDICTS[done.verdict]
            filled = "full" if done.outcome == "done" else "none"
            label = f"{done.verdict}, {done.outcome}"
            axes.plot(done.began - start, rows[done.client], marker, color=colour, fillstyle=filled, label=label)
        if anomaly.at:
            axes.axvline(anomaly.at - start, color="#cf222e", linestyle="--", linewidth=1.0)
        axes.set_yticks(range(len(clients)), clients)
        axes.set_ylim(-0.6, max(1, len(clients)) - 0.2)
        axes.set_xlim(0, end - start)
        axes.set_xlabel("seconds")
        axes.set_title(f"{anomaly.kind}: {story.name}", fontsize=9, loc="left")
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), frameon=False, fontsize=7, ncols=8, loc="outside lower center")
        figure.savefig(path, metadata={"Date": None})
