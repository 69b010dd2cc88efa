"""A queue as the place where a capture hands on what it reads: each batch once, in order, whoever writes it and however often."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.client.aio import AsyncClient
from sluiceway.client.errors import CallError
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_GROUP_KEYS, MAX_ITEMS_ARROW, MAX_TEXT_BYTES
from sluiceway.model.chunks import MAX_CHUNK_BYTES, recut
from sluiceway.model.items import OPTIONAL, PAYLOAD
from sluiceway.ports.change_stream import BrokenOffError, StaleBatchError

_FIELDS = {field.name: field for field in OPTIONAL}
_SCHEMA = pa.schema([PAYLOAD, _FIELDS["kind"], _FIELDS["reference"]])


class QueueSink:
    """Each partition of the stream has an idempotency group of its own, whose sequence is the number of the batch.

    So all of a partition goes to one partition of the queue, in order. A record becomes an item with its payload, its kind and, as the
    reference, its key; a key of more than 1,024 bytes is left out. The client repeats calls for as long as its `retry_for` says. It is
    not closed.
    """

    def __init__(
        self,
        client: AsyncClient,
        name: str,
        queue_name: str,
        *,
        chunk_items: int = MAX_ITEMS_ARROW,
        chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        self._client, self._name, self._queue_name = client, name, queue_name
        # Who goes on with a batch must cut it as whoever began it did, so these do not change from one start to the next.
        self._chunk_items, self._chunk_bytes = chunk_items, chunk_bytes

    async def write(self, partition: str, batch: int, records: pa.RecordBatch) -> None:
        """As `ChangeSink.write`. Raises SluicewayError also for a batch of too many chunks, before anything of it is sent."""
        chunks = list(recut([to_items(records)], self._chunk_items, self._chunk_bytes))
        if len(chunks) > MAX_GROUP_KEYS:
            raise SluicewayError(
                "invalid_request",
                f"batch {batch} of partition {partition} has {records.num_rows:,} records in {len(chunks):,} chunks; at most "
                f"{MAX_GROUP_KEYS:,} can be written as one",
            )
        group = group_of(self._name, partition)
        for number, chunk in enumerate(chunks):
            try:
                await self._client.produce_arrow(
                    self._queue_name,
                    chunk,
                    idempotency_key=f"{batch}/{number}",
                    idempotency_group=group,
                    idempotency_sequence=batch,
                )
            except CallError as error:
                raise self._verdict(error, partition, batch, number) from error

    def _verdict(self, error: CallError, partition: str, batch: int, number: int) -> Exception:
        where = f"chunk {number} of batch {batch} of partition {partition}"
        if error.code == "stale_sequence":
            return StaleBatchError(f"{where}: queue {self._queue_name} has a later batch already")
        if error.code == "key_conflict":
            detail = f"{where} is in queue {self._queue_name} with other records: the stream did not repeat exactly what it gave before"
            return SluicewayError("key_conflict", detail)
        if error.retryable:
            return BrokenOffError(f"{where} could not be written to queue {self._queue_name}: {error}")
        if error.code == "queue_not_found":
            make = f"make it with: sluiceway queue create {self._queue_name}; it goes on by itself then"
            return SluicewayError(error.code, f"{error.detail}; {make}")
        return error


def group_of(name: str, partition: str) -> str:
    """The idempotency group of a capture's partition."""
    group = f"capture/{name}/{partition}"
    if len(group.encode()) <= MAX_TEXT_BYTES:
        return group
    return f"capture/{name}/sha256:{hashlib.sha256(partition.encode()).hexdigest()}"


def to_items(records: pa.RecordBatch) -> pa.RecordBatch:
    """Records with the columns of CHANGES → the columns that the server takes."""
    key = records.column("key")
    fits = pc.less_equal(pc.binary_length(key), MAX_TEXT_BYTES)
    if pc.any(pc.invert(fits)).as_py():
        # Taken by number, so that nothing of what is left out stays in the buffers: chunks are cut by those.
        numbers = pa.array(np.arange(len(key)))
        key = key.take(pc.if_else(fits, numbers, pa.scalar(None, numbers.type)))
    return pa.RecordBatch.from_arrays([records.column("payload"), records.column("kind"), key], schema=_SCHEMA)
