"""Inspection of a queue's items by position: requests and results."""

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
    """List up to `limit` items of a partition by offset, from `start` on: those in the line and in leases, or the `scheduled` ones.

    A scheduled item is not in the line; it is listed at the offset at which it was produced.
    """

    partition: int
    start: int
    limit: int
    scheduled: bool = False


class Standing(NamedTuple):
    """State of a listed item beside its row; None where it does not apply."""

    lease_deadline: Millis | None = None
    expires_at: Millis | None = None
    due_at: Millis | None = None


@dataclass(slots=True)
class ItemsPage:
    """Rows with the columns of `model.leased_items`, each batch with its state. `last`: last offset examined, if there are more items."""

    rows: list[tuple[pa.RecordBatch, Standing]]
    last: int | None = None


@dataclass(slots=True)
class Browse:
    """Read up to `limit` items in these states from a new snapshot of a partition, or from `position` on of an earlier `snapshot`."""

    partition: int
    states: tuple[BrowseState, ...]
    limit: int
    snapshot: str | None = None
    position: int = 0
    payload: bool = True


@dataclass(slots=True)
class BrowsedPage:
    """Rows with the columns of `model.leased_items`, each batch with its state; payloads are empty unless requested.

    The next page begins at `position` of `snapshot`; None: this is the last page.
    """

    rows: list[tuple[pa.RecordBatch, Standing]]
    snapshot: str | None = None
    position: int = 0


@dataclass(slots=True)
class DeleteItems:
    """Drop waiting items, ready or scheduled, by sorted unique offsets of each partition. Leased items stay.

    `foreign`: ids of other incarnations or of partitions that do not exist.
    """

    offsets: Mapping[int, Offsets]
    request_timeout: Millis
    foreign: Sequence[str] = ()


@dataclass(slots=True)
class Deleted:
    """Number of items durably dropped, and the ignored ids with their reasons."""

    deleted: int = 0
    ignored: list[tuple[str, LeftReason]] = field(default_factory=list)

    def add(self, other: Deleted) -> None:
        """Add the other result to this one."""
        self.deleted += other.deleted
        self.ignored += other.ignored
