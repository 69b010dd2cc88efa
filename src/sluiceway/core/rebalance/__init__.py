"""Rebalances: from the partitions a queue has to those it is to have, step by step."""

from __future__ import annotations
