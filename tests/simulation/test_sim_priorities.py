"""Random histories of clusters whose queues go by priorities: promises are kept, and each planted bug is found."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation import bugs_priority
from simulation.cluster_by_priority import PriorityWorld
from simulation.planting import Bug
from tests.simulation.planted_bugs import found

SEEDS = 12
"""Histories here; `make sim` runs more, and `make sim-bank` looks for every planted bug anew."""


def test_promises_are_kept_whatever_befalls_priorities_and_instances() -> None:
    tally: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = PriorityWorld(seed)
        world.live()
        for ledger in world.ledgers.values():
            tally.update(ledger.tally)
    # A world in which nothing happens would prove nothing.
    least = {"produced": 35 * SEEDS, "highest first": 3 * SEEDS, "at the limit": SEEDS // 3, "retry": SEEDS, "divided": SEEDS}
    for what, number in least.items():
        assert tally[what] >= number, what


@pytest.mark.parametrize("bug", bugs_priority.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, {})
