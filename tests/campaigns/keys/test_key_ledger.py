"""The ledger of the campaign finds what must not be."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pytest

from tests.campaigns.keys.key_ledger import KeyLedger, Run, bodies, body

SOON = time.monotonic() + 3_600


def delivered(ledger: KeyLedger, *items: tuple[int, int]) -> list[Run]:
    keys, numbers = bodies(pa.chunked_array([pa.array([body(*item) for item in items], pa.binary())]))
    return ledger.delivers(keys, numbers, SOON)


def test_what_is_in_order_is_right() -> None:
    ledger = KeyLedger(3)
    assert delivered(ledger, (1, 0), (2, 0), (1, 1)) == [Run(1, 0, 0, 2), Run(2, 0, 2, 1)]
    ledger.settles(np.array([1]), np.array([2]))
    ledger.let_go(np.array([1, 2]))
    # Nobody answered: it may have been settled or not.
    delivered(ledger, (1, 2))
    ledger.let_go(np.array([1]))
    delivered(ledger, (1, 0), (1, 1))
    assert ledger.wrong == []


@pytest.mark.parametrize(
    ("items", "what"),
    [
        ([(1, 1)], "before others of its key"),
        ([(1, 0), (1, 2)], "does not follow"),
        ([(1, 1), (1, 0)], "before others of its key"),
        ([(0, 0)], "after it was completed"),
        ([(2, 1)], "while another consumer holds its key"),
    ],
)
def test_what_is_not_is_found(items: list[tuple[int, int]], what: str) -> None:
    ledger = KeyLedger(3)
    delivered(ledger, (0, 0), (2, 0))
    ledger.settles(np.array([0, 2]), np.array([1, 1]))
    ledger.settled(np.array([0]), np.array([1]))
    ledger.let_go(np.array([0]))
    delivered(ledger, *items)
    assert any(what in line for line in ledger.wrong), ledger.wrong
