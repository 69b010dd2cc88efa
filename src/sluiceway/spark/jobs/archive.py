"""The job `archive`: moves a queue's items to Parquet by day, each once.

Exactness: a batch owns one folder, named by the checkpoint and the batch's number. It is written aside, read back and compared with what
came from the queue, renamed, and gets its manifest. Only then does Spark commit the batch, and only then are its items completed. A driver
killed before that reads exactly the same items again, and puts them into the same folder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import MapType, StructType

from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.spark.jobs.archive_files import (
    DIVISIONS,
    Location,
    Manifest,
    Span,
    is_whole,
    open_archive,
    publish,
    read_manifest,
    tidy,
    write_manifest,
)
from sluiceway.spark.jobs.checkpoint import claim, last_committed, local_path
from sluiceway.spark.jobs.common import Followed, Place, ProgressListener, Stop, follow, items_leased, never, unheard
from sluiceway.spark.options import source_options

log = logging.getLogger("sluiceway.spark")

_HOUR = 3_600_000


class _Sum(msgspec.Struct, frozen=True):
    """Order-independent checksum of items: their number, and the sum of their hashes."""

    items: int
    hashes: int


def archive(
    spark: SparkSession,
    place: Place,
    *,
    to: str | Path,
    checkpoint: str | Path,
    by: str = "day",
    consumer: str = "archive",
    once: bool = False,
    interval: str = "10s",
    max_items: int = 50_000,
    hold_for: str | None = None,
    tell: ProgressListener = unheard,
    stop: Stop = never,
) -> Followed:
    """Move the queue's items into Parquet files under the folder `to`, by the day (or hour) of their produce, in UTC.

    Runs until `stop` says so; with `once`, until what is ready is done. After any crash, an item is in the archive once, or still in the
    queue, if the job is restarted with the same checkpoint within `hold_for`. Every machine of Spark must see both folders under these
    paths. An interrupted batch is counted by the next run. Raises `invalid_request` for a folder that is not an archive, and for a
    checkpoint of something else.
    """
    options = place.options(consumer=consumer, maxItemsPerTrigger=max_items, holdFor=hold_for)
    source_options(options)
    every = parse_duration(interval, "interval")
    root, checkpoint = local_path(to, "to"), local_path(checkpoint, "checkpoint")
    open_archive(root, by)
    name = claim(checkpoint, "archive", {"queue": place.queue, "to": str(root)})
    keeper = _Keeper(spark, root, name, place.queue, DIVISIONS[by])
    items = spark.readStream.format("sluiceway").options(**options).load()
    writer = items.writeStream.foreachBatch(keeper.keep).option("checkpointLocation", str(checkpoint)).queryName(f"archive {place.queue}")
    started = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=f"{every} milliseconds")
    followed = follow("archive", started.start(), tell, stop, items_leased)
    last = last_committed(checkpoint)
    kept = [items for number, items in keeper.kept.items() if number <= last]
    return Followed(sum(kept), len(kept), followed.stopped)


class _Keeper:
    """Puts batches into the archive. `kept`: number of items by batch number, for this run."""

    def __init__(self, spark: SparkSession, root: Path, writer: str, queue: str, division: tuple[str, ...]) -> None:
        self.kept: dict[int, int] = {}
        self._spark, self._root, self._writer, self._queue, self._division = spark, root, writer, queue, division

    def keep(self, batch: DataFrame, number: int) -> None:
        """Put the batch into the archive. Returns when it is durable and compared with what was read."""
        location = Location(self._root, self._writer, number)
        # The lease is no column of the item: it ends with the batch.
        items = batch.drop("lease_id")
        manifest = read_manifest(location)
        if manifest is None or not self._has(manifest, items, location):
            manifest = self._write(items, location)
        self.kept[number] = manifest.items

    def _has(self, manifest: Manifest, items: DataFrame, location: Location) -> bool:
        """Whether the batch exists already, whole. Raises `invalid_request` if other items are there: they may exist nowhere else."""
        read = _sum_of(items)
        if (manifest.items, manifest.digest) != (read.items, str(read.hashes)):
            raise invalid("checkpoint", f"batch {location.name} is in the archive with other items; use a new checkpoint")
        return is_whole(location, manifest)

    def _write(self, items: DataFrame, location: Location) -> Manifest:
        shutil.rmtree(location.aside, ignore_errors=True)
        seen = Observation()
        # Hours since 1970, so that the session's time zone is irrelevant.
        hours = F.floor(F.unix_millis("enqueued_at") / _HOUR)
        folders = {
            "day": F.date_from_unix_date(F.floor(hours / 24).cast("int")).cast("string"),
            "hour": F.format_string("%02d", hours % 24),
        }
        divided = items.observe(seen, *_sum_columns(items.schema)).withColumns({name: folders[name] for name in self._division})
        ordered = divided.sortWithinPartitions(*self._division, "partition", "offset")
        ordered.write.partitionBy(*self._division).parquet(str(location.aside))
        files = tidy(location.aside)
        read = _to_sum(seen.get)
        spans, written = self._on_disk(location.aside, items.schema)
        if written != read or sum(file.items for file in files) != read.items:
            raise SluicewayError(
                "internal",
                f"batch {location.name} was written and is not what was read: {written.items:,} items with the digest {written.hashes} "
                f"in place of {read.items:,} with {read.hashes}; its items are still in the queue. Check the disk, then start again",
            )
        publish(location)
        manifest = Manifest(location.name, self._queue, read.items, str(read.hashes), spans, files)
        write_manifest(location, manifest)
        log.info("batch %s: %d items in %d files", location.name, read.items, len(files))
        return manifest

    def _on_disk(self, folder: Path, schema: StructType) -> tuple[dict[str, Span], _Sum]:
        """Spans and checksum of the files, read back."""
        columns = [*_sum_columns(schema), F.min("offset").alias("first"), F.max("offset").alias("last")]
        stored = self._spark.read.schema(schema).parquet(str(folder))
        found = {row["partition"]: row.asDict() for row in stored.groupBy("partition").agg(*columns).collect()}
        spans = {str(number): Span(row["items"], row["first"], row["last"]) for number, row in sorted(found.items())}
        return spans, _Sum(sum(row["items"] for row in found.values()), sum(int(row["hashes"]) for row in found.values()))


def _sum_of(items: DataFrame) -> _Sum:
    return _to_sum(items.agg(*_sum_columns(items.schema)).collect()[0].asDict())


def _to_sum(found: Mapping[str, object]) -> _Sum:
    return _Sum(int(str(found["items"])), int(str(found["hashes"] or 0)))


def _sum_columns(schema: StructType) -> list[Column]:
    """Columns of the checksum. Nulls do not affect a hash, so each column is accompanied by its null flag.

    Except for keys and `priority`, no value of which has the hash of a null: without a flag, items without them have the checksum of
    earlier releases, which had none of them.
    An upgraded job compares it with the manifest of a batch that was interrupted before.
    """
    parts: list[Column] = []
    for field in schema.fields:
        column = F.map_entries(field.name) if isinstance(field.dataType, MapType) else F.col(field.name)
        parts += [column] if field.name in ("key", "priority", "unique_key") else [column, column.isNull()]
    # As decimals: the sum of many hashes overflows a bigint.
    return [F.count(F.lit(1)).alias("items"), F.sum(F.xxhash64(*parts).cast("decimal(20,0)")).alias("hashes")]
