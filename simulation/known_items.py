"""Items, batches and leases from the clients' point of view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from simulation.scene import Place
from sluiceway.kernel.clock import Millis
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Disposition, Produced, ProduceKey


@dataclass(slots=True, eq=False)
class Way:
    """Transfer of items from partition `source` to another queue, or to another partition of the same queue (then `target` is `#…`)."""

    source: str
    target: str | None
    incarnation: str | None = None
    """Incarnation of the target, if the transfer was bound to one."""
    nowhere: bool = False
    """Whether its partition was told that the target no longer exists."""
    arrived: set[str] = field(default_factory=set)
    """Payloads that are durable at the target."""
    places: dict[str, Place] = field(default_factory=dict)
    """For items that stay in their queue: place, with attempts and times, at departure."""
    limits: dict[str, int] = field(default_factory=dict)
    """Maximum size of the next lease of an item whose last lease ran out."""


@dataclass(slots=True, eq=False)
class Item:
    """One payload through all its moves. Durably it is in one of three states: it lives in `home`, travels on `way`, or has `ended`."""

    payload: str
    index: int
    queue: str
    """Queue it was produced to."""
    due_at: Millis
    reference: str | None
    batch: Batch = field(init=False)
    origin: str | None = None
    """Its first item id, once that is durable."""
    home: str | None = None
    """Partition it lives in."""
    way: Way | None = None
    ended: bool = False
    key: str | None = None
    priority: int | None = None
    unique_key: str | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """Body of a produce request, sent once or, with a key, several times. With a `way` it is a transfer."""

    key: ProduceKey | None
    items: Sequence[Item]
    rows: pa.RecordBatch
    way: Way | None = None
    asking: int = 0
    unknown: bool = False
    answer: Produced | None = None

    @property
    def may_exist(self) -> bool:
        return bool(self.asking) or self.unknown or self.answer is not None


@dataclass(slots=True, eq=False)
class Held:
    """Lease as its consumer knows it. Once `loose`, its items may be in any state."""

    partition: int
    number: int
    client_id: str
    lease_key: str | None
    deadline: Millis
    told_at: Millis
    items: dict[int, Item]
    """Unsettled items by offset."""
    offsets: tuple[int, ...] = ()
    staged: dict[int, Disposition] = field(default_factory=dict)
    maybe_staged: dict[int, set[Disposition]] = field(default_factory=dict)
    loose: bool = False
    uncertain: bool = False

    @property
    def name(self) -> tuple[int, int]:
        return self.partition, self.number


def new_rows(
    queue: str,
    numbers: Sequence[int],
    dues: Sequence[Millis | None],
    keys: Sequence[str | None] = (),
    priorities: Sequence[int | None] = (),
    unique_keys: Sequence[str | None] = (),
) -> tuple[list[Item], pa.RecordBatch]:
    """Build items with unique payloads of different lengths, some with a reference, some due later; also returns them as a batch.

    `keys`, `priorities`, `unique_keys`: those of the items; empty: none has one.
    """
    items, rows = [], []
    none: list[None] = [None] * len(numbers)
    columns = zip(numbers, dues, keys or none, priorities or none, unique_keys or none, strict=True)
    for index, (number, due, key, priority, unique_key) in enumerate(columns):
        payload = f"i{number}:" + "abcdefghijklmnopqrstuvwxyz"[: number * 7 % 27]
        reference = f"r{number}" if number % 5 == 0 else None
        row: dict[str, object] = {"payload": payload.encode()}
        if reference is not None:
            row["reference"] = reference
        if due is not None:
            row["enqueue_at"] = due
        if key is not None:
            row["key"] = key
        if priority is not None:
            row["priority"] = priority
        if unique_key is not None:
            row["unique_key"] = unique_key
        items.append(Item(payload, index, queue, due or 0, reference, key=key, priority=priority, unique_key=unique_key))
        rows.append(row)
    return items, batch_from_rows(rows)
