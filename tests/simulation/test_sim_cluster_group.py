"""Random histories of group members with their real driver: promises are kept, planted bugs are found, and a seed is a history for good."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation.bank import MEMBER_BANK, SEEDS_PER_BUG, hunt
from simulation.cluster_group import MemberWorld, run_members
from simulation.planting import Bug
from simulation.runner import main
from simulation.world import EventLog
from tests.simulation.replays import replayed

SEEDS = 15


def test_promises_are_kept_in_any_weather() -> None:
    tally: Counter[str] = Counter()
    for seed in range(SEEDS):
        log = EventLog()
        world = MemberWorld(seed, log)
        world.live()
        text = "\n".join(log.lines)
        for what in (
            " gained ",
            " lost ",
            "is killed",
            "freezes",
            "is cut off",
            "leaves",
            "stops",
            "ran out",
            "no answer",
            "handler failed",
        ):
            tally[what] += text.count(what)
        tally[world.strategy] += 1
    # A world in which nothing happens would prove nothing.
    for what in (" gained ", " lost ", "is killed", "freezes", "is cut off", "leaves", "stops", "ran out", "no answer", "handler failed"):
        assert tally[what] > SEEDS // 5, what
    assert tally["rounds"] > SEEDS // 5
    assert tally["claims"] > SEEDS // 5


@pytest.mark.parametrize("bug", MEMBER_BANK, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert hunt(bug, range(SEEDS_PER_BUG)) is not None, bug.what


def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_members(7, log)
    assert log.digest() in replayed("--members", "--seed", "7")


def test_the_command_counts_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--members", "--seeds", "2", "--first", "5"]) == 0
    assert "members: 2 of 2 seeds, 0 failed" in capsys.readouterr().out
