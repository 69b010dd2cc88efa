"""How a queue was, minute by minute: what an instance notes of its share, and what is told of all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from sluiceway.kernel.clock import Millis

MINUTE: Final[Millis] = 60_000
MAX_MINUTES: Final = 1_440
"""For so long a queue's minutes are kept, and for up to an hour more."""

LEVELS: Final = ("ready", "total_leased", "scheduled")
"""Items at the end of a minute, under the names that `queue.stats` has for them."""
COUNTS: Final = ("produced", "leased", "completed", "retried", "expired", "dead", "released", "cleared", "redriven", "failures")
"""What happened within a minute, under the names that `queue.stats` has for the sums since ever."""
OLDEST: Final = "oldest_s"
"""The age, in seconds, of the item that comes next; the highest of the partitions."""

Minute = int
"""A minute since the Unix epoch."""
NO_COUNTS: Final = (0,) * len(COUNTS)


class Tally(NamedTuple):
    """A share now: LEVELS, since when the item that comes next has been there (None: there is none), and COUNTS since the share began."""

    levels: tuple[int, ...] = (0,) * len(LEVELS)
    oldest_at: Millis | None = None
    counts: tuple[int, ...] = NO_COUNTS


class Page(msgspec.Struct, array_like=True):
    """Minutes of a queue in which something had changed at an instance, as places in the page, and what it then had.

    A column that is not there is zero in all of them. OLDEST has seconds since the epoch.
    """

    places: list[int]
    columns: dict[str, list[int | None]]


class History(NamedTuple):
    """Minutes from `first` on. A None is a minute in which nobody looked."""

    first: Minute
    series: Mapping[str, Sequence[int | None]]


def encode_page(page: Page) -> bytes:
    return msgspec.msgpack.encode(page)


def decode_page(data: bytes) -> Page:
    return msgspec.msgpack.decode(data, type=Page)
