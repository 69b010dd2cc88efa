"""The campaign of partitions in a bucket: a cluster whose instances are killed, stopped and cut off under load, with a ledger outside.

Its object store answers as late as S3 Standard, or as `--median` and `--p99` say. `make test-bucket` runs all of it, after the store's
suites, the specification and the simulation. The last line sums it up; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.bucket_costs import bucket
from tests.campaigns.cluster.cuts import cut_every_line
from tests.campaigns.cluster.kills import Pace, kill_again_and_again, stop_one_after_the_other
from tests.campaigns.kit import command
from tests.campaigns.kit.fleet import PostgresFleet
from tests.campaigns.kit.lines import Switchboard
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import Traffic, judged
from tests.servers.postgres_server import PostgresServer

INSTANCES = 3


class Campaign(command.Campaign):
    name = "bucket"

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        super().__init__(given, folder, stack)
        self._postgres = stack.enter_context(PostgresServer())
        self._bucket = stack.enter_context(bucket(given.median, given.p99))
        self._random = random.Random(given.seed)

    def kills(self, report: Report) -> None:
        """kill −9 one of three instances again and again"""
        with self._instances(report) as (_, traffic):
            kill_again_and_again(report, traffic, self._random, Pace(self._given.seconds, self._given.every))

    def stops(self, report: Report) -> None:
        """stop each instance in good order under load"""
        with self._instances(report) as (_, traffic):
            stop_one_after_the_other(report, traffic, self._random)

    def cuts(self, report: Report) -> None:
        """cut one instance off from the meta store, from the bucket, from the others"""
        with Switchboard() as switchboard, self._instances(report, switchboard) as (fleet, traffic):
            cut_every_line(report, traffic, fleet, self._random, self._given.cut)

    @contextmanager
    def _instances(self, report: Report, switchboard: Switchboard | None = None) -> Iterator[tuple[PostgresFleet, Traffic]]:
        fleet = PostgresFleet(
            self._new_folder(report.name), self._postgres, INSTANCES, switchboard, bucket=self._bucket, meta_in_bucket=self._given.meta
        )
        with judged(report, Traffic(fleet)) as traffic:
            yield fleet, traffic

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
        parser.add_argument("--seconds", type=float, default=300.0, help="of kills")
        parser.add_argument("--every", type=float, default=6.0, help="seconds between two kills")
        parser.add_argument("--cut", type=float, default=10.0, help="seconds of each cut")
        parser.add_argument("--meta", action="store_true", help="the meta store is in the bucket, too")
        parser.add_argument("--median", type=float, default=60.0, help="of a request's latency, in milliseconds")
        parser.add_argument("--p99", type=float, default=200.0)


if __name__ == "__main__":
    sys.exit(Campaign.run())
