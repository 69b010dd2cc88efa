"""`python -m bench key_peers`: items with keys, delivered in order by key to several consumers, by ours and by its peers.

Eight clients produce batches of 1,000 items of 100 bytes with 100 or with 1,000 keys each, lease and settle. A round has two slices of each
system: as many items as it can do, then half of that rate, for the time from the moment when an item is to be sent until a client has it.
Each slice checks the order of each key. docs/explanation/benchmarks.md has the method, and what each system guarantees.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.by_key.ordered_systems import ORDERED, OURS
from sluiceway.bench import harness, systems
from sluiceway.bench.figures import progress, shown, write_page
from sluiceway.bench.work import Served

RESULTS = Path("bench/results/key_peers.json")
MARK = "key peers"
"""Of the page's part with the tables."""
KEYS = (100, 1_000)
BATCHES = 24
"""Of a slice at half load, at least: a slow system takes longer for them, up to MAX_SECONDS."""
MAX_SECONDS = 30.0

Row = dict[str, Any]
Document = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Run the comparison. Exit code 1 if a system that was named could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench key_peers", description=__doc__)
    parser.add_argument("--systems", nargs="+", choices=ORDERED, metavar="SYSTEM", default=list(ORDERED), help=", ".join(ORDERED))
    parser.add_argument("--keys", nargs="+", type=int, default=list(KEYS), help="distinct keys of a batch: divisors of 1,000")
    parser.add_argument("--rounds", type=int, default=3, help="slices of each system")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a slice")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="put the tables into this page, such as docs/explanation/benchmarks.md")
    parser.add_argument("--json", action="store_true", help="print the document")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or given.seconds <= 0 or any(keys < 1 or 1_000 % keys for keys in given.keys):
        parser.error("at least one round, of more than 0 seconds, with divisors of 1,000 as numbers of keys")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    document: Document = {}
    for document in _measured(given.systems, given.keys, given.rounds, given.seconds):
        # After each run: a command that is ended keeps what it has.
        given.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2) if given.json else tables(document))
    progress(f"written to {given.output}")
    if given.page:
        write_page(given.page, MARK, tables(document))
    return int(len({run["system"] for run in document["runs"] if "failed" not in run}) < len(given.systems))


def _measured(names: Sequence[str], counts: Sequence[int], rounds: int, seconds: float) -> Iterator[Document]:
    """Yields the document before the first run, and again after each."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    document: Document = {"machine": machine, "seconds": seconds, "systems": {}, "absent": {}, "runs": []}
    for name in names:
        if reason := ORDERED[name].missing():
            progress(f"NOT MEASURED, {name}: {reason}")
            document["absent"][name] = reason
    present = [name for name in names if name not in document["absent"]]
    with harness.started(dict.fromkeys(ORDERED[name].server for name in present), progress) as running:
        present = [name for name in present if ORDERED[name].server in running]
        document["systems"] = {name: _described(name) for name in present}
        yield document
        for number in range(1, rounds + 1):
            for keys in counts:
                for name in present:
                    run = _run(name, running[ORDERED[name].server], keys, seconds)
                    document["runs"].append({"system": name, "keys": keys, "round": number} | run)
                    progress(f"{number}/{rounds} {keys} keys, {name}: {_told(run)}")
                    yield document


def _described(name: str) -> dict[str, str]:
    ordered = ORDERED[name]
    module = ordered.load()
    return {"version": module.version(), "guarantee": systems.module(ordered.server).GUARANTEES[ordered.server], "order": module.ORDER}


def _run(name: str, served: Served, keys: int, seconds: float) -> Row:
    """A slice at full load, and one at half of what that one did."""
    run: Row = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load": round(os.getloadavg()[0], 1)}
    try:
        full = _slice(name, served, keys, seconds)
        longer = min(MAX_SECONDS, max(seconds, BATCHES * 1_000 / (full.rate / 2)))
        half = _slice(name, served, keys, longer, full.rate / 2)
    except harness.FailedError as error:
        return run | {"failed": str(error)}
    faults = {fault: int(full.figures[fault] + half.figures[fault]) for fault in ("inversions", "repeats", "overlaps")}
    return run | {
        "items_per_s": _short(full.rate),
        "server_us": _short(full.server / full.items * 1e6),
        "client_us": _short(full.client / full.items * 1e6),
        "half_per_s": _short(half.figures["rate"]),
        "p50_ms": _short(half.figures["wait_p50_ms"]),
        "p99_ms": _short(half.figures["wait_p99_ms"]),
        "half_server_us": _short(half.server / half.items * 1e6),
        "items_checked": full.items + half.items,
        "missing": int(half.figures["missing"]),
        **faults,
    }


def _slice(name: str, served: Served, keys: int, seconds: float, *rate: float) -> harness.Slice:
    return harness.slice_by("bench.by_key.keyed_slice", served, seconds, name, served.address, *map(str, (keys, seconds, *rate)))


def _short(value: float) -> float:
    return round(value) if value >= 1_000 else float(f"{value:.4g}")


def _told(run: Row) -> str:
    if "failed" in run:
        return f"FAILED: {run['failed']}"
    faults = f"{run['inversions']} inversions, {run['overlaps']} overlaps, {run['missing']} missing"
    return f"{run['items_per_s']:,.0f} items/s, at half of it p99 {run['p99_ms']:,.3g} ms, {faults}"


# ---- tables ---------------------------------------------------------------------------------------------------

COLUMNS = {
    "items/s": "items_per_s",
    "server, µs": "server_us",
    "client, µs": "client_us",
    "half load, items/s": "half_per_s",
    "wait p50, ms": "p50_ms",
    "wait p99, ms": "p99_ms",
}
"""Columns by heading."""


def tables(document: Document) -> str:
    """Render Markdown: for each number of keys the figures and the ratios, then what each system guarantees."""
    runs = [run for run in document["runs"] if "failed" not in run]
    if not runs:
        return "Nothing measured."
    loads = sorted(run["load"] for run in runs)
    when = " to ".join(dict.fromkeys((min(run["at"] for run in runs)[:10], max(run["at"] for run in runs)[:10])))
    parts = [f"Measured {when} on {document['machine']}, load {loads[0]:g} to {loads[-1]:g}, slices of {document['seconds']:g} s."]
    parts += [f"**{name} was not measured**: {reason}." for name, reason in document["absent"].items()]
    failed = [run for run in document["runs"] if "failed" in run]
    parts += [f"**{run['system']} failed** with {run['keys']:,} keys in round {run['round']}: {run['failed']}." for run in failed]
    for keys in dict.fromkeys(run["keys"] for run in runs):
        own = [run for run in runs if run["keys"] == keys]
        parts += [f"**{keys:,} keys a batch**", _figures(own, document["systems"]), _ahead(own, document["systems"])]
    return "\n\n".join([*parts, _order(runs, document["systems"])])


def ratios(runs: Sequence[Row], name: str, key: str) -> float | None:
    """Median over the rounds of our value to that system's in the same round; None without both."""
    ours = {run["round"]: run[key] for run in runs if run["system"] == OURS}
    pairs = [(ours[run["round"]], run[key]) for run in runs if run["system"] == name and run["round"] in ours]
    return statistics.median(mine / theirs for mine, theirs in pairs) if pairs and name != OURS else None


def _figures(runs: Sequence[Row], names: Sequence[str]) -> str:
    rows = [["", "rounds", *COLUMNS, "ours, items/s ×", "ours, p99 ×"]]
    for name in names:
        own = [run for run in runs if run["system"] == name]
        if own:
            cells = [shown(statistics.median(run[key] for run in own)) for key in COLUMNS.values()]
            rate, wait = ratios(runs, name, "items_per_s"), ratios(runs, name, "p99_ms")
            told = ["" if ratio is None else f"{ratio:.3g}" for ratio in (rate, wait)]
            rows.append([name, str(len(own)), *cells, *told])
    return _markdown(rows)


def _ahead(runs: Sequence[Row], names: Sequence[str]) -> str:
    """The peers that are ahead of ours. Of the wait, less is better."""
    told = []
    for key, about, sign in (("items_per_s", "with more items/s", 1), ("p99_ms", "with a lower p99", -1)):
        found = {name: ratio for name in names if (ratio := ratios(runs, name, key)) is not None}
        ahead = [f"{name} ({ratio:.3g} ×)" for name, ratio in found.items() if sign * ratio < sign]
        told.append(f"{about} than ours: {', '.join(ahead) or 'none'}")
    return f"Peers {'; '.join(told)}."


def _order(runs: Sequence[Row], described: dict[str, dict[str, str]]) -> str:
    faults = ("items_checked", "inversions", "overlaps", "repeats", "missing")
    rows = [["", "version", "what is certain once it has confirmed", "order", "items checked", *faults[1:]]]
    for name, about in described.items():
        own = [run for run in runs if run["system"] == name]
        counts = [f"{sum(run[fault] for run in own):,}" for fault in faults]
        rows.append([name, about["version"], about["guarantee"], about["order"], *counts])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
