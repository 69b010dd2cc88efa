"""The answer of a produce that was divided by key, from those of its parts."""

from __future__ import annotations

import pytest

from sluiceway.cluster.produce_by_key import together
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_keys import Division, divided
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Produce, Produced, ProducedByKey, ProduceKey

ROWS = batch_from_rows([{"payload": b"x", "key": key} for key in "abab"])
STORED = "stored"


def parts() -> list[Division]:
    """`a` is at home in partition 0, `b` in 1."""
    return divided(ROWS, "ab".index)


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
    answer = together(divided(rows, lambda _: 3), [Produced(3, 5, 3, deduplicated=False)], Produce(rows, 1_000))
    assert type(answer) is Produced
    assert answer == (3, 5, 3, False)


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
