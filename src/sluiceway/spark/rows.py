"""What a leased item looks like as a row of Spark."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sluiceway.model.items import HEADERS

SCHEMA = StructType(
    [
        StructField("id", StringType(), False),
        StructField("origin", StringType(), False),
        StructField("queue", StringType(), False),
        StructField("partition", IntegerType(), False),
        StructField("offset", LongType(), False),
        StructField("attempts", IntegerType(), False),
        StructField("enqueued_at", TimestampType(), False),
        StructField("kind", StringType()),
        StructField("encoding", StringType()),
        StructField("reference", StringType()),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("payload", BinaryType(), False),
        StructField("lease_id", StringType(), False),
    ]
)

OPTIONAL = {"kind": pa.utf8(), "encoding": pa.utf8(), "reference": pa.utf8(), "headers": HEADERS}


def to_rows(batch: pa.RecordBatch, queue: str, lease_id: str, schema: pa.Schema) -> pa.RecordBatch:
    """Items as the server sends them → rows of `schema` (the Arrow form of `SCHEMA`). No Python runs per row."""
    incarnation = json.loads(batch.schema.metadata[b"sluiceway"])["incarnation"]
    rows = batch.num_rows
    partition = batch.column("partition").cast(pa.utf8())
    columns = {
        "id": join_id(incarnation, partition, batch.column("offset")),
        "origin": join_id(incarnation, partition, batch.column("origin_offset")),
        "queue": pa.repeat(queue, rows),
        "lease_id": pa.repeat(lease_id, rows),
        **{name: batch.column(name) for name in ("partition", "offset", "attempts", "enqueued_at", "payload")},
    }
    for name, kind in OPTIONAL.items():
        columns[name] = batch.column(name) if name in batch.schema.names else pa.nulls(rows, kind)
    if "origin" in batch.schema.names:
        columns["origin"] = pc.coalesce(batch.column("origin"), columns["origin"])
    return pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)


def join_id(incarnation: str, partition: pa.Array, offset: pa.Array) -> pa.Array:
    """The ids of items of these partitions (as text) and offsets."""
    return pc.binary_join_element_wise(incarnation, partition, offset.cast(pa.utf8()), ".")
