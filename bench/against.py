"""`python -m bench against REF`: how fast this checkout is as a multiple of an older one, at the same work, end to end.

REF is any commit that git knows here. It is put into a directory of its own, and installed by its own `make setup`, with the packages of
its own lock file. A round starts a server of each, on empty data, and drives both in turns of a quarter of a second, case by case, so what
else the machine does affects both. The client is this checkout's. A ratio is of all of ours to all of theirs in one round. The figure is
the median over the rounds, and the interval that has the true median with a confidence of 95 %, whatever the distribution.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sluiceway.bench.figures import progress, write_page
from sluiceway.bench.servers import SLUICEWAY, Server, cpu_seconds, server
from sluiceway.bench.systems.sluiceway import lean_clients
from sluiceway.bench.work import Work, run, together

CHECKOUTS = Path(".tools/against")
MARK = "against"
"""Of the page's part with the table."""
CASES = ("arrow-1000x100-c8", "json-1000x100-c8", "single-produce-c64", "single-cycle-c64")
AIM = 0.98
"""Lower bound of the items a second, as a multiple of the older checkout's."""
TURN = 0.25
"""Seconds."""
FEWEST = 6
"""Rounds below which there is no interval: the extremes of five ratios are one of 94 %."""
OWN = ("MAKEFLAGS", "MAKELEVEL", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT", "VIRTUAL_ENV")
"""Variables of this environment that another checkout must not have."""

Document = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Run the comparison. Exit code 1 if a case is slower than the aim, by its whole interval; 2 if REF cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m bench against", description=__doc__)
    parser.add_argument("ref", metavar="REF", help="commit, branch or tag to compare with")
    parser.add_argument("--cases", nargs="+", type=lambda text: Work.named(text).name, metavar="CASE", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.0, help="that each of both has for a case in a round")
    parser.add_argument("--output", type=Path, help="write the document into this file")
    parser.add_argument("--page", type=Path, help="put the table into this page, such as docs/explanation/performance.md")
    parser.add_argument("--json", action="store_true", help="print the document")
    given = parser.parse_args(arguments)
    works = [Work.named(case) for case in given.cases]
    if given.rounds < 1 or given.seconds <= 0 or any(work.kind == "latency" for work in works):
        parser.error("at least one round, of more than 0 seconds, of cases without `latency`")
    try:
        commit, python = installed(given.ref)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        progress(f"{given.ref} cannot be had: {error}\n{getattr(error, 'stderr', '')[-2_000:]}")
        return 2
    document = _measured(commit, python, works, given.rounds, given.seconds)
    if given.output:
        given.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2) if given.json else table(document))
    if given.page:
        write_page(given.page, MARK, markdown(document))
    return int(any(figures["verdict"] == "slower" for figures in document["cases"].values()))


# ---- the older checkout ---------------------------------------------------------------------------------------


def installed(ref: str) -> tuple[str, Path]:
    """Install the commit, unless an earlier run did. Returns its hash, and its interpreter.

    Raises CalledProcessError if git does not know it, or its `make setup` fails.
    """
    commit = _git("rev-parse", "--verify", f"{ref}^{{commit}}")
    place = (CHECKOUTS / commit[:12]).absolute()
    if not place.exists():
        _extract(commit, place)
    progress(f"make setup in {place}")
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    subprocess.run(["make", "--no-print-directory", "setup"], cwd=place, env=environment, capture_output=True, text=True, check=True)
    return commit, place / ".venv" / "bin" / "python"


def _extract(commit: str, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        archive = Path(folder) / "archive.tar"
        _git("archive", f"--output={archive}", commit)
        with tarfile.open(archive) as tar:
            tar.extractall(Path(folder) / "tree", filter="data")
        (Path(folder) / "tree").rename(place)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


# ---- measurement ----------------------------------------------------------------------------------------------


class Turns(NamedTuple):
    """What one server did in all of its turns of a round. `seconds`: of the clock; `processor`: seconds that the server used."""

    items: int
    seconds: float
    processor: float

    @property
    def rate(self) -> float:
        return self.items / self.seconds


def _measured(commit: str, python: Path, works: Sequence[Work], rounds: int, seconds: float) -> Document:
    done: dict[Work, list[tuple[Turns, Turns]]] = {work: [] for work in works}
    loads = []
    for number in range(rounds):
        loads.append(round(os.getloadavg()[0], 1))
        with tempfile.TemporaryDirectory(prefix="sluiceway-against-") as folder:
            place = Path(folder)
            with server(SLUICEWAY, place / "ours") as ours, server(SLUICEWAY, place / "theirs", python=python) as theirs:
                for work in works:
                    pair = run(_in_turns(ours, theirs, work, seconds))
                    done[work].append(pair)
                    progress(f"{number + 1}/{rounds} {work.name}: {pair[0].rate:,.0f} to {pair[1].rate:,.0f} items/s")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "here": _git("describe", "--always", "--dirty", "--abbrev=12"),
        "against": commit[:12],
        "rounds": rounds,
        "seconds": seconds,
        "loads": [min(loads), max(loads)],
        "cases": {work.name: figures_of(pairs) for work, pairs in done.items()},
    }


async def _in_turns(ours: Server, theirs: Server, work: Work, seconds: float) -> tuple[Turns, Turns]:
    """Drive both servers for `seconds` each, in turns of TURN, after one of each that does not count."""
    both = [ours, theirs]
    async with lean_clients(ours.url, work) as mine, lean_clients(theirs.url, work) as others:
        clients, items, elapsed = [mine, others], [0, 0], [0.0, 0.0]
        for each in clients:
            await together(each, work, TURN)
        used = [cpu_seconds(each.pid) for each in both]
        for turn in range(math.ceil(seconds / TURN)):
            # Which comes first alternates.
            for which in (0, 1) if turn % 2 else (1, 0):
                began = time.perf_counter()
                items[which] += await together(clients[which], work, TURN)
                elapsed[which] += time.perf_counter() - began
        used = [cpu_seconds(each.pid) - before for each, before in zip(both, used, strict=True)]
    done = [Turns(*each) for each in zip(items, elapsed, used, strict=True)]
    return done[0], done[1]


def figures_of(pairs: Sequence[tuple[Turns, Turns]]) -> Document:
    """Medians of a case, with the ratios of ours to theirs: of items a second, and of the server's processor time for an item."""
    rates = [ours.rate / theirs.rate for ours, theirs in pairs]
    costs = [(ours.processor / ours.items) / (theirs.processor / theirs.items) for ours, theirs in pairs]
    around = interval(rates)
    return {
        "items_per_s": round(statistics.median(ours.rate for ours, _ in pairs)),
        "theirs_per_s": round(statistics.median(theirs.rate for _, theirs in pairs)),
        "ratio": round(statistics.median(rates), 3),
        "interval": around and [round(each, 3) for each in around],
        "server_us_ratio": round(statistics.median(costs), 3),
        "server_us_interval": (found := interval(costs)) and [round(each, 3) for each in found],
        "verdict": verdict(around),
    }


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """An interval that has the median with a confidence of at least 95 %: between two of the ratios, by rank. None for too few."""
    count = len(ratios)
    if count < FEWEST:
        return None
    # The median is below the ratio of rank k with the probability of fewer than k heads in `count` throws.
    tail, rank = 0.5**count, 0
    while tail <= 0.025:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    ordered = sorted(ratios)
    return ordered[rank - 1], ordered[count - rank]


def verdict(around: tuple[float, float] | None) -> str:
    """`met` or `slower` if the whole interval is on that side of the aim."""
    if around is None or around[0] < AIM <= around[1]:
        return "undecided"
    return "met" if around[0] >= AIM else "slower"


def table(document: Document) -> str:
    first, last = document["loads"]
    rounds = f"{document['rounds']} rounds of {document['seconds']:g} s"
    lines = [f"{document['here']} against {document['against']}: {rounds}, load {first} to {last}"]
    for case, figures in document["cases"].items():
        lines.append(
            f"  {case:20} {figures['items_per_s']:>9,} items/s against {figures['theirs_per_s']:>9,}: "
            f"{_told(figures, 'ratio', 'interval')} (aim: {AIM:g}, {figures['verdict']}), "
            f"server's time an item {_told(figures, 'server_us_ratio', 'server_us_interval')}"
        )
    return "\n".join([*lines, document["machine"]])


def markdown(document: Document) -> str:
    first, last = document["loads"]
    about = (
        f"`{document['here']}` against `{document['against']}`, {document['at'][:10]}, on {document['machine']}: "
        f"{document['rounds']} rounds of {document['seconds']:g} s, load {first:g} to {last:g}."
    )
    lines = [about, "", "|  | items/s | before | ratio | aim | server's CPU time an item |", "| --- | --- | --- | --- | --- | --- |"]
    for case, figures in document["cases"].items():
        cells = [case, f"{figures['items_per_s']:,}", f"{figures['theirs_per_s']:,}", _told(figures, "ratio", "interval")]
        cells += [f"≥ {AIM:g}: {figures['verdict']}", _told(figures, "server_us_ratio", "server_us_interval")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(figures: Document, ratio: str, around: str) -> str:
    between = f" ({figures[around][0]:.3f} to {figures[around][1]:.3f})" if figures[around] else ""
    return f"{figures[ratio]:.3f} ×{between}"
