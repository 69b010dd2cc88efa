"""The upgrade's campaign: servers of two releases under load, replaced one by one, there and back, with kills in between; then finalized.

`make test-upgrade` runs all of it, `make test-upgrade ARGS='single --rounds 4'` a part. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.campaigns.kit import command
from tests.campaigns.kit.fleet import Fleet, Instance, PostgresFleet
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import Traffic, judged
from tests.campaigns.upgrade.releases import THIS, later
from tests.campaigns.upgrade.rolling import roll
from tests.servers.postgres_server import PostgresServer

SIZE = 3


class Campaign(command.Campaign):
    name = "upgrade"

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        super().__init__(given, folder, stack)
        self._stack = stack
        self._random = random.Random(given.seed)
        self._later = later(self._new_folder("release"))

    def cluster(self, report: Report) -> None:
        """three instances on PostgreSQL, one by one"""
        postgres = self._stack.enter_context(PostgresServer())
        self._roll(report, PostgresFleet(self._new_folder("cluster"), postgres, SIZE))

    def single(self, report: Report) -> None:
        """one server on SQLite"""
        self._roll(report, Fleet([Instance(self._new_folder("single"), "single", lambda _: "")]))

    def _roll(self, report: Report, fleet: Fleet) -> None:
        with judged(report, Traffic(fleet)) as traffic:
            roll(report, traffic, self._random, THIS, self._later, self._given.rounds)

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
        parser.add_argument("--rounds", type=int, default=20, help="times that all instances are replaced")


if __name__ == "__main__":
    sys.exit(Campaign.run())
