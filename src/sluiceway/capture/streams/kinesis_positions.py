"""Positions in a Kinesis shard, as text with metadata."""

from __future__ import annotations

import re
from typing import NamedTuple

from sluiceway.kernel.clock import Millis
from sluiceway.ports.change_stream import UnknownPositionError

TRIM_HORIZON, AT_TIMESTAMP, GONE = "TRIM_HORIZON", "AT_TIMESTAMP", "GONE"

SLACK: Millis = 10_000
"""Arrival times are approximate, and a shard's records may be slightly out of order."""

NUMBER = "[0-9]{1,128}"
"""Form of a sequence number."""
_TEXT = re.compile(rf"({NUMBER}|TRIM_HORIZON|AT_TIMESTAMP|GONE)(?:@([0-9]{{1,16}}))?(?:~([0-9]{{1,16}}))?(?:<({NUMBER}))?")


class Position(NamedTuple):
    """A place in a shard. As text: `ORIGIN@AT~SEEN<FIRST`, where all but the origin are optional.

    `origin` is the number of the last record read, or the starting point: `TRIM_HORIZON` (the oldest record available), `AT_TIMESTAMP` (the
    first that arrived at `at` or later), `GONE` (all records of the shard had been dropped before it was known).

    `at`: arrival time of the record of that number; at the beginning of a child, a lower bound for its records. `seen`: none of the records
    after this position had arrived by then. So if `seen` is more recent than the stream's retention, none was dropped unread. `first`:
    number of the first record of the batch that this position ends.
    """

    origin: str
    at: Millis | None = None
    seen: Millis | None = None
    first: str = ""

    @property
    def number(self) -> int:
        """The number of the last record read; 0, below all numbers, if there is none."""
        return int(self.origin) if self.origin.isdigit() else 0

    @property
    def is_record(self) -> bool:
        return self.origin.isdigit()

    @property
    def since(self) -> Millis | None:
        """Lower bound for the arrival of records after this position, or None."""
        bounds = [bound for bound in (self.seen, None if self.at is None else max(self.at - SLACK, 0)) if bound is not None]
        return max(bounds, default=None)

    def __str__(self) -> str:
        at = "" if self.at is None else f"@{self.at}"
        seen = "" if self.seen is None else f"~{self.seen}"
        return f"{self.origin}{at}{seen}" + (f"<{self.first}" if self.first else "")


def parse_position(text: str) -> Position:
    """Parse a position. Raises UnknownPositionError for an invalid text."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise UnknownPositionError(f"{text[:200]!r} is not a position in a shard")
    origin, at, seen, first = found.groups()
    if origin == AT_TIMESTAMP and at is None:
        raise UnknownPositionError(f"{text[:200]!r} has no time")
    return Position(origin, None if at is None else int(at), None if seen is None else int(seen), first or "")
