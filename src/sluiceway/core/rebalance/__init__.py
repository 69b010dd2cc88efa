"""Rebalances: the plan and the step machine that take a queue from its current partitions to the requested ones."""

from __future__ import annotations
