"""Queue history: the minutes that an instance records of its share, and their sum over all instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from sluiceway.kernel.clock import Millis

MINUTE: Final[Millis] = 60_000
MAX_MINUTES: Final = 1_440
"""Retention of a queue's minutes; they may be kept for up to an hour more."""

LEVELS: Final = ("ready", "total_leased", "scheduled")
"""Items at the end of a minute, under their `queue.stats` names."""
COUNTS: Final = ("produced", "leased", "completed", "retried", "expired", "dead", "released", "cleared", "redriven", "failures")
"""Counts within a minute, under the names of the totals in `queue.stats`."""
OLDEST: Final = "oldest_s"
"""Age of the next item, in seconds; the maximum over the partitions."""

Minute = int
"""Minutes since the Unix epoch."""
NO_COUNTS: Final = (0,) * len(COUNTS)


class Tally(NamedTuple):
    """State of a share: LEVELS, the next item's time of arrival (None: no item), and COUNTS since the share began."""

    levels: tuple[int, ...] = (0,) * len(LEVELS)
    oldest_at: Millis | None = None
    counts: tuple[int, ...] = NO_COUNTS


class Page(msgspec.Struct, array_like=True):
    """Minutes in which an instance's counts of a queue changed, as places in the page, with the new counts.

    An absent column is zero in all of them. OLDEST has seconds since the epoch.
    """

    places: list[int]
    columns: dict[str, list[int | None]]


class History(NamedTuple):
    """Minutes from `first` on. None: a minute that no instance recorded."""

    first: Minute
    series: Mapping[str, Sequence[int | None]]


def encode_page(page: Page) -> bytes:
    return msgspec.msgpack.encode(page)


def decode_page(data: bytes) -> Page:
    return msgspec.msgpack.decode(data, type=Page)
