"""`make bench`: produce → lease → complete, durable, ours beside its peers, in one run. See docs/explanation/benchmarks.md.

Slices of the systems alternate, so that a change in the machine's speed affects all; the result is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluiceway.bench import campaign, harness, systems
from sluiceway.bench.figures import progress
from sluiceway.bench.work import Work

LATEST = Path("bench/results/latest.json")
PARTS = (
    "peers",
    "page",
    "workers",
    "spark",
    "hard",
    "growth",
    "hung",
    "model",
    "bucket_costs",
    "backup_cost",
    "key_costs",
    "key_peers",
    "engines",
    "against",
    "odd_shapes",
)
"""Modules of `bench/` that run by name."""


def _case(text: str) -> str:
    return Work.named(text).name


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if a named system could not be measured, or ours in some case."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__, epilog=f"Also: {', '.join(PARTS)} (each with --help).")
    parser.add_argument(
        "--cases", nargs="+", type=_case, metavar="CASE", help="such as arrow-1000x100-c8 or single-cycle-c64; all, if none is named"
    )
    parser.add_argument("--systems", nargs="+", choices=systems.MODULES, metavar="SYSTEM", help=", ".join(systems.MODULES))
    parser.add_argument("--rounds", type=int, default=campaign.ROUNDS, help="slices of each system")
    parser.add_argument(
        "--seconds", type=float, help=f"length of a slice; {campaign.SECONDS:g}, or {campaign.FEWER_SECONDS:g} where few systems take part"
    )
    parser.add_argument("--output", type=Path, default=LATEST)
    parser.add_argument("--merge", action="store_true", help="keep the cases of the output file that are not measured now")
    parser.add_argument("--json", action="store_true", help="print the document")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or (given.seconds is not None and given.seconds <= 0):
        parser.error("at least one round, of more than 0 seconds")
    document = _measure(given.cases, given.systems, given.rounds, given.seconds)
    if given.merge and given.output.exists():
        document = _merged(json.loads(given.output.read_text()), document)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2) if given.json else table(document))
    progress(f"written to {given.output}")
    absent = set(given.systems or ()) - {name for case in document["cases"].values() for name in case}
    if absent:
        progress(f"NOT MEASURED: {', '.join(sorted(absent))}")
    return int(bool(absent))


def _measure(cases: Sequence[str] | None, names: Sequence[str] | None, rounds: int, seconds: float | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}",
        "cases": {},
        "ratios": {},
        "ratios_on_postgres": {},
        "ratios_of_consumer": {},
        "measured": {},
        "systems": {},
    }
    with harness.started(names or systems.MODULES, progress) as running:
        for name in running:
            module = systems.module(name)
            document["systems"][name] = {"version": module.version(), "guarantee": module.GUARANTEES[name]}
        for part in campaign.parts(cases, list(running)):
            length = seconds or part.seconds
            taking_part = {name: running[name] for name in part.systems}
            for work, slices in harness.measure(part.works, taking_part, rounds, length, progress).items():
                document["cases"][work.name] = harness.case_of(slices)
                document["ratios"][work.name] = harness.ratios_of(slices)
                document["ratios_on_postgres"][work.name] = harness.ratios_of(slices, harness.ON_POSTGRES)
                document["ratios_of_consumer"][work.name] = harness.ratios_of(slices, harness.GATHERING)
                document["measured"][work.name] = {
                    "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "rounds": rounds,
                    "seconds": length,
                    "load": round(os.getloadavg()[0], 1),
                }
    return document


def _merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Merge the new document with the earlier cases that were not measured again."""
    kept = {
        name: before.get(name, {}) | now[name]
        for name in ("cases", "ratios", "ratios_on_postgres", "ratios_of_consumer", "measured", "systems")
    }
    return now | kept


def table(document: dict[str, Any]) -> str:
    lines = []
    for case, figures in document["cases"].items():
        lines.append(case)
        for name, each in figures.items():
            ratio = document["ratios"].get(case, {}).get(name)
            cost = f"server {each['server_us_per_item']:>8,.4g} µs  client {each['client_us_per_item']:>8,.4g} µs"
            delay = f"  p99 of a cycle {each['cycle_ms']['p99']:,.3g} ms" if "cycle_ms" in each else ""
            against = f"  ours {ratio:,.3g}×" if ratio is not None else ""
            lines.append(
                f"  {name:20} {each['items_per_s']:>11,.0f} items/s  ({each['min']:,.0f} to {each['max']:,.0f})  {cost}{delay}{against}"
            )
    return "\n".join([*lines, document["machine"]])


if __name__ == "__main__":
    # A terminated benchmark still stops its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
