"""Groups: division of a resource's items among members (heartbeats, rounds, claims, plan), and of a change stream's partitions (tasks)."""

from __future__ import annotations
