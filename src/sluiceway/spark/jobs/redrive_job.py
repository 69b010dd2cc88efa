"""The job `redrive`: sends dead items that match an SQL condition back to their source.

Exactness: each batch's items are produced under a key made of the checkpoint and the batch, and leave the dead queue after Spark has
committed the batch. A repeated batch has the same items, and the condition is evaluated with the time of its first run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW
from sluiceway.kernel.names import check_queue_name
from sluiceway.spark.jobs.checkpoint import claim, last_committed, local_path
from sluiceway.spark.jobs.common import Place, ProgressListener, Stop, follow, never, unheard
from sluiceway.spark.jobs.trace import ORIGIN, with_headers
from sluiceway.spark.options import source_options
from sluiceway.spark.rows import SCHEMA, to_rows
from sluiceway.spark.server_calls import Client
from sluiceway.spark.settle import settle
from sluiceway.spark.spark_errors import translated

COLUMNS = (
    *("id", "origin", "source", "reason", "attempts", "enqueued_at"),
    *("kind", "encoding", "reference", "key", "priority", "unique_key", "headers", "payload"),
)
"""Columns available to a condition."""

_TARGET, _CHOSEN = "_target", "_chosen"
_EXAMPLES = 5
_EXAMPLE_BYTES = 200


class Example(msgspec.Struct, frozen=True):
    """A dead item that would go back."""

    id: str
    source: str | None
    reason: str | None
    attempts: int | None
    target: str
    payload: bytes


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Preview: of `looked` items, `matched` would go back, by target. `homeless` ones match too, but have no source."""

    looked: int
    matched: int
    targets: dict[str, int]
    homeless: int
    examples: list[Example]


class Redriven(msgspec.Struct, frozen=True, kw_only=True):
    """`redriven` items went back in this run, by target. The rest of `looked` remain in the dead queue.

    An interrupted batch is not counted: the next run repeats it.
    """

    looked: int
    redriven: int
    targets: dict[str, int]
    stopped: bool


def look(spark: SparkSession, place: Place, *, where: str = "true", target: str | None = None) -> Look:
    """Preview `redrive` on the next 10,000 items of each partition. Takes and changes nothing."""
    client = Client(place.server())
    try:
        partitions = _partitions(client, place.queue)
    finally:
        client.close()
    condition = _condition(spark, where)
    rows = spark.range(len(partitions), numPartitions=len(partitions)).mapInArrow(_Peek(place, partitions), SCHEMA)
    try:
        judged = _judged(rows, condition, target).persist()
        try:
            return _seen(judged)
        finally:
            judged.unpersist()
    except PySparkException as error:
        raise translated(error) from error


def redrive(
    spark: SparkSession,
    place: Place,
    *,
    checkpoint: str | Path,
    where: str = "true",
    target: str | None = None,
    rate: int | None = None,
    consumer: str = "redrive",
    max_items: int = MAX_ITEMS_ARROW,
    hold_for: str = "1d",
    tell: ProgressListener = unheard,
    stop: Stop = never,
) -> Redriven:
    """Send the matching ready items of a dead queue back to their source, or to `target`, at most `rate` a second; each of them once.

    Once holds if a killed job is restarted with the same checkpoint within `hold_for`, and within the target's `idempotency_window`. Raises
    `invalid_request` for a non-deterministic condition, for a missing target, and for a dead queue with `max_attempts`: items that do not
    match are leased and put back, and would eventually be dropped.
    """
    options = place.options(consumer=consumer, maxItemsPerTrigger=min(max_items, rate or max_items), holdFor=hold_for)
    source_options(options)
    folder = local_path(checkpoint, "checkpoint")
    condition = _condition(spark, where)
    if target == place.queue:
        raise invalid("target", "must differ from the queue that the items come from")
    client = Client(place.server())
    try:
        if client.call("/v1/queues.info", {"queue_name": place.queue})["max_attempts"]:
            detail = (
                "the job leases what does not match and puts it back, which counts as an attempt; set the dead queue's max_attempts to 0"
            )
            raise invalid("queue", f"{place.queue} has max_attempts: {detail}")
        for name in look(spark, place, where=where, target=target).targets:
            _check_target(client, name)
        name = claim(folder, "redrive", {"queue": place.queue, "where": where, "target": target or ""})
        sender = _Sender(place, f"redrive/{name}", rate, partial(_check_target, client))
        judged = _judged(spark.readStream.format("sluiceway").options(**options).load(), condition, target)
        writer = judged.writeStream.foreachBatch(sender.send).option("checkpointLocation", str(folder)).queryName(f"redrive {place.queue}")
        followed = follow("redrive", writer.trigger(availableNow=True).start(), tell, stop)
    finally:
        client.close()
    looked, targets = sender.sent(last_committed(folder))
    return Redriven(looked=looked, redriven=targets.total(), targets=dict(targets), stopped=followed.stopped)


class _Sender:
    """Processes the batches."""

    def __init__(self, place: Place, name: str, rate: int | None, check: Callable[[str], None]) -> None:
        self._looked: Counter[int] = Counter()
        self._targets: dict[int, Counter[str]] = {}
        self._place, self._name, self._rate, self._check = place, name, rate, check

    def send(self, batch: DataFrame, number: int) -> None:
        """Produce the chosen items into their targets; the others are put back when the batch is closed."""
        # Read once: it is used several times below.
        batch = batch.persist()
        try:
            targets = {row[_TARGET]: row["count"] for row in batch.where(_CHOSEN).groupBy(_TARGET).count().orderBy(_TARGET).collect()}
            for target in targets:
                self._check(target)
            for target in targets:
                self._produce(batch.where(F.col(_CHOSEN) & (F.col(_TARGET) == target)), target, number)
            back = batch.where(~F.col(_CHOSEN)).select("id", F.lit("retry").alias("outcome"), F.lit(0).alias("retry_after_ms"))
            place = self._place
            about = {"request_timeout": place.request_timeout, "api_key": place.api_key, "ca_file": place.ca_file}
            settle(back, url=place.url, queue=place.queue, **about)
            self._looked[number] = batch.count()
            self._targets[number] = Counter(targets)
        finally:
            batch.unpersist()
        if self._rate is not None:
            # A batch has at most one second's worth of items.
            time.sleep(sum(targets.values()) / self._rate)

    def sent(self, last: int) -> tuple[int, Counter[str]]:
        """Over the batches up to `last`: the number of items examined, and of items sent by target."""
        done = [number for number in self._looked if number <= last]
        return sum(self._looked[number] for number in done), sum((self._targets[number] for number in done), Counter())

    def _produce(self, rows: DataFrame, target: str, number: int) -> None:
        options = self._place.options(queue=target, writeId=f"{self._name}/{number}")
        headers = with_headers(F.col("headers"), {ORIGIN: F.col("origin")}).alias("headers")
        items = rows.select("payload", "kind", "encoding", "reference", "key", "priority", headers)
        items.write.format("sluiceway").mode("append").options(**options).save()


class _Peek:
    """Runs in a task: peeks at the next items of those of the partitions whose places in the list it gets."""

    def __init__(self, place: Place, partitions: Sequence[int]) -> None:
        self._place, self._partitions = place, partitions

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = to_arrow_schema(SCHEMA, timezone="UTC")
        queue = self._place.queue
        client = Client(self._place.server())
        try:
            for batch in batches:
                for at in batch.column(0).to_pylist():
                    for items in _next_items(client, queue, self._partitions[at]):
                        yield to_rows(items, queue, "", schema)
        finally:
            client.close()


def _next_items(client: Client, queue: str, partition: int) -> Iterable[pa.RecordBatch]:
    fields = {"queue_name": queue, "partition": partition, "limit": MAX_ITEMS_ARROW}
    try:
        batches: Iterable[pa.RecordBatch] = client.fetch_arrow("/v1/queue.peek", fields)
        return batches
    except SluicewayError as error:
        if error.field != "partition":
            raise
        # A rebalance has removed it meanwhile, so it is empty.
        return ()


def _partitions(client: Client, queue: str) -> list[int]:
    """The numbers of the queue's partitions. After a rebalance they have gaps."""
    stats = client.call("/v1/queue.stats", {"queue_name": queue})
    return sorted(int(part["partition"]) for logical in stats["logical_queues"] for part in logical["partitions"])


def _check_target(client: Client, queue: str) -> None:
    try:
        client.call("/v1/queues.info", {"queue_name": check_queue_name(queue, "target")})
    except SluicewayError as error:
        if error.code != "queue_not_found":
            raise
        raise invalid("target", f"there is no queue {queue!r} to send items to; create it, or name another target") from None


def _condition(spark: SparkSession, where: str) -> Column:
    """Parse the condition. Raises `invalid_request` if it is invalid or non-deterministic: a repeated batch must choose the same items."""
    condition = F.expr(where)
    try:
        tried = _about_death(spark.createDataFrame([], SCHEMA)).select(*COLUMNS).where(condition)
        deterministic = tried._jdf.queryExecution().analyzed().deterministic()
    except PySparkException as error:
        raise invalid("where", f"{translated(error).detail}. The columns are {', '.join(COLUMNS)}") from error
    if not deterministic:
        raise invalid("where", "this may choose other items when a batch is repeated; leave out rand(), uuid() and the like")
    return condition


def _judged(items: DataFrame, condition: Column, target: str | None) -> DataFrame:
    """The items with their target, and whether they go there."""
    told = _about_death(items)
    to = F.col("source") if target is None else F.lit(target)
    matches = F.coalesce(condition, F.lit(False))
    # Evaluate the condition first, so that it sees only the item's columns.
    told = told.select(*COLUMNS, matches.alias("_matches"))
    return told.withColumn(_TARGET, to).withColumn(_CHOSEN, F.col("_matches") & F.col(_TARGET).isNotNull())


def _about_death(items: DataFrame) -> DataFrame:
    """Add `source`, `reason` and `attempts` from the dead queue's own headers, and remove these from `headers`."""

    def told(name: str) -> Column:
        # The last of that name: the producer's own headers come before it, and may say anything.
        pairs = F.filter(F.map_entries("headers"), lambda pair: pair["key"] == f"sluiceway-{name}")
        return F.when(F.col("_buried"), F.try_element_at(pairs, F.lit(-1))["value"])

    # Items produced into the dead queue itself originate there: their producer must not choose where an operator sends them.
    buried = F.substring_index("origin", ".", 1) != F.substring_index("id", ".", 1)
    own = F.map_filter("headers", lambda name, _: ~name.startswith("sluiceway-"))
    dead = items.withColumn("_buried", buried)
    found = {"source": told("queue"), "reason": told("reason"), "attempts": told("attempts").try_cast("int")}
    return dead.withColumns(found).withColumn("headers", F.when(F.size(own) > 0, own))


def _seen(judged: DataFrame) -> Look:
    figures = judged.agg(F.count(F.lit(1)).alias("looked"), F.count_if(F.col("_matches") & ~F.col(_CHOSEN)).alias("homeless")).collect()[0]
    chosen = judged.where(_CHOSEN)
    targets = {row[_TARGET]: row["count"] for row in chosen.groupBy(_TARGET).count().orderBy(_TARGET).collect()}
    start = F.substring("payload", 1, _EXAMPLE_BYTES).alias("payload")
    some = chosen.select("id", "source", "reason", "attempts", F.col(_TARGET).alias("target"), start).limit(_EXAMPLES).collect()
    examples = [Example(**row.asDict() | {"payload": bytes(row["payload"])}) for row in some]
    return Look(looked=figures["looked"], matched=sum(targets.values()), targets=targets, homeless=figures["homeless"], examples=examples)
