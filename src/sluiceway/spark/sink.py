"""Produce sink: rows become items in keyed chunks, so that repeating a task or a batch adds nothing."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, IntegerType, MapType, StringType, StructType, TimestampType

from sluiceway.client.protocol import Call
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW
from sluiceway.model.chunks import MAX_CHUNK_BYTES, recut, row_bytes
from sluiceway.model.items import ENQUEUE_AT, OPTIONAL, PAYLOAD, PRODUCED
from sluiceway.spark.bad_rows import Sieve
from sluiceway.spark.collector import spare_collector
from sluiceway.spark.options import CHUNK_BYTES, CHUNK_ITEMS, Server, SinkOptions
from sluiceway.spark.server_calls import Client, arrow_call
from sluiceway.spark.task_clients import client_of_task
from sluiceway.spark.worker_errors import plain_errors

log = logging.getLogger("sluiceway.spark")

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
"""Spark's names for the local properties of a streaming query's tasks."""

GROUPS = 16
"""Idempotency groups per task of a streaming query. All keys of a group live in one partition, so one group would fill only that.

Chunk k of batch n is in group n + k: small batches do not all go to the same partition, and however the batch is cut, its first chunk is
looked up where it was written.
"""

_BODIES = ("payload", "value")
_TEXT = StringType()
_COLUMNS: dict[str, DataType] = {
    "kind": _TEXT,
    "encoding": _TEXT,
    "reference": _TEXT,
    "key": _TEXT,
    "priority": IntegerType(),
    "unique_key": _TEXT,
    "headers": MapType(_TEXT, _TEXT),
    "enqueue_at": TimestampType(),
}
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_FIELDS = {field.name: field for field in (*OPTIONAL, ENQUEUE_AT) if field.name in (*PRODUCED, "enqueue_at")}


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """Figures of one task. `deduplicated`: chunks written by an earlier attempt; `bad`: rows sent to the queue for bad rows."""

    items: int
    chunks: int
    deduplicated: int
    bad: int = 0


def check_columns(schema: StructType) -> str:
    """Return the name of the payload column in lower case: column names are case-insensitive, as in Spark.

    Raises `invalid_request` that names the column at fault.
    """
    check_once(schema)
    bodies = [name.lower() for name in schema.names if name.lower() in _BODIES]
    if len(bodies) != 1:
        have = ", ".join(schema.names) or "none"
        raise invalid("payload", f"expected exactly one column named payload or value (binary or string); the columns are {have}")
    for field in schema.fields:
        name = field.name.lower()
        if name in _BODIES:
            if not isinstance(field.dataType, BinaryType | StringType):
                raise invalid(field.name, f"the column must be binary or string, not {field.dataType.simpleString()}")
        elif name not in _COLUMNS:
            raise invalid(field.name, f"unknown column of an item; expected payload or value, and any of {', '.join(_COLUMNS)}")
        elif field.dataType.simpleString() not in (_INTEGERS if name == "priority" else (_COLUMNS[name].simpleString(),)):
            expected = _COLUMNS[name].simpleString()
            raise invalid(field.name, f"the column must be {expected}, not {field.dataType.simpleString()}")
    return bodies[0]


def check_once(schema: StructType) -> None:
    """Raises `invalid_request` for a column that occurs twice, ignoring case."""
    lower = [name.lower() for name in schema.names]
    for name in schema.names:
        if lower.count(name.lower()) > 1:
            raise invalid(name, f"this column occurs more than once; the columns are {', '.join(schema.names)}")


def in_lower_case(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same columns under lower-case names."""
    return batch.rename_columns([name.lower() for name in batch.schema.names])


def to_items(batch: pa.RecordBatch, body: str) -> pa.RecordBatch:
    """Convert Spark's rows to the server's columns. A null payload raises `invalid_request`."""
    payload = batch.column(body)
    if payload.null_count:
        raise invalid(body, f"{payload.null_count} of {batch.num_rows} rows have no value here; every item needs a payload")
    arrays, fields = [payload.cast(PAYLOAD.type)], [PAYLOAD]
    for name, field in _FIELDS.items():
        if name in batch.schema.names:
            column = batch.column(name)
            if name == "enqueue_at":
                column = pc.floor_temporal(column, unit="millisecond")
            arrays.append(column.cast(field.type))
            fields.append(field)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


class _Produce:
    """The common part of batch and stream sink; runs in a task."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        self._body = check_columns(schema)
        self._options = options
        if options.bad_rows is not None:
            _check_there(replace(options.server, queue=options.bad_rows))

    @plain_errors()
    def write(self, batches: Iterator[pa.RecordBatch], prefix: str, sequence: int | None = None) -> Written:
        """Write a task's rows; unacceptable ones go, with similar keys, to the queue for bad rows, if there is one."""
        options, number = self._options, _task().partitionId()
        sieve = Sieve(self._body, number, keep=options.bad_rows is not None)
        rows = (to_items(batch, self._body) for batch in sieve.good(map(in_lower_case, batches)) if batch.num_rows)
        sent = _whole(rows, number) if options.atomic else rows
        chunks = recut(sent, options.chunk_items, MAX_CHUNK_BYTES if options.atomic else CHUNK_BYTES)
        written = _send_all(options.server, chunks, prefix, sequence)
        bad = sieve.bad()
        if options.bad_rows is not None and bad:
            # With default chunks, whatever this write's options: a repetition has the same keys. The queue's name separates them from
            # others' rows.
            elsewhere = replace(options.server, queue=options.bad_rows)
            told = _send_all(elsewhere, recut(bad, CHUNK_ITEMS, CHUNK_BYTES), f"{options.server.queue}/{prefix}", sequence)
            written = replace(written, bad=told.items)
        return written


def _check_there(server: Server) -> None:
    """Raises `invalid_request` if that queue for bad rows does not exist: before anything is written, even if no row is bad."""
    client = Client(server)
    try:
        client.call("/v1/queues.info", {"queue_name": server.queue})
    except SluicewayError as error:
        if error.code == "queue_not_found":
            raise invalid("badRows", f"there is no queue {server.queue!r}; create it first") from None
        # A key that may write there may lack the right to read.
        if error.code != "forbidden":
            raise
    finally:
        client.close()


def _whole(batches: Iterator[pa.RecordBatch], number: int) -> Iterator[pa.RecordBatch]:
    """The items, once it is clear that one call takes all of them. Otherwise raises `invalid_request`, before anything is sent."""
    kept: list[pa.RecordBatch] = []
    rows = size = calls = 0
    for batch in batches:
        rows += batch.num_rows
        size += int(row_bytes(batch).sum())
        calls = max(-(-rows // MAX_ITEMS_ARROW), -(-size // MAX_CHUNK_BYTES))
        if calls == 1:
            kept.append(batch)
        else:
            kept.clear()
    if calls > 1:
        most = f"{MAX_ITEMS_ARROW:,} rows and {MAX_CHUNK_BYTES >> 20} MiB"
        what = f"task {number} has {rows:,} rows of {size:,} bytes, and one call takes {most}; nothing of the task is written"
        raise invalid("atomic", f"{what}. Use {calls} times as many tasks, or more: df.repartition(n)")
    yield from kept


def _send_all(server: Server, chunks: Iterator[pa.RecordBatch], prefix: str, sequence: int | None) -> Written:
    """Write chunks of items, keyed `prefix/number`; with a `sequence`, in groups that remember it.

    While the server stores a chunk, the next one is made. It is sent once the chunk before is stored, so rows stay in order.
    """
    spare_collector()
    items = count = deduplicated = 0
    sent: Call[dict[str, Any]] | None = None
    with client_of_task(server) as client:
        for chunk in chunks:
            query: dict[str, object] = {"queue_name": server.queue, "request_timeout": client.server_wait}
            if sequence is None:
                query["idempotency_key"] = f"{prefix}/{count}"
            else:
                query["idempotency_key"] = f"{prefix}/{sequence}/{count}"
                query["idempotency_group"] = f"{prefix}/{(sequence + count) % GROUPS}"
                query["idempotency_sequence"] = sequence
            call = arrow_call("/v1/queue.produce", query, chunk)
            if sent is not None:
                deduplicated += _was_there(client, sent)
            client.start(call)
            sent = call
            items += chunk.num_rows
            count += 1
        if sent is not None:
            deduplicated += _was_there(client, sent)
    return Written(items, count, deduplicated)


def _was_there(client: Client, sent: Call[dict[str, Any]]) -> bool:
    """Wait until the chunk is stored. Returns whether an earlier attempt had stored it."""
    try:
        return bool(client.finish(sent)["deduplicated"])
    except SluicewayError as error:
        if error.code != "key_conflict":
            raise
        key = parse_qs(sent.path.partition("?")[2])["idempotency_key"][0]
        raise SluicewayError(
            "key_conflict",
            f"chunk {key} was written before with other rows: the repeated write has other rows, another partitioning or another "
            "chunkItems than the first one",
        ) from None


class BatchSink(DataSourceArrowWriter):
    """`df.write`. Every task attempt of a write uses the same keys; with `writeId`, so does every repetition of the write."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        self._produce = _Produce(schema, options)
        self._write_id = options.write_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return self._produce.write(iterator, f"{self._write_id}/{_task().partitionId()}")

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _report(messages, self._write_id)


class StreamSink(DataSourceStreamArrowWriter):
    """`df.writeStream`. Repeating a batch adds nothing: keys of a query's last batch are remembered for 30 days."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        if options.write_id is not None:
            raise invalid("writeId", "this option is for batch writes; a streaming write is keyed by its query and batch")
        self._produce = _Produce(schema, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        task = _task()
        query_id, batch_id = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        if query_id is None or batch_id is None:
            raise SluicewayError("internal", f"Spark did not pass this task the local properties {QUERY_ID} and {BATCH_ID}")
        return self._produce.write(iterator, f"{query_id}/{task.partitionId()}", int(batch_id))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _report(messages, f"batch {batchId}")


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None
    return task


def _report(messages: Sequence[WriterCommitMessage | None], what: str) -> None:
    written = [message for message in messages if isinstance(message, Written)]
    items, chunks = sum(each.items for each in written), sum(each.chunks for each in written)
    log.info("%s: %d items in %d chunks, %d of them written before", what, items, chunks, sum(each.deduplicated for each in written))
    if bad := sum(each.bad for each in written):
        # In a repeated write they were there before.
        rows = "row that no queue takes is" if bad == 1 else "rows that no queue takes are"
        log.warning("%s: %d %s in the queue for bad rows", what, bad, rows)
