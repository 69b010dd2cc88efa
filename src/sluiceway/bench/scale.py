"""`make bench-scale`: ten million waiting items, a million leases' worth of items that expire together, two thousand idle partitions, a
thousand idle long polls, and a partition that hangs.

Aims are those of docs/performance.md. An absolute time says something about this machine only; a ratio is taken within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sluiceway.bench import backlog, expiry, hung, idle, polls
from sluiceway.bench.figures import Figure, progress, table

PARTS = ("backlog", "expiry", "idle", "polls", "hung")
POLLS = 1_000


def measure(part: str, folder: Path, items: int, leased: int, partitions: int) -> list[Figure]:
    if part == "backlog":
        return backlog.measure(folder, items)
    if part == "idle":
        return idle.measure(folder, partitions)
    if part == "polls":
        return polls.measure(folder, POLLS)
    if part == "hung":
        return hung.measure(folder)
    figures: list[Figure] = []
    for number, case in enumerate(expiry.CASES):
        figures += expiry.measure(folder / f"{number}", leased, case)
        shutil.rmtree(folder / f"{number}")
    return figures


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if an aim was missed."""
    parser = argparse.ArgumentParser(prog="make bench-scale", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which to measure; all of them, if none is named")
    parser.add_argument("--items", type=int, default=10_000_000, help="waiting items")
    parser.add_argument("--leased", type=int, default=1_000_000, help="items whose leases expire")
    parser.add_argument("--partitions", type=int, default=2_000, help="idle partitions")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    figures: list[Figure] = []
    for part in given.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="sluiceway-scale-") as folder:
            figures += measure(part, Path(folder), given.items, given.leased, given.partitions)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[2]:.1f}"
    if given.json:
        print(json.dumps({"machine": machine, "figures": [figure.document() for figure in figures]}, indent=2))
    else:
        print(f"{table(figures)}\n{machine}")
    missed = sum(figure.missed for figure in figures)
    progress(f"{missed} aims missed" if missed else "every aim met")
    return int(missed > 0)
