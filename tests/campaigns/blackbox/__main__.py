"""The black-box campaign: real servers on every kind of storage under load and faults, with a history of every call, checkers over it, and
pictures of it.

`make campaign` runs a minute on each storage, `make campaign ARGS='--storage sqlite --minutes 120'` longer on one. Histories, pages and
logs are kept in build/campaign, and `ARGS='judge DIR'` judges kept histories again. `ARGS=planted` sees that bugs planted in the product's
code are found.
The last line sums it up; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.campaigns.blackbox import checkers
from tests.campaigns.blackbox.campaign import Judged, Plan, rounds
from tests.campaigns.blackbox.campaign_page import Course, Found, write_bank
from tests.campaigns.blackbox.nemeses import Nemesis, nemeses
from tests.campaigns.blackbox.operation_log import read_round
from tests.campaigns.blackbox.planted_bugs import BUGS, PlantedBug, plant
from tests.campaigns.blackbox.targets import STORAGES, target

ROUND = 45.0
"""Seconds of load in a round."""
SERVERS = "servers"
"""The folder of data and logs, which is kept where something was wrong."""
PLANTED_ROUND = 15.0
PLANTED_MINUTES = 5.0
"""Of a campaign against a planted bug, at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = _parser().parse_intermixed_args(arguments)
    _open_more_files()
    # As Ctrl-C, upon which asyncio cancels the campaign: so no server outlives it.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if given.what == "judge":
        return _judge([Path(each) for each in given.which])
    folder = (given.folder or Path("build", "campaign", time.strftime("%Y%m%d-%H%M%S"))).resolve()
    folder.mkdir(parents=True)
    return _find(given, folder) if given.what == "planted" else _run(given, folder)


def _open_more_files() -> None:
    """Raise the soft limit of open files to the hard one, as servers do. A line has two for each connection, and three instances that take
    over partitions of a bucket have a thousand connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["run", "judge", "planted"], default="run")
    parser.add_argument("which", nargs="*", help="`judge`: histories, or folders with some; `planted`: bugs, all if none is named")
    parser.add_argument("--storage", action="append", choices=STORAGES, help="one of them; may be repeated; all if left out")
    parser.add_argument("--minutes", type=float, default=1.0, help="on each storage")
    parser.add_argument("--round", type=float, default=ROUND, help="seconds of load before queues are emptied and judged")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000, help="of all choices; not of the processes' timing")
    parser.add_argument("--faults", action="append", help="only those whose name begins so; may be repeated; `none`: no fault at all")
    parser.add_argument("--folder", type=Path, help="made anew for histories and pages; in build/campaign if left out")
    return parser


def _run(given: argparse.Namespace, folder: Path) -> int:
    courses = []
    for storage in given.storage or STORAGES:
        place = folder / storage
        place.mkdir()
        courses.append(asyncio.run(_course(storage, place, given)))
        print(f"{storage}: the page is {courses[-1].write()}", flush=True)
    anomalies = sum(len(each.anomalies) for each in courses)
    verdict = f"{'FAILED' if anomalies else 'ok'}: {anomalies} anomalies, seed {given.seed}"
    print(" | ".join([verdict, *(each.summary() for each in courses)]))
    return 1 if anomalies else 0


async def _course(storage: str, folder: Path, given: argparse.Namespace) -> Course:
    with target(storage, folder / SERVERS) as started:
        kinds = chosen(nemeses(started), given.faults)
        course = Course(storage, given.seed, folder, started.left_out)
        print(f"{storage}: started; {len(kinds)} kinds of faults", flush=True)
        async for judged in rounds(started, kinds, folder, Plan(60 * given.minutes, given.round, given.seed)):
            _tell(storage, judged, course.add(judged))
    if not course.anomalies:
        shutil.rmtree(folder / SERVERS)
    return course


def chosen(kinds: Sequence[Nemesis], names: Sequence[str] | None) -> list[Nemesis]:
    """Those whose name begins with one of these; None: all."""
    return [each for each in kinds if names is None or each.kind.startswith(tuple(names))]


def _tell(who: str, judged: Judged, line: str) -> None:
    print(f"{who} {judged.seconds:6.1f} s  {line}", flush=True)
    for each in judged.anomalies[:10]:
        print(f"  {each.kind.upper()}: {each.text}", flush=True)


# ---- planted bugs -------------------------------------------------------------------------------------------------------


def _find(given: argparse.Namespace, folder: Path) -> int:
    """A campaign against each planted bug, until an anomaly names it."""
    names = [bug.name for bug in BUGS]
    if unknown := set(given.which) - set(names):
        raise SystemExit(f"no such bug: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    found = [_hunt(bug, folder, given.seed) for bug in BUGS if not given.which or bug.name in given.which]
    missed = [each for each in found if not each.kind]
    print(f"the page is {write_bank(found, folder)}")
    print(f"{'FAILED' if missed else 'ok'}: {len(found) - len(missed)} of {len(found)} planted bugs found, seed {given.seed}")
    return 1 if missed else 0


def _hunt(bug: PlantedBug, folder: Path, seed: int) -> Found:
    place, source = folder / bug.name, folder / f"{bug.name}-source"
    place.mkdir()
    found = asyncio.run(_search(bug, place, plant(bug, source), seed))
    shutil.rmtree(source)
    if found.kind:
        shutil.rmtree(place / SERVERS)
    print(f"{bug.name}: " + (f"{found.kind} after {found.seconds:.0f} s: {found.text}" if found.kind else "NOT FOUND"), flush=True)
    return found


async def _search(bug: PlantedBug, folder: Path, command: Sequence[str], seed: int) -> Found:
    found = Found(bug.name, bug.about, bug.storage, "", "", 0.0)
    with target(bug.storage, folder / SERVERS, command) as started:
        course = Course(f"{bug.storage} with the planted bug {bug.name}", seed, folder, started.left_out)
        kinds = chosen(nemeses(started), bug.faults)
        async for judged in rounds(started, kinds, folder, Plan(60 * PLANTED_MINUTES, PLANTED_ROUND, seed)):
            course.add(judged)
            if named := [each for each in judged.anomalies if each.kind.startswith(bug.found_as)]:
                found = found._replace(kind=named[0].kind, text=named[0].text, seconds=judged.seconds)
                break
    course.write()
    return found


# ---- kept histories -----------------------------------------------------------------------------------------------------


def _judge(histories: Sequence[Path]) -> int:
    """Judge kept histories again."""
    paths = [path for given in histories for path in (sorted(given.rglob("round-*.jsonl*")) if given.is_dir() else [given])]
    found = 0
    for path in paths:
        anomalies = checkers.check(read_round(path))
        found += len(anomalies)
        print(f"{path}: {len(anomalies)} anomalies")
        for each in anomalies:
            print(f"  {each.kind.upper()}: {each.text}")
    print(f"{'FAILED' if found else 'ok'}: {found} anomalies in {len(paths)} histories")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
