"""Row-by-row verification: the input, straight from the files, against the table and the dead queue.

Two multisets of rows are compared in one pass: each side's rows count +1 or −1, and a nonzero sum is a difference. That is `exceptAll` in
both directions.
"""

from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sluiceway.client import Client
from sluiceway.client.arrow import LeasedTable
from sluiceway.demo.check import Check
from sluiceway.demo.feeds import Feed
from sluiceway.demo.work import Work
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON

_LETTER = pa.schema(
    [(name, pa.utf8()) for name in ("reference", "reason", "queue", "attempts", "origin")] + [("payload", pa.binary())],
)


def verify(spark: SparkSession, feed: Feed, client: Client, dead_queue: str, work: Work) -> Check:
    """Compare the input with the output. Leaves the dead queue's items in place, with a copy in `work.dead_letters`."""
    expected = feed.from_files().persist()
    good = expected.where("fault is null").drop("fault")
    table = _table(spark, good, work)
    dead = _dead_letters(spark, client, dead_queue, work)
    faulty = expected.where("fault is not null").select("reference", F.col("fault").alias("reason"))
    missing, unexpected = _difference(good, table)
    dead_missing, dead_unexpected = _difference(faulty, dead)
    rows, found, lost, duplicated, unknown = _by_reference(expected, table.select("reference").union(dead.select("reference")))
    reasons = {row["reason"]: row["count"] for row in dead.groupBy("reason").count().orderBy(F.desc("count")).collect()}
    letters = sum(reasons.values())
    expected.unpersist()
    return Check(
        rows=rows,
        table=found - letters,
        dead=letters,
        lost=lost,
        duplicated=duplicated,
        unknown=unknown,
        missing=missing,
        unexpected=unexpected,
        dead_missing=dead_missing,
        dead_unexpected=dead_unexpected,
        reasons=reasons,
    )


def _table(spark: SparkSession, like: DataFrame, work: Work) -> DataFrame:
    """Read the table with the columns of `like`, some of which may come from folder names."""
    if not any(work.table.rglob("*.parquet")):
        return like.limit(0)
    found = spark.read.parquet(str(work.table))
    return found.select(*(F.col(f"`{field.name}`").cast(field.dataType) for field in like.schema))


def _difference(expected: DataFrame, found: DataFrame) -> tuple[int, int]:
    """Count the rows that are only in `expected`, and only in `found`."""
    columns = [f"`{name}`" for name in expected.columns]
    both = expected.withColumn("_side", F.lit(1)).union(found.select(*columns).withColumn("_side", F.lit(-1)))
    surplus = both.groupBy(*columns).agg(F.sum("_side").alias("_surplus")).where("_surplus != 0")
    zero = F.lit(0)
    row = surplus.agg(
        F.coalesce(F.sum(F.greatest("_surplus", zero)), zero), F.coalesce(F.sum(F.greatest(-F.col("_surplus"), zero)), zero)
    ).collect()[0]
    return int(row[0]), int(row[1])


def _by_reference(expected: DataFrame, found: DataFrame) -> tuple[int, int, int, int, int]:
    """Count rows in and rows found, and lost, duplicated and unknown references."""
    one, zero = F.lit(1), F.lit(0)
    into = expected.select("reference", one.alias("wanted"), zero.alias("got"))
    out = found.select("reference", zero.alias("wanted"), one.alias("got"))
    each = into.union(out).groupBy("reference").agg(F.sum("wanted").alias("wanted"), F.sum("got").alias("got"))
    row = each.agg(
        F.sum("wanted"),
        F.sum("got"),
        F.sum(F.when((F.col("wanted") > 0) & (F.col("got") == 0), 1).otherwise(0)),
        F.sum(F.when(F.col("got") > 1, F.col("got") - 1).otherwise(0)),
        F.sum(F.when(F.col("wanted") == 0, 1).otherwise(0)),
    ).collect()[0]
    return int(row[0]), int(row[1]), int(row[2]), int(row[3]), int(row[4])


def _dead_letters(spark: SparkSession, client: Client, queue: str, work: Work) -> DataFrame:
    """Read the dead queue by leases, and put the items back. The leases are keyed, so a repeated call gets its own leases again."""
    shutil.rmtree(work.dead_letters, ignore_errors=True)
    work.dead_letters.mkdir()
    ids: list[str] = []
    while True:
        number = len(list(work.dead_letters.iterdir()))
        leased = client.lease_arrow(queue, batch_size=MAX_ITEMS_ARROW, lease_timeout="10m", max_partitions=1, lease_key=f"verify/{number}")
        if not len(leased):
            break
        ids += leased.ids().to_pylist()
        pq.write_table(_letters(leased), work.dead_letters / f"part-{number:05}.parquet")
    for start in range(0, len(ids), MAX_ITEMS_JSON):
        client.retry(queue, ids[start : start + MAX_ITEMS_JSON])
    if not ids:
        return spark.createDataFrame([], "reference string, reason string")
    return spark.read.parquet(str(work.dead_letters)).select("reference", "reason")


def _letters(leased: LeasedTable) -> pa.Table:
    headers = [dict(pairs) for pairs in leased.table["headers"].to_pylist()]
    columns = {
        "reference": leased.table["reference"],
        "reason": [each["sluiceway-reason"] for each in headers],
        "queue": [each["sluiceway-queue"] for each in headers],
        "attempts": [each["sluiceway-attempts"] for each in headers],
        "origin": leased.table["origin"],
        "payload": leased.table["payload"],
    }
    return pa.table(columns, schema=_LETTER)
