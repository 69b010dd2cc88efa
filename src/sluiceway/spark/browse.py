"""Batch source: a queue as a read-only table.

One task reads each partition of the queue, as of the task's start. So the partitions are of different moments, and a repeated task takes a
new snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, EqualTo, Filter, In, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_ARROW
from sluiceway.spark.columns import ITEM, Columns, ItemColumns, JsonColumns
from sluiceway.spark.options import BrowseOptions
from sluiceway.spark.rows import OPTIONAL, join_id
from sluiceway.spark.rows import SCHEMA as LEASED
from sluiceway.spark.server_calls import Client
from sluiceway.spark.task_clients import client_of_task
from sluiceway.spark.worker_errors import plain_errors

BROWSED = StructType(
    [
        StructField("id", StringType(), False),
        StructField("origin", StringType(), False),
        StructField("queue", StringType(), False),
        StructField("partition", IntegerType(), False),
        StructField("offset", LongType(), False),
        StructField("state", StringType(), False),
        StructField("attempts", IntegerType(), False),
        StructField("enqueued_at", TimestampType(), False),
        StructField("enqueue_at", TimestampType()),
        StructField("expire_deadline", TimestampType()),
        StructField("lease_id", StringType()),
        StructField("lease_deadline", TimestampType()),
        *(LEASED[name] for name in ("kind", "encoding", "reference", "key", "priority", "unique_key", "headers", "payload")),
    ]
)


class Part(InputPartition):
    """A partition of the queue, read by one task."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class BrowseReader(DataSourceReader):
    """Reads the columns of `schema`, taken from BROWSED, or made from payloads. Raises `invalid_request` for others."""

    def __init__(self, schema: StructType, options: BrowseOptions) -> None:
        self._columns: Columns = JsonColumns(schema, BROWSED) if options.json else ItemColumns(schema, BROWSED)
        self._schema = self._columns.read
        self._options = options
        self._states = options.states
        self._numbers: frozenset[int] | None = None
        self.pushFilters = PushedFilters(self._narrow)  # type: ignore[method-assign]

    def _narrow(self, filters: list[Filter]) -> Iterable[Filter]:
        """Restrict the read to the states and partitions of these filters; returns the remaining filters, for Spark to apply."""
        for each in filters:
            values = _allowed(each)
            column = self._column(each.attribute) if isinstance(each, EqualTo | In) else ""
            if values is not None and column == "state":
                self._states = tuple(state for state in self._states if state in values)
            elif values is not None and column == "partition":
                numbers = frozenset(value for value in values if isinstance(value, int))
                self._numbers = numbers if self._numbers is None else self._numbers & numbers
            else:
                yield each

    def _column(self, path: tuple[str, ...]) -> str:
        """The item's column that the path names; empty: none. Members of payloads may have the names of such columns."""
        if isinstance(self._columns, ItemColumns):
            return path[0] if len(path) == 1 else ""
        return path[1] if len(path) == 2 and path[0] == ITEM else ""

    @plain_errors()
    def partitions(self) -> Sequence[InputPartition]:
        """The queue's current partitions. Spark replaces an empty list by one partition of its own, of which nothing is read."""
        if not self._states:
            return []
        client = Client(self._options.server)
        try:
            info = client.call("/v1/queues.info", {"queue_name": self._options.server.queue})
        finally:
            client.close()
        numbers = [each["partition"] for each in info["partitions"]]
        return [Part(number) for number in numbers if self._numbers is None or number in self._numbers]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Part):
            return
        server = self._options.server
        schema = to_arrow_schema(self._schema, timezone="UTC")
        body: dict[str, Any] = {"queue_name": server.queue, "partition": partition.number, "limit": MAX_ITEMS_ARROW}
        if "payload" not in schema.names:
            body["payload"] = False
        begin: dict[str, Any] = {"states": list(self._states)}
        with plain_errors(), client_of_task(server) as client:
            while begin:
                answer = _page(client, body | begin)
                about = json.loads(answer.schema.metadata[b"sluiceway"])
                for batch in answer:
                    if batch.num_rows:
                        rows = _rows(batch, about["incarnation"], server.queue, schema)
                        yield self._columns.make(rows)
                begin = {"cursor": about["cursor"]} if about["cursor"] else {}


class PushedFilters:
    """A reader's `pushFilters` that works with and without Spark's filter push-down.

    Push-down is off by default (`spark.sql.python.filterPushdown.enabled`), and Spark then refuses readers that override `pushFilters`,
    which it detects by this attribute. Without push-down Spark applies all filters itself, with the same result.
    """

    def __init__(self, narrow: Callable[[list[Filter]], Iterable[Filter]]) -> None:
        self.__func__ = DataSourceReader.pushFilters
        self._narrow = narrow

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return list(self._narrow(filters))


def _allowed(each: Filter) -> frozenset[Any] | None:
    """The values that a filter lets through, if it names them."""
    if isinstance(each, EqualTo):
        return frozenset([each.value])
    return frozenset(each.value) if isinstance(each, In) else None


def _page(client: Client, body: dict[str, Any]) -> pa.RecordBatchReader:
    try:
        return client.fetch_arrow("/v1/queue.browse", body)
    except SluicewayError as error:
        if error.code != "snapshot_gone":
            raise
        what = "the snapshot that this task has partly read is gone; run the read again"
        raise SluicewayError("snapshot_gone", f"{error.detail}; {what}") from None


def _rows(batch: pa.RecordBatch, incarnation: str, queue: str, schema: pa.Schema) -> pa.RecordBatch:
    """Convert the server's items to rows of `schema`. No Python runs per row."""
    rows, names = batch.num_rows, set(batch.schema.names)
    place = batch.column("partition").cast(pa.utf8())

    def column(name: str) -> pa.Array:
        if name == "id":
            return join_id(incarnation, place, batch.column("offset"))
        if name == "origin":
            origin = join_id(incarnation, place, batch.column("origin_offset"))
            return pc.coalesce(batch.column("origin"), origin) if "origin" in names else origin
        if name == "queue":
            return pa.repeat(queue, rows)
        if name == "lease_id":
            lease = batch.column("lease")
            number = pc.binary_join_element_wise("L", lease.cast(pa.utf8()), "")
            named = pc.binary_join_element_wise(incarnation, place, number, ".")
            return pc.if_else(pc.equal(lease, 0), pa.scalar(None, pa.utf8()), named)
        return batch.column(name) if name in names else pa.nulls(rows, OPTIONAL[name])

    return pa.RecordBatch.from_arrays([column(field.name).cast(field.type) for field in schema], schema=schema)
