"""What the comparison of the rows found: plain data, since the ledger is made where there is no Spark."""

from __future__ import annotations

import msgspec


class Check(msgspec.Struct, frozen=True):
    """What the comparison found: rows in the input, in the table and in the dead queue; of the other counts, all must be 0.

    `lost`: input rows that are in neither the table nor the dead queue. `duplicated`: rows too many of one reference.
    `unknown`: references that the input does not have. `missing` and `unexpected`: rows of which every column was compared,
    that the table lacks or has too many; `dead_missing` and `dead_unexpected` the same of the dead queue, with the reason.
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
