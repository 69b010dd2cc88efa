"""What a task of the stream source reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.columns import ItemColumns
from sluiceway.spark.offsets import Slice
from sluiceway.spark.options import Server as Address
from sluiceway.spark.options import source_options
from sluiceway.spark.rows import SCHEMA
from sluiceway.spark.server_calls import Client
from sluiceway.spark.source import read_slices
from tests.spark.spark_world import Server, server

PAYLOAD = StructType([SCHEMA["payload"]])
ITEMS = 25_000


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


def leased(world: Server, queue: str) -> str:
    """A lease of that many items, whose payloads are their numbers."""
    world.create(queue, 1)
    client = Client(Address(world.url, queue, 60_000))
    for start in range(0, ITEMS, 5_000):
        rows = pa.record_batch({"payload": pa.array([b"%d" % number for number in range(start, start + 5_000)])})
        client.send_arrow("/v1/queue.produce", {"queue_name": queue}, rows)
    client.close()
    answer = world.call("/v1/queue.lease", queue_name=queue, client_id="c", batch_size=100_000, payload=False)
    (lease,) = answer["leases"]
    assert lease["count"] == ITEMS
    return str(lease["lease_id"])


def read(world: Server, queue: str, *slices: Slice) -> Iterator[pa.RecordBatch]:
    options = source_options({"url": world.url, "queue": queue, "consumer": "c"})
    return read_slices(slices, options, ItemColumns(PAYLOAD, PAYLOAD))


def test_a_lease_of_many_items_is_read_in_order(world: Server) -> None:
    batches = list(read(world, "many", Slice(leased(world, "many"), 2_000, 22_000)))
    assert [batch.num_rows for batch in batches] == [10_000, 10_000, 2_000]
    assert [int(text) for batch in batches for text in batch.column("payload").to_pylist()] == list(range(2_000, 24_000))


def test_what_was_read_before_a_failure_arrives(world: Server) -> None:
    lease = leased(world, "failing")
    rows = read(world, "failing", Slice(lease, 0, 10), Slice(lease[:-1] + "9", 0, 10))
    assert next(rows).num_rows == 10
    with pytest.raises(SluicewayError, match="9 of this batch"):
        next(rows)


def test_a_task_that_stops_early_leaves_no_thread(world: Server) -> None:
    rows = read(world, "left", Slice(leased(world, "left"), 0, ITEMS))
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sluiceway-read-ahead")]
