"""Random histories of clusters that are rebalanced all the while: promises are kept, each planted bug is found, and a seed is a history."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation import bugs_rebalance
from simulation.cluster_rebalances import RebalanceWorld, run_rebalances
from simulation.planting import Bug
from simulation.world import EventLog
from tests.simulation.planted_bugs import found
from tests.simulation.replays import replayed

SOME = 6
"""Histories here; `make sim` runs more, and `make sim-bank` looks for every planted bug anew."""


def test_promises_are_kept_whatever_is_made_of_the_partitions() -> None:
    tally: Counter[str] = Counter()
    for seed in range(SOME):
        world = RebalanceWorld(seed)
        world.live()
        tally.update(world.watch.tally)
        for ledger in world.ledgers.values():
            tally["items"] += ledger.tally["produced"]
            tally["keys"] += ledger.tally["keys kept"]
            tally["moved"] += sum(trail.tally["moved in"] for trail in ledger.trails.values())
    # A world in which nothing happens would prove nothing.
    for what, least in (("items", 100), ("keys", 20), ("moved", 5), ("flip", SOME), ("removed", SOME), ("done", 3)):
        assert tally[what] >= least, what


KNOWN = {
    "goes_by_the_record_alone": 2,
    "removes_what_was_not_sealed": 7,
    "moves_without_due_times": 2,
    "moves_under_one_key": 14,
    "serves_before_its_parents_are_gone": 11,
    "moves_without_expiry": 14,
    "moves_without_attempts": 1,
    "goes_on_as_the_home": 2,
    "seals_what_has_scheduled_items": 25,
    "takes_itself_for_the_coordinator": 1,
    "hands_over_no_keys": 0,
    "takes_keys_again": 4,
    "leaves_data_to_who_removed_it": 11,
    "seals_what_has_transfers": 48,
    "obeys_who_is_coordinator_no_more": 27,
    "names_a_home_that_knows_nothing": 0,
    "gives_numbers_again": 1,
    "notes_no_answer_that_it_knows": 14,
}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


@pytest.mark.parametrize("bug", bugs_rebalance.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, KNOWN)


@pytest.mark.slow
def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_rebalances(3, log)
    assert log.digest() in replayed("--rebalance", "--seed", "3")
