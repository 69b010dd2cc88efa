"""Random histories of consumers that wait for items of other instances: promises are kept, planted bugs are found, and a seed is a history
for good."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation.bank import DEMAND_BANK
from simulation.demand_world import DemandWorld, run_demand
from simulation.planting import Bug
from simulation.world import EventLog
from tests.simulation.planted_bugs import found
from tests.simulation.replays import replayed

SEEDS = 12

KNOWN = {"drops_what_no_lease_takes": 7, "waits_for_those_it_has_told": 7}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


def test_promises_are_kept_whatever_befalls_the_calls() -> None:
    tally: Counter[str] = Counter()
    for seed in range(SEEDS):
        log = EventLog()
        world = DemandWorld(seed, log)
        world.live()
        text = "\n".join(log.lines)
        tally.update({what: text.count(what) for what in ("cut", "frozen", "move from")})
        tally["fetches"] += world.fetches
        tally["items"] += world.produced
        tally["large"] += world.rules.few < world.rules.instances - 1
    # A world in which nothing happens would prove nothing.
    for what in ("cut", "frozen", "move from", "large"):
        assert tally[what] > SEEDS // 6, what
    for what in ("fetches", "items"):
        assert tally[what] > 50 * SEEDS, what


@pytest.mark.parametrize("bug", DEMAND_BANK, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, KNOWN)


def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_demand(3, log)
    assert log.digest() in replayed("--demand", "--seed", "3")
