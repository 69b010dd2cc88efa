"""The data pipeline on Spark: a stream source, a batch and stream sink, outcomes by column, a local session, a listener."""

from __future__ import annotations

from sluiceway.spark.listener import watch
from sluiceway.spark.session import session
from sluiceway.spark.settle import settle

__all__ = ["session", "settle", "watch"]
