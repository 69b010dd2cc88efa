"""The answer of a produce that was divided by key, from those of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from sluiceway.cluster.produce_by_key import DividedError, home_of_part, parts_again, parts_of, together
from sluiceway.core.partition.key_slots import home_of_key, slots_of
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_keys import Division, divided, hash_of, in_runs
from sluiceway.model.items import batch_from_rows
from sluiceway.model.queue import MOVING, PartitionRecord, QueueRecord
from sluiceway.model.requests import Produce, Produced, ProducedByKey, ProduceKey
from sluiceway.model.small_batch import Rows, as_few, in_columns

ROWS = batch_from_rows([{"payload": b"x", "key": key} for key in "abab"])
STORED = "stored"


def parts() -> list[Division]:
    """`a` is at home in partition 0, `b` in 1."""
    return divided(ROWS, lambda keys: (keys == hash_of("b")).astype(np.int64), (0, 1))


def answered(*outcomes: str, key: str | None = "k") -> Produced:
    """With an error of that code, or stored, for each part."""
    found = [
        Produced(at, 10 * at, 2, deduplicated=False) if outcome == STORED else SluicewayError(outcome, "no")
        for at, outcome in enumerate(outcomes)
    ]
    return together(parts(), found, Produce(ROWS, 1_000, None if key is None else ProduceKey(key)))


def test_the_items_have_their_places_in_the_order_of_the_call() -> None:
    answer = answered(STORED, STORED)
    assert isinstance(answer, ProducedByKey)
    assert answer.places == [(0, 0), (1, 10), (0, 1), (1, 11)]


def test_items_that_follow_each_other_in_one_partition_need_no_places() -> None:
    rows = batch_from_rows([{"payload": b"x", "key": "a"}] * 3)
    answer = together(
        divided(rows, lambda keys: np.zeros(len(keys), np.int64), (3,)), [Produced(3, 5, 3, deduplicated=False)], Produce(rows, 1_000)
    )
    assert type(answer) is Produced
    assert answer == Produced(3, 5, 3, deduplicated=False)


def test_duplicates_have_the_places_of_the_items_that_are_there() -> None:
    found = [Produced(0, 10, 2, deduplicated=False, duplicates=((1, 4),)), Produced(1, 20, 2, deduplicated=False, duplicates=((0, 7),))]
    answer = together(parts(), found, Produce(ROWS, 1_000))
    assert isinstance(answer, ProducedByKey)
    assert answer.places == [(0, 10), (1, 7), (0, 4), (1, 20)]
    assert answer.duplicates == ((1, 7), (2, 4))


def test_a_single_duplicate_beside_nothing_else_is_told_with_its_place() -> None:
    rows = batch_from_rows([{"payload": b"x", "key": "a"}])
    stored = [Produced(3, 9, 1, deduplicated=False, duplicates=((0, 8),))]
    answer = together(divided(rows, lambda keys: np.zeros(len(keys), np.int64), (3,)), stored, Produce(rows, 1_000))
    assert isinstance(answer, ProducedByKey)
    assert (answer.places, answer.partitions, answer[:3], answer.duplicates) == ([(3, 8)], None, (3, 8, 1), ((0, 8),))


def test_duplicates_of_a_part_that_was_stored_in_pieces_are_in_the_partition_of_their_piece() -> None:
    """Their offsets, and what is stored, are counted from the beginning of each piece."""
    rows = batch_from_rows([{"payload": b"x", "key": "a"}] * 6)
    stored = Produced(7, 20, 6, deduplicated=True, runs=((7, 20, 3), (0, 3, 1), (5, 9, 2)), duplicates=((1, 2), (3, 1), (4, 8)))
    answer = together(divided(rows, lambda keys: np.zeros(len(keys), np.int64), (3,)), [stored], Produce(rows, 1_000))
    assert isinstance(answer, ProducedByKey)
    assert answer.places == [(7, 20), (7, 2), (7, 21), (0, 1), (5, 8), (5, 9)]
    assert answer.duplicates == ((1, 2), (3, 1), (4, 8))


FORMS = [batch_from_rows, lambda rows: as_few(batch_from_rows(rows))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"unique": "until_settled", "order": "key"}, [(0, [2, 3]), (2, [0, 5, 1, 4])]),
        ({"unique": "until_settled"}, [(0, [2]), (1, [0, 1, 4, 5]), (2, [3])]),
        ({"unique": "until_settled", "fair": "key"}, [(0, [2]), (1, [0, 5, 1, 4]), (2, [3])]),
        ({"order": "key"}, [(0, [3]), (2, [0, 2, 5, 1, 4])]),
    ],
)
def test_items_are_where_their_keys_are_or_else_their_unique_keys(
    form: Callable[[list[dict[str, object]]], Rows], settings: dict[str, str], expected: list[tuple[int, list[int]]]
) -> None:
    zero, one, two = (next(f"{n}" for n in range(99) if home_of_key(record(**settings), f"{n}") == at) for at in range(3))
    rows: list[dict[str, object]] = [
        {"payload": b"0"},
        {"payload": b"1", "key": two, "unique_key": one},
        {"payload": b"2", "unique_key": zero},
        {"payload": b"3", "key": zero, "unique_key": two},
        {"payload": b"4", "key": two},
        {"payload": b"5"},
    ]
    request = Produce(form(rows), 1_000)
    found = [(each.place, each.numbers.tolist()) for each, _ in parts_of(record(**settings), request)]
    assert found == expected


def test_the_rows_of_a_partition_stay_as_they_were_sent_if_they_are_unique_alone() -> None:
    rows = batch_from_rows([{"payload": b"%d" % number, "unique_key": f"{number}"} for number in range(100)])
    parts = parts_of(record(unique="until_settled"), Produce(rows, 1_000))
    assert len(parts) == 3
    for each, part in parts:
        assert (np.diff(each.numbers) > 0).all()
        assert part.part is not None
        assert len(part.part.slots) == 1
        assert home_of_part(record(unique="until_settled"), part) == each.place


def record(**settings: str) -> QueueRecord:
    return QueueRecord("q", "aaaaaaaa", 0, 0, tuple(PartitionRecord(number) for number in range(3)), **settings)  # type: ignore[arg-type]


def test_a_part_that_was_stored_in_pieces_has_a_place_for_each_item() -> None:
    """As it is after a rebalance."""
    stored = [Produced(7, 20, 2, deduplicated=True, runs=((7, 20, 1), (0, 3, 1))), Produced(1, 10, 2, deduplicated=True)]
    answer = together(parts(), stored, Produce(ROWS, 1_000))
    assert isinstance(answer, ProducedByKey)
    assert answer.places == [(7, 20), (1, 10), (0, 3), (1, 11)]
    assert answer.deduplicated


def test_a_part_is_divided_again_by_the_homes_that_its_slots_have_now() -> None:
    record = QueueRecord("q", "aaaaaaaa", 0, 0, (PartitionRecord(0), PartitionRecord(1)), order="key")
    rows = batch_from_rows([{"payload": f"{number}".encode(), "key": f"k{number % 40}"} for number in range(200)])
    request = Produce(rows, 1_000, ProduceKey("k"))
    (division, part), _ = parts_of(record, request)
    assert home_of_part(record, part) == part.partition == 0
    assert part.part is not None
    moved = {slot for slot, _ in part.part.slots[::3]}
    slots = tuple(2 if slot in moved else home for slot, home in enumerate(slots_of(record)))
    after = msgspec.structs.replace(record, slots=slots)
    with pytest.raises(DividedError):
        home_of_part(after, part)
    again = parts_again(after, division, part)
    assert [each.place for each, _ in again] == [0, 2]
    for each, piece in again:
        assert piece.part is not None
        assert piece.part.digest == part.part.digest
        assert home_of_part(after, piece) == each.place
        assert {slot in moved for slot, _ in piece.part.slots} == {each.place == 2}
        assert [rows["payload"][number].as_py() for number in each.numbers] == in_columns(each.rows)["payload"].to_pylist()
    assert sorted(number for each, _ in again for number in each.numbers) == sorted(division.numbers)
    between = msgspec.structs.replace(record, slots=tuple(MOVING if slot in moved else home for slot, home in enumerate(slots_of(record))))
    assert home_of_part(between, part) == MOVING


@pytest.mark.parametrize("form", [None, as_few])
def test_rows_of_one_key_and_priority_follow_each_other(form: Callable[[Any], Any] | None) -> None:
    """Of equal ones in the order of the call; one without a priority counts as of 4."""
    said = [("a", 0), ("b", 9), (None, None), ("a", 9), ("b", 9), ("a", 4), ("a", None), (None, 5)]
    rows = batch_from_rows([{"payload": b"x", "key": key, "priority": priority} for key, priority in said])
    rows = rows if form is None else form(rows)
    whole = [(in_runs(rows, *by), by) for by in ((True, True), (False, True), (True, False))]
    assert [each.numbers.tolist() for each, _ in whole] == [
        [3, 5, 6, 0, 1, 4, 7, 2],
        [1, 3, 4, 7, 2, 5, 6, 0],
        [0, 3, 5, 6, 1, 4, 2, 7],
    ]
    one, other = divided(rows, lambda keys: (keys == hash_of("b")).astype(np.int64), (0, 1), by_priority=True)
    assert (one.numbers.tolist(), other.numbers.tolist()) == ([3, 5, 6, 0, 7, 2], [1, 4])
    for each in (*(each for each, _ in whole), one, other):
        found = in_columns(each.rows).to_pylist()
        assert [(row["key"], row.get("priority")) for row in found] == [said[number] for number in each.numbers]


@pytest.mark.parametrize("code", ["unavailable", "storage_full", "queue_paused", "too_many_requests"])
def test_when_a_part_is_stored_no_error_says_that_nothing_is(code: str) -> None:
    """A client repeats such a call under another idempotency key, which would store the other part twice."""
    for outcomes in ((STORED, code), (code, STORED), (code, "outcome_unknown")):
        with pytest.raises(SluicewayError) as raised:
            answered(*outcomes)
        assert raised.value.code == "outcome_unknown"
        assert "stores what is missing" in raised.value.detail
    with pytest.raises(SluicewayError) as raised:
        answered(code, STORED, key=None)
    assert (raised.value.code, "the others may be stored" in raised.value.detail) == ("outcome_unknown", True)


def test_when_no_part_is_stored_the_error_is_that_of_a_part() -> None:
    with pytest.raises(SluicewayError) as raised:
        answered("storage_full", "unavailable")
    assert raised.value.code == "storage_full"


@pytest.mark.parametrize("code", ["key_conflict", "stale_sequence"])
def test_what_is_wrong_with_the_idempotency_key_is_said(code: str) -> None:
    """To repeat the call would not help."""
    for outcomes in ((STORED, code), ("outcome_unknown", code)):
        with pytest.raises(SluicewayError) as raised:
            answered(*outcomes)
        assert raised.value.code == code
