"""What judges a rebalance must find what is wrong with one, and nothing in one that is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.campaigns.kit.ledger import Tally
from tests.campaigns.rebalance.copying import Item, differences
from tests.campaigns.rebalance.moves import steps_between
from tests.campaigns.rebalance.moving_traffic import Calls, MovingLedger
from tests.campaigns.rebalance.order import Order
from tests.campaigns.rebalance.rebalance_judging import wrong_entries, wrong_steps


def order_of(*numbers: int) -> Order:
    order = Order()
    for number in numbers:
        order.served(number)
    return order


def test_items_in_order_are_in_order() -> None:
    order = order_of(*range(10))
    order.ended(10)
    assert not order.faults


@pytest.mark.parametrize(
    ("numbers", "produced"),
    [((0, 2, 1, 3), 4), ((0, 1, 3), 4), ((0, 1, 1, 2), 3), ((1, 0), 2), ((0, 1), 3)],
    ids=["one swap", "one missing", "one twice", "the first two", "the last missing"],
)
def test_one_item_out_of_order_is_found(numbers: tuple[int, ...], produced: int) -> None:
    order = order_of(*numbers)
    order.ended(produced)
    assert order.faults


DRAIN = {"step": "drain", "at": "2026-01-01T00:00:03Z", "instance": "i0", "partition": 0}
FOUND: dict[str, Any] = {
    "state": "done",
    "plan": {"creates": [{"partition": 1, "backend": "b", "parents": [0]}], "drains": [0], "keeps": [], "reopens": [], "in_order": True},
    "steps": [
        {"step": "create", "at": "2026-01-01T00:00:00Z", "instance": "i0", "partition": None},
        {"step": "flip", "at": "2026-01-01T00:00:01Z", "instance": "i0", "partition": None},
        {"step": "shut", "at": "2026-01-01T00:00:02Z", "instance": "i1", "partition": None},
        {"step": "keys", "at": "2026-01-01T00:00:02Z", "instance": "i1", "partition": None},
        DRAIN,
        {**DRAIN, "partition": None},
        {"step": "finish", "at": "2026-01-01T00:00:04Z", "instance": "i1", "partition": None},
    ],
}


def with_steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return {**FOUND, "steps": list(steps)}


def test_the_steps_of_a_good_one_are_good() -> None:
    assert wrong_steps(FOUND) == []


@pytest.mark.parametrize(
    "found",
    [
        with_steps(*FOUND["steps"][:4], *FOUND["steps"][5:]),
        with_steps(*FOUND["steps"][:5], *FOUND["steps"][4:]),
        with_steps(FOUND["steps"][1], FOUND["steps"][0], *FOUND["steps"][2:]),
        with_steps(*FOUND["steps"][:6]),
        with_steps(*FOUND["steps"], FOUND["steps"][6]),
        with_steps({**FOUND["steps"][0], "at": "2026-01-01T00:00:09Z"}, *FOUND["steps"][1:]),
    ],
    ids=["not removed", "removed twice", "out of order", "no finish", "two", "back in time"],
)
def test_a_step_that_is_missing_or_in_the_wrong_place_is_found(found: dict[str, Any]) -> None:
    assert wrong_steps(found)


def entry(action: str, states: Mapping[str, tuple[str | None, str | None]] | None = None, *partitions: int) -> dict[str, Any]:
    changes = {number: {"from": before, "to": after} for number, (before, after) in (states or {}).items()}
    return {"action": action, "actor": "system", "detail": {"states": changes, "partitions": [*partitions]}}


ENTRIES = [
    entry("queue.rebalance", {"1": (None, "preparing")}),
    entry("rebalance.create"),
    entry("rebalance.flip", {"0": ("available", "draining")}),
    entry("rebalance.shut"),
    entry("rebalance.keys", {"1": ("preparing", "available")}),
    entry("rebalance.problem"),
    entry("rebalance.drain", {"0": ("draining", None)}, 0),
    entry("rebalance.finish"),
]


def test_the_entries_of_a_good_one_are_good() -> None:
    assert wrong_entries(FOUND, ENTRIES) == []
    assert wrong_entries(FOUND, [*ENTRIES[:4], *ENTRIES[3:]]) == []


@pytest.mark.parametrize("left_out", [0, 1, 2, 3, 4, 6, 7])
def test_each_entry_that_is_missing_is_found(left_out: int) -> None:
    assert wrong_entries(FOUND, [each for number, each in enumerate(ENTRIES) if number != left_out])


def test_one_that_was_cancelled_at_once_has_two_entries_of_its_end() -> None:
    steps = FOUND["steps"][:1]
    back = {"1": ("preparing", None)}
    entries = [*ENTRIES[:2], entry("rebalances.cancel", back), entry("rebalance.finish", back)]
    assert wrong_entries({**FOUND, "state": "cancelled", "steps": steps}, entries) == []
    assert wrong_entries({**FOUND, "state": "cancelled", "steps": FOUND["steps"]}, entries)


def test_entries_out_of_order_without_an_actor_or_with_a_gap_are_found() -> None:
    assert wrong_entries(FOUND, [*ENTRIES[:2], ENTRIES[3], ENTRIES[2], *ENTRIES[4:]])
    assert wrong_entries(FOUND, [*ENTRIES[:6], entry("rebalance.drain", {"0": ("draining", None)}, 0, 1), ENTRIES[7]])
    assert wrong_entries(FOUND, [*ENTRIES[:7], {**ENTRIES[7], "actor": ""}])
    assert wrong_entries(FOUND, [*ENTRIES[:6], entry("rebalance.drain", {"0": ("available", None)}, 0), ENTRIES[7]])


def item(**changes: Any) -> Item:
    return Item("p", "k", "r", (), 1, "2026-01-01T00:00:00Z", None, None)._replace(**changes)


def test_a_copy_is_the_same_or_its_difference_is_named() -> None:
    before = {"q.0.1": item(), "q.0.2": item()}
    assert differences(before, dict(before)) == []
    assert "are gone" in differences(before, {"q.0.1": item()})[0]
    assert "have come" in differences(before, {**before, "q.0.3": item()})[0]
    for name, value in (("payload", "x"), ("attempts", 0), ("created_at", "now"), ("due_at", "now"), ("headers", (("a", "b"),))):
        assert "have changed" in differences(before, {**before, "q.0.2": item(**{name: value})})[0]


def books(**counts: int) -> Counter[str]:
    return Counter({"produced": 5, "moved_in": 4, "completed": 3, "dead": 1, "moved": 2, "total": 2, "transferring": 1, **counts})


def test_the_books_of_partitions_balance_with_what_was_moved() -> None:
    ledger = MovingLedger(Tally())
    ledger.check_balance(books())
    assert not ledger.tally.faults
    for name in ("produced", "moved_in", "completed", "moved", "total"):
        ledger = MovingLedger(Tally())
        ledger.check_balance(books(**{name: books()[name] + 1}))
        assert ledger.tally.faults == 1


def test_the_slowest_of_a_hundred_calls_counts_and_few_calls_say_nothing() -> None:
    calls = Calls()
    for number in range(100):
        calls.add("queue.produce", 1.0 if number == 50 else 0.1)
    calls.add("queue.lease", 9.0)
    assert calls.p99(0, float("inf")) == {"queue.produce": 1.0}
    assert calls.p99(0, 0) == {}


def test_a_slow_call_is_laid_to_the_steps_that_were_under_way() -> None:
    found = {**FOUND, "queue_name": "q", "created_at": "2025-12-31T23:59:59Z"}
    new_year = 1_767_225_600.0
    assert [*steps_between(found, new_year + 1.2, new_year + 2.5)] == ["q shut", "q keys", "q drain"]
    assert [*steps_between(found, new_year - 9, new_year - 8)] == [*steps_between(found, new_year + 8, new_year + 9)] == []
