"""Sluiceway: a partitioned, lease-based work queue that feeds Spark."""

from __future__ import annotations

__version__ = "0.2.0.dev0"

REPOSITORY = "https://github.com/sluiceway/sluiceway"
"""The project's address. The metadata of both distributions is made of it, so that it stands in one place."""
