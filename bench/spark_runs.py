"""Runs in one Spark session: rows into and out of Sluiceway and Kafka, and their costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sluiceway.bench.servers import FamilyMeter, family_cpu
from sluiceway.spark.options import Server as Address
from sluiceway.spark.server_calls import Client

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4
"""Partitions of a queue and of a topic, and tasks of a write."""

_HEX = 128
_REQUEST_TIMEOUT = 600_000


class Run(NamedTuple):
    """Costs in seconds: by the clock, of the processor for Spark (Java and Python) and the server; `batches`: rows and seconds of each."""

    seconds: float
    spark_cpu: float
    server_cpu: float
    batches: tuple[tuple[int, float], ...] = ()

    @property
    def steady(self) -> float:
        """Seconds per row in all batches but the first, which includes the start."""
        later = self.batches[1:]
        return sum(seconds for _, seconds in later) / sum(rows for rows, _ in later)

    @property
    def trigger(self) -> float:
        """Median seconds of a batch, without the first."""
        return statistics.median(seconds for _, seconds in self.batches[1:])


class Work(Protocol):
    """A stream of `items` of `size` bytes, `most` a batch."""

    @property
    def items(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def most(self) -> int: ...


class Place(NamedTuple):
    """A system in Spark, as `format` names it. `pid`: process whose processor time counts; `sink`, `source`: Spark's options for a queue or
    topic; `columns`: those that are read, None: all."""

    name: str
    format: str
    pid: int | None
    sink: Callable[[str], dict[str, str]] | None
    source: Callable[[str, Work], dict[str, str]]
    columns: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.format == "sluiceway"


def sluiceway(name: str, url: str, pid: int, columns: str | None = None) -> Place:
    def sink(queue: str) -> dict[str, str]:
        return {"url": url, "queue": queue}

    def source(queue: str, work: Work) -> dict[str, str]:
        return {"url": url, "queue": queue, "consumer": "bench", "maxItemsPerTrigger": str(work.most)}

    return Place(name, "sluiceway", pid, sink, source, columns)


def kafka(name: str, bootstrap: str, pid: int) -> Place:
    where = {"kafka.bootstrap.servers": bootstrap}

    def sink(topic: str) -> dict[str, str]:
        return {**where, "topic": topic, "kafka.acks": "all"}

    def source(topic: str, work: Work) -> dict[str, str]:
        return {**where, "subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(work.most)}

    return Place(name, "kafka", pid, sink, source)


def empty(spark: SparkSession, name: str, columns: str | None = None) -> Place:
    """Registers the source that calls no server. Its tasks and record batches are as large as ours."""
    from pyspark import cloudpickle

    from bench import empty_source

    # Workers know no package `bench`.
    cloudpickle.register_pickle_by_value(empty_source)  # type: ignore[no-untyped-call]
    spark.dataSource.register(empty_source.EmptySource)

    def source(_: str, work: Work) -> dict[str, str]:
        # As many as ours: one for a batch of one item.
        tasks = min(PARTITIONS, work.most)
        numbers = {"items": work.items, "most": work.most, "size": work.size, "tasks": tasks, "chunk": work.most // tasks}
        return {name: str(number) for name, number in numbers.items()}

    return Place(name, empty_source.NAME, None, None, source, columns)


def create_queue(url: str, name: str) -> None:
    client = Client(Address(url, name, _REQUEST_TIMEOUT))
    try:
        client.call("/v1/queues.create", {"queue_name": name, "requested_partitions": PARTITIONS})
    finally:
        client.close()


def delete_queue(url: str, name: str) -> None:
    client = Client(Address(url, name, _REQUEST_TIMEOUT))
    try:
        client.call("/v1/queues.delete", {"queue_name": name, "force": True})
    finally:
        client.close()


def make_rows(spark: SparkSession, folder: Path, items: int, size: int) -> DataFrame:
    """Make rows, in parquet, with a column `value` of `size` bytes that compress badly."""
    from pyspark.sql import functions as F

    parts = [F.sha2(F.concat(F.col("id").cast("string"), F.lit(f"/{part}")), 512) for part in range(-(-size // _HEX))]
    place = str(folder / f"rows-{items}-{size}")
    rows = spark.range(0, items, 1, PARTITIONS).select(F.concat(*parts).substr(1, size).cast("binary").alias("value"))
    rows.write.mode("overwrite").parquet(place)
    return spark.read.parquet(place)


def write(spark: SparkSession, place: Place, rows: DataFrame, name: str) -> Run:
    assert place.sink is not None
    options = place.sink(name)
    return _measured(spark, place.pid, lambda: rows.write.format(place.format).mode("append").options(**options).save())


def scan(spark: SparkSession, rows: DataFrame) -> Run:
    """Read all rows, and write them to nowhere."""
    return _measured(spark, None, lambda: rows.write.format("noop").mode("overwrite").save())


def read(spark: SparkSession, place: Place, name: str, work: Work, checkpoint: Path) -> Run:
    """Read all items, to nowhere. Raises RuntimeError if some are missing."""
    batches: list[tuple[int, float]] = []

    def run() -> None:
        stream = spark.readStream.format(place.format).options(**place.source(name, work))
        rows = (stream if place.columns is None else stream.schema(place.columns)).load()
        query = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()
        told = ((batch.numInputRows, batch.durationMs["triggerExecution"] / 1000) for batch in query.recentProgress)
        batches.extend(batch for batch in told if batch[0])

    measured = _measured(spark, place.pid, run)
    found = sum(rows for rows, _ in batches)
    if found != work.items:
        raise RuntimeError(f"{place.name}: {found} rows read of {work.items}")
    return measured._replace(batches=tuple(batches))


def _measured(spark: SparkSession, server: int | None, run: Callable[[], object]) -> Run:
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    java = gateway.proc.pid
    # Spark's Python workers may outlive the daemon that forked them; then no member of the family waits for them.
    with FamilyMeter(java) as meter:
        before = meter.seconds(), family_cpu(server) if server else 0.0
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
        return Run(seconds, meter.seconds() - before[0], (family_cpu(server) - before[1]) if server else 0.0)
