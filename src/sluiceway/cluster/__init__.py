"""The instances of a cluster: which of them owns which partitions, how they ask one another, and rebalances."""

from __future__ import annotations
