"""Makes `format("sluiceway-capture")` work without registering: Spark looks for modules named `pyspark_…` and their `DefaultSource`."""

from __future__ import annotations

from sluiceway.spark.capture_source import CaptureSource as DefaultSource

__all__ = ["DefaultSource"]
