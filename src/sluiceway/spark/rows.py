"""Spark rows of leased items."""

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
        StructField("key", StringType()),
        StructField("priority", IntegerType()),
        StructField("unique_key", StringType()),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("payload", BinaryType(), False),
        StructField("lease_id", StringType(), False),
    ]
)

OPTIONAL = {
    "kind": pa.utf8(),
    "encoding": pa.utf8(),
    "reference": pa.utf8(),
    "key": pa.utf8(),
    "priority": pa.int8(),
    "unique_key": pa.utf8(),
    "headers": HEADERS,
}


def to_rows(batch: pa.RecordBatch, queue: str, lease_id: str, schema: pa.Schema) -> pa.RecordBatch:
    """Convert the server's items to rows of `schema` (the Arrow form of `SCHEMA`, or some of its columns). No Python runs per row."""
    incarnation = json.loads(batch.schema.metadata[b"sluiceway"])["incarnation"]
    rows = batch.num_rows
    texts: dict[str, pa.Array] = {}
    if "id" in schema.names or "origin" in schema.names:
        partition = batch.column("partition").cast(pa.utf8())
        texts["id"] = join_id(incarnation, partition, batch.column("offset"))
        if "origin" in schema.names:
            texts["origin"] = _origins(batch, incarnation, partition, texts["id"])

    def column(name: str) -> pa.Array:
        if name in texts:
            return texts[name]
        if name in ("queue", "lease_id"):
            return pa.repeat(queue if name == "queue" else lease_id, rows)
        return batch.column(name) if name in batch.schema.names else pa.nulls(rows, OPTIONAL[name])

    return pa.RecordBatch.from_arrays([column(field.name).cast(field.type) for field in schema], schema=schema)


def _origins(batch: pa.RecordBatch, incarnation: str, partition: pa.Array, ids: pa.Array) -> pa.Array:
    # Most items were never put back, so the two are equal.
    moved = not batch.column("origin_offset").equals(batch.column("offset"))
    own = join_id(incarnation, partition, batch.column("origin_offset")) if moved else ids
    return pc.coalesce(batch.column("origin"), own) if "origin" in batch.schema.names else own


def join_id(incarnation: str, partition: pa.Array, offset: pa.Array) -> pa.Array:
    """The ids of items of these partitions (as text) and offsets."""
    return pc.binary_join_element_wise(incarnation, partition, offset.cast(pa.utf8()), ".")
