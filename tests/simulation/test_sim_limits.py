"""Random histories of clusters whose queue has a limit: it holds, each planted bug is found."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation import bugs_quotas
from simulation.cluster_by_limit import world_by_limit
from simulation.planting import Bug
from tests.simulation.planted_bugs import found

SEEDS = 18
"""Histories here; `make sim` runs more, and `make sim-bank` looks for every planted bug anew."""


def test_the_limit_holds_whatever_befalls_partitions_and_instances() -> None:
    tally: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = world_by_limit(seed)
        world.live()
        for ledger in world.ledgers.values():
            tally.update(ledger.tally)
        tally["owners"] += len({owner for kept in world.vault.partitions.values() for owner in kept.users.values()})
    # A world in which nothing happens would prove nothing.
    least = {"produced": 100 * SEEDS, "leased": 100 * SEEDS, "at the queue's limit": 20 * SEEDS, "owners": 2 * SEEDS}
    for what, number in least.items():
        assert tally[what] >= number, what


KNOWN = {"takes_partitions_that_are_not_open_for_empty": 5}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


@pytest.mark.parametrize("bug", bugs_quotas.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, KNOWN)
