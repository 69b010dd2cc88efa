"""The browse call of a partition, and its answer as JSON or Arrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import repeat
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from sluiceway.contract.fields import time_field
from sluiceway.contract.item_answers import Browsed, BrowsedItem, BrowseState
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.ids import ItemId, LeaseId
from sluiceway.kernel.limits import MAX_ITEMS_ARROW
from sluiceway.model.inspection import Browse, BrowsedPage, Standing
from sluiceway.model.items import PAYLOAD, TIME, fit
from sluiceway.model.leased_items import common_schema
from sluiceway.model.queue import QueueRecord
from sluiceway.wire.arrow_codec import METADATA_KEY
from sluiceway.wire.decoding import Call, JsonDecoder, PartitionNumber
from sluiceway.wire.outcome_selection import check_partition

_CURSOR: Final = r"^([0-9a-f]{48})\.(0|[1-9][0-9]{0,17})$"
_IS_CURSOR: Final = re.compile(_CURSOR, re.ASCII)

CursorText = Annotated[str, Meta(extra_json_schema={"pattern": _CURSOR, "maxLength": 67})]


class BrowseCall(Call):
    partition: PartitionNumber
    states: Annotated[list[BrowseState], Meta(extra_json_schema={"minItems": 1, "maxItems": 3, "uniqueItems": True})] | None = None
    cursor: CursorText | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_ARROW)] = 1_000
    payload: bool = True

    def request(self, record: QueueRecord) -> Browse:
        """The browse to run. Raises `invalid_request` for an unknown partition, repeated states, a bad cursor, or states with a cursor."""
        check_partition(self.partition, record)
        if self.cursor is None:
            states: list[BrowseState] = ["ready"] if self.states is None else self.states
            if not states or len(set(states)) < len(states):
                raise invalid("states", "expected one or more of ready, leased and scheduled, each once")
            return Browse(self.partition, tuple(states), self.limit, payload=self.payload)
        if self.states is not None:
            raise invalid("states", "the cursor's snapshot already has its states; give states or cursor, not both")
        found = _IS_CURSOR.fullmatch(self.cursor)
        if found is None:
            raise invalid("cursor", "expected the cursor of the previous page")
        return Browse(self.partition, (), self.limit, found[1], int(found[2]), self.payload)


decode_browse = JsonDecoder(BrowseCall)


def browsed(record: QueueRecord, request: Browse, page: BrowsedPage, *, arrow: bool) -> bytes | memoryview:
    """The page as JSON, or as an Arrow stream of one batch. Its cursor is null on the last page."""
    cursor = None if page.snapshot is None else f"{page.snapshot}.{page.position}"
    if not arrow:
        items = [item for rows in page.rows for item in items_of(record, *rows, payload=request.payload)]
        return msgspec.json.encode(Browsed(queue_name=record.queue_name, partition=request.partition, items=items, cursor=cursor))
    about = {"queue_name": record.queue_name, "incarnation": record.incarnation, "partition": request.partition, "cursor": cursor}
    rows = _columns(page, request.payload).replace_schema_metadata({METADATA_KEY: msgspec.json.encode(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return memoryview(sink.getvalue()).cast("B")


def _columns(page: BrowsedPage, payload: bool) -> pa.Table:
    """The page as one table. The work is per run of items with the same standing, not per item."""
    batches = [batch for batch, _ in page.rows]
    schema = common_schema(batches)
    # Items that were produced singly arrive as batches of one row. A reader pays the same for each batch, so they are combined.
    table = pa.Table.from_batches([fit(batch, schema) for batch in batches], schema).combine_chunks()
    counts = [batch.num_rows for batch in batches]
    standings = [standing for _, standing in page.rows]
    state = pc.if_else(pc.equal(table["lease"], 0), "ready", "leased")
    due = _times([standing.due_at for standing in standings], counts)
    table = table.add_column(0, pa.field("state", pa.utf8(), nullable=False), pc.if_else(due.is_valid(), "scheduled", state))
    table = table.append_column("enqueue_at", due)
    table = table.append_column("expire_deadline", _times([standing.expires_at for standing in standings], counts))
    table = table.append_column("lease_deadline", _times([standing.lease_deadline for standing in standings], counts))
    return table if payload else table.drop_columns([PAYLOAD.name])


def _times(times: list[Millis | None], counts: list[int]) -> pa.Array:
    millis = np.repeat(np.array([0 if time is None else time for time in times], np.int64), counts)
    absent = np.repeat(np.array([time is None for time in times], np.bool_), counts)
    return pa.array(millis, pa.int64(), mask=absent).view(TIME)


def items_of(record: QueueRecord, batch: pa.RecordBatch, standing: Standing, payload: bool) -> Iterator[BrowsedItem]:
    """The rows of one partition, with the columns of `model.leased_items`; without `payload`, their payloads are null."""
    names = batch.schema.names

    def column(name: str) -> Any:
        return batch.column(name).to_pylist() if name in names else repeat(None, batch.num_rows)

    number, partition = batch.column("lease")[0].as_py(), batch.column("partition")[0].as_py()
    lease_id = str(LeaseId(record.incarnation, partition, number)) if number else None
    state: BrowseState = "scheduled" if standing.due_at is not None else "leased" if number else "ready"
    due_at, expires_at, deadline = (time_field(time) for time in (standing.due_at, standing.expires_at, standing.lease_deadline))
    place = (record.incarnation, partition)
    rows = zip(
        batch.column("offset").to_pylist(),
        batch.column("origin_offset").to_pylist(),
        column("origin"),
        batch.column("attempts").to_pylist(),
        batch.column("enqueued_at").cast(pa.int64()).to_pylist(),
        *(column(name) for name in ("kind", "encoding", "reference", "key", "priority", "unique_key", "headers", "payload")),
        strict=True,
    )
    for (
        offset,
        origin_offset,
        origin,
        attempts,
        enqueued_at,
        kind,
        encoding,
        reference,
        key,
        priority,
        unique_key,
        headers,
        content,
    ) in rows:
        yield BrowsedItem(
            state,
            str(ItemId(*place, offset)),
            origin or str(ItemId(*place, origin_offset)),
            partition,
            attempts,
            time_field(enqueued_at),
            due_at,
            expires_at,
            lease_id,
            deadline,
            kind,
            encoding,
            reference,
            key,
            priority,
            unique_key,
            None if headers is None else dict(headers),
            content if payload else None,
        )
