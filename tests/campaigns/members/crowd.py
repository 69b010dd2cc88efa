"""Many members of one group over PostgreSQL, watched through the group's own records."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from sluiceway.bench.servers import family_cpu
from sluiceway.core.group.group_records import GroupView, Keys, read_group
from sluiceway.group import Parameters, define, open_meta_store
from tests.servers import pids

GROUP = "crowd"
KEYS = Keys(GROUP)
ITEMS = [f"k7f3q2ma.{number}" for number in range(1_000)]
PARAMETERS = Parameters(settle_timeout=100, round_interval=200, beat_interval=500, lease_timeout=3_000, member_timeout=4_000)
"""Those of a cluster."""
LOOK = 0.05
"""Seconds between two looks of the observer."""
PATIENCE = 120.0


class Crowd:
    """Processes that are members of the group. `alive`: their ids."""

    def __init__(self, url: str) -> None:
        self._store = open_meta_store(url)
        command = [sys.executable, "-m", "tests.campaigns.members.forked_members", url, GROUP]
        self._forker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.alive: set[int] = set()

    async def __aenter__(self) -> Self:
        await define(self._store, GROUP, ITEMS, parameters=PARAMETERS)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._forker.kill()
        self._forker.wait()
        await self._store.close()

    def join(self, count: int = 1) -> None:
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        print(count, file=self._forker.stdin, flush=True)
        self.alive |= {int(self._forker.stdout.readline()) for _ in range(count)}

    def kill(self, *victims: int) -> None:
        for pid in victims:
            pids.kill(pid)
            self.alive.remove(pid)

    async def settled(self) -> float:
        """Seconds until the members that are alive, and no others, have all items between them, and have stopped what they gave away."""
        began = time.monotonic()
        while not self._is_settled(await self._look()):
            if time.monotonic() - began > PATIENCE:
                raise AssertionError(f"{len(self.alive)} members did not settle within {PATIENCE:.0f} s")
            await asyncio.sleep(LOOK)
        return time.monotonic() - began

    async def _look(self) -> GroupView:
        return read_group(await self._store.read(prefixes=[KEYS.prefix]), KEYS, 0)

    def _is_settled(self, look: GroupView) -> bool:
        if look.round is None or look.plan is None or not look.round.sealed:
            return False
        here = {int(look.members[name].address.removeprefix("pid:")) for name in look.round.participants if name in look.members}
        given = sum(map(len, look.plan.owners.values()))
        stopped = all(look.members[name].applied == look.plan.round for name in look.plan.waits if name in look.members)
        return here == self.alive and len(look.members) == len(self.alive) and given == len(ITEMS) and stopped

    def cpu(self, server: int) -> tuple[float, float]:
        """Seconds of CPU so far: of PostgreSQL, and of the members together."""
        return family_cpu(server), sum(pids.cpu_time(pid).computing for pid in self.alive)
