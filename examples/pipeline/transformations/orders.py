"""Orders from a queue into a table, invoices from the table into another queue, and a count of both."""

from __future__ import annotations

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()
URL = os.environ.get("SLUICEWAY_URL", "http://127.0.0.1:2319")


@dp.table
def orders() -> DataFrame:
    """Every item of the queue, once. Items are done when they are in the table."""
    items = spark.readStream.format("sluiceway").options(url=URL, queue="orders", consumer="orders-pipeline").load()
    order = F.from_json(F.col("payload").cast("string"), "id long, shop int")
    return items.select(order.alias("order"), "origin", "enqueued_at").select("order.*", "origin", "enqueued_at")


@dp.materialized_view
def shops() -> DataFrame:
    """How many orders each shop has had."""
    return spark.read.table("orders").groupBy("shop").count()


dp.create_sink("invoices", "sluiceway", {"url": URL, "queue": "invoices"})


@dp.append_flow(target="invoices")
def invoice() -> DataFrame:
    """An invoice for each order, in a queue: written once, whatever is killed."""
    asked = spark.readStream.table("orders").select("id", "shop", "origin")
    return asked.select(
        F.to_json(F.struct("id", "shop")).alias("payload"), F.lit("invoice").alias("kind"), F.col("origin").alias("reference")
    )
