"""What is asked of a queue's items by their place, whoever has them, and what is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from sluiceway.contract.item_answers import BrowseState, LeftReason
from sluiceway.kernel.clock import Millis
from sluiceway.model.requests import Offsets


@dataclass(slots=True)
class ListItems:
    """Look at up to `limit` items of a partition by offset, from `start` on: those in the line and in leases, or the `scheduled` ones.

    A scheduled item has no place in the line; it goes by the one at which it was produced.
    """

    partition: int
    start: int
    limit: int
    scheduled: bool = False


class Standing(NamedTuple):
    """What holds of a listed item beside what its row says, where it applies."""

    lease_deadline: Millis | None = None
    expires_at: Millis | None = None
    due_at: Millis | None = None


@dataclass(slots=True)
class ItemsPage:
    """Rows with the columns of `model.leased`, and how they stand. `last` is the last offset that was looked at, if there are more."""

    rows: list[tuple[pa.RecordBatch, Standing]]
    last: int | None = None


@dataclass(slots=True)
class Browse:
    """Read up to `limit` items of a partition as it is now, of these states; or (from `position` on) of the `snapshot` of before."""

    partition: int
    states: tuple[BrowseState, ...]
    limit: int
    snapshot: str | None = None
    position: int = 0
    payload: bool = True


@dataclass(slots=True)
class BrowsedPage:
    """Rows with the columns of `model.leased`, and how they stand; payloads that were not asked for are empty.

    The next page begins at `position` of the `snapshot`; None: there is none.
    """

    rows: list[tuple[pa.RecordBatch, Standing]]
    snapshot: str | None = None
    position: int = 0


@dataclass(slots=True)
class DeleteItems:
    """Drop items (sorted, unique offsets by partition) that wait, ready or scheduled. Leased items stay.

    `foreign` are ids of other incarnations or partitions that do not exist.
    """

    offsets: Mapping[int, Offsets]
    request_timeout: Millis
    foreign: Sequence[str] = ()


@dataclass(slots=True)
class Deleted:
    """How many items were dropped, durably, and what was left (id, reason)."""

    deleted: int = 0
    ignored: list[tuple[str, LeftReason]] = field(default_factory=list)

    def add(self, other: Deleted) -> None:
        """Put the other's count and ids to these."""
        self.deleted += other.deleted
        self.ignored += other.ignored
