"""The soak: one server at half of its full rate, with producers, consumers and operators of every kind, and random faults. Memory, handles,
files and latencies are measured over time; their slopes have limits.

`make soak` takes ten minutes, `make soak MINUTES=120` two hours. Pages and measurements are kept in build/soak; `ARGS='judge DIR'` judges
them again. `ARGS=planted` sees that leaks planted in the product's code are found.
The last line sums it up; exit code 1 if something grows too fast, or was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.campaigns.blackbox.planted_bugs import PlantedBug, plant
from tests.campaigns.soak import soak_page
from tests.campaigns.soak.planted_leaks import LEAKS
from tests.campaigns.soak.soak_page import Found, Result
from tests.campaigns.soak.soak_record import SoakRecord, read_record
from tests.campaigns.soak.soak_run import Plan, planned, soak
from tests.server.server_process import COMMAND

PLANTED: float = 180.0
"""Seconds of a soak with a planted leak, without faults and in one life."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = _parser().parse_intermixed_args(arguments)
    # As Ctrl-C, upon which asyncio cancels the soak: so no server outlives it.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if given.what == "judge":
        return max(_judge(Path(each)) for each in given.which)
    folder = (given.folder or Path("build", "soak", time.strftime("%Y%m%d-%H%M%S"))).resolve()
    folder.mkdir(parents=True)
    return _find(given, folder) if given.what == "planted" else _run(given, folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["run", "judge", "planted"], default="run")
    parser.add_argument("which", nargs="*", help="`judge`: folders of soaks; `planted`: leaks, all if none is named")
    minutes = float(os.environ.get("MINUTES") or 10)
    parser.add_argument("--minutes", type=float, default=minutes, help="of half load; also MINUTES=…")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000, help="of all choices; not of the processes' timing")
    parser.add_argument("--folder", type=Path, help="made anew for the page; in build/soak if left out")
    return parser


def _run(given: argparse.Namespace, folder: Path) -> int:
    plan = planned(given.minutes, given.seed)
    print(f"soak: {given.minutes:g} minutes in {plan.lives} lives of the server, seed {given.seed}; {folder}", flush=True)
    record = asyncio.run(soak(plan, folder, COMMAND, _say))
    result = _concluded("Soak", record, folder)
    if result.is_good:
        shutil.rmtree(folder / "servers")
    return 0 if result.is_good else 1


def _say(line: str) -> None:
    print(line, flush=True)


def _concluded(title: str, record: SoakRecord, folder: Path) -> Result:
    """Judge it, write the page, and print the summary."""
    result = soak_page.judged(record)
    table = soak_page.rows(result)
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    for row in table:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for each in result.findings[:40]:
        print(f"  {each}")
    print(f"the page is {soak_page.write(title, record, result, folder)}")
    print(f"{'ok' if result.is_good else 'FAILED'}: {soak_page.told(record, result)}", flush=True)
    return result


def _judge(folder: Path) -> int:
    """Judge a kept soak again."""
    return 0 if _concluded("Soak", read_record(folder / "record.jsonl"), folder).is_good else 1


# ---- planted leaks ------------------------------------------------------------------------------------------------------


def _find(given: argparse.Namespace, folder: Path) -> int:
    """A soak with each planted leak, which must be over the limit of the right series."""
    names = [leak.name for leak in LEAKS]
    if unknown := set(given.which) - set(names):
        raise SystemExit(f"no such leak: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    found = [_hunt(leak, folder, given.seed) for leak in LEAKS if not given.which or leak.name in given.which]
    missed = [each for each in found if not each.seen]
    print(f"the page is {soak_page.write_bank(found, folder)}")
    print(f"{'FAILED' if missed else 'ok'}: {len(found) - len(missed)} of {len(found)} planted leaks found, seed {given.seed}")
    return 1 if missed else 0


def _hunt(leak: PlantedBug, folder: Path, seed: int) -> Found:
    place, source = folder / leak.name, folder / f"{leak.name}-source"
    place.mkdir()
    began = time.monotonic()
    record = asyncio.run(soak(Plan(PLANTED, 1, seed, has_faults=False), place, plant(leak, source), _say))
    result = soak_page.judged(record)
    soak_page.write(f"Soak with the planted leak {leak.name}", record, result, place)
    shutil.rmtree(source)
    shutil.rmtree(place / "servers")
    seen = [f"{name} {grows}, allowed {allowed}" for name, _, grows, allowed, verdict in soak_page.rows(result) if verdict == "over"]
    is_named = any(name in leak.found_as for name in result.over)
    found = Found(leak.name, leak.about, "; ".join([*seen, *result.findings[:1]]) if is_named else "", time.monotonic() - began)
    print(f"{leak.name}: {found.seen or 'NOT FOUND'}", flush=True)
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
