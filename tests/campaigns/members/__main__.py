"""The campaign on groups of many members: real processes over one PostgreSQL that join, die, freeze, and die in numbers.

`make test-members` runs it, `make test-members ARGS='--members 150'` with more of them. The last line sums it up; exit code 1 if anything
was wrong. What was aimed at and missed is said there as well, and is not wrong: it depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from tests.campaigns.kit import command
from tests.campaigns.kit.fleet import postgres_url
from tests.campaigns.kit.report import Report, most_and_median
from tests.campaigns.members.crowd import PARAMETERS, Crowd
from tests.servers import pids
from tests.servers.postgres_server import PostgresServer

SETTLED_AIM = 3.0
"""Seconds until a join, or a death since it could be known, is settled."""
SETTLED_WITHIN = 15.0
SILENT = PARAMETERS.member_timeout / 1_000
REST = 10.0
"""Seconds at rest for which the load is measured."""
AT_ONCE = 10


class Campaign(command.Campaign):
    name = "members"

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        super().__init__(given, folder, stack)
        # Each member has connections for its calls, and one for notifications.
        connections = str(given.members * 10 + 50)
        self._postgres = stack.enter_context(PostgresServer(settings={"max_connections": connections}))
        self._random = random.Random(given.seed)

    def members(self, report: Report) -> None:
        """join, kill −9, SIGSTOP, and ten kills at once"""
        asyncio.run(self._run(report))

    async def _run(self, report: Report) -> None:
        url = postgres_url({name: str(value) for name, value in conninfo_to_dict(self._postgres.dsn()).items()})
        async with Crowd(url) as crowd:
            crowd.join(self._given.members)
            report.figure(f"{self._given.members} members joined at once, settled after {await crowd.settled():.1f} s")
            await self._rest(report, crowd)
            await self._repeat(report, crowd, "joined", 0.0, self._join)
            await self._repeat(report, crowd, "was killed", SILENT, self._kill)
            await self._repeat(report, crowd, "came back from a freeze", 0.0, self._freeze)
            crowd.kill(*self._random.sample(sorted(crowd.alive), AT_ONCE))
            report.figure(f"{AT_ONCE} killed at once: settled {await crowd.settled() - SILENT:.1f} s after it could be known")

    async def _rest(self, report: Report, crowd: Crowd) -> None:
        before, began = crowd.cpu(self._postgres.pids()[0]), time.monotonic()
        await asyncio.sleep(REST)
        server, members = (now - then for now, then in zip(crowd.cpu(self._postgres.pids()[0]), before, strict=True))
        seconds = time.monotonic() - began
        report.figure(
            f"at rest PostgreSQL took {server / seconds:.2f} of a core, a member {members / seconds / len(crowd.alive):.2%} of one"
        )

    async def _repeat(self, report: Report, crowd: Crowd, what: str, known: float, act: Callable[[Crowd], Awaitable[None]]) -> None:
        """`known`: seconds after which others can know of it."""
        times = []
        for _ in range(self._given.times):
            await act(crowd)
            seconds = await crowd.settled() - known
            report.within(f"a member {what}: settling", seconds, SETTLED_WITHIN)
            times.append(seconds)
        since = " since it could be known" if known else ""
        report.figure(f"a member {what}, {len(times)} times: settled after {most_and_median(times)}{since}")
        report.aim(f"settled after a member {what}", max(times), SETTLED_AIM)

    async def _join(self, crowd: Crowd) -> None:
        crowd.join()

    async def _kill(self, crowd: Crowd) -> None:
        crowd.kill(self._random.choice(sorted(crowd.alive)))

    async def _freeze(self, crowd: Crowd) -> None:
        """Until it is given up and the others have settled; then it comes back, which has to settle as well."""
        victim = self._random.choice(sorted(crowd.alive))
        pids.stop(victim)
        crowd.alive.remove(victim)
        await crowd.settled()
        os.kill(victim, signal.SIGCONT)
        crowd.alive.add(victim)

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
        parser.add_argument("--members", type=int, default=100, help="processes")
        parser.add_argument("--times", type=int, default=10, help="of each event")


if __name__ == "__main__":
    sys.exit(Campaign.run())
