"""`mode=consume`: a batch read that leases ready items. Reading settles nothing.

The driver takes the leases when the DataFrame is created, and they are part of it: every action on it reads the same items, and planning
takes none. Their keys contain only the consumer's name, so a later load under that name, say after a crash, finds what was taken and not
closed, call by call up to the first with nothing left. Leases beyond that gap stay until `holdFor` is over, and then return to the queue.
`settle(…, close=True)` closes the leases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.admission import Admission
from sluiceway.spark.batch_leases import portions
from sluiceway.spark.columns import Columns
from sluiceway.spark.offsets import HeldLease, Offset
from sluiceway.spark.options import SourceOptions
from sluiceway.spark.server_calls import Client
from sluiceway.spark.source import Task, extend, read_slices
from sluiceway.spark.task_clients import client_of_task
from sluiceway.spark.worker_errors import plain_errors

_KEY = "read"
"""Prefix of these leases' keys; those of a stream begin with its nonce."""


def take(options: SourceOptions) -> tuple[HeldLease, ...]:
    """Return what this consumer has taken before and not closed (up to a gap, see above), plus ready items up to `max_items_per_trigger` in
    total."""
    client = Client(options.server)
    queue = options.server.queue
    try:
        # Reject a key without read access before anything is leased.
        client.call("/v1/queues.info", {"queue_name": queue})
        stats = client.call("/v1/queue.stats", {"queue_name": queue})
        # Items that arrive meanwhile are left for another read, which might otherwise never end.
        there = sum(each["ready"] + each["total_leased"] for logical in stats["logical_queues"] for each in logical["partitions"])
        most = min(there, options.max_items_per_trigger)
        admission = Admission(client, options.consumer, None, options.min_partitions if options.runs else 0)
        return tuple(admission.take(queue, _KEY, most, options.hold_for, 0))
    finally:
        client.close()


def give_back(options: SourceOptions, leases: tuple[HeldLease, ...]) -> None:
    """Release the leases, as if never taken; including earlier ones, since a lease's answer does not distinguish them."""
    client = Client(options.server)
    try:
        for queue, some in portions(leases, options):
            client.call("/v1/queue.release", {"queue_name": queue, "lease_ids": [lease.lease_id for lease in some]})
    finally:
        client.close()


class ConsumeReader(DataSourceReader):
    """Reads the items of these leases, repeatably."""

    def __init__(self, options: SourceOptions, leases: tuple[HeldLease, ...], columns: Columns) -> None:
        self._options = options
        self._leases = leases
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks. Spark replaces an empty list by one partition of its own."""
        offset = Offset("").following(self._leases, self._options.min_partitions, self._options.runs)
        return [Task(slices) for slices in offset.tasks()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's items, and hold them for `hold_for` from then on. Raises `lease_not_found`."""
        slices = partition.slices if isinstance(partition, Task) else ()
        # Extend here, since Spark may plan a DataFrame once, and read it long after.
        with plain_errors(), client_of_task(self._options.server) as client:
            gone = extend(client, [HeldLease(each.lease_id, each.count) for each in slices], self._options)
            if gone:
                why = "is closed or expired, so the items that this DataFrame leased can no longer be read"
                raise SluicewayError("lease_not_found", f"lease {next(iter(gone))} {why}; load again to lease the items that are ready now")
        yield from read_slices(slices, self._options, self._columns)
