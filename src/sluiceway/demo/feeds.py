"""From files to items, and from items to a table: the part of the pipeline that knows the data.

A feed defines the way from an item to a row of the table once. The streaming query applies it to leased items, the check to rows read
from the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from sluiceway.demo.inputs import FLIGHTS, Input
from sluiceway.demo.work import Work
from sluiceway.kernel.errors import invalid
from sluiceway.spark.jobs.shape import JSON_TIMES, to_json

ITEM_COLUMNS = "id string, attempts int, reference string, payload binary"
"""What `Feed.from_items` uses of an item: the source builds no other column."""
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


@dataclass(frozen=True, slots=True)
class Feed:
    """`raw` has the columns `reference` (the row's number in the input, as text) and `raw` (the row as read).

    `encode`: raw row to an item's payload; `decode`: payload to a row; `direct`: raw row to the same row.
    `judge`: DataFrame with the column `row` to one with the table's columns and `fault`, the reason to keep the row out, or null.
    """

    raw: DataFrame
    kind: str
    encode: Callable[[Column], Column]
    decode: Callable[[Column], Column]
    direct: Callable[[Column], Column]
    judge: Callable[[DataFrame], DataFrame]
    partition_by: tuple[str, ...] = ()

    def items(self) -> DataFrame:
        """Items to produce: one per row."""
        return self.raw.select(self.encode(F.col("raw")).alias("payload"), F.lit(self.kind).alias("kind"), "reference")

    def from_items(self, items: DataFrame) -> DataFrame:
        """Leased items as judged rows, with their `id`, `attempts` and `reference`."""
        return self.judge(items.select("id", "attempts", "reference", self.decode(F.col("payload").cast("string")).alias("row")))

    def from_files(self) -> DataFrame:
        """Expected output: judged rows straight from the input, with their `reference`."""
        return self.judge(self.raw.select("reference", self.direct(F.col("raw")).alias("row")))


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
    judge = partial(_judge_flight, airlines=F.broadcast(names.cache()), planes=F.broadcast(built.cache()))
    raw = _numbered(frame, source.name, work)
    return Feed(raw, "flight", to_json, partial(_from_json, schema=schema), _as_is, judge, ("month",))


def _judge_flight(rows: DataFrame, airlines: DataFrame, planes: DataFrame) -> DataFrame:
    """Find flights without an arrival, by their arrival time: a diverted flight that arrived late has one, though no delay."""
    keys = [name for name in rows.columns if name != "row"]
    never = F.when(F.col("dep_time").isNull(), "cancelled: it never departed").otherwise("departed, and never arrived")
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
    return Feed(raw, "row", to_json, partial(_from_json, schema=frame.schema), _as_is, _judge_nothing)


def _lines(spark: SparkSession, source: Input, work: Work) -> Feed:
    spark.conf.set("spark.sql.caseSensitive", "true")
    lines = spark.read.text(list(source.paths))
    if source.kind == "text":
        return Feed(_numbered(lines, source.name, work), "line", _value, _line, lambda raw: _line(raw["value"]), _judge_nothing)
    raw = _numbered(lines.where(F.trim("value") != ""), source.name, work)
    known = work.read("schema")
    schema = StructType.fromJson(known) if known else _line_schema(spark, source)
    work.note("schema", schema.jsonValue())
    decode = partial(_from_json, schema=schema)
    return Feed(raw, "line", _value, decode, lambda raw: decode(raw["value"]), _judge_line)


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
