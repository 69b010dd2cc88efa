"""Groups in the simulated world: many histories without a broken promise, and each planted bug found."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from simulation import bugs_placing
from simulation.bank import GROUP_BANK
from simulation.bugs_group import RARE
from simulation.group import GroupWorld, Weather, run_group
from simulation.planting import Bug, planted
from simulation.runner import main
from simulation.world import EventLog
from tests.simulation.planted_bugs import found
from tests.simulation.replays import replayed

SEEDS = 40
KNOWN = {
    "serves_beyond_its_lease": 7,
    "takes_its_lease_from_when_the_answer_came": 43,
    "judges_others_by_its_own_parameters": 43,
    "gives_members_up_too_soon": 9,
    "has_no_patience_with_clocks": 40,
    "takes_the_first_beat_for_the_last": 1,
    "says_too_soon_that_it_has_stopped": 1,
    "serves_before_all_have_left_the_era": 40,
    "leaves_the_era_before_it_knows": 115,
    "leaves_the_era_out_of_the_token": 3,
    "does_not_wait_for_the_old_owner_to_stop": 1,
    "does_not_wait_for_those_who_leave": 8,
    "seals_over_a_mark": 28,
    "seals_a_resource_that_has_changed": 3,
    "marks_itself_in_a_round_that_is_over": 242,
    "seals_without_waiting_for_anyone": 1,
    "never_strikes_off_a_silent_leaver": 93,
    "no_round_for_a_silent_member": 16,
    "opens_round_after_round": 1,
    "keeps_the_grant_when_the_owner_changes": 1,
    "counts_grants_anew": 7,
    "moves_more_than_it_must": 1,
    "moves_one_more_than_it_must": 1,
    "claims_without_looking_whose_it_is": 6,
    "claims_without_a_new_grant": 6,
    "never_gives_back_what_is_too_much": 10,
    "serves_what_it_gives_back": 9,
    "places_into_a_plan_that_has_changed": 13,
    "places_into_a_resource_that_has_changed": 3,
    "removes_from_a_plan_that_has_changed": 273,
    "removes_from_a_resource_that_has_changed": 3,
    "places_under_the_old_version": 2,
    "gives_new_items_to_nobody": 2,
    "leaves_in_the_plan_what_it_removes": 2,
    "leaves_what_it_removes_to_a_round": 2,
    "places_on_those_who_leave": 3,
    "places_on_those_who_have_gone": 3,
    "places_on_those_who_take_no_part": 2,
    "places_in_any_plan": 3,
    "divides_everything_anew": 3,
    "forgets_who_may_still_serve_an_item": 2,
    "claims_what_had_an_owner": 99,
    "leaves_claims_behind": 3,
    "claims_what_has_just_gone": 59,
    "limits_what_has_gone": 36,
    "leaves_limits_behind": 2,
    "places_a_queue_on_everybody": 33,
    "places_beside_what_there_is_of_a_queue": 7,
    "plans_without_limits": 7,
    "moves_a_queue_for_no_reason": 16,
    "spreads_anew_in_each_round": 37,
    "bounds_each_round_alone": 47,
    "says_no_zone": 37,
    "plans_without_zones": 53,
    "fills_one_zone_with_each_queue": 37,
    "gives_the_larger_shares_by_name": 37,
    "takes_no_notice_of_zones_for_a_limited_queue": 37,
}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


@functools.cache
def weathers() -> list[Weather]:
    return [GroupWorld(seed).weather for seed in range(400)]


@pytest.mark.parametrize("seed", [*range(SEEDS), 1618])
def test_no_promise_is_broken(seed: int) -> None:
    run_group(seed)


@pytest.mark.parametrize("bug", GROUP_BANK, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, KNOWN)


def test_there_are_enough_of_them_and_each_has_a_name_and_a_reason() -> None:
    every = [*GROUP_BANK, *RARE, *bugs_placing.RARE]
    assert len(every) >= 63
    assert len({bug.name for bug in every}) == len(every)
    assert all(bug.what.endswith(".") for bug in every)


@pytest.mark.parametrize(
    "has",
    [
        lambda weather: weather.slow >= 50,
        lambda weather: weather.unknown > 0.1,
        lambda weather: weather.hang > 0.1,
        lambda weather: weather.kills > 0,
        lambda weather: weather.pauses > 4,
        lambda weather: weather.cuts > 2,
        lambda weather: weather.leaves > 1,
        lambda weather: weather.joins > 2,
        lambda weather: weather.changes > 4,
        lambda weather: weather.kinds == ("times",),
        lambda weather: weather.places > 8,
        lambda weather: weather.limits > 4,
        lambda weather: weather.zones > 1,
        lambda weather: weather.loads,
        lambda weather: weather.pins > 0,
    ],
)
def test_every_kind_of_weather_comes(has: Callable[[Weather], bool]) -> None:
    assert sum(map(has, weathers())) > 20


def test_a_seed_is_the_same_history_in_every_process() -> None:
    log = EventLog()
    run_group(7, log)
    assert log.digest() in replayed("--group", "--seed", "7")


def test_the_command_counts_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--group", "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert "groups: 2 of 2 seeds, 0 failed" in said
    assert "queues" not in said


def test_a_failing_seed_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    bug = next(bug for bug in GROUP_BANK if bug.name == "opens_round_after_round")
    with planted(bug):
        assert main(["--group", "--first", "1", "--seeds", "1"]) == 1
        assert "python -m simulation --group --seed 1 --trace" in capsys.readouterr().out
        assert main(["--group", "--seed", "1", "--trace"]) == 1
    trace = capsys.readouterr().out.splitlines()
    assert any("commits" in line for line in trace)
    assert "BrokenPromiseError" in trace[-1]
