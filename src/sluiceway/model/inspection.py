"""Inspection of a queue's items by position: requests and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import pyarrow as pa

from sluiceway.contract.item_answers import BrowseState, FailedReason, LeftReason
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_filter import ItemFilter
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


class Place(NamedTuple):
    """A place in the reading order of a partition: the line, by offset, then the scheduled entries, by number and row."""

    scheduled: bool = False
    at: int = 0
    row: int = 0


BEGIN = Place()


@dataclass(slots=True)
class Search:
    """Find up to `limit` items of a partition, in these states and matching `wanted`, from the place `start` on.

    Compares up to `rows` items, and stops after `request_timeout` ms. The items are read as they stand: one that changes its place
    meanwhile may be missed, or found twice.
    """

    partition: int
    states: tuple[BrowseState, ...]
    wanted: ItemFilter
    limit: int
    rows: int
    request_timeout: Millis
    start: Place = BEGIN
    payload: bool = True


@dataclass(slots=True)
class SearchedPage:
    """Rows as of a BrowsedPage, and the number of items compared. `next`: the place at which to search on; None: the end was reached."""

    rows: list[tuple[pa.RecordBatch, Standing]] = field(default_factory=list)
    looked_at: int = 0
    next: Place | None = None


@dataclass(slots=True)
class SearchedQueue:
    """Rows found in all partitions, and the number of items compared. `skipped`: partitions that are not available.

    `next`: the partition, and the place in it, at which to search on; None: the end was reached.
    """

    rows: list[tuple[pa.RecordBatch, Standing]] = field(default_factory=list)
    looked_at: int = 0
    skipped: list[int] = field(default_factory=list)
    next: tuple[int, Place] | None = None


@dataclass(slots=True)
class ByItems:
    """A call on items by sorted unique offsets of each partition. A scheduled item has the offset at which it was produced.

    `foreign`: ids of other incarnations or of partitions that do not exist.
    """

    offsets: Mapping[int, Offsets]
    request_timeout: Millis
    foreign: Sequence[str] = ()


@dataclass(slots=True)
class DeleteItems(ByItems):
    """Drop waiting items, ready or scheduled. Leased items stay."""


@dataclass(slots=True)
class RunNow(ByItems):
    """Make scheduled items ready, although they are not due. Answered by MadeReady."""


@dataclass(slots=True)
class MoveItems(ByItems):
    """Send waiting items, ready or scheduled, to the queue `target`; None: dead items, each to the queue that it came from.

    Waits until they have arrived or `request_timeout` is over; what has begun continues after that. Answered by MovedAway.
    """

    target: str | None = None


@dataclass(slots=True)
class Deleted:
    """Number of items durably dropped, and the ignored ids with their reasons."""

    deleted: int = 0
    ignored: list[tuple[str, LeftReason]] = field(default_factory=list)

    def add(self, other: Deleted) -> None:
        """Add the other result to this one."""
        self.deleted += other.deleted
        self.ignored += other.ignored


@dataclass(slots=True)
class MadeReady:
    """Number of items durably made ready, and the ignored ids with their reasons."""

    ready: int = 0
    ignored: list[tuple[str, LeftReason]] = field(default_factory=list)

    def add(self, other: MadeReady) -> None:
        """Add the other result to this one."""
        self.ready += other.ready
        self.ignored += other.ignored


@dataclass(slots=True)
class MovedAway:
    """`matched`: items taken out of the queue; `moved`: those durable in their target; `targets`: these by target; and the ignored ids.

    If some partitions fail and others do not, the ids of those are ignored, too, with the code of the error.
    """

    matched: int = 0
    moved: int = 0
    targets: dict[str, int] = field(default_factory=dict)
    ignored: list[tuple[str, LeftReason]] = field(default_factory=list)

    def add(self, other: MovedAway) -> None:
        """Add the other result to this one."""
        self.matched += other.matched
        self.moved += other.moved
        for target, items in other.targets.items():
            self.targets[target] = self.targets.get(target, 0) + items
        self.ignored += other.ignored

    def note_failures(self, failures: Sequence[tuple[Iterable[str], SluicewayError]]) -> None:
        """Record ids whose partitions failed. Raises an error if no item has moved: `outcome_unknown` if any is."""
        if failures and not self.matched:
            raise max((error for _, error in failures), key=lambda error: error.code == "outcome_unknown")
        for names, error in failures:
            # The other codes promise that nothing was done, too.
            self.ignored += [(name, _FAILED.get(error.code, "unavailable")) for name in names]


_FAILED: Mapping[str, FailedReason] = {code: code for code in get_args(FailedReason)}
