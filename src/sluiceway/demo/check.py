"""Result of the comparison of rows: plain data, since the ledger is made without Spark."""

from __future__ import annotations

import msgspec


class Check(msgspec.Struct, frozen=True):
    """Rows in the input, in the table and in the dead queue; all other counts must be 0.

    `lost`: input rows in neither the table nor the dead queue. `duplicated`: surplus rows of a reference.
    `unknown`: references that are not in the input. `missing`, `unexpected`: rows, compared in every column,
    that the table lacks or has too many of; `dead_missing`, `dead_unexpected`: the same for the dead queue, with the reason.
    """

    rows: int
    table: int
    dead: int
    lost: int
    duplicated: int
    unknown: int
    missing: int
    unexpected: int
    dead_missing: int
    dead_unexpected: int
    reasons: dict[str, int]
