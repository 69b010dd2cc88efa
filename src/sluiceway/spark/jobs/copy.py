"""The job `copy`: moves ready items to the queue's other partitions, or to another queue, as new items.

Exactness: a repeated batch has the same items, and the sink's chunks are keyed by query, batch and task. The items are completed at the
source only after Spark has committed the batch.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.spark.jobs.checkpoint import claim, local_path
from sluiceway.spark.jobs.common import Place, ProgressListener, Stop, never, unheard
from sluiceway.spark.jobs.common import follow as follow_query
from sluiceway.spark.jobs.trace import history, with_headers
from sluiceway.spark.options import source_options
from sluiceway.spark.server_calls import Client
from sluiceway.spark.spark_errors import translated

DRAINING = "draining"


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """Result of this run. `left`: items still ready in the source partitions; in draining ones also items leased by any client."""

    items: int
    batches: int
    left: int
    stopped: bool


def copy(
    spark: SparkSession,
    place: Place,
    *,
    checkpoint: str | Path,
    to: Place | None = None,
    follow: bool = False,
    consumer: str = "copy",
    max_items: int = 50_000,
    hold_for: str = "1d",
    tell: ProgressListener = unheard,
    stop: Stop = never,
) -> Copied:
    """Move the ready items of the queue's draining partitions to its open ones; with `to`, all ready items to that queue, on any server.

    Each item arrives once if a killed job is restarted with the same checkpoint within `hold_for`. Ends when what was ready is copied; with
    `follow`, when `stop` says so. Raises `invalid_request` for a queue without draining partitions, for one that keeps its order or is a
    dead queue (without `to`), and for a `to` that is missing or is the queue itself.
    """
    options = place.options(consumer=consumer, maxItemsPerTrigger=max_items, holdFor=hold_for, partitions=None if to else DRAINING)
    source_options(options)
    folder = local_path(checkpoint, "checkpoint")
    if to is None:
        # A restart has leases to close, even when nothing is draining any more.
        source, goes_to = _checked_draining(place, begun=folder.exists()), "its open partitions"
    else:
        source, target = _checked_target(place, to)
        goes_to = f"{to.queue} ({target})"
    claim(folder, "copy", {"queue": f"{place.queue} ({source})", "to": goes_to})
    try:
        items = spark.readStream.format("sluiceway").options(**options).load()
        headers = with_headers(F.col("headers"), history()).alias("headers")
        items = items.select("payload", "kind", "encoding", "reference", "key", "priority", headers)
        writer = items.writeStream.format("sluiceway").options(**(to or place).options()).queryName(f"copy {place.queue}")
        writer = writer.option("checkpointLocation", str(folder))
        query = (writer if follow else writer.trigger(availableNow=True)).start()
    except (PySparkException, Py4JJavaError) as error:
        raise translated(error) from error
    done = follow_query("copy", query, tell, stop)
    return Copied(items=done.items, batches=done.batches, left=_left(place, draining=to is None), stopped=done.stopped)


def _checked_draining(place: Place, *, begun: bool) -> str:
    """The queue's incarnation. Raises `invalid_request` unless its draining partitions are suitable for this job."""
    client = Client(place.server())
    try:
        info = client.call("/v1/queues.info", {"queue_name": place.queue})
        open_one = info["rebalance"] and client.call("/v1/rebalances.get", {"id": info["rebalance"]["id"]})
        of = _whose_dead_queue(client, place.queue)
    finally:
        client.close()
    if open_one and (open_one["plan"]["in_order"] or open_one["plan"].get("by_key")):
        raise invalid(
            "queue", f"{place.queue} keeps its order in this rebalance, and copying would break it; let its consumers empty the partition"
        )
    if not begun and not any(part["state"] == DRAINING for part in info["partitions"]):
        raise invalid("queue", f"no partition of {place.queue} is draining; start a rebalance, or name the queue to copy to (--to-queue)")
    if of:
        told = "and copies would lose their source queue; let the rebalance copy them (rebalance start --drain copy), which keeps it"
        raise invalid("queue", f"{place.queue} is the dead queue of {of}, {told}")
    return str(info["incarnation"])


def _whose_dead_queue(client: Client, queue: str) -> str | None:
    """The first queue, among those visible to the key, that uses it as its dead queue."""
    more: dict[str, object] = {}
    while True:
        page = client.call("/v1/queues.list", {"limit": 1_000, **more})
        for each in page["items"]:
            if each["dead_queue"] == queue:
                return str(each["queue_name"])
        if page["next"] is None:
            return None
        more = {"pivot": page["next"]}


def _checked_target(place: Place, to: Place) -> tuple[str, str]:
    """The incarnations of both queues, which identify them even if a server has several addresses.

    Raises `queue_not_found`, and `invalid_request` if both are the same queue, or if one server's key would be sent to the other.
    """
    elsewhere = to.url.rstrip("/") != place.url.rstrip("/")
    if elsewhere and not to.api_key and not place.api_key and os.environ.get("SLUICEWAY_API_KEY"):
        told = f"SLUICEWAY_API_KEY is for {place.url}; say where the key for {to.url} is (env:NAME or file:PATH), even if it is the same"
        raise invalid("to_key", told)
    here, there = Client(place.server()), Client(to.server())
    try:
        source = here.call("/v1/queues.info", {"queue_name": place.queue})
        target = there.call("/v1/queues.info", {"queue_name": to.queue})
    except SluicewayError as error:
        if error.code != "queue_not_found":
            raise
        raise SluicewayError("queue_not_found", f"{error.detail}; create it first: copy does not know its settings") from None
    finally:
        here.close()
        there.close()
    if target["incarnation"] == source["incarnation"]:
        raise invalid("to_queue", "must differ from the queue that the items come from")
    return str(source["incarnation"]), str(target["incarnation"])


def _left(place: Place, *, draining: bool) -> int:
    client = Client(place.server())
    try:
        stats = client.call("/v1/queue.stats", {"queue_name": place.queue})
    finally:
        client.close()
    parts = [part for logical in stats["logical_queues"] for part in logical["partitions"]]
    if draining:
        # A rebalance waits for leased items as well: they come back, or are done.
        return sum((part.get("ready") or 0) + (part.get("total_leased") or 0) for part in parts if part["state"] == DRAINING)
    return sum(part.get("ready") or 0 for part in parts)
