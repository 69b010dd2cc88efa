"""The campaign of captures: simulated schedules, and real streams read by real processes that are killed, frozen and started again.

`make test-tasks` runs all of it, `make test-tasks ARGS='schedules --seeds 2000'` a part. The last line sums it up; exit code 1 if
anything was wrong.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

from tests.campaigns.kit import command
from tests.campaigns.kit.report import Report
from tests.campaigns.tasks.cost import run_cost
from tests.campaigns.tasks.processes import BatchTasks, PlainTasks, SparkTasks
from tests.campaigns.tasks.schedules import run_schedules
from tests.campaigns.tasks.shards import Make, run_frozen, run_kafka, run_shards
from tests.campaigns.tasks.tables import run_tables
from tests.servers.kafka_server import KafkaServer, NoServerError


class Campaign(command.Campaign):
    name = "tasks"

    def schedules(self, report: Report) -> None:
        """simulated fault schedules of the protocol, and what breaks without each of its rules"""
        run_schedules(report, self._new_folder(report.name), self._given.seeds, self._given.first)

    def kinesis(self, report: Report) -> None:
        """a stream goes from 4 to 16 to 5 shards while it is written to, and its tasks are killed"""
        given = self._given
        run_shards(report, self._new_folder(report.name), self._make, given.seconds, given.every, given.seed)

    def postgres(self, report: Report) -> None:
        """tables under pgbench, database and tasks are killed; from the queue the tables are made again, row by row"""
        run_tables(report, self._new_folder(report.name), self._make, self._given.seconds, self._given.seed)

    def batches(self, report: Report) -> None:
        """the same, read by micro-batches of a streaming query"""
        run_tables(report, self._new_folder(report.name), BatchTasks, self._given.seconds, self._given.seed)

    def frozen(self, report: Report) -> None:
        """a task stands still until others read what was its own, and wakes up"""
        run_frozen(report, self._new_folder(report.name), self._make, self._given.freezes, self._given.seed)

    def kafka(self, report: Report) -> None:
        """as `kinesis`, smaller, with log and election in Kafka, whose server is killed once"""
        given = self._given
        with ExitStack() as stack:
            try:
                server = stack.enter_context(KafkaServer())
            except NoServerError as error:
                report.say(f"NOT RUN: {error}")
                report.missed.append("not run: there is no Kafka")
                return
            run_kafka(report, self._new_folder(report.name), self._make, server, given.seconds / 2, given.every, given.seed)

    def cost(self, report: Report) -> None:
        """what a change costs 200 tasks with 2,000 partitions, in messages, bytes and virtual time"""
        run_cost(report, self._given.members, self._given.partitions)

    @property
    def _make(self) -> Make:
        return PlainTasks if self._given.plain else SparkTasks

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=50_000, help="of `schedules`")
        parser.add_argument("--first", type=int, default=0, help="of `schedules`: the first seed")
        parser.add_argument("--plain", action="store_true", help="tasks are plain processes, without Spark (but for `batches`)")
        parser.add_argument(
            "--seconds", type=float, default=90.0, help="of trouble in `kinesis`, `postgres` and `batches`; half as many in `kafka`"
        )
        parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills in `kinesis` and `kafka`")
        parser.add_argument("--freezes", type=int, default=4, help="of `frozen`: how many tasks are frozen, one after the other")
        parser.add_argument("--members", type=int, default=200, help="of `cost`: tasks")
        parser.add_argument("--partitions", type=int, default=2_000, help="of `cost`")
        parser.add_argument("--seed", type=int, default=0, help="whom what happens to")


if __name__ == "__main__":
    sys.exit(Campaign.run())
