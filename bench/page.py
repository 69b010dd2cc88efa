"""`python -m bench page`: the plots and tables of docs/explanation/benchmarks.md, made from latest.json, workers.json and key_peers.json
in bench/results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import key_peers, workers
from sluiceway.bench import systems
from sluiceway.bench.figures import progress, write_page

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""The page between these two lines is made from the figures; the rest is written by hand."""

OURS, PEER = "#1f6f8b", "#b8b8b0"
_OWN = ("sluiceway", "sluiceway-client", "sluiceway-consumer", "sluiceway-workers-2", "sluiceway-postgres")
BARS = {
    "bench-batches.svg": (
        "Batches of 1,000 items of 100 B, 8 clients: items/s",
        ("arrow-1000x100-c8", "json-1000x100-c8", "protobuf-1000x100-c8"),
    ),
    "bench-singles.svg": ("Single items, 64 connections: items/s", ("single-produce-c64", "single-cycle-c64")),
}
LATENCY = "single-latency-c1"
AIMS = (
    *(
        ("arrow-1000x100-c8", *aim)
        for aim in (("redis-everysec", 2), ("nats", 5), ("rabbitmq-quorum", 8), ("postgres", 5), ("kafka-share", 2))
    ),
    ("json-1000x100-c8", "redis-everysec", 1.2),
    ("arrow-10000x100-c8", "in-process", 0.5),
    *(("single-produce-c64", *aim) for aim in (("postgres", 1.5), ("redis-always", 1), ("nats", 0.75))),
    *(("single-cycle-c64", *aim) for aim in (("rabbitmq-quorum", 1), ("postgres", 2), ("redis-always", 1.3), ("nats", 0.9))),
    *((f"arrow-{work}", *aim) for work in ("100x100-c1", "1x100-c8") for aim in (("postgres", 1.2), ("redis-everysec", 1))),
)
"""Lower bounds of ours as a multiple of a peer, by case."""
CONSUMER_AIMS = tuple(
    (f"single-{kind}-c64", peer, 1) for kind in ("produce", "cycle") for peer in ("redis-always", "nats", "rabbitmq-quorum", "postgres")
)
"""Lower bounds of `sluiceway-consumer`, in the same way."""
POSTGRES_AIM = 3
"""Lower bound of our PostgreSQL store against rows on the same server, in the first of these cases."""
LATENCY_AIM = 5
"""Upper bound of the p99 of a cycle at low load, as a multiple of that of `redis-always`."""
SIZES = (1, 100, 1_000, 10_000)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench page", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("bench/results/latest.json"))
    parser.add_argument("--workers", type=Path, default=workers.RESULTS)
    parser.add_argument("--keys", type=Path, default=key_peers.RESULTS)
    parser.add_argument("--page", type=Path, default=Path("docs/explanation/benchmarks.md"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    given = parser.parse_args(arguments)
    document = json.loads(given.results.read_text())
    text = given.page.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        parser.error(f"{given.page} has no lines {BEGIN} and {END}")
    given.page.write_text(f"{head}{BEGIN}\n\n{tables(document)}\n\n{END}{tail}")
    if given.workers.exists():
        write_page(given.page, workers.MARK, workers.tables(json.loads(given.workers.read_text())))
    if given.keys.exists():
        write_page(given.page, key_peers.MARK, key_peers.tables(json.loads(given.keys.read_text())))
    for file in plots(document, given.images):
        progress(f"written: {file}")
    return 0


# ---- tables ---------------------------------------------------------------------------------------------------


def tables(document: dict[str, Any]) -> str:
    when = sorted(each["at"] for each in document["measured"].values())
    dates = " to ".join(dict.fromkeys((when[0][:10], when[-1][:10])))
    parts = [f"Measured {dates} on {document['machine']}.", _systems(document["systems"]), _aims(document), _lost(document)]
    for case, figures in document["cases"].items():
        measured = document["measured"][case]
        about = f"{measured['rounds']} rounds of {measured['seconds']:g} s, load {measured['load']}"
        parts.append(f"### {case}\n\n{about}\n\n{_case(figures, document['ratios'].get(case, {}))}")
    return "\n\n".join(parts)


def _systems(told: dict[str, dict[str, str]]) -> str:
    rows = [f"| {name} | {told[name]['version']} | {told[name]['guarantee']} |" for name in systems.MODULES if name in told]
    return "\n".join(["| system | version | what is certain once it has confirmed |", "| --- | --- | --- |", *rows])


def _aims(document: dict[str, Any]) -> str:
    ratios = document["ratios"]
    rows = [(case, f"ours against {peer}", f"≥ {least:g}", ratios.get(case, {}).get(peer), least, 1) for case, peer, least in AIMS]
    of_consumer = document.get("ratios_of_consumer", {})
    rows += [
        (case, f"our producer and consumer against {peer}", f"≥ {least:g}", of_consumer.get(case, {}).get(peer), least, 1)
        for case, peer, least in CONSUMER_AIMS
    ]
    case = AIMS[0][0]
    on_postgres = document["ratios_on_postgres"].get(case, {}).get("postgres")
    rows.append((case, "our PostgreSQL store against postgres", f"≥ {POSTGRES_AIM}", on_postgres, POSTGRES_AIM, 1))
    delay = ratios.get(LATENCY, {}).get("redis-always")
    rows.append((LATENCY, "p99 of ours against redis-always", f"≤ {LATENCY_AIM}", delay, LATENCY_AIM, -1))
    lines = ["### Aims", "", "| case | | aim | measured |", "| --- | --- | --- | --- |"]
    for case, what, aim, ratio, bound, sign in rows:
        missed = ratio is not None and sign * ratio < sign * bound
        told = "not measured" if ratio is None else f"{ratio:.3g} ×{', **missed**' if missed else ''}"
        lines.append(f"| {case} | {what} | {aim} × | {told} |")
    return "\n".join(lines)


def _lost(document: dict[str, Any]) -> str:
    """List the peers that are ahead of ours in a case. Systems that are not peers are left out."""
    peers = [name for name in systems.MODULES if name not in (*_OWN, "in-process", "in-memory", "disk")]
    lines = []
    for case, ratios in document["ratios"].items():
        behind = [
            f"{name} ({ratios[name]:.3g} ×)"
            for name in peers
            if name in ratios and (ratios[name] > 1 if case == LATENCY else ratios[name] < 1)
        ]
        if behind:
            lines.append(f"* {case}{', p99 of a cycle' if case == LATENCY else ''}: {', '.join(behind)}")
    return "\n".join(["### Where we lose", "", *(lines or ["In no case that was measured."])])


def _case(figures: dict[str, Any], ratios: dict[str, float]) -> str:
    timed = any("cycle_ms" in each for each in figures.values())
    if timed:
        heads = [
            "",
            *(f"{call}, p50 / p99 / p99.9 ms" for call in ("produce", "lease", "complete", "cycle")),
            "server µs",
            "ours: p99 of the cycle ×",
        ]
    else:
        heads = ["", "items/s", "from", "to", "server µs an item", "client µs an item", "ours ×"]
    rows = []
    for name, each in _ordered(figures):
        if timed:
            cells = [
                " / ".join(f"{part:.3g}" for part in each[f"{call}_ms"].values()) for call in ("produce", "lease", "complete", "cycle")
            ]
        else:
            cells = [f"{each[field]:,.0f}" for field in ("items_per_s", "min", "max")]
        cells.append(f"{each['server_us_per_item']:,.3g}")
        if not timed:
            cells.append(f"{each['client_us_per_item']:,.3g}")
        rows.append([name, *cells, f"{ratios[name]:,.3g}" if name in ratios else ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def _ordered(figures: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, figures[name]) for name in systems.MODULES if name in figures]


# ---- plots ----------------------------------------------------------------------------------------------------


def plots(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the plots whose cases were measured."""
    import matplotlib

    # Equal figures must make equal files: no date, no random ids.
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "sluiceway", "svg.fonttype": "none", "font.size": 9})
    cases = document["cases"]
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for file, (title, names) in BARS.items():
        if measured := [name for name in names if name in cases]:
            files.append(_bars(folder / file, title, {name: cases[name] for name in measured}))
    if LATENCY in cases:
        files.append(_latency(folder / "bench-latency.svg", cases[LATENCY]))
    if any(f"arrow-{size}x100-c8" in cases for size in SIZES):
        files.append(_sizes(folder / "bench-sizes.svg", cases))
    return files


def _bars(file: Path, title: str, cases: dict[str, Any]) -> Path:
    """Draw one bar per system, with one axis per case."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(cases), figsize=(4.6 * len(cases), 4.2), layout="constrained", squeeze=False)
    for axis, (case, figures) in zip(axes[0], cases.items(), strict=True):
        ordered = sorted(_ordered(figures), key=lambda each: each[1]["items_per_s"])
        rates = [each["items_per_s"] for _, each in ordered]
        spread = [[rate - each["min"] for rate, (_, each) in zip(rates, ordered, strict=True)]]
        spread.append([each["max"] - rate for rate, (_, each) in zip(rates, ordered, strict=True)])
        colours = [OURS if name in _OWN else PEER for name, _ in ordered]
        axis.barh([name for name, _ in ordered], rates, color=colours, xerr=spread, error_kw={"elinewidth": 0.8, "ecolor": "#555555"})
        axis.set_title(case, fontsize=9)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.tick_params(axis="x", rotation=30)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return _saved(figure, file)


def _latency(file: Path, figures: dict[str, Any]) -> Path:
    """Draw for each system a line from the median to the p99.9 of a cycle, with the p99 between, on a logarithmic scale."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    ordered = sorted(((name, each) for name, each in _ordered(figures) if "cycle_ms" in each), key=lambda each: -each[1]["cycle_ms"]["p99"])
    for row, (_, each) in enumerate(ordered):
        times, colour = each["cycle_ms"], OURS if ordered[row][0] in _OWN else "#8a8a80"
        axis.plot([times["p50"], times["p99_9"]], [row, row], color=colour, linewidth=1)
        for name, mark in (("p50", "|"), ("p99", "o"), ("p99_9", ">")):
            axis.plot(times[name], row, mark, color=colour, label=name.replace("_", ".") if row == 0 else None)
    axis.set_yticks(range(len(ordered)), [name for name, _ in ordered])
    axis.set_xscale("log")
    axis.set_xlabel("ms")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("One connection, 200 cycles a second: time of a cycle")
    return _saved(figure, file)


def _sizes(file: Path, cases: dict[str, Any]) -> Path:
    """Draw items per second against the size of a batch."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    lines: dict[str, list[tuple[int, float]]] = {}
    for size in SIZES:
        for name, each in _ordered(cases.get(f"arrow-{size}x100-c8", {})):
            lines.setdefault(name, []).append((size, each["items_per_s"]))
    for name, points in lines.items():
        if len(points) > 1:
            own = name in _OWN
            axis.plot(*zip(*points, strict=True), "o-", label=name, linewidth=2 if own else 1, color=OURS if name == "sluiceway" else None)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("items of 100 B a call")
    axis.set_ylabel("items/s, the whole cycle, 8 clients")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Size of a batch")
    return _saved(figure, file)


def _saved(figure: Any, file: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
    return file
