"""The cluster's campaign: real processes under load that are killed, frozen, cut off and stopped, with a ledger outside.

`make test-cluster` runs all of it, `make test-cluster ARGS='kills --seconds 30'` a part. The last line sums it up; exit code 1 if anything
was wrong. What was aimed at and missed is said there as well, and is not wrong: it depends on the machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

from tests.campaigns.cluster.calls import complete_while_one_is_down, create_and_produce, relay
from tests.campaigns.cluster.cost import compare_workers
from tests.campaigns.cluster.cuts import cut_every_line
from tests.campaigns.cluster.freezing import freeze_an_owner
from tests.campaigns.cluster.kills import Pace, kill_again_and_again, stop_one_after_the_other
from tests.campaigns.cluster.many_partitions import take_over_many
from tests.campaigns.kit import command
from tests.campaigns.kit.fleet import Bucket, PostgresFleet, WorkerFleet
from tests.campaigns.kit.history import History
from tests.campaigns.kit.lines import Switchboard
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import Traffic, judged
from tests.servers.postgres_server import PostgresServer

WORKERS = 4


class Campaign(command.Campaign):
    name = "cluster"
    size: ClassVar[int] = 4
    """Instances of a cluster."""
    bucket: Bucket | None = None
    """Where the partitions are, if not in PostgreSQL."""
    meta_in_bucket = False

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        super().__init__(given, folder, stack)
        self._postgres = stack.enter_context(PostgresServer())
        self._random = random.Random(given.seed)

    def kills(self, report: Report) -> None:
        """kill −9 one of the instances again and again"""
        with self._instances(report) as (_, traffic, _):
            kill_again_and_again(report, traffic, self._random, self._pace())

    def workers(self, report: Report) -> None:
        """kill −9 one of the workers again and again"""
        with judged(report, Traffic(WorkerFleet(self._new_folder("workers"), WORKERS))) as traffic:
            kill_again_and_again(report, traffic, self._random, self._pace())

    def freeze(self, report: Report) -> None:
        """SIGSTOP an owner, let others take over, SIGCONT"""
        with self._instances(report) as (_, traffic, history):
            freeze_an_owner(report, traffic, history, self._random, self._given.freeze)

    def cuts(self, report: Report) -> None:
        """cut one instance off from the meta store, from storage, from the others"""
        with Switchboard() as switchboard, self._instances(report, switchboard) as (fleet, traffic, _):
            cut_every_line(report, traffic, fleet, self._random, self._given.cut)

    def stops(self, report: Report) -> None:
        """stop each instance in good order under load"""
        with self._instances(report) as (_, traffic, _):
            stop_one_after_the_other(report, traffic, self._random)

    def calls(self, report: Report) -> None:
        """a new queue's first item, an item that is waited for elsewhere, a complete over three instances with one down"""
        with self._instances(report) as (_, traffic, history):
            create_and_produce(report, traffic, self._random, self._given.creates)
            relay(report, traffic, self._random, self._given.relays)
            complete_while_one_is_down(report, traffic, history, self._random)

    def takeover(self, report: Report) -> None:
        """kill −9 one instance of a cluster with thousands of partitions"""
        folder = self._new_folder("takeover")
        fleet = PostgresFleet(folder, self._postgres, self.size, bucket=self.bucket, meta_in_bucket=self.meta_in_bucket)
        take_over_many(report, fleet, self._given.partitions)

    def cost(self, report: Report) -> None:
        """CPU per item and throughput of 1, 2 and 4 workers"""
        compare_workers(report, self._new_folder("cost"), self._given.slices, self._given.slice)

    def _pace(self) -> Pace:
        return Pace(self._given.seconds, self._given.every)

    @contextmanager
    def _instances(self, report: Report, switchboard: Switchboard | None = None) -> Iterator[tuple[PostgresFleet, Traffic, History]]:
        folder = self._new_folder(report.name)
        fleet = PostgresFleet(folder, self._postgres, self.size, switchboard, bucket=self.bucket, meta_in_bucket=self.meta_in_bucket)
        with judged(report, Traffic(fleet)) as traffic:
            traffic.history = history = fleet.history()
            yield fleet, traffic, history

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
        parser.add_argument("--seconds", type=float, default=300.0, help="of kills, in `kills` and in `workers`")
        parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
        parser.add_argument("--freeze", type=float, default=15.0, help="seconds that an owner stands still")
        parser.add_argument("--cut", type=float, default=10.0, help="seconds of each cut")
        parser.add_argument("--creates", type=int, default=50, help="new queues")
        parser.add_argument("--relays", type=int, default=500, help="items that are waited for elsewhere")
        parser.add_argument("--partitions", type=int, default=10_000, help="of the cluster in `takeover`")
        parser.add_argument("--slices", type=int, default=5, help="counted slices of each number of workers")
        parser.add_argument("--slice", type=float, default=3.0, help="seconds of a slice")


if __name__ == "__main__":
    sys.exit(Campaign.run())
