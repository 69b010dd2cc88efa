"""Distribution: compares partitions for produces, and divides ready items among waiters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_SHARED = 4
"""Requests that may share a transaction, as long as that is at most half of those under way."""
OTHERS = 32
"""Requests that suffice to keep a server busy."""


class Candidate(NamedTuple):
    """A partition that could take a produce. Compared as a tuple: the least is chosen."""

    waiting: int
    """Ready items, plus those of accepted requests not committed yet."""
    claimed: int
    """Leased and scheduled items: break ties."""
    last_chosen: int
    partition: int


def transaction_limit(requests: int) -> int:
    """Maximum number of the `requests` under way that may share a transaction, since all would wait if it hangs.

    `MIN_SHARED` if that is not more than half; more only if they are a quarter, or leave `OTHERS`.
    """
    return max(min(MIN_SHARED, (requests + 1) // 2), requests // 4, requests - OTHERS)


def deal(available: int, wants: Sequence[int]) -> list[int]:
    """Divide items round-robin: 23 among wants of 20, 6 and 1 give 16, 6 and 1.

    Where the division is uneven, earlier waiters get one more.
    """
    shares = list(wants)
    hungry = sorted(range(len(wants)), key=lambda index: -wants[index])
    while hungry and wants[hungry[-1]] <= available // len(hungry):
        available -= wants[hungry.pop()]
    if hungry:
        level, over = divmod(available, len(hungry))
        for place, index in enumerate(sorted(hungry)):
            shares[index] = level + (place < over)
    return shares
