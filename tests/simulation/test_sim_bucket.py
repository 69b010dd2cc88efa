"""Random histories of partitions in a bucket: promises are kept, planted bugs are found, and a seed is a history for good."""

from __future__ import annotations

import pytest

from simulation.bank import BUCKET_BANK, SEEDS_PER_BUG, hunt
from simulation.bucket_world import BucketWorld, run_bucket
from simulation.planting import Bug
from simulation.world import EventLog
from tests.simulation.replays import replayed

SEEDS = 40


def test_promises_are_kept_whatever_befalls_the_owners() -> None:
    logs: list[str] = []
    opened = acknowledged = 0
    for seed in range(SEEDS):
        log = EventLog()
        world = BucketWorld(seed, log)
        world.live()
        logs += log.lines
        opened += world.opened
        acknowledged += sum(len(line.acknowledged) for line in world.lines)
    # A world in which nothing happens would prove nothing.
    text = "\n".join(logs)
    for what in ("is killed", "stands still", " unknown", " refused", "is not opened"):
        assert text.count(what) > SEEDS // 4, what
    assert opened > 5 * SEEDS
    assert acknowledged > 40 * SEEDS


@pytest.mark.parametrize("seed", [1118, 3283, 5899, 8233])
def test_what_once_failed_does_not_fail_again(seed: int) -> None:
    BucketWorld(seed).live()


@pytest.mark.parametrize("bug", BUCKET_BANK, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found = hunt(bug, range(SEEDS_PER_BUG))
    assert found is not None, bug.what
    assert not found.is_crash_of_plant, found.how


def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_bucket(7, log)
    assert log.digest() in replayed("--bucket", "--seed", "7")
