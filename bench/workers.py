"""`make bench ARGS='--cases workers'`: single jobs through a handler that does nothing, by `sluiceway work` and by other task queues.

Systems alternate: a round has one run of each, with its own server on empty data; the result is the median of the rounds. Each run is
written when it ends: `--resume` goes on where an earlier command stopped. docs/explanation/benchmarks.md has the method.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.task_queues.catalog import EVERYSEC, OURS, QUEUES, TaskQueue
from bench.task_queues.runs import WARM_UP, FailedError, Row, measure_server_kill, measure_speed, measure_worker_kill
from sluiceway.bench.figures import progress, shown, write_page

RESULTS = Path("bench/results/workers.json")
MARK = "workers"
"""Of the page's part with the table."""
PARTS = ("speed", "worker-kill", "server-kill")
KILLED = 2_000
"""Jobs where something is killed."""
PACED = 1_000 + WARM_UP
"""Jobs of the latency."""
AIM = 10
"""Lower bound of our jobs a second as a multiple of the best peer's."""

Document = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Run the comparison. Exit code 1 if a system that was named could not be measured."""
    parser = argparse.ArgumentParser(prog="make bench ARGS='--cases workers …'", description=__doc__)
    parser.add_argument("--systems", nargs="+", choices=QUEUES, metavar="SYSTEM", default=list(QUEUES), help=", ".join(QUEUES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each system")
    parser.add_argument("--jobs", type=int, default=10_000, help="jobs of a run; slow systems do a fifth or a tenth of them")
    parser.add_argument("--paced", type=int, default=PACED, help="jobs of the latency, 200 a second")
    parser.add_argument("--killed", type=int, default=KILLED, help="jobs where something is killed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--resume", action="store_true", help="keep the runs of the output file, and do only those that it lacks")
    kept.add_argument("--merge", action="store_true", help="keep the runs of other parts and systems that the output file has")
    parser.add_argument("--page", type=Path, help="put the tables into this page, such as docs/explanation/benchmarks.md")
    parser.add_argument("--json", action="store_true", help="print the document")
    given = parser.parse_args(arguments)
    if min(given.rounds, given.jobs, given.paced, given.killed) < 1:
        parser.error("at least one round, of at least one job")
    document = _opened(given.output if given.resume or given.merge else None)
    if given.merge:
        document["runs"] = [run for run in document["runs"] if run["part"] not in given.parts or run["system"] not in given.systems]
    absent = _describe(document, given.systems)
    sizes = {"speed": given.jobs, "worker-kill": given.killed, "server-kill": given.killed}
    for part in PARTS:
        if part in given.parts:
            _measure(document, part, [name for name in given.systems if name not in absent], given.rounds, sizes[part], given)
    _write(document, given.output)
    print(json.dumps(document, indent=2) if given.json else tables(document))
    if given.page:
        write_page(given.page, MARK, tables(document))
    return int(bool(absent))


def _opened(file: Path | None) -> Document:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    before = json.loads(file.read_text()) if file is not None and file.exists() else {}
    return {"machine": machine, "systems": before.get("systems", {}), "absent": {}, "runs": before.get("runs", [])}


def _describe(document: Document, names: Sequence[str]) -> list[str]:
    """Record versions and choices, and return the systems that this machine lacks."""
    absent = []
    for name in names:
        queue = QUEUES[name]
        if reason := queue.found():
            progress(f"NOT MEASURED, {name}: {reason}")
            document["absent"][name] = reason
            absent.append(name)
        else:
            document["systems"][name] = {"version": queue.version(), "choices": queue.choices, "links": list(queue.links)}
    return absent


def _measure(document: Document, part: str, names: Sequence[str], rounds: int, jobs: int, given: argparse.Namespace) -> None:
    done = {(run["part"], run["system"], run["round"]) for run in document["runs"]}
    for number in range(1, rounds + 1):
        for name in names:
            # The kills do not depend on when Redis syncs: all of its variants keep what a process had written when it was killed.
            if (part, name, number) in done or (part != "speed" and name.endswith(EVERYSEC)):
                continue
            load, queue = round(os.getloadavg()[0], 1), QUEUES[name]
            count = max(1, int(jobs * queue.share)) if part == "speed" else jobs
            run: Row = {"part": part, "system": name, "round": number, "at": _now(), "load": load, "jobs": count}
            try:
                run |= {key: _short(value) for key, value in _runs(given.paced)[part](queue, count).items()}
            except FailedError as error:
                run["failed"] = str(error)
            document["runs"].append(run)
            _write(document, given.output)
            progress(f"{part} {number}/{rounds} {name}: {_told(run)}")


def _runs(paced: int) -> dict[str, Callable[[TaskQueue, int], Row]]:
    return {
        "speed": lambda queue, jobs: measure_speed(queue, jobs, paced),
        "worker-kill": measure_worker_kill,
        "server-kill": measure_server_kill,
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _short(value: float) -> float:
    return value if isinstance(value, int) else round(value) if value >= 1_000 else float(f"{value:.4g}")


def _told(run: Row) -> str:
    if "failed" in run:
        return f"FAILED: {run['failed']}"
    if run["part"] != "speed":
        return f"{run['lost']} of {run['confirmed']:,} lost"
    return f"{run['work_per_s']:,.0f} jobs/s worked off, {run['together_per_s']:,.0f} with their production, p99 {run['p99_ms']:,.3g} ms"


def _write(document: Document, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=2) + "\n")


# ---- tables ---------------------------------------------------------------------------------------------------

SPEED = {
    "worked off, jobs/s": "work_per_s",
    "produced and worked off, jobs/s": "together_per_s",
    "produced, jobs/s": "produce_per_s",
    "p50, ms": "p50_ms",
    "p99, ms": "p99_ms",
    "worker, µs": "worker_us",
    "server, µs": "server_us",
    "producer, µs": "producer_us",
}
"""Columns by heading."""


def tables(document: Document) -> str:
    """Render Markdown: the speeds, what kills lose, the ratios, and how each system is set up."""
    runs = document["runs"]
    when = sorted({run["at"][:10] for run in runs})
    measured = f"Measured {' to '.join(dict.fromkeys((when[0], when[-1])))} on {document['machine']}." if when else "Nothing measured."
    absent = [f"**{name} was not measured**: {reason}." for name, reason in document["absent"].items()]
    return "\n\n".join([measured, *absent, _speeds(runs), _aims(runs), _kills(runs), _choices(document["systems"])])


def _of(runs: Sequence[Row], part: str, name: str) -> list[Row]:
    return [run for run in runs if run["part"] == part and run["system"] == name]


def _median(runs: Sequence[Row], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def _speeds(runs: Sequence[Row]) -> str:
    rows = [["", "rounds", "load", *SPEED]]
    for name in QUEUES:
        found = _of(runs, "speed", name)
        done = [run for run in found if "failed" not in run]
        if done:
            loads = sorted(run["load"] for run in done)
            cells = [shown(_median(done, key)) for key in SPEED.values()]
            rows.append([name, str(len(done)), f"{loads[0]:g} to {loads[-1]:g}", *cells])
        elif found:
            rows.append([name, "**failed**", *[""] * (1 + len(SPEED))])
    return _markdown(rows)


def ratios(runs: Sequence[Row], key: str) -> dict[str, float]:
    """Median over the rounds of our value to each peer's in the same round."""
    rounds = {run["round"]: run for run in _of(runs, "speed", OURS) if "failed" not in run}
    found = {}
    for name in QUEUES:
        pairs = [(rounds[run["round"]], run) for run in _of(runs, "speed", name) if run["round"] in rounds and "failed" not in run]
        if pairs and not name.startswith(OURS):
            found[name] = statistics.median(ours[key] / theirs[key] for ours, theirs in pairs)
    return found


def _aims(runs: Sequence[Row]) -> str:
    """Compare ours with the best peer, among those that sync each job and among the others."""
    rows = [["sluiceway against the best peer", "peer", "aim", "measured"]]
    for is_synced in (True, False):
        best = None
        for key, heading in (("work_per_s", "jobs/s worked off"), ("together_per_s", "jobs/s produced and worked off")):
            found = {name: ratio for name, ratio in ratios(runs, key).items() if name.endswith(EVERYSEC) != is_synced}
            if found:
                name = min(found, key=found.__getitem__)
                best = best or name
                rows.append([heading, name, f"≥ {AIM} ×", f"{found[name]:.3g} ×{', **missed**' if found[name] < AIM else ''}"])
        if best is not None:
            delay = ratios(runs, "p99_ms")[best]
            rows.append(["p99", best, "≤ 1 ×", f"{delay:.3g} ×{', **missed**' if delay > 1 else ''}"])
    ahead = [f"{name} ({ratio:.3g} ×)" for name, ratio in ratios(runs, "p99_ms").items() if ratio > 1]
    return "\n\n".join([_markdown(rows), f"Peers with a lower p99 than ours: {', '.join(ahead) or 'none'}."])


def _kills(runs: Sequence[Row]) -> str:
    rows = [["", "", "kills", "jobs confirmed", "lost", "handled twice or more", "last one handled after, s", "worker ended by itself"]]
    for part, heading in (("worker-kill", "worker"), ("server-kill", "server")):
        for name in QUEUES:
            found = _of(runs, part, name)
            done = [run for run in found if "failed" not in run]
            if done:
                lost = sum(run["lost"] for run in done)
                again = sum(run["handled_again"] for run in done)
                confirmed = sum(run["confirmed"] for run in done)
                slowest = max(run["recovered_s"] for run in done)
                ended = sum(run["worker_restarts"] for run in done)
                told = f"**{lost:,}**" if lost else "0"
                rows.append([name, heading, str(len(done)), f"{confirmed:,}", told, f"{again:,}", shown(slowest), str(ended)])
            elif found:
                rows.append([name, heading, "**failed**", *[""] * 5])
    return _markdown(rows)


def _choices(systems: dict[str, dict[str, Any]]) -> str:
    rows = [["", "version", "configuration"]]
    for name in QUEUES:
        if about := systems.get(name):
            links = ", ".join(f"[{number}]({link})" for number, link in enumerate(about["links"], 1))
            rows.append([name, about["version"], f"{about['choices']} {links}"])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
