"""Items, batches and leases as the clients of a queue know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Produced, ProduceKey, Verdict


@dataclass(slots=True, eq=False)
class Item:
    """One item in the life that it has in one queue."""

    payload: str
    index: int
    not_before: Millis
    reference: str | None
    origin: str | None
    """The id that it brought along: only a dead item has one."""
    batch: Batch = field(init=False)
    scheduled: bool = False
    seen: bool = False
    ending: int = 0
    """Calls that may end its life and whose outcome is not known (yet)."""
    gone: bool = False
    dying: bool = False
    attempts: int = 0
    held: Held | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """One body of a produce, asked for once or, with a key, several times."""

    key: ProduceKey | None
    items: Sequence[Item]
    rows: pa.RecordBatch
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
    staged: dict[int, Verdict] = field(default_factory=dict)
    loose: bool = False
    uncertain: bool = False

    @property
    def name(self) -> tuple[int, int]:
        return self.partition, self.number


def new_rows(numbers: Sequence[int], dues: Sequence[Millis | None]) -> tuple[list[Item], pa.RecordBatch]:
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
        item = Item(payload, index, due or 0, reference, None)
        item.scheduled = due is not None
        items.append(item)
        rows.append(row)
    return items, batch_from_rows(rows)
