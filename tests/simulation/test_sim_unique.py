"""Random histories of clusters whose items are unique: promises are kept, each planted bug is found, and a seed is a history for good."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation import bugs_unique
from simulation.cluster_unique import UniqueWorld, run_unique
from simulation.planting import Bug
from simulation.world import EventLog
from tests.simulation.planted_bugs import found
from tests.simulation.replays import replayed

SEEDS = 30
"""Histories here; `make sim` runs more, and `make sim-bank` looks for every planted bug anew."""


def test_promises_are_kept_whatever_befalls_unique_items_and_instances() -> None:
    tally: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = UniqueWorld(seed)
        world.live()
        for ledger in world.ledgers.values():
            tally.update(ledger.tally)
        tally["owners"] += len({owner for kept in world.vault.partitions.values() for owner in kept.users.values()})
    # A world in which nothing happens would prove nothing.
    least = {"produced": 50 * SEEDS, "left out": 10 * SEEDS, "divided": SEEDS, "keys kept": SEEDS, "retry": SEEDS, "owners": 2 * SEEDS}
    for what, number in least.items():
        assert tally[what] >= number, what


def test_what_once_failed_does_not_fail_again() -> None:
    """The ledger was wrong: an item whose lease ran out, and that was leased again, held its unique key within the cycle."""
    run_unique(47)


KNOWN = {"forgets_leased_items_at_a_takeover": 10}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


@pytest.mark.parametrize("bug", bugs_unique.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, KNOWN)


def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_unique(3, log)
    assert log.digest() in replayed("--unique", "--seed", "3")
