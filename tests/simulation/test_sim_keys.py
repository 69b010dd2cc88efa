"""Random histories of clusters whose queues go by keys: promises are kept, each planted bug is found, and a seed is a history for good."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation import bugs_keys
from simulation.cluster_by_key import run_by_key, world_by_key
from simulation.planting import Bug
from simulation.world import EventLog
from tests.simulation.planted_bugs import found
from tests.simulation.replays import replayed

SEEDS = 40
"""Histories here; `make sim` runs more, and `make sim-bank` looks for every planted bug anew."""


def test_promises_are_kept_whatever_befalls_keys_and_instances() -> None:
    tally: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = world_by_key(seed)
        world.live()
        for ledger in world.ledgers.values():
            tally.update(ledger.tally)
            for trail in ledger.trails.values():
                tally.update({f"were {what}": trail.tally[what] for what in ("expired", "retried", "released", "dead")})
        tally["owners"] += len({owner for kept in world.vault.partitions.values() for owner in kept.users.values()})
    # A world in which nothing happens would prove nothing.
    least = {
        "produced": 50 * SEEDS,
        "in order": 10 * SEEDS,
        "runs": SEEDS,
        "runs broken off": SEEDS // 2,
        "at the limit": 2 * SEEDS,
        "divided": SEEDS,
        "keys kept": SEEDS,
        "were expired": SEEDS,
        "were retried": SEEDS,
        "were released": SEEDS,
        "owners": 3 * SEEDS,
    }
    for what, number in least.items():
        assert tally[what] >= number, what


@pytest.mark.parametrize("seed", [444, 724, 847])
def test_what_once_failed_does_not_fail_again(seed: int) -> None:
    """Each time, the ledger was wrong. 444: items that were stored while the queue had no rules have no keys for it. 724: of two calls at
    once with one idempotency key, each stored a part. 847: a late opening of a former owner found the storage away."""
    run_by_key(seed)


KNOWN = {
    "forgets_what_it_holds_back": 62,
    "takes_a_part_for_the_whole": 14,
    "takes_leased_keys_for_free": 2,
    "a_delay_lets_others_pass": 5,
    "leaves_the_rest_of_a_run": 2,
    "counts_anew_after_a_takeover": 39,
    "delays_end_with_a_takeover": 32,
    "moves_what_holds_up_its_key": 35,
}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


@pytest.mark.parametrize("bug", bugs_keys.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, KNOWN)


def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_by_key(3, log)
    assert log.digest() in replayed("--keys", "--seed", "3")
