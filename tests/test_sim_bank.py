"""Every planted bug is found; the code is whole again afterwards."""

from __future__ import annotations

import pytest

from planted_bugs import found
from sluiceway.core.logical_queue import LogicalQueue
from sluiceway.sim.bank import BANK, hunt
from sluiceway.sim.planting import Bug, planted

KNOWN = {
    "calls_back_without_attempts": 15,
    "waits_for_stopped_partitions": 10,
    "looks_away_from_closed_partitions": 117,
    "answers_a_lease_in_part": 16,
    "sleeps_through_a_reopening": 11,
    "remembers_one_key_of_a_group": 13,
    "takes_any_body_for_the_first": 19,
    "lets_an_old_owner_write": 32,
    "ignores_the_back_off": 22,
    "backs_off_by_one_attempt_more": 22,
    "redrives_a_copy": 14,
    "serves_while_paused": 16,
    "never_tries_a_slow_partition_again": 12,
}
"""Seeds that have shown a bug (`planted_bugs.found`)."""


@pytest.mark.parametrize("bug", BANK, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found(bug, KNOWN)


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
