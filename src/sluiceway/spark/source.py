"""The stream source: the driver leases, tasks read what was leased, and the next trigger closes it.

What makes a replay exact: the offset that Spark logs before a batch runs names the batch's leases, and a lease always reads
the same. What makes a crash harmless: leases are taken under a key made from the start offset, so that a driver which died
before Spark logged the batch finds them again. Leases are closed in the next `latestOffset`, whose `start` is in Spark's
commit log by then; Spark's own `commit` comes a batch later and is not needed.
"""

from __future__ import annotations

import logging
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON, MAX_PARTITIONS
from sluiceway.spark.http import Client
from sluiceway.spark.offsets import HeldLease, Offset, Slice
from sluiceway.spark.options import Server, SourceOptions
from sluiceway.spark.rows import SCHEMA, to_rows

log = logging.getLogger("sluiceway.spark")

_UNLOGGED_HOLD: Millis = 5 * 60_000
"""Lease timeout of a checkpoint's first batch until Spark has logged it: before that, nothing remembers its nonce."""

_IDLE_WAIT = "500ms"
"""How long a trigger waits at the server for a first item. Spark asks again 10 ms after an empty answer."""


class Task(InputPartition):
    """What one Spark task reads."""

    def __init__(self, slices: tuple[Slice, ...]) -> None:
        super().__init__(slices)
        self.slices = slices


class LeaseStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query's side of the queue. Spark keeps one in a process of its own beside the driver, and copies for tasks."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._nonce = uuid.uuid4().hex[:12]
        self._client: Client | None = None
        self._keeper: LeaseKeeper | None = None
        self._closed_sequence = 0
        self._available_now = False
        self._quota: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        return Offset(self._nonce).to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_items_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        self._available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Close the batch that ends at `start`, lease the next one. Nothing to lease: `start` itself."""
        at = Offset.parse(start)
        self._close(at)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else sys.maxsize
        if self._quota is not None:
            most = min(most, self._quota)
        leases = self._lease(at, most)
        if self._available_now:
            # Counted after the first batch, because that one may be leases found again, which are not ready and count no more.
            taken = sum(lease.count for lease in leases)
            self._quota = self._ready() if self._quota is None else max(0, self._quota - taken)
        return at.following(leases, self._options.min_partitions).to_dict() if leases else start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of the batch that ends at `end`. Its offset is logged, so its leases are held from now on."""
        if start == end:
            return []
        before, batch = Offset.parse(start), Offset.parse(end)
        if batch.sequence != before.sequence + 1:
            raise SluicewayError(
                "invalid_request",
                f"Spark asks for batches {before.sequence + 1} to {batch.sequence} at once, and the checkpoint names the leases of the "
                "last one only; asynchronous progress tracking cannot be used with this source",
            )
        if self._keeper is None:
            self._keeper = LeaseKeeper(self._options)
        self._keeper.hold(batch.lease_ids)
        return [Task(slices) for slices in batch.tasks()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        server = self._options.server
        schema = to_arrow_schema(SCHEMA, timezone="UTC")
        client = Client(server)
        try:
            for part in partition.slices:
                yield from _read_slice(client, server, part, schema)
        finally:
            client.close()

    def stop(self) -> None:
        """Leases stay: a restart from the checkpoint finds them, or they expire."""
        if self._keeper is not None:
            self._keeper.stop()
        if self._client is not None:
            self._client.close()

    def _call(self, path: str, **body: object) -> dict[str, Any]:
        server = self._options.server
        if self._client is None:
            client = Client(server)
            # To lease takes the scope `consume`, to read what was leased `read`. A key without that must not take items first.
            client.call("/v1/queues.info", {"queue_name": server.queue})
            self._client = client
        return self._client.call(path, {"queue_name": server.queue, **body})

    def _close(self, at: Offset) -> None:
        if self._closed_sequence >= at.sequence:
            return
        if self._keeper is not None:
            self._keeper.release()
        for some in _portions(at.lease_ids):
            answer = self._call("/v1/queue.complete", lease_ids=some)
            # After a restart it is natural that they are closed already.
            if answer["ignored"] and self._keeper is not None:
                gone = ", ".join(entry["id"] for entry in answer["ignored"])
                log.warning("leases gone before their batch was done, so their items may be served again: %s", gone)
        self._closed_sequence = at.sequence

    def _lease(self, at: Offset, most: int) -> list[HeldLease]:
        """Lease up to `most` items, one keyed call after another until one answers with none.

        Call k of a sequence always has the same key, so a driver that died in between finds the first calls' leases again
        and goes on from there.
        """
        leases: list[HeldLease] = []
        items = calls = 0
        while items < most:
            answer = self._call(
                "/v1/queue.lease",
                client_id=self._options.consumer,
                lease_key=f"{at.nonce}/{at.sequence + 1}/{calls}",
                batch_size=min(MAX_ITEMS_ARROW, most - items),
                max_partitions=MAX_PARTITIONS,
                lease_timeout=format_duration(self._options.hold_for if at.sequence else min(_UNLOGGED_HOLD, self._options.hold_for)),
                request_timeout="0s" if self._available_now or calls else _IDLE_WAIT,
                payload=False,
            )
            if not answer["leases"]:
                break
            leases += [HeldLease(lease["lease_id"], lease["count"]) for lease in answer["leases"]]
            items += sum(lease["count"] for lease in answer["leases"])
            calls += 1
        return leases

    def _ready(self) -> int:
        answer = self._call("/v1/queue.stats")
        return sum(partition["ready"] for logical in answer["logical_queues"] for partition in logical["partitions"])


class LeaseKeeper:
    """Holds the leases of the batch in flight: extends them at once and then every third of `holdFor`, in a thread of its own."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._held: list[str] = []
        self._client = Client(options.server)
        threading.Thread(target=self._run, name="sluiceway-lease-keeper", daemon=True).start()

    def hold(self, lease_ids: list[str]) -> None:
        """Raises `lease_not_found` if one of them is gone: the batch cannot be read as it was logged."""
        with self._lock:
            self._held = lease_ids
            if gone := self._extend():
                raise SluicewayError("lease_not_found", _lost(gone[0], "closed or expired"))

    def release(self) -> None:
        with self._lock:
            self._held = []

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._options.hold_for / 3000):
            with self._lock:
                try:
                    if gone := self._extend():
                        log.warning("leases lost while their batch runs, so their items are served again: %s", ", ".join(gone))
                except SluicewayError as error:
                    log.warning("leases not extended, will try again: %s", error)

    def _extend(self) -> list[str]:
        """Extend what is held; return those that are gone."""
        gone: list[str] = []
        for some in _portions(self._held):
            answer = self._client.call(
                "/v1/queue.extend",
                {
                    "queue_name": self._options.server.queue,
                    "lease_ids": some,
                    "lease_timeout": format_duration(self._options.hold_for),
                    "request_timeout": self._client.server_wait,
                },
            )
            gone += [entry["id"] for entry in answer["ignored"]]
        return gone


def _read_slice(client: Client, server: Server, part: Slice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    body = {"queue_name": server.queue, "lease_id": part.lease_id, "start": part.start, "limit": part.count}
    try:
        answer = client.fetch_arrow("/v1/queue.peek", body)
    except SluicewayError as error:
        if error.code != "lease_not_found":
            raise
        raise SluicewayError("lease_not_found", _lost(part.lease_id, "closed or expired")) from None
    # Items that were produced one by one arrive in batches of one, and each batch costs Spark about as much as a thousand rows.
    items = answer.read_all().combine_chunks()
    if items.num_rows != part.count:
        short = part.count - items.num_rows
        raise SluicewayError("lease_not_found", _lost(part.lease_id, f"short of {short} items that something else settled"))
    for batch in items.to_batches():
        yield to_rows(batch, server.queue, part.lease_id, schema)


def _lost(lease_id: str, how: str) -> str:
    return (
        f"lease {lease_id} of this batch is {how}, so the batch cannot be read again as it was. Its open items are not lost: "
        "they are back in the queue. Start the query with a new checkpoint, and raise the option holdFor if queries stand still for longer"
    )


def _portions(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), MAX_ITEMS_JSON):
        yield ids[start : start + MAX_ITEMS_JSON]
