"""`mode=consume`: a batch read that takes what is ready. Nothing of it is settled by reading.

The leases are taken when the DataFrame is made, by the driver, and stand in it: so every action on it reads the same items, and planning
takes none. Their keys are made of the consumer's name alone, so whoever loads again under that name, after a crash say, finds what was
taken and not closed, call by call up to the first of which nothing is left. What was taken behind that stays leased until `holdFor` is over
and is back then. `settle(…, close=True)` closes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.admission import Admission
from sluiceway.spark.columns import JsonColumns
from sluiceway.spark.offsets import HeldLease, Offset
from sluiceway.spark.options import SourceOptions
from sluiceway.spark.server_calls import Client
from sluiceway.spark.source import Task, extend, portions, read_slices

_KEY = "read"
"""What the keys of these leases begin with; those of a stream begin with its nonce."""


def take(options: SourceOptions) -> tuple[HeldLease, ...]:
    """What this consumer has taken before and not closed (up to a gap, see above), and as much of what is ready as makes
    `max_items_per_trigger` with it.
    """
    client = Client(options.server)
    queue = options.server.queue
    try:
        # A key that may not read is told so before anything is leased.
        client.call("/v1/queues.info", {"queue_name": queue})
        stats = client.call("/v1/queue.stats", {"queue_name": queue})
        # What comes while it leases is left for another read, or it might never end.
        there = sum(each["ready"] + each["total_leased"] for logical in stats["logical_queues"] for each in logical["partitions"])
        most = min(there, options.max_items_per_trigger)
        return tuple(Admission(client, options.consumer, None).take(queue, _KEY, most, options.hold_for, 0))
    finally:
        client.close()


def give_back(options: SourceOptions, leases: tuple[HeldLease, ...]) -> None:
    """Put it back, as if it had not been taken; also what was found, for the answer to a lease does not tell the two apart."""
    client = Client(options.server)
    try:
        for queue, some in portions(leases, options):
            client.call("/v1/queue.release", {"queue_name": queue, "lease_ids": some})
    finally:
        client.close()


class ConsumeReader(DataSourceReader):
    """Reads what is in these leases, each time the same."""

    def __init__(self, options: SourceOptions, leases: tuple[HeldLease, ...], columns: JsonColumns | None) -> None:
        self._options = options
        self._leases = leases
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks. In a list of none Spark puts one of its own."""
        return [Task(slices) for slices in Offset("").following(self._leases, self._options.min_partitions).tasks()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """What is read is held for `hold_for` from then on. Raises `lease_not_found`."""
        slices = partition.slices if isinstance(partition, Task) else ()
        # Here, because Spark may plan a DataFrame once, and read it long after.
        client = Client(self._options.server)
        try:
            gone = extend(client, [HeldLease(each.lease_id, each.count) for each in slices], self._options)
        finally:
            client.close()
        if gone:
            why = "is closed or expired, so what this DataFrame has taken cannot be read any more as it was"
            raise SluicewayError("lease_not_found", f"lease {next(iter(gone))} {why}; load again, which takes what is ready now")
        yield from read_slices(slices, self._options, self._columns)
