"""Random histories of whole clusters: promises are kept, each ablation and each planted bug is found, and a seed is a history for good."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation import bugs_cluster
from simulation.cluster import ClusterWorld, run_cluster
from simulation.planting import Bug
from simulation.world import EventLog
from tests.simulation.planted_bugs import found
from tests.simulation.replays import replayed

SOME = 12
"""Histories here; `make sim` runs more, and `make sim-bank` looks for every planted bug anew."""


def test_promises_are_kept_whatever_befalls_the_instances() -> None:
    tally: Counter[str] = Counter()
    for seed in range(SOME):
        world = ClusterWorld(seed)
        world.live()
        for ledger in world.ledgers.values():
            tally.update(ledger.tally)
        tally["asked"] += world.network.asked
        tally["instances"] += len(world.instances)
        tally["spanned"] += world.spanned
        tally["owners"] += len({owner for kept in world.vault.partitions.values() for owner in kept.users.values()})
    # A world in which nothing happens would prove nothing.
    for what in ("produced", "leased", "done", "asked"):
        assert tally[what] > 100, what
    for what in ("instances", "owners"):
        assert tally[what] > 3 * SOME, what
    assert tally["spanned"], "no settle was of several partitions"


@pytest.mark.parametrize("seed", [1024])
def test_what_once_failed_does_not_fail_again(seed: int) -> None:
    """1024: a repeated lease key at an instance that was just losing the partitions with its leases."""
    ClusterWorld(seed).live()


KNOWN = {
    "makes_what_is_missing_as_new": 9,
    "takes_over_at_once": 0,
    "writes_are_not_fenced": 7,
    "leaves_out_what_has_another_owner": 31,
    "goes_on_with_what_it_has_lost": 4,
    "takes_a_part_that_nobody_heard_of_for_done": 1,
    "forgets_what_it_owns_of_a_new_queue": 0,
    "does_not_open_what_it_gains": 2,
    "writes_under_the_first_grant": 1,
    "takes_an_unheard_answer_for_a_refusal": 31,
    "refuses_what_it_was_writing": 22,
    "takes_more_under_a_key": 46,
    "passes_on_what_a_peer_asks": 71,
}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


@pytest.mark.parametrize("ablation", bugs_cluster.ABLATIONS, ids=lambda bug: bug.name)
def test_without_what_it_stands_on_it_falls(ablation: Bug) -> None:
    found(ablation, KNOWN)


@pytest.mark.parametrize("bug", bugs_cluster.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, KNOWN)


def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_cluster(3, log)
    assert log.digest() in replayed("--cluster", "--seed", "3")
