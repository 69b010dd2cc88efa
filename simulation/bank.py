"""Bank of planted bugs (mutation testing): a simulator that misses them proves nothing when it finds no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from simulation import (
    bugs_bucket,
    bugs_cluster,
    bugs_demand,
    bugs_group,
    bugs_keys,
    bugs_life,
    bugs_limits,
    bugs_loads,
    bugs_partition,
    bugs_pins,
    bugs_placing,
    bugs_priority,
    bugs_queue,
    bugs_quotas,
    bugs_rebalance,
    bugs_tasks,
    bugs_unique,
    bugs_zones,
)
from simulation.bucket_world import run_bucket
from simulation.cluster import run_cluster
from simulation.cluster_by_key import run_by_key
from simulation.cluster_by_limit import run_by_limit
from simulation.cluster_by_priority import run_by_priority
from simulation.cluster_group import run_members
from simulation.cluster_rebalances import run_rebalances
from simulation.cluster_unique import run_unique
from simulation.demand_world import run_demand
from simulation.group import run_group
from simulation.planting import Bug, planted
from simulation.promises import BrokenPromiseError
from simulation.queue_run import run_history
from simulation.task_world import run_tasks

BANK: tuple[Bug, ...] = (*bugs_queue.BUGS, *bugs_partition.BUGS, *bugs_life.BUGS)
GROUP_BANK: tuple[Bug, ...] = (*bugs_group.BUGS, *bugs_placing.BUGS, *bugs_limits.BUGS, *bugs_zones.BUGS, *bugs_loads.BUGS, *bugs_pins.BUGS)
MEMBER_BANK: tuple[Bug, ...] = tuple(bugs_cluster.MEMBER_BUGS)
DEMAND_BANK: tuple[Bug, ...] = tuple(bugs_demand.BUGS)
CLUSTER_BANK: tuple[Bug, ...] = (*bugs_cluster.ABLATIONS, *bugs_cluster.BUGS)
REBALANCE_BANK: tuple[Bug, ...] = tuple(bugs_rebalance.BUGS)
KEY_BANK: tuple[Bug, ...] = tuple(bugs_keys.BUGS)
PRIORITY_BANK: tuple[Bug, ...] = tuple(bugs_priority.BUGS)
UNIQUE_BANK: tuple[Bug, ...] = tuple(bugs_unique.BUGS)
LIMIT_BANK: tuple[Bug, ...] = tuple(bugs_quotas.BUGS)
BUCKET_BANK: tuple[Bug, ...] = tuple(bugs_bucket.BUGS)
TASK_BANK: tuple[Bug, ...] = (*bugs_tasks.ABLATIONS, *bugs_tasks.BUGS)
SEEDS_PER_BUG = 300

_LIVES: Sequence[tuple[Sequence[Bug], Callable[[int], object]]] = (
    (BANK, run_history),
    (GROUP_BANK, run_group),
    (MEMBER_BANK, run_members),
    (DEMAND_BANK, run_demand),
    (CLUSTER_BANK, run_cluster),
    (REBALANCE_BANK, run_rebalances),
    (KEY_BANK, run_by_key),
    (PRIORITY_BANK, run_by_priority),
    (UNIQUE_BANK, run_unique),
    (LIMIT_BANK, run_by_limit),
    (TASK_BANK, run_tasks),
    (BUCKET_BANK, run_bucket),
)


_MISCALLED = re.compile(r"<locals>\.[\w<>]+\(\) (got|missing|takes) ")
"""Matches the TypeError of a planted function whose signature no longer fits: the original has other parameters by now."""


class Found(NamedTuple):
    seed: int
    how: str
    """The simulator's message."""

    @property
    def is_crash_of_plant(self) -> bool:
        """Whether the planted function itself could not be called. Such a crash says nothing about the simulator."""
        return _MISCALLED.search(self.how) is not None


def hunt(bug: Bug, seeds: Iterable[int]) -> Found | None:
    """Return the first seed that shows the bug, or None. A crash of the code under test counts; check `Found.is_crash_of_plant`."""
    live = next((live for bank, live in _LIVES if bug in bank), run_history)
    with planted(bug):
        for seed in seeds:
            try:
                live(seed)
            except Exception as error:
                kind = "" if isinstance(error, BrokenPromiseError) else f"{type(error).__name__}: "
                return Found(seed, kind + re.sub(r"i[0-9]+:[a-z]*", "an item", str(error)))
    return None
