"""The Python client: `Client` for blocking code, `AsyncClient` for asyncio. Both make the same calls with the same guarantees."""

from __future__ import annotations

from sluiceway.client.aio import AsyncClient
from sluiceway.client.answers import (
    Backoff,
    Cleared,
    Completed,
    Explanation,
    Extended,
    Ignored,
    Lease,
    Leased,
    LeasedItem,
    PartitionStats,
    Produced,
    QueueInfo,
    QueuePage,
    QueueStats,
    Redriven,
    Released,
    Retried,
    Staged,
)
from sluiceway.client.errors import CallError
from sluiceway.client.http import DEFAULT_URL
from sluiceway.client.item_calls import Item, Retry, Verdict
from sluiceway.client.queue_calls import Settings, Verb
from sluiceway.client.sync import Client
from sluiceway.kernel.errors import SluicewayError

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "Backoff",
    "CallError",
    "Cleared",
    "Client",
    "Completed",
    "Explanation",
    "Extended",
    "Ignored",
    "Item",
    "Lease",
    "Leased",
    "LeasedItem",
    "PartitionStats",
    "Produced",
    "QueueInfo",
    "QueuePage",
    "QueueStats",
    "Redriven",
    "Released",
    "Retried",
    "Retry",
    "Settings",
    "SluicewayError",
    "Staged",
    "Verb",
    "Verdict",
]
