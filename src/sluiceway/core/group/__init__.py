"""Groups: how members divide items of a resource (heartbeats, rounds, claims, plan), and the partitions of a change stream (tasks)."""

from __future__ import annotations
