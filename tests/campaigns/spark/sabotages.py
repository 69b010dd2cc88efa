"""What a source or a sink does wrong in a control group. A campaign that finds nothing wrong with these finds nothing."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from sluiceway.client.protocol import Call
from sluiceway.spark import server_calls, sink
from sluiceway.spark.server_calls import Client
from sluiceway.spark.source import LeaseStreamReader


def complete_early() -> None:
    """A batch is completed as soon as its tasks have been planned and read, and not when Spark has logged it."""
    honest = LeaseStreamReader.read

    def read(self: LeaseStreamReader, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from honest(self, partition)
        server = self._options.server
        client = Client(server)
        for part in partition.slices:  # type: ignore[attr-defined]
            client.call("/v1/queue.complete", {"queue_name": server.queue, "lease_ids": [part.lease_id]})
        client.close()

    LeaseStreamReader.read = read  # type: ignore[method-assign]


def write_without_keys() -> None:
    """What is written again is there again."""

    def arrow_call(path: str, query: dict[str, Any], batch: pa.RecordBatch) -> Call[dict[str, Any]]:
        return server_calls.arrow_call(path, {name: value for name, value in query.items() if not name.startswith("idempotency")}, batch)

    sink.arrow_call = arrow_call  # type: ignore[attr-defined, assignment]


def forget_the_nonce() -> None:
    """A driver that was started again looks for leases under a key of its own, and not under that of the offset."""
    honest = LeaseStreamReader.latestOffset
    nonce = uuid.uuid4().hex[:12]

    def latest_offset(self: LeaseStreamReader, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return honest(self, {**start, "nonce": nonce}, limit)

    LeaseStreamReader.latestOffset = latest_offset  # type: ignore[method-assign]


def read_backwards() -> None:
    """Once the driver was killed, tasks hand the same rows on in another order."""
    honest = LeaseStreamReader.read

    def read(self: LeaseStreamReader, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        folder = Path(json.loads(os.environ["SLUICEWAY_CAMPAIGN"])["folder"])
        for rows in honest(self, partition):
            backwards = pa.array(range(rows.num_rows - 1, -1, -1))
            yield rows.take(backwards) if any(folder.glob("reached-*")) else rows

    LeaseStreamReader.read = read  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {
    "lost": complete_early,
    "doubled": write_without_keys,
    "left": forget_the_nonce,
    "other rows": read_backwards,
}
"""By what they are to be found guilty of."""


def apply(name: str) -> None:
    if name:
        SABOTAGES[name]()
