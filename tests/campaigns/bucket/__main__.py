"""The campaign of partitions in a bucket: the cluster's scenarios with an object store, faults of that store, and a second server of S3.

The object store answers as late as S3 Standard, or as `--median` and `--p99` say. `make test-bucket` runs all of it, after the stores'
suites, the specification and the simulation. The last line sums it up; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.campaigns.bucket.throttling import STRIKES, strike_with
from tests.campaigns.cluster import __main__ as cluster
from tests.campaigns.cluster.kills import Pace, kill_again_and_again
from tests.campaigns.kit.fleet import PostgresFleet
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import Traffic, judged
from tests.servers.faulty_bucket import faulty_bucket
from tests.servers.program_server import NoServerError
from tests.servers.versity_server import VersityServer


class Campaign(cluster.Campaign):
    name = "bucket"
    size = 3

    kills = cluster.Campaign.kills
    freeze = cluster.Campaign.freeze
    cuts = cluster.Campaign.cuts
    stops = cluster.Campaign.stops
    calls = cluster.Campaign.calls

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        super().__init__(given, folder, stack)
        self.bucket = self._faulty = stack.enter_context(faulty_bucket(given.median, given.p99))
        self.meta_in_bucket = given.meta

    def throttling(self, report: Report) -> None:
        """let the bucket throttle, fail, answer late, and lose answers"""
        with self._instances(report) as (_, traffic, _):
            strike_with(STRIKES, report, traffic, self._faulty, self._random, self._given.fault)

    def gateway(self, report: Report) -> None:
        """the same kills on versitygw, another server of S3"""
        try:
            VersityServer.install()
        except NoServerError as error:
            report.figure(f"NOT RUN: {error}")
            return
        with VersityServer() as versity:
            fleet = PostgresFleet(
                self._new_folder(report.name), self._postgres, self.size, bucket=versity, meta_in_bucket=self.meta_in_bucket
            )
            with judged(report, Traffic(fleet)) as traffic:
                kill_again_and_again(report, traffic, self._random, Pace(self._given.gateway, self._given.every))

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        super()._add_options(parser)
        parser.set_defaults(seconds=60.0, every=6.0, cut=5.0, creates=20, relays=100)
        parser.add_argument(
            "--fault", type=float, default=12.0, help="seconds of a fault that strikes every request; others last half as long"
        )
        parser.add_argument("--gateway", type=float, default=30.0, help="seconds of kills on versitygw")
        parser.add_argument("--meta", action="store_true", help="the meta store is in the bucket, too")
        parser.add_argument("--median", type=float, default=60.0, help="of a request's latency, in milliseconds")
        parser.add_argument("--p99", type=float, default=200.0)


if __name__ == "__main__":
    sys.exit(Campaign.run())
