"""Queues that go by keys, on real servers: order with kills and failures, limits that are never exceeded, a flood beside a quiet key, and
shares by weight.

`make test-keys` runs all of it, `make test-keys ARGS='order --keys 10000 --each 10'` a part. The last line sums it up; exit code 1 if
anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.campaigns.keys.limits_run import LimitsRun
from tests.campaigns.keys.order_run import OrderRun, Plan
from tests.campaigns.keys.queue_limits_run import QueueLimitsRun
from tests.campaigns.keys.quiet_run import QuietRun
from tests.campaigns.keys.shares_run import SharesRun
from tests.campaigns.kit import command
from tests.campaigns.kit.report import Report, quantile

WAIT_AIM = 2.0
USED_AIM = 0.95
SHARE_AIM = 0.05


class Campaign(command.Campaign):
    name = "keys"

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        super().__init__(given, folder, stack)
        given.seed = random.randrange(1 << 16) if given.seed is None else given.seed

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--keys", type=int, default=1_000_000)
        parser.add_argument("--each", type=int, default=10, help="items of each key")
        parser.add_argument("--consumers", type=int, default=64)
        parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between kills of the server; 0: none")
        parser.add_argument("--flood", type=int, default=1_000_000, help="items of the key that floods")
        parser.add_argument("--leases", type=int, default=10_000, help="by which shares are measured")
        parser.add_argument("--seconds", type=float, default=20.0, help="of limits and rates")
        parser.add_argument("--seed", type=int)

    def order(self, report: Report) -> None:
        """many keys and consumers, retries, leases that run out, kills of the server, rebalances: no item overtakes another of its key"""
        plan = Plan(self._given.keys, self._given.each, self._given.consumers, kill_every=self._given.kill_every)
        run = OrderRun(plan, self._new_folder("order"), self._given.seed)
        asyncio.run(run.run())
        counts = run.counts
        for line in [*run.ledger.wrong[:20], *counts.problems]:
            report.fail(line)
        lost = int((run.ledger.possible < plan.items).sum())
        if lost:
            report.fail(f"items of {lost} keys were never delivered")
        report.figure(
            f"{counts.produced:,} items of {plan.keys:,} keys, {run.ledger.delivered:,} deliveries to {plan.consumers} consumers, "
            f"{counts.kills} kills, {counts.retried:,} retried, {counts.released:,} released, {counts.dropped:,} dropped, "
            f"{counts.unknown:,} in doubt, {counts.repeated:,} calls repeated: {len(run.ledger.wrong)} inversions"
        )
        for line in counts.rebalances:
            report.figure(f"rebalanced {line}")

    def limits(self, report: Report) -> None:
        """a limit and a rate for each of many keys: never exceeded, and used up"""
        run = LimitsRun(self._new_folder("limits"), self._given.seconds)
        asyncio.run(run.run())
        for line in run.wrong[:20]:
            report.fail(line)
        for what, used in run.used.items():
            report.figure(f"{what}: {used:.1%} used, most at once {run.most[what]}")
            if used < USED_AIM:
                report.fail(f"{what}: only {used:.1%} of what is allowed was used")

    def queue(self, report: Report) -> None:
        """a rate and a limit for a whole queue, served by several processes that are killed: never exceeded, and used up"""
        run = QueueLimitsRun(self._new_folder("queue"), self._given.seconds, self._given.seed)
        asyncio.run(run.run())
        for line in run.wrong:
            report.fail(line)
        report.figure(f"{run.ahead:.0f} items ahead of the rate and {run.most} leased at once at most, through {run.kills} kills")
        for what, used in run.used.items():
            report.figure(f"{what}: {used:.1%} used")
            if used < USED_AIM:
                report.fail(f"{what}: only {used:.1%} of what is allowed was used")

    def quiet(self, report: Report) -> None:
        """a key floods the queue, and another has an item now and then"""
        run = QuietRun(self._new_folder("quiet"), self._given.flood)
        asyncio.run(run.run())
        idle, flooded = (quantile(each, 0.99) for each in (run.idle, run.flooded))
        report.figure(
            f"a quiet key's item waits {1_000 * idle:.0f} ms (p99) without, {1_000 * flooded:.0f} ms beside {run.flood:,} items of another"
        )
        report.aim("p99 beside a flood, compared with none", flooded / idle, WAIT_AIM)

    def shares(self, report: Report) -> None:
        """a thousand tenants with weights from 1 to 10, all of which wait: each is served by its weight"""
        run = SharesRun(self._new_folder("shares"), self._given.leases, self._given.seed)
        asyncio.run(run.run())
        report.figure(f"{len(run.weights):,} tenants, {run.leases:,} leases of {run.items:,} items: {run.worst:.1%} from its share at most")
        report.aim("distance from a share", run.worst, SHARE_AIM)


if __name__ == "__main__":
    sys.exit(Campaign.run())
