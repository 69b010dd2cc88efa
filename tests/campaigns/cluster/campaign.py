"""The cluster's campaign: real processes under load that are killed, frozen, cut off and stopped, with a ledger outside.

`make test-cluster` runs all of it, `make test-cluster ARGS='kills --seconds 30'` a part. The last line sums it up; exit code 1 if anything
was wrong. What was aimed at and missed is said there as well, and is not wrong: it depends on the machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.campaigns.cluster.calls import run_calls
from tests.campaigns.cluster.cost import compare_workers
from tests.campaigns.cluster.cuts import run_cuts
from tests.campaigns.cluster.cutting import Switchboard
from tests.campaigns.cluster.fleet import Fleet, PostgresFleet, WorkerFleet, started
from tests.campaigns.cluster.freezing import run_freezing
from tests.campaigns.cluster.history import History
from tests.campaigns.cluster.kills import Pace, run_kills, run_stops
from tests.campaigns.cluster.report import Report
from tests.campaigns.cluster.scenarios import conduct
from tests.campaigns.cluster.traffic import Traffic
from tests.campaigns.crash.ledger import Tally
from tests.servers.postgres_server import PostgresServer

INSTANCES = 4


class Campaign:
    """Each scenario has a cluster of its own."""

    def __init__(self, given: argparse.Namespace, folder: Path, postgres: PostgresServer) -> None:
        self._given = given
        self._folder = folder
        self._postgres = postgres
        self._random = random.Random(given.seed)

    def kills(self, report: Report) -> None:
        """kill −9 one of four instances again and again"""
        with self._instances(report) as (fleet, traffic, history):
            run_kills(report, fleet, traffic, history, self._random, self._pace())

    def workers(self, report: Report) -> None:
        """kill −9 one of four workers again and again"""
        fleet = WorkerFleet(self._new_folder("workers"), INSTANCES)
        with self._loaded(report, fleet) as traffic:
            run_kills(report, fleet, traffic, None, self._random, self._pace())

    def freeze(self, report: Report) -> None:
        """SIGSTOP an owner, let others take over, SIGCONT"""
        with self._instances(report) as (fleet, traffic, history):
            run_freezing(report, fleet, traffic, history, self._random, self._given.freeze)

    def cuts(self, report: Report) -> None:
        """cut one instance off from the meta store, from storage, from the others"""
        with Switchboard() as switchboard, self._instances(report, switchboard) as (fleet, traffic, history):
            run_cuts(report, fleet, traffic, history, self._random, self._given.cut)

    def stops(self, report: Report) -> None:
        """stop each instance in good order under load"""
        with self._instances(report) as (fleet, traffic, history):
            run_stops(report, fleet, traffic, history, self._random)

    def calls(self, report: Report) -> None:
        """a new queue's first item, an item that is waited for elsewhere, a complete over three instances with one down"""
        with self._instances(report) as (fleet, traffic, history):
            run_calls(report, fleet, traffic, history, self._random, self._given.creates, self._given.relays)

    def cost(self, report: Report) -> None:
        """CPU per item and throughput of 1, 2 and 4 workers"""
        compare_workers(report, self._new_folder("cost"), self._given.slices, self._given.slice)

    def _pace(self) -> Pace:
        return Pace(self._given.seconds, self._given.every)

    def _new_folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder

    @contextmanager
    def _instances(self, report: Report, switchboard: Switchboard | None = None) -> Iterator[tuple[PostgresFleet, Traffic, History]]:
        fleet = PostgresFleet(self._new_folder(report.name), self._postgres, INSTANCES, switchboard)
        with self._loaded(report, fleet) as traffic:
            yield fleet, traffic, fleet.history()

    @contextmanager
    def _loaded(self, report: Report, fleet: Fleet) -> Iterator[Traffic]:
        """With the queues; nothing is produced yet."""
        traffic = Traffic(fleet, Tally())
        with started(fleet):
            try:
                traffic.create_queues()
                report.say(f"{fleet.homes} instances are ready")
                yield traffic
            finally:
                traffic.end()


SCENARIOS: dict[str, Callable[[Campaign, Report], None]] = {
    "kills": Campaign.kills,
    "workers": Campaign.workers,
    "freeze": Campaign.freeze,
    "cuts": Campaign.cuts,
    "stops": Campaign.stops,
    "calls": Campaign.calls,
    "cost": Campaign.cost,
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make test-cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = "; ".join(f"{name}: {scenario.__doc__}" for name, scenario in SCENARIOS.items())
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], default=[], help=f"all if none is named. {told}")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--seconds", type=float, default=300.0, help="of kills, in `kills` and in `workers`")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--freeze", type=float, default=15.0, help="seconds that an owner stands still")
    parser.add_argument("--cut", type=float, default=10.0, help="seconds of each cut")
    parser.add_argument("--creates", type=int, default=50, help="new queues")
    parser.add_argument("--relays", type=int, default=500, help="items that are waited for elsewhere")
    parser.add_argument("--slices", type=int, default=5, help="counted slices of each number of workers")
    parser.add_argument("--slice", type=float, default=3.0, help="seconds of a slice")
    parser.add_argument("--keep", type=Path, help="a folder, made anew, that keeps logs and data")
    return parser


def main() -> int:
    given = arguments().parse_args()
    begin = lambda folder, stack: Campaign(given, folder, stack.enter_context(PostgresServer()))  # noqa: E731
    return conduct("cluster", given, SCENARIOS, begin, f", seed {given.seed}")


if __name__ == "__main__":
    sys.exit(main())
