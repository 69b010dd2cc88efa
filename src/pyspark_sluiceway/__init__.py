"""Makes `format("sluiceway")` work without registering: Spark looks for modules named `pyspark_…` and their `DefaultSource`."""

from __future__ import annotations

from sluiceway.spark.format import SluicewaySource as DefaultSource

__all__ = ["DefaultSource"]
