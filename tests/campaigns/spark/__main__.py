"""The campaign of Spark: drivers, tasks, executors and servers that are killed at chosen points, with a ledger over the sinks.

`make test-spark` runs all of it, `make test-spark ARGS='kills --rounds 1'` a part. The last line sums it up; exit code 1 if anything was
wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.campaigns.kit import command
from tests.campaigns.kit.report import Report
from tests.campaigns.spark.control import run_control
from tests.campaigns.spark.driver_kills import POINTS, run_kills
from tests.campaigns.spark.shared import run_late, run_shared
from tests.campaigns.spark.trouble import run_idle, run_moved, run_servers, run_workers
from tests.campaigns.spark.versions import OTHERS, OWN_PYTHON, run_versions
from tests.campaigns.spark.volume import run_volume
from tests.spark.spark_standalone_kills import run_standalone

_NOT_OURS = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS")


class Campaign(command.Campaign):
    name = "spark"

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        super().__init__(given, folder, stack)
        # What a user's shell says of Spark and of servers is not for these.
        for name in [name for name in os.environ if name in _NOT_OURS or (name.startswith("SLUICEWAY_") and "_TEST_" not in name)]:
            del os.environ[name]
        os.environ["no_proxy"] = "*"

    def kills(self, report: Report) -> None:
        """kill −9 the driver, with all that belongs to it, at each stage of a batch: the first, a middle one and the last"""
        run_kills(report, self._new_folder(report.name), self._given.rounds, self._given.point or ())

    def control(self, report: Report) -> None:
        """sources and sinks that do one thing wrong must be found out"""
        run_control(report, self._new_folder(report.name))

    def workers(self, report: Report) -> None:
        """kill −9 the processes of tasks in mid-task"""
        run_workers(report, self._new_folder(report.name))

    def servers(self, report: Report) -> None:
        """kill −9 the server in mid-batch, six times in a query, and start it again; on SQLite and on PostgreSQL"""
        run_servers(report, self._new_folder(report.name))

    def moved(self, report: Report) -> None:
        """rebalance the queue in mid-batch, again and again; on SQLite and on PostgreSQL"""
        run_moved(report, self._new_folder(report.name))

    def idle(self, report: Report) -> None:
        """a query that has nothing to do holds no lease"""
        run_idle(report, self._new_folder(report.name))

    def shared(self, report: Report) -> None:
        """two queries of one queue with random outcomes and triggers: drivers and servers are killed, and it is rebalanced 8 → 3 → 12"""
        run_shared(report, self._new_folder(report.name), seed=self._given.seed)

    def late(self, report: Report) -> None:
        """a driver that comes back when its leases have run out is refused in words, and goes on if it may"""
        run_late(report, self._new_folder(report.name))

    def standalone(self, report: Report) -> None:
        """a standalone cluster against two instances: executors and owners are killed in mid-batch"""
        run_standalone(report, self._new_folder(report.name))

    def volume(self, report: Report) -> None:
        """many items of 1 KB through ingest, process and archive, with 4 GB for Spark: flat memory, nothing lost"""
        run_volume(report, self._new_folder(report.name), self._given.items)

    def versions(self, report: Report) -> None:
        """the tests of Spark with the other PySpark that is supported; with other Pythons, too, if they are named"""
        run_versions(report, self._new_folder(report.name), self._given.pyspark or OTHERS, self._given.python or (OWN_PYTHON,))

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=3, choices=[1, 2, 3], help="of `kills`: in how many batches at each point")
        parser.add_argument(
            "--point", action="append", choices=[point.name for point in POINTS], help="of `kills`: only this one; may be repeated"
        )
        parser.add_argument("--seed", type=int, default=1, help="of `shared`: for its outcomes, triggers and kills")
        parser.add_argument("--items", type=int, default=1_000_000, help="of `volume`")
        parser.add_argument("--python", action="append", help="of `versions`: under this one, such as python3.13; may be repeated")
        parser.add_argument(
            "--pyspark", action="append", help=f"of `versions`: this version instead of {', '.join(OTHERS)}; may be repeated"
        )


if __name__ == "__main__":
    sys.exit(Campaign.run())
