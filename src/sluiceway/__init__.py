"""Sluiceway: a partitioned, lease-based work queue that feeds Spark."""

from __future__ import annotations

__version__ = "0.1.0"
