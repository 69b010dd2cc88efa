"""The campaign of rebalances: real processes whose partitions come, go and move under load, with a ledger outside.

`make test-rebalance` runs all of it, `make test-rebalance ARGS='order --items 2000'` a part. The last line sums it up; exit code 1 if
anything was wrong. What was aimed at and missed is said there as well, and is not wrong: it depends on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.campaigns.kit import command
from tests.campaigns.kit.fleet import started
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import judged
from tests.campaigns.rebalance.cancels import cancel_at_every_step
from tests.campaigns.rebalance.copying import run_copies
from tests.campaigns.rebalance.mixed_fleet import LOCAL, Backend, MixedFleet
from tests.campaigns.rebalance.moves import QUEUES, run_moves
from tests.campaigns.rebalance.moving_traffic import MovingTraffic
from tests.campaigns.rebalance.operations import run_operations
from tests.campaigns.rebalance.order import move_in_order
from tests.campaigns.rebalance.spread import NAMES, run_spread
from tests.campaigns.rebalance.step_kills import Way, kill_alone_at_every_step, strike_at_every_step
from tests.servers.faulty_bucket import faulty_bucket
from tests.servers.postgres_server import PostgresServer

INSTANCES = 3
STEPPED = {"orders": 2, "single": 1}
"""Few partitions, so that each step of a move is one of few."""


class Campaign(command.Campaign):
    name = "rebalance"

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        super().__init__(given, folder, stack)
        self._postgres = stack.enter_context(PostgresServer())
        self._bucket = stack.enter_context(faulty_bucket(given.median, given.p99)) if given.bucket else None

    def alone(self, report: Report) -> None:
        """4 → 12 → 3 partitions and from SQLite to PostgreSQL, or a bucket, and back, on a single server; no client may notice"""
        self._moves(report, 1)

    def together(self, report: Report) -> None:
        """the same on a cluster"""
        self._moves(report, INSTANCES)

    def kills(self, report: Report) -> None:
        """kill −9 the coordinator at every step of a move, just before the step is recorded and just after"""
        self._strikes(report, {"orders": ("before", "after"), "single": ("before", "after") if self._given.both_ways else ("after",)})

    def freezes(self, report: Report) -> None:
        """freeze the coordinator at every step of a move, and let it go on when others have done the rest"""
        self._strikes(report, {"orders": ("frozen",)})

    def restarts(self, report: Report) -> None:
        """kill −9 a single server after every step of a move, and start it again"""
        for queue in self._queues():
            fleet = self._fleet(f"{report.name}-{queue}", 1)
            with judged(report, MovingTraffic(fleet, STEPPED, by_client=False)) as traffic:
                kill_alone_at_every_step(report, fleet, traffic, queue)

    def cancels(self, report: Report) -> None:
        """cancel a move at each of its steps"""
        for queue in self._queues():
            with self._stepped(report, queue, Backend()) as (fleet, traffic):
                cancel_at_every_step(report, fleet, traffic, fleet.steps(), queue)

    def order(self, report: Report) -> None:
        """a queue with one partition is moved while it is filled and emptied, and stays in order"""
        for size in (1, INSTANCES):
            with self._unloaded(report, self._fleet(f"{report.name}{size}", size)) as fleet:
                move_in_order(report, fleet, self._given.items)

    def spread(self, report: Report) -> None:
        """how 100 partitions, and one, are divided among three backends"""
        with self._unloaded(report, self._fleet(report.name, 1, {name: Backend() for name in NAMES})) as fleet:
            run_spread(report, fleet)

    def copies(self, report: Report) -> None:
        """a backlog without consumers is copied, with and without a rate"""
        with self._unloaded(report, self._fleet(report.name, 1)) as fleet:
            run_copies(report, fleet, self._given.backlog)

    def operations(self, report: Report) -> None:
        """what operators do: add, remove, a new backend, vacate one, stop and start its storage"""
        with PostgresServer() as storage:
            fleet = MixedFleet(self._new_folder(report.name), storage, 2, on_one_machine=True, bucket=self._bucket)
            with judged(report, MovingTraffic(fleet, QUEUES, by_client=True)) as traffic:
                run_operations(report, fleet, traffic, self._bucket or storage)

    def _queues(self) -> list[str]:
        return [queue for queue in STEPPED if self._given.queue in (queue, None)]

    def _strikes(self, report: Report, ways: Mapping[str, tuple[Way, ...]]) -> None:
        for queue, those in ((queue, ways[queue]) for queue in self._queues() if queue in ways):
            # An instance that is frozen while it writes to an SQLite file keeps the others from that file; docs/project/tasks.md says so.
            shared = Backend(dsn=self._postgres.dsn()) if self._bucket is None else Backend(bucket=self._bucket)
            local = shared if "frozen" in those else Backend()
            with self._stepped(report, queue, local) as (fleet, traffic):
                traffic.history = fleet.history()
                strike_at_every_step(report, fleet, traffic, fleet.steps(), queue, those)

    def _moves(self, report: Report, size: int) -> None:
        fleet = self._fleet(report.name, size)
        with judged(report, MovingTraffic(fleet, QUEUES, by_client=True)) as traffic:
            run_moves(report, fleet, traffic, self._given.seconds)

    def _fleet(self, name: str, size: int, backends: Mapping[str, Backend] | None = None) -> MixedFleet:
        return MixedFleet(self._new_folder(name), self._postgres, size, backends, bucket=self._bucket)

    @contextmanager
    def _unloaded(self, report: Report, fleet: MixedFleet) -> Iterator[MixedFleet]:
        with started(fleet):
            yield fleet
        for line in fleet.check_logs():
            report.fail(line)

    @contextmanager
    def _stepped(self, report: Report, queue: str, local: Backend) -> Iterator[tuple[MixedFleet, MovingTraffic]]:
        fleet = self._fleet(f"{report.name}-{queue}", INSTANCES)
        fleet.backends[LOCAL] = local
        with judged(report, MovingTraffic(fleet, STEPPED, by_client=False)) as traffic:
            yield fleet, traffic

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=15.0, help="of load before anything moves, in `alone` and `together`")
        parser.add_argument("--items", type=int, default=10_000, help="that wait in the queue of `order` when it is moved")
        parser.add_argument("--backlog", type=int, default=200_000, help="items of `copies`")
        parser.add_argument("--bucket", action="store_true", help="a bucket instead of PostgreSQL for partitions")
        parser.add_argument("--median", type=float, default=60.0, help="of a request's latency to the bucket, in milliseconds")
        parser.add_argument("--p99", type=float, default=200.0)
        parser.add_argument("--queue", choices=[*STEPPED], help="of `kills`, `restarts` and `cancels`: only this one is moved")
        parser.add_argument(
            "--both-ways", action="store_true", help="of `kills`: both before and after, also with the queue that keeps its order"
        )


if __name__ == "__main__":
    sys.exit(Campaign.run())
