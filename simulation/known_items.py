"""Items, batches and leases as the clients know them."""

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
    """A transfer: items that leave one partition (`source`) for another queue, or for another partition of theirs (`target` is `#…`)."""

    source: str
    target: str | None
    incarnation: str | None = None
    """Of the target, if it was bound to one."""
    nowhere: bool = False
    """Its partition was told that the target is no more."""
    arrived: set[str] = field(default_factory=set)
    """Payloads that are durable in the target."""
    places: dict[str, Place] = field(default_factory=dict)
    """Of items that stay in their queue: what they had behind them, and before them, when they went."""
    limits: dict[str, int] = field(default_factory=dict)
    """How large a lease may be that takes one of them, after its last one ran out."""


@dataclass(slots=True, eq=False)
class Item:
    """One payload, through all its lives. What is durable of it: where it lives, or the way it is on, or that it has ended."""

    payload: str
    index: int
    queue: str
    """Where it was produced."""
    due_at: Millis
    reference: str | None
    batch: Batch = field(init=False)
    origin: str | None = None
    """The id it was first given, once that is durable."""
    home: str | None = None
    """The partition it lives in."""
    way: Way | None = None
    ended: bool = False


@dataclass(slots=True, eq=False)
class Batch:
    """One body of a produce, asked for once or, with a key, several times. With a `way` it is a transfer."""

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
    """A lease as its consumer knows it. Once it is `loose` its items may be anywhere."""

    partition: int
    number: int
    client_id: str
    lease_key: str | None
    deadline: Millis
    told_at: Millis
    items: dict[int, Item]
    """Those that it has not settled, by offset."""
    offsets: tuple[int, ...] = ()
    staged: dict[int, Disposition] = field(default_factory=dict)
    maybe_staged: dict[int, set[Disposition]] = field(default_factory=dict)
    loose: bool = False
    uncertain: bool = False

    @property
    def name(self) -> tuple[int, int]:
        return self.partition, self.number


def new_rows(queue: str, numbers: Sequence[int], dues: Sequence[Millis | None]) -> tuple[list[Item], pa.RecordBatch]:
    """Items whose payloads nobody else has, of different lengths, some with a reference, some due later."""
    items, rows = [], []
    for index, (number, due) in enumerate(zip(numbers, dues, strict=True)):
        payload = f"i{number}:" + "abcdefghijklmnopqrstuvwxyz"[: number * 7 % 27]
        reference = f"r{number}" if number % 5 == 0 else None
        row: dict[str, object] = {"payload": payload.encode()}
        if reference is not None:
            row["reference"] = reference
        if due is not None:
            row["enqueue_at"] = due
        items.append(Item(payload, index, queue, due or 0, reference))
        rows.append(row)
    return items, batch_from_rows(rows)
