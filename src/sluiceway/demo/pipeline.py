"""The Spark driver of the demo: ingest, process, verify. Run as `python -m sluiceway.demo.pipeline WORK RESULTS`.

It may be killed at any moment and restarted. Completed stages are noted; an interrupted one is repeated without effect on the result:
the ingest is a keyed write, the processing continues from its checkpoint, and a batch owns its files.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

import msgspec
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sluiceway.client import Client, QueueStats
from sluiceway.demo.feeds import ITEM_COLUMNS, Feed, open_feed
from sluiceway.demo.inputs import FLIGHTS
from sluiceway.demo.verify import verify
from sluiceway.demo.work import Job, Work
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.spark import session, settle

_RETRY_FOR = "2m"
_LOOK_AFTER = 0.25
"""Seconds between two checks whether the queue is empty."""


def main(arguments: list[str]) -> int:
    work = Work(Path(arguments[0]), Path(arguments[1]))
    try:
        _run(work)
    except Exception as error:
        # The log gets the whole traceback.
        traceback.print_exc()
        is_final = isinstance(error, SluicewayError) and error.code == "invalid_request"
        work.note("error", {"reason": _reason(error), "final": is_final})
        return 1
    return 0


def _run(work: Work) -> None:
    job = msgspec.convert(work.read("job"), Job)
    url = str(work.read("url"))
    spark = _session(work)
    try:
        feed = open_feed(spark, job.input, work)
    except (PySparkException, Py4JJavaError) as error:
        raise invalid("input", f"Spark cannot read {job.input.name}: {_reason(error)}") from error
    rows = sum(count for _, count in work.read("rows"))
    if not work.is_done("ingest"):
        work.began("ingest")
        _ingest(feed, rows, url, job.queue)
        work.ended("ingest")
    if not work.is_done("process"):
        work.began("process")
        _process(spark, feed, rows, url, job.queue, work)
        work.ended("process")
    with Client(url, client_id="demo-verify", retry_for=_RETRY_FOR) as client:
        work.note("check", msgspec.to_builtins(verify(spark, feed, client, job.dead_queue, work)))
    if job.input.kind == FLIGHTS:
        work.note("delays", _delays(spark, work))
    spark.stop()


def _reason(error: Exception) -> str:
    """First line of the error: Spark's messages continue with the stacks of several processes."""
    text = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else str(error)
    return str(text).strip().partition("\n")[0]


def _session(work: Work) -> SparkSession:
    local = {
        "spark.local.dir": work.scratch / "local",
        "spark.sql.warehouse.dir": work.scratch / "warehouse",
    }
    settings = {
        **local,
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.streaming.stopTimeout": "30s",
    }
    return session("sluiceway demo", **settings)


def _ingest(feed: Feed, rows: int, url: str, queue: str) -> None:
    chunk = min(2_000, max(20, rows // 200))
    options = {"url": url, "queue": queue, "writeId": "ingest", "chunkItems": str(chunk), "requestTimeout": _RETRY_FOR}
    feed.items().write.format("sluiceway").mode("append").options(**options).save()


def _process(spark: SparkSession, feed: Feed, rows: int, url: str, queue: str, work: Work) -> None:
    """Process until no item is ready, leased, scheduled or on its way to the dead queue."""
    options = {
        "url": url,
        "queue": queue,
        "consumer": "demo",
        "maxItemsPerTrigger": str(min(100_000, max(100, rows // 4))),
        "minPartitions": "2",
        "holdFor": "10m",
        "requestTimeout": _RETRY_FOR,
    }

    def run(items: DataFrame, batch: int) -> None:
        work.log_batch("begin", batch)
        work.log_batch("end", batch, _batch(feed, items, batch, url, queue, work))

    items = spark.readStream.format("sluiceway").schema(ITEM_COLUMNS).options(**options).load()
    query = items.writeStream.foreachBatch(run).option("checkpointLocation", str(work.checkpoint)).start()
    with Client(url, retry_for=_RETRY_FOR) as client:
        while query.isActive and not _is_empty(client.stats(queue)):
            time.sleep(_LOOK_AFTER)
    query.stop()
    # Raises the error that ended the query, if any.
    query.awaitTermination()


def _batch(feed: Feed, items: DataFrame, batch: int, url: str, queue: str, work: Work) -> int:
    """Write rows without a fault into the table; retry the others after their first attempt, then send them to the dead queue.

    Returns the number of items.
    """
    outcome = F.when(F.col("attempts") == 1, "retry").otherwise("dead").alias("outcome")
    with feed.store(items, batch, work.table) as stored:
        settle(stored.faults.select("id", outcome, F.col("fault").alias("reason")), url=url, queue=queue)
        return stored.size()


def _is_empty(stats: QueueStats) -> bool:
    return all(partition.total == 0 and partition.transferring == 0 for partition in stats.partitions)


def _delays(spark: SparkSession, work: Work) -> list[list[object]]:
    """Compute [airline, month, mean arrival delay in minutes, flights] for the picture."""
    means = (
        spark.read.parquet(str(work.table))
        .where("arr_delay is not null")
        .groupBy("airline", "month")
        .agg(F.avg("arr_delay").alias("mean"), F.count("*").alias("flights"))
    )
    return [list(row) for row in means.collect()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
