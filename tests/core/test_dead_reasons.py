"""Dead items are counted by why they died: all of them, whatever has become of some, and without looking at them one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.partition import dead_reasons, queries
from sluiceway.core.partition.dead_reasons import reason_groups
from sluiceway.core.partition.records import unpack_bits
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import DONE, Disposition
from sluiceway.model.small_batch import SmallBatch
from tests.core.core_model import EVERYTHING, START, Rig
from tests.core.partition_spots import spots_of


def dead(reason: str | None, source: str | None = "orders", **own: str) -> dict[str, Any]:
    named = {"sluiceway-reason": reason, "sluiceway-queue": source}
    headers = own | {name: text for name, text in named.items() if text is not None}
    return {"payload": b"x", "headers": list(headers.items()) or None}


def grouped(*rows: dict[str, Any]) -> list[tuple[str, str, int, list[int]]]:
    batch = batch_from_rows(rows)
    found = reason_groups(batch)
    return [(each.reason, each.source, each.items, list(unpack_bits(each.rows) or range(batch.num_rows))) for each in found]


@pytest.mark.parametrize(
    ("reason", "group"),
    [
        ("ValueError: no such customer 19", "ValueError"),
        ("ValueError: two\nlines", "ValueError"),
        ("max_attempts 20 reached: requests.exceptions.Timeout: 5s", "max_attempts 20 reached: requests.exceptions.Timeout"),
        ("max_attempts 20 reached", "max_attempts 20 reached"),
        ("max_attempts 20 reached: the lease ran out", "max_attempts 20 reached: the lease ran out"),
        ("the address is wrong: 12 Main Street", "the address is wrong: 12 Main Street"),
        ("", ""),
        ("é" * 300, "é" * 200),
    ],
)
def test_exceptions_are_alike_whatever_their_message(reason: str, group: str) -> None:
    assert grouped(dead(reason)) == [(group, "orders", 1, [0])]


def test_items_are_grouped_by_reason_and_source_the_largest_group_first() -> None:
    rows = [dead("a", "q"), dead(None, None), dead("b", "q"), dead("b", "r"), dead("b", "q", color="red"), dead(None, "q"), dead("a", None)]
    assert grouped(*rows) == [("b", "q", 2, [2, 4]), ("a", "q", 1, [0]), ("a", "", 1, [6]), ("b", "r", 1, [3])]


def test_rows_that_did_not_die_have_no_reasons() -> None:
    assert grouped(dead(None, None), {"payload": b"x", "headers": [("color", "red")]}) == []


def test_of_many_reasons_the_largest_groups_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_reasons, "MAX_GROUPS", 2)
    assert [each[:3] for each in grouped(*(dead(text) for text in "abbccc"))] == [("c", "orders", 3), ("b", "orders", 2)]


def test_rows_by_their_values_are_grouped_too() -> None:
    rig = Rig()
    rig.machine.produce(SmallBatch([b"x"], {"headers": [{"sluiceway-reason": "a", "sluiceway-queue": "q"}]}, 40), START, None)
    rig.commit()
    assert queries.reasons(rig.machine) == {("a", "q"): 1}


REASONS = st.sampled_from([None, "a", "b", "ValueError: 1", "ValueError: 2"])
PRODUCES = st.lists(st.tuples(REASONS, st.sampled_from(["q", "r"])), min_size=1, max_size=8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), PRODUCES),
        st.tuples(st.sampled_from(["complete", "retry", "later"]), st.sets(st.integers(0, 12))),
        st.tuples(st.sampled_from(["commit", "reload", "compact"]), st.none()),
    ),
    max_size=20,
)


@given(STEPS)
def test_the_counts_are_those_of_the_items_that_are_left(steps: list[tuple[str, Any]]) -> None:
    rig, reasons = Rig(), dict[int, tuple[str, str] | None]()
    for name, about in steps:
        if name == "produce":
            first = rig.machine.log.header.next
            rows = [dead(reason, source) for reason, source in about]
            rig.machine.produce(batch_from_rows(rows), START, None)
            reasons |= {first + n: None if reason is None else (reason.split(":")[0], source) for n, (reason, source) in enumerate(about)}
        elif name == "commit":
            rig.commit()
        elif name == "reload":
            rig.reload()
        elif name == "compact":
            rig.compact()
        elif rig.machine.log.ready_count:
            # Some are left leased.
            lease = rig.lease(EVERYTHING)
            offsets = [int(offset) for piece in queries.open_slices(lease) for offset in piece.offsets]
            chosen = [offset for n, offset in enumerate(offsets) if n in about]
            how = {"complete": DONE, "retry": Disposition("retry", retry_after=0), "later": Disposition("retry", retry_after=50)}[name]
            rig.settle(chosen, how)
    rig.commit()
    left = Counter(alike for spot in spots_of(rig.machine) if (alike := reasons[spot.origin]) is not None)
    assert queries.reasons(rig.machine) == left
