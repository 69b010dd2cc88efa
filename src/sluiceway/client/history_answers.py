"""What the server tells of a queue's last day."""

from __future__ import annotations

from datetime import datetime

import msgspec


class QueueHistory(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's last minutes that have ended, the first of which begins at `first_at` (`from` in JSON).

    `series` has a number for each of them, by name; None: nobody looked then. `ready`, `total_leased`, `scheduled`: items at the end of the
    minute; `oldest_s`: for how many seconds the item that comes next has been there. The others, named as in `PartitionStats`: how many in
    that minute.
    """

    queue_name: str
    every: str = "1m"
    first_at: datetime = msgspec.field(name="from")
    series: dict[str, list[int | None]] = {}
