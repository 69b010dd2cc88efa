"""The cluster: ownership of partitions, requests between instances, and rebalances."""

from __future__ import annotations
