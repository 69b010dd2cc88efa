"""Tasks in the simulated world: many histories without a broken promise, and each planted bug and missing rule found."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import pytest

from simulation.bank import TASK_BANK
from simulation.bugs_tasks import ABLATIONS
from simulation.planting import Bug, planted
from simulation.runner import main
from simulation.task_world import TasksWorld, Weather, run_tasks
from simulation.world import EventLog
from tests.simulation.planted_bugs import found
from tests.simulation.replays import replayed

SEEDS = 150
KNOWN = {
    "no_fence": 17,
    "no_number_of_the_opening": 148,
    "no_grant_on_cancel": 15,
    "counts_a_rival_of_the_same_term": 36,
    "follows_decisions_of_any_term": 6,
    "follows_a_leader_who_has_left": 6,
    "listens_to_owners_of_before": 17,
    "hands_over_to_those_who_have_gone": 28,
    "follows_any_hint": 502,
    "sows_twice": 13,
    "says_everything_once": 10,
    "learns_of_children_after_the_end": 294,
    "opens_before_the_old_reader_has_stopped": 23,
    "releases_before_it_has_stopped": 23,
    "no_wait_at_a_barrier": 17,
    "no_wait_after_a_restart": 47,
    "no_order_of_commits": 11,
    "reaches_a_barrier_twice": 41,
    "restores_from_where_the_snapshot_stands": 10,
    "takes_a_part_for_a_snapshot": 68,
}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


@functools.cache
def lived(seed: int) -> Counter[str]:
    """How often each kind of record counted in that history. Raises if a promise was broken."""
    world = TasksWorld(seed)
    world.live()
    return world.log.counted


@functools.cache
def weathers() -> list[Weather]:
    return [TasksWorld(seed).weather for seed in range(400)]


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_no_promise_is_broken(first: int) -> None:
    for seed in range(first, first + 10):
        lived(seed)


PROMISES = {
    "no_parent_gate": "S3",
    "no_fence": "S2",
    "no_number_of_the_opening": "S13",
    "no_grant_on_cancel": "S12",
    "no_wait_at_a_barrier": "S15",
    "no_handing_over_before_the_wait": "L7",
    "no_wait_after_a_restart": "S15",
    "no_commit_before_a_barrier": "S16",
    "no_order_of_commits": "S13",
    "no_children_from_a_query_that_ended_early": "S5",
}
"""The promise that rests on a rule, by the ablation that leaves the rule out."""


def test_a_long_line_of_barriers_is_no_endless_one() -> None:
    """One member is left with ten partitions, and crosses barrier after barrier for 20 s."""
    lived(25_751)


@pytest.mark.parametrize("bug", TASK_BANK, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    seen = found(bug, KNOWN)
    assert seen.how.startswith(PROMISES.get(bug.name, ""))


def test_the_rules_that_promises_rest_on_are_left_out() -> None:
    assert PROMISES.keys() <= {bug.name for bug in ABLATIONS}


def test_there_are_enough_of_them_and_each_has_a_name_and_a_reason() -> None:
    assert len(TASK_BANK) >= 39
    assert len({bug.name for bug in TASK_BANK}) == len(TASK_BANK)
    assert all(bug.what.endswith(".") for bug in TASK_BANK)


@pytest.mark.parametrize(
    "has",
    [
        lambda weather: weather.lost > 0.3,
        lambda weather: weather.doubled > 0.5,
        lambda weather: weather.slow >= 150,
        lambda weather: weather.kills > 1,
        lambda weather: weather.freezes > 2,
        lambda weather: weather.deafs > 2,
        lambda weather: weather.leaves > 2,
        lambda weather: weather.joins > 2,
        lambda weather: weather.rivals > 0,
        lambda weather: weather.whims > 0,
        lambda weather: weather.snapshots > 4,
        lambda weather: weather.forgetful > 0,
        lambda weather: weather.laggards > 0,
        lambda weather: weather.early == 1.0,
        lambda weather: weather.breaks,
    ],
)
def test_every_kind_of_weather_comes(has: Callable[[Weather], bool]) -> None:
    assert sum(map(has, weathers())) > 20


def test_every_kind_of_record_counts_often() -> None:
    counted: Counter[str] = Counter()
    for seed in range(60):
        counted += lived(seed)
    kinds = ("Join", "Leave", "Term", "Seeds", "Assign", "Move", "CancelMove", "Supersede", "Release", "Finish", "Reach", "Snapshot")
    assert all(counted[kind] > 10 for kind in kinds), counted


def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_tasks(7, log)
    assert log.digest() in replayed("--tasks", "--seed", "7")


def test_the_command_counts_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tasks", "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert "tasks: 2 of 2 seeds, 0 failed" in said
    assert "groups" not in said


def test_a_failing_seed_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    bug = next(bug for bug in TASK_BANK if bug.name == "removes_nothing")
    with planted(bug):
        assert main(["--tasks", "--seeds", "1"]) == 1
        assert "python -m simulation --tasks --seed 0 --trace" in capsys.readouterr().out
        assert main(["--tasks", "--seed", "0", "--trace"]) == 1
    trace = capsys.readouterr().out.splitlines()
    assert any("counts: Finish" in line for line in trace)
    assert "BrokenPromiseError" in trace[-1]
