"""The sink of a capture that writes to a queue. Each batch is stored once and in order, even if several members write it.

A record that is too large for an item goes to the queue's dead queue in parts: consecutive items of MAX_PAYLOAD_BYTES, the last one
smaller, with these headers.

* `sluiceway-reason`, and `sluiceway-queue`: the queue that the record was for.
* `sluiceway-capture`, `sluiceway-partition`, `sluiceway-position`: the record's source.
* `sluiceway-part`, such as `2/3`, and `sluiceway-bytes` and `sluiceway-sha256` of the whole payload.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.adapters import system
from sluiceway.client._async.client import AsyncClient
from sluiceway.client.errors import CallError
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_GROUP_KEYS, MAX_ITEMS_ARROW, MAX_PAYLOAD_BYTES, MAX_TEXT_BYTES
from sluiceway.model.chunks import MAX_CHUNK_BYTES, recut
from sluiceway.model.items import OPTIONAL, PAYLOAD
from sluiceway.model.task_records import DeadLetters
from sluiceway.ports.change_stream import BrokenOffError, StaleBatchError

log = logging.getLogger(__name__)

_FIELDS = {field.name: field for field in OPTIONAL}
_SCHEMA = pa.schema([PAYLOAD, _FIELDS["kind"], _FIELDS["reference"]])
_DEAD_SCHEMA = pa.schema([*_SCHEMA, _FIELDS["headers"]])


class QueueSink:
    """A sink that writes records to the queue `queue_name` for the capture `name`. It does not close `client`.

    Each partition of the stream has its own idempotency group, whose sequence is the batch number. So a stream partition goes to one
    partition of the queue, in order. A record becomes an item with its payload and kind, and its key as the reference. A key of more than
    2,048 bytes is dropped. A record that is too large for an item goes to the queue's dead queue, so that the others are not held up.
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
        # A batch must be cut into the same chunks by the member that resumes it, so these do not change between starts.
        self._chunk_items, self._chunk_bytes = chunk_items, chunk_bytes

    async def write(self, partition: str, batch: int, records: pa.RecordBatch) -> DeadLetters | None:
        """Write a batch as `ChangeSink.write` does.

        Also raises SluicewayError, before it sends anything, for a batch with too many chunks, and for a record that is too large if the
        queue has no dead queue.
        """
        sizes = pc.fill_null(pc.binary_length(records.column("payload")), 0)
        fits = pc.less_equal(sizes, MAX_PAYLOAD_BYTES)
        # Chunks are cut with the large records included, as by older releases without dead letters, which may have written some of them.
        chunks = list(recut([to_items(records).append_column("fits", fits)], self._chunk_items, self._chunk_bytes))
        if len(chunks) > MAX_GROUP_KEYS:
            raise SluicewayError(
                "invalid_request",
                f"batch {batch} of partition {partition} has {records.num_rows:,} records in {len(chunks):,} chunks; at most "
                f"{MAX_GROUP_KEYS:,} can be written as one",
            )
        dead = None
        if pc.any(pc.invert(fits)).as_py():
            dead = await self._bury(partition, batch, records.filter(pc.invert(fits)))
            chunks = [chunk.filter(chunk.column("fits")) for chunk in chunks]
        for number, chunk in enumerate(chunks):
            if chunk.num_rows:
                await self._produce(self._queue_name, partition, batch, number, chunk.drop_columns(["fits"]))
        return dead

    async def _bury(self, partition: str, batch: int, records: pa.RecordBatch) -> DeadLetters:
        """Store records that are too large for an item in the dead queue."""
        last = records.slice(records.num_rows - 1).to_pylist()[0]
        try:
            dead_queue = (await self._client.queue_info(self._queue_name)).dead_queue
        except CallError as error:
            raise self._verdict(error, self._queue_name, f"batch {batch} of partition {partition}") from error
        if dead_queue is None:
            raise SluicewayError(
                "invalid_request",
                f"the record at {last['position']} of partition {partition} has {len(last['payload']):,} bytes, an item at most "
                f"{MAX_PAYLOAD_BYTES:,}, and queue {self._queue_name} has no dead queue. Give it one: sluiceway queue update "
                f"{self._queue_name} --dead-queue NAME; the capture then continues by itself",
            )
        for number, chunk in enumerate(recut(self._letters(partition, records), MAX_ITEMS_ARROW)):
            await self._produce(dead_queue, partition, batch, number, chunk)
        log.error("%s: a record of %d bytes at %s went to dead queue %s", partition, len(last["payload"]), last["position"], dead_queue)
        return DeadLetters(records.num_rows, dead_queue, last["position"], system.now())

    def _letters(self, partition: str, records: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Their parts, one at a time. The same records always give the same."""
        for number in range(records.num_rows):
            record = records.slice(number, 1)
            ((kind, key, payload),) = zip(*(record.column(name).to_pylist() for name in ("kind", "key", "payload")), strict=True)
            size, parts = len(payload), -(-len(payload) // MAX_PAYLOAD_BYTES)
            headers = {
                "sluiceway-reason": f"the record has {size:,} bytes, an item at most {MAX_PAYLOAD_BYTES:,}",
                "sluiceway-queue": self._queue_name,
                "sluiceway-capture": self._name,
                "sluiceway-partition": partition,
                "sluiceway-position": record.column("position")[0].as_py(),
                "sluiceway-bytes": str(size),
                "sluiceway-sha256": hashlib.sha256(payload).hexdigest(),
            }
            fitting = key if key is not None and len(key.encode()) <= MAX_TEXT_BYTES else None
            for part in range(parts):
                piece = payload[part * MAX_PAYLOAD_BYTES : (part + 1) * MAX_PAYLOAD_BYTES]
                pairs = [*headers.items(), ("sluiceway-part", f"{part + 1}/{parts}")]
                columns = [[piece], [kind], [fitting], [pairs]]
                arrays = [pa.array(column, field.type) for column, field in zip(columns, _DEAD_SCHEMA, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=_DEAD_SCHEMA)

    async def _produce(self, queue_name: str, partition: str, batch: int, number: int, chunk: pa.RecordBatch) -> None:
        try:
            await self._client.produce_arrow(
                queue_name,
                chunk,
                idempotency_key=f"{batch}/{number}",
                idempotency_group=group_of(self._name, partition),
                idempotency_sequence=batch,
            )
        except CallError as error:
            raise self._verdict(error, queue_name, f"chunk {number} of batch {batch} of partition {partition}") from error

    def _verdict(self, error: CallError, queue_name: str, where: str) -> Exception:
        if error.code == "stale_sequence":
            return StaleBatchError(f"{where}: queue {queue_name} has a later batch already")
        if error.code == "key_conflict":
            detail = f"{where} is in queue {queue_name} with other records: the stream did not repeat the same records"
            return SluicewayError("key_conflict", detail)
        if error.retryable:
            return BrokenOffError(f"{where} could not be written to queue {queue_name}: {error}")
        if error.code == "queue_not_found":
            make = f"create it with: sluiceway queue create {queue_name}; the capture then continues by itself"
            return SluicewayError(error.code, f"{error.detail}; {make}")
        return error


def group_of(name: str, partition: str) -> str:
    """The idempotency group of a capture's partition. Partition names that are too long are hashed."""
    group = f"capture/{name}/{partition}"
    if len(group.encode()) <= MAX_TEXT_BYTES:
        return group
    return f"capture/{name}/sha256:{hashlib.sha256(partition.encode()).hexdigest()}"


def to_items(records: pa.RecordBatch) -> pa.RecordBatch:
    """Convert records with the columns of CHANGES into the columns of an Arrow produce."""
    key = records.column("key")
    fits = pc.less_equal(pc.binary_length(key), MAX_TEXT_BYTES)
    if pc.any(pc.invert(fits)).as_py():
        # `take` copies, so dropped keys leave the buffers. Chunks are cut by the buffers' sizes.
        numbers = pa.array(np.arange(len(key)))
        key = key.take(pc.if_else(fits, numbers, pa.scalar(None, numbers.type)))
    return pa.RecordBatch.from_arrays([records.column("payload"), records.column("kind"), key], schema=_SCHEMA)
