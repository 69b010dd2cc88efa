"""Priorities in a partition."""

from __future__ import annotations

import pytest

from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import explain, key_counts, open_slices
from sluiceway.model.requests import DONE, RELEASE, Disposition
from tests.core.core_model import START, Rig, Row

STRICT = KeyRules(priority=True)


def rig_of(keys: KeyRules) -> Rig:
    rig = Rig()
    rig.follow(Rules(keys=keys))
    return rig


def produce(rig: Rig, items: str, due_at: int = 0) -> int:
    """Each item is its key, its priority (`-`: none) and a name: `a7x`. Returns the offset of the first."""
    rows = [Row(each.encode(), due_at or None, key=each[0], priority=None if each[1] == "-" else int(each[1])) for each in items.split()]
    return rig.produce(rows, START)[0]


def leased(rig: Rig, want: int = 1, disposition: Disposition = DONE, now: int = START) -> list[str]:
    lease = rig.machine.lease(want, "c", now + 1_000, now)
    rig.commit()
    if lease is None:
        return []
    served = rig.served(open_slices(lease))
    rig.settle([each.offset for each in served], disposition, now)
    rig.commit()
    return [each.payload.decode() for each in served]


def test_the_highest_come_first_and_of_equals_the_oldest() -> None:
    rig = rig_of(STRICT)
    produce(rig, "a4x b0x a-x c9x b4x")
    produce(rig, "a9y b5y c0y")
    assert leased(rig, 3) == ["c9x", "a9y", "b5y"]
    assert [leased(rig) for _ in range(5)] == [["a4x"], ["a-x"], ["b4x"], ["b0x"], ["c0y"]]


def test_without_the_setting_they_do_not_matter() -> None:
    rig = rig_of(KeyRules())
    produce(rig, "a0x a9x a4x")
    assert leased(rig, 3) == ["a0x", "a9x", "a4x"]


def test_of_those_that_wait_when_the_setting_comes_only_what_was_stored_after_counts() -> None:
    """The others have the default: nothing was noted of them."""
    rig = rig_of(KeyRules())
    produce(rig, "a0x a9x")
    rig.follow(Rules(keys=STRICT))
    produce(rig, "a5y a0y")
    assert leased(rig, 4) == ["a5y", "a0x", "a9x", "a0y"]


def test_a_flood_of_low_ones_keeps_no_high_one_waiting() -> None:
    rig = rig_of(STRICT)
    for _ in range(20):
        produce(rig, " ".join(["a0x"] * 50))
    for priority in range(1, 10):
        produce(rig, f"a{priority}y")
        assert leased(rig) == [f"a{priority}y"]
    assert leased(rig, 2) == ["a0x", "a0x"]


def test_in_a_fair_queue_they_hold_within_each_key_and_keys_are_served_in_turn() -> None:
    rig = rig_of(KeyRules(fair=True, priority=True))
    produce(rig, "a9u a9v a9w a0x b0x b9y c-x")
    turns = [leased(rig) for _ in range(7)]
    assert sorted(turns[:3]) == [["a9u"], ["b9y"], ["c-x"]]
    assert turns[3:] in ([["a9v"], ["b0x"], ["a9w"], ["a0x"]], [["b0x"], ["a9v"], ["a9w"], ["a0x"]])


@pytest.mark.parametrize("disposition", [RELEASE, Disposition("retry", 0)])
def test_what_comes_back_is_the_first_of_its_priority(disposition: Disposition) -> None:
    rig = rig_of(STRICT)
    produce(rig, "a4x a4y")
    assert leased(rig, 1, disposition) == ["a4x"]
    produce(rig, "a9z a3z")
    assert leased(rig, 4) == ["a9z", "a4x", "a4y", "a3z"]


def test_it_says_what_is_served_before_an_item() -> None:
    rig = rig_of(STRICT)
    first = produce(rig, "a4x a9x a4y a0y")
    said = [explain(rig.machine, first + at) for at in range(4)]
    assert [each.ahead for each in said] == [1, 0, 2, 3]
    assert said[0].reason == "1 item of its partition is served before it, of higher priority or older"
    assert said[1].reason == "it is the next of its partition"
    assert not list(key_counts(rig.machine, 10)), "the queue does not go by keys"
    rig.follow(Rules(keys=KeyRules(fair=True, priority=True)))
    assert explain(rig.machine, first + 3).reason == "3 items of its key are served before it, of higher priority or older"


@pytest.mark.parametrize("keys", [STRICT, KeyRules(fair=True, priority=True)])
def test_only_waiting_items_above_the_default_have_precedence(keys: KeyRules) -> None:
    rig = rig_of(keys)
    produce(rig, "a4x a0x")
    assert leased(rig) == ["a4x"]
    found = [rig.machine.log.has_precedence]
    produce(rig, "a5y a5z b9x")
    for _ in range(3):
        found.append(rig.machine.log.has_precedence)
        assert leased(rig) != ["a0x"]
    assert [*found, rig.machine.log.has_precedence] == [False, True, True, True, False]
