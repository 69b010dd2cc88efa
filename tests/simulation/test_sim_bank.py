"""Every planted bug is found; the code is whole again afterwards."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest

from simulation.bank import BANK, Found, hunt
from simulation.planting import Bug, planted
from simulation.runner import BUGS
from sluiceway.core.queue.logical_queue import LogicalQueue
from tests.simulation import planted_bugs
from tests.simulation.planted_bugs import found

KNOWN = {
    "opens_again_without_a_pause": 3,
    "works_on_after_a_mistake": 8,
    "calls_unknown_unavailable": 4,
    "finds_leases_that_are_over": 8,
    "answers_a_lease_key_with_what_it_has": 4,
    "waits_for_stopped_partitions": 10,
    "takes_what_is_unknown_for_refused": 4,
    "lets_a_lease_key_block_the_line": 4,
    "keeps_intents_in_memory": 4,
    "forgets_at_the_target_first": 4,
    "believes_any_stored_time": 9,
    "remembers_one_key_of_a_group": 15,
    "takes_any_body_for_the_first": 13,
    "lets_an_old_owner_write": 11,
    "looks_before_it_shuts_out": 9,
    "backs_off_by_one_attempt_more": 22,
    "clears_the_leased": 4,
    "calls_back_without_attempts": 15,
    "leaves_produces_behind_a_hung_commit": 9,
    "never_tries_a_slow_partition_again": 12,
    "looks_away_from_closed_partitions": 94,
    "says_done_before_it_is_durable": 14,
    "sends_two_of_a_key_at_once": 58,
    "sleeps_through_a_reopening": 35,
    "stops_without_a_word": 32,
    "sends_to_another_dead_queue_what_may_have_arrived": 153,
    "serves_while_paused": 17,
    "answers_a_lease_in_part": 13,
    "writes_the_target_before_the_intent": 65,
    "compacts_one_row_too_few": 95,
    "compacts_by_what_did_not_land": 103,
}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


@pytest.mark.parametrize("bug", BANK, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, KNOWN)


def test_a_crash_of_the_planted_function_itself_shows_nothing() -> None:
    def change(_original: Any) -> Any:
        def committed(_self: Any, _number: int) -> None: ...

        return committed

    bug = Bug("out_of_date", "It takes other arguments than the code that it stands for.", LogicalQueue, "committed", change)
    with pytest.raises(AssertionError, match="crashes by itself"):
        found(bug, {})


def test_a_known_seed_that_shows_nothing_any_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its history is lived through in vain in every run, also where one of the first shows the bug."""
    bug = BANK[0]
    monkeypatch.setattr(planted_bugs, "hunt", lambda _bug, _seeds: Found(3, "a broken promise"))
    with pytest.warns(UserWarning, match="is shown by seed 3 now"):
        found(bug, {bug.name: 7})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found(bug, {bug.name: 3})
        found(bug, {})


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.name)
def test_a_planted_function_can_be_called_as_the_original(bug: Bug) -> None:
    """With all of its positional arguments, and all that have to be named."""
    original = vars(bug.target)[bug.attribute]
    plant = bug.change(original)
    plain = [each.__func__ if isinstance(each, staticmethod | classmethod) else each for each in (original, plant)]
    if not all(inspect.isfunction(each) for each in plain):
        return
    takes = inspect.signature(plain[0]).parameters.values()
    positional = [None for each in takes if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    inspect.signature(plain[1]).bind(*positional, **{each.name: None for each in takes if each.kind == each.KEYWORD_ONLY})


def test_there_are_enough_of_them_and_each_has_a_name_and_a_reason() -> None:
    assert len(BANK) >= 80
    assert len({bug.name for bug in BANK}) == len(BANK)
    assert all(bug.what.endswith(".") for bug in BANK)


def test_a_planted_bug_is_gone_after_the_block() -> None:
    original = LogicalQueue.cancel
    bug = next(bug for bug in BANK if (bug.target, bug.attribute) == (LogicalQueue, "cancel"))
    with planted(bug):
        assert LogicalQueue.cancel is not original
    assert LogicalQueue.cancel is original


def test_what_is_not_a_bug_is_not_found() -> None:
    harmless = Bug("harmless", "Nothing is changed.", LogicalQueue, "cancel", lambda original: original)
    assert hunt(harmless, range(3)) is None
