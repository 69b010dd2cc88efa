"""Sync logs, and what goes with them: the log that a group of tasks shares, its election, the positions of its partitions."""

from __future__ import annotations
