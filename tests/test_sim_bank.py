"""Every planted bug is found; the code is whole again afterwards."""

from __future__ import annotations

import pytest

from sluiceway.core.logical_queue import LogicalQueue
from sluiceway.sim.bank import BANK, SEEDS_PER_BUG, hunt
from sluiceway.sim.planting import Bug, planted


@pytest.mark.parametrize("bug", BANK, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert hunt(bug, range(SEEDS_PER_BUG)) is not None, bug.what


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
