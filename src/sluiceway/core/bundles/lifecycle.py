"""The steps of a bundle: open, closed, ended. Pure: told the record, the counts and the time, it says what to do next.

Every step may be taken twice, by two instances or after a crash. The follow-up is produced under an idempotency group of the bundle, and
its item is the same each time, since the counts of a closed bundle no longer change once they are even. A partition remembers a group for
GROUP_KEEP after its last use. So a follow-up is produced no later than REACH after the close: an instance that does it a second time,
however late it wakes, adds nothing.
"""

from __future__ import annotations

from typing import Literal

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import GROUP_KEEP
from sluiceway.model.bundle_records import BundleRecord
from sluiceway.model.requests import BundleCount, CountStep

DAY: Millis = 86_400_000
OPEN_FOR: Millis = 30 * DAY
"""How long a bundle may be open. One that is never closed would otherwise be kept for ever."""
REACH: Millis = GROUP_KEEP - DAY
"""How long after its close a bundle may end. A day less than groups are remembered: more than clocks differ, and than a call takes."""
KEPT_FOR: Millis = DAY
"""How long the record of an ended bundle is kept. Longer than a produce that names the bundle can be under way."""
SOONEST: Millis = 200
LATEST: Millis = 5_000
"""Bounds of the pause between two counts, which is a tenth of the bundle's age."""

Step = Literal["wait", "close", "finish", "expire", "delete"]


def wants(record: BundleRecord, now: Millis) -> CountStep | None:
    """What to ask the partitions; None: nothing now."""
    if record.state == "open":
        return "look" if record.items is not None and now <= record.created_at + OPEN_FOR else None
    return "close" if record.state == "closed" else "forget"


def decide(record: BundleRecord, count: BundleCount, now: Millis) -> Step:
    """The next step of a bundle of which this was counted. `finish`: produce the follow-up, then record the end."""
    if record.state == "open":
        if now > record.created_at + OPEN_FOR:
            return "expire"
        return "close" if record.items is not None and count.stored >= record.items else "wait"
    if record.state == "closed":
        assert record.closed_at is not None, "it is closed"
        if now > record.closed_at + REACH:
            return "expire"
        return "wait" if count.left else "finish"
    assert record.ended_at is not None, "it has ended"
    return "delete" if now > record.ended_at + KEPT_FOR else "wait"


def due(record: BundleRecord, now: Millis) -> Millis:
    """When to look again at a bundle that waits."""
    if record.ended_at is not None:
        return record.ended_at + KEPT_FOR + 1
    if record.closed_at is None and record.items is None:
        return record.created_at + OPEN_FOR + 1
    since = record.created_at if record.closed_at is None else record.closed_at
    return now + min(LATEST, max(SOONEST, (now - since) // 10))
