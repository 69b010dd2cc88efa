"""The bank of planted bugs: a simulator that does not find them proves nothing when it finds no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from sluiceway.sim import bugs_group, bugs_life, bugs_partition, bugs_placing, bugs_queue
from sluiceway.sim.checks import BrokenPromiseError
from sluiceway.sim.group import run_group
from sluiceway.sim.history import run_history
from sluiceway.sim.planting import Bug, planted

BANK: tuple[Bug, ...] = (*bugs_queue.BUGS, *bugs_partition.BUGS, *bugs_life.BUGS)
GROUP_BANK: tuple[Bug, ...] = (*bugs_group.BUGS, *bugs_placing.BUGS)
SEEDS_PER_BUG = 200


class Found(NamedTuple):
    seed: int
    how: str
    """What the simulator said."""


def hunt(bug: Bug, seeds: Iterable[int]) -> Found | None:
    """The first of the seeds that shows the bug. A crash of the code under test shows it too."""
    live: Callable[[int], object] = run_group if bug in GROUP_BANK else run_history
    with planted(bug):
        for seed in seeds:
            try:
                live(seed)
            except Exception as error:
                kind = "" if isinstance(error, BrokenPromiseError) else f"{type(error).__name__}: "
                return Found(seed, kind + re.sub(r"i[0-9]+:[a-z]*", "an item", str(error)))
    return None
