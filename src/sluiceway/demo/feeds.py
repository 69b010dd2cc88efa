"""From files to items, and from items to a table: the part of the pipeline that knows the data.

A feed states which rows of its input belong into the table. The streaming query stores leased items accordingly, and the check compares
what is there with the rows read from the files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from sluiceway.demo.flight_tasks import CANCELLED, FAULTS, LOST, FlightTasks
from sluiceway.demo.inputs import FLIGHTS, Input
from sluiceway.demo.work import Work
from sluiceway.kernel.errors import invalid
from sluiceway.spark.jobs.shape import JSON_TIMES, to_json

ITEM_COLUMNS = "id string, attempts int, reference string, payload binary"
"""What `Feed.store` uses of an item: the source builds no other column."""
_MALFORMED = "_sluiceway_malformed"
_ROW_BITS = 33
"""Row bits of `monotonically_increasing_id`; the bits above are the number of the Spark partition."""

_NUMBERS = (
    *("year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay"),
    *("flight", "air_time", "distance", "hour", "minute"),
)
_FLIGHT_COLUMNS = (
    *("year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay"),
    *("carrier", "flight", "tailnum", "origin", "dest", "air_time", "distance", "hour", "minute", "time_hour"),
)


class Stored(NamedTuple):
    """A batch whose good rows are in the table, or will be once its `faults` are used: the columns `id`, `attempts` and `fault` of the
    others. `size`: the number of its items, once they were."""

    faults: DataFrame
    size: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Feed:
    """`raw` has the columns `reference` (the row's number in the input, as text) and `raw` (the row as read).

    `encode`: raw row to an item's payload. `direct`: raw row to a row of the table. `judge`: DataFrame with the column `row` to one with
    the table's columns and `fault`, the reason to keep the row out, or null. `store`: writes a batch of items into the table, in a folder
    of its own, and gives those with a fault.
    """

    raw: DataFrame
    kind: str
    encode: Callable[[Column], Column]
    direct: Callable[[Column], Column]
    judge: Callable[[DataFrame], DataFrame]
    store: Callable[[DataFrame, int, Path], AbstractContextManager[Stored]]

    def items(self) -> DataFrame:
        """Items to produce: one per row."""
        return self.raw.select(self.encode(F.col("raw")).alias("payload"), F.lit(self.kind).alias("kind"), "reference")

    def from_files(self) -> DataFrame:
        """Expected output: judged rows straight from the input, with their `reference`."""
        return self.judge(self.raw.select("reference", self.direct(F.col("raw")).alias("row")))


@contextmanager
def _store(
    items: DataFrame, batch: int, table: Path, decode: Callable[[Column], Column], judge: Callable[[DataFrame], DataFrame]
) -> Iterator[Stored]:
    """Let Spark write the rows that `decode` makes of payloads."""
    rows = judge(items.select("id", "attempts", "reference", decode(F.col("payload").cast("string")).alias("row"))).persist()
    try:
        good = rows.where("fault is null").drop("id", "attempts", "fault")
        good.write.mode("overwrite").parquet(str(table / f"batch={batch}"))
        yield Stored(rows.where("fault is not null").select("id", "attempts", "fault"), rows.count)
    finally:
        rows.unpersist()


def open_feed(spark: SparkSession, source: Input, work: Work) -> Feed:
    """Open the feed of an input, and note its row counts under `rows`. Raises `invalid_request` for an input without rows."""
    if source.kind == FLIGHTS:
        return _flights(spark, source, work)
    if source.kind in ("csv", "parquet"):
        return _structs(spark, source, work)
    return _lines(spark, source, work)


def _flights(spark: SparkSession, source: Input, work: Work) -> Feed:
    flights, airlines, planes = source.paths
    special = {"time_hour": TimestampType(), **{name: IntegerType() for name in _NUMBERS}}
    schema = StructType([StructField(name, special.get(name, StringType())) for name in _FLIGHT_COLUMNS])
    frame = spark.read.csv(flights, schema=schema, header=True, nullValue="NA", enforceSchema=False)
    names = spark.read.csv(airlines, header=True).select("carrier", F.col("name").alias("airline"))
    built = spark.read.csv(planes, header=True, nullValue="NA").select(
        "tailnum", "manufacturer", "model", F.col("year").cast("int").alias("plane_year"), F.col("seats").cast("int").alias("seats")
    )
    tasks = FlightTasks(to_arrow_schema(schema, timezone="UTC"), names.toArrow(), built.toArrow())
    judge = partial(_judge_flight, airlines=F.broadcast(names), planes=F.broadcast(built))
    raw = _numbered(frame, source.name, work)
    return Feed(raw, "flight", to_json, _as_is, judge, partial(_store_flights, tasks=tasks))


@contextmanager
def _store_flights(items: DataFrame, batch: int, table: Path, tasks: FlightTasks) -> Iterator[Stored]:
    """Let each task write its part of the batch: what Arrow does with columns takes a third of the time of Spark's own rows."""
    for unfinished in table.glob(f"*/batch={batch}"):
        shutil.rmtree(unfinished)
    seen = Observation()
    counted = items.observe(seen, F.count(F.lit(1)).alias("items"))
    yield Stored(counted.mapInArrow(partial(tasks.store, batch=batch, table=table), FAULTS), lambda: int(seen.get["items"]))


def _judge_flight(rows: DataFrame, airlines: DataFrame, planes: DataFrame) -> DataFrame:
    """Find flights without an arrival, by their arrival time: a diverted flight that arrived late has one, though no delay."""
    keys = [name for name in rows.columns if name != "row"]
    never = F.when(F.col("dep_time").isNull(), CANCELLED).otherwise(LOST)
    fault = F.when(F.col("arr_time").isNull(), never).alias("fault")
    flat = rows.select(*keys, "row.*")
    return flat.join(airlines, "carrier", "left").join(planes, "tailnum", "left").withColumn("fault", fault)


def _structs(spark: SparkSession, source: Input, work: Work) -> Feed:
    # Nanosecond timestamps, as other tools write them, are read as integers.
    spark.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
    spark.conf.set("spark.sql.caseSensitive", "true")
    if source.kind == "csv":
        frame = spark.read.csv(list(source.paths), header=True, multiLine=True, escape='"')
    else:
        frame = spark.read.parquet(*source.paths)
    raw = _numbered(frame, source.name, work)
    return Feed(
        raw, "row", to_json, _as_is, _judge_nothing, partial(_store, decode=partial(_from_json, schema=frame.schema), judge=_judge_nothing)
    )


def _lines(spark: SparkSession, source: Input, work: Work) -> Feed:
    spark.conf.set("spark.sql.caseSensitive", "true")
    lines = spark.read.text(list(source.paths))
    if source.kind == "text":
        store = partial(_store, decode=_line, judge=_judge_nothing)
        return Feed(_numbered(lines, source.name, work), "line", _value, lambda raw: _line(raw["value"]), _judge_nothing, store)
    raw = _numbered(lines.where(F.trim("value") != ""), source.name, work)
    known = work.read("schema")
    schema = StructType.fromJson(known) if known else _line_schema(spark, source)
    work.note("schema", schema.jsonValue())
    decode = partial(_from_json, schema=schema)
    store = partial(_store, decode=decode, judge=_judge_line)
    return Feed(raw, "line", _value, lambda raw: decode(raw["value"]), _judge_line, store)


def _line_schema(spark: SparkSession, source: Input) -> StructType:
    found = spark.read.json(list(source.paths), columnNameOfCorruptRecord=_MALFORMED).schema
    good = [field for field in found.fields if field.name != _MALFORMED]
    if not good:
        raise invalid("input", f"{source.name} has no line that is a JSON object")
    return StructType([*good, StructField(_MALFORMED, StringType())])


def _judge_line(rows: DataFrame) -> DataFrame:
    malformed = F.col("row").isNull() | F.col(f"row.{_MALFORMED}").isNotNull()
    fault = F.when(malformed, "the line is not a JSON object")
    return rows.withColumn("fault", fault).withColumn("row", F.col("row").dropFields(_MALFORMED))


def _judge_nothing(rows: DataFrame) -> DataFrame:
    return rows.withColumn("fault", F.lit(None).cast("string"))


def _from_json(payload: Column, schema: StructType) -> Column:
    return F.from_json(payload, schema, {**JSON_TIMES, "columnNameOfCorruptRecord": _MALFORMED})


def _as_is(raw: Column) -> Column:
    return raw


def _value(raw: Column) -> Column:
    # As bytes: a line need not be valid text.
    return raw["value"].cast("binary")


def _line(payload: Column) -> Column:
    return F.struct(payload.alias("value"))


def _numbered(frame: DataFrame, name: str, work: Work) -> DataFrame:
    """Number the rows: columns `reference` and `raw`. The numbers are the same in every run, since Spark splits the same files alike.

    A row's number is its place in its Spark partition plus the rows of the partitions before, which are counted once.
    """
    columns = [frame["`{}`".format(name.replace("`", "``"))] for name in frame.columns]
    marked = frame.select(F.struct(*columns).alias("raw"), F.monotonically_increasing_id().alias("at"))
    counts = work.read("rows")
    if counts is None:
        split = F.shiftright("at", _ROW_BITS).alias("split")
        counts = [[row["split"], row["count"]] for row in marked.groupBy(split).count().orderBy("split").collect()]
        if not counts:
            raise invalid("input", f"there are no rows in {name}")
        work.note("rows", counts)
    before, starts = 1, []
    for split, count in counts:
        starts += [F.lit(split).cast("long"), F.lit(before).cast("long")]
        before += count
    first = F.create_map(*starts)[F.shiftright("at", _ROW_BITS)]
    number = first + F.col("at").bitwiseAND((1 << _ROW_BITS) - 1)
    return marked.select(number.cast("string").alias("reference"), "raw")
