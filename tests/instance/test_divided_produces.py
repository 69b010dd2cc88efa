"""The error of a produce that is divided by its items' keys: a refusal only if nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sluiceway.cluster.produce_by_key import Outcome, together
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_keys import Division
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Produce, Produced

STORED = Produced(0, 7, 1, False)


def error_of(outcomes: Sequence[Outcome]) -> str:
    rows = batch_from_rows([{"payload": b"x", "key": str(number)} for number in range(len(outcomes))])
    parts = [Division(number, rows.slice(number, 1), np.array([number]), ((0, 1),)) for number in range(len(outcomes))]
    with pytest.raises(SluicewayError) as found:
        together(parts, outcomes, Produce(rows, 1_000))
    return found.value.code


@pytest.mark.parametrize("code", ["unavailable", "queue_paused", "storage_full", "too_many_requests", "partition_damaged"])
def test_what_is_stored_in_part_was_not_refused(code: str) -> None:
    refused = SluicewayError(code, "this part")
    assert error_of([refused, refused]) == code
    assert error_of([STORED, refused]) == "outcome_unknown"
    assert error_of([SluicewayError("outcome_unknown", "another part"), refused]) == "outcome_unknown"


def test_the_refusal_of_all_parts_says_most() -> None:
    assert error_of([SluicewayError("unavailable", "this part"), SluicewayError("queue_paused", "another part")]) == "queue_paused"


def test_an_error_that_no_repetition_mends_is_told() -> None:
    assert error_of([STORED, SluicewayError("key_conflict", "this part")]) == "key_conflict"
    with pytest.raises(ZeroDivisionError):
        together([], [ZeroDivisionError()], Produce(batch_from_rows([{"payload": b"x"}]), 1_000))
