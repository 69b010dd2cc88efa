"""Queues in Ray Data: a source of leased items, sinks that settle them and that produce."""

from __future__ import annotations

try:
    import ray.data  # noqa: F401 - a clearer message than that of the modules below
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("sluiceway.ray needs Ray Data: pip install 'sluiceway-client[ray]'", name=error.name) from None

from sluiceway.ray.queue_sink import QueueSink
from sluiceway.ray.queue_source import QueueSource
from sluiceway.ray.settle_sink import SettleSink

__all__ = ["QueueSink", "QueueSource", "SettleSink"]
