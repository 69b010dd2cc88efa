"""The Python client: `Client` for blocking code, `AsyncClient` for asyncio. Both make the same calls with the same guarantees."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sluiceway.client.answers import (
    AuditEntry,
    AuditPage,
    Backoff,
    Browsed,
    BrowsedItem,
    Cleared,
    Completed,
    CreatedKey,
    Deleted,
    Event,
    Explanation,
    Extended,
    Ignored,
    Instance,
    InstanceList,
    KeyInfo,
    KeyPage,
    Lease,
    Leased,
    LeasedItem,
    MovedPartition,
    OwnKey,
    PartitionExplanation,
    PartitionStats,
    Produced,
    QueueInfo,
    QueuePage,
    QueueStats,
    Redriven,
    Released,
    Reloaded,
    Retried,
    Round,
    Staged,
)
from sluiceway.client.capture_answers import TaskAlarm, TaskGroup, TaskList, TaskMember, TaskPartition, TaskSummary, UnseenTasks
from sluiceway.client.consumer_answers import ConsumerInfo, ConsumerPage, QueryInfo, QueueConsumers
from sluiceway.client.consumer_common import DeadItem, RetryItem
from sluiceway.client.errors import CallError
from sluiceway.client.history_answers import QueueHistory
from sluiceway.client.http_exchange import DEFAULT_URL
from sluiceway.client.item_calls import Item, Retry, Verdict
from sluiceway.client.queue_calls import Settings, Verb
from sluiceway.client.sync import Client
from sluiceway.client.sync_producer import Producer, Sent
from sluiceway.contract.rebalances import (
    OpenRebalance,
    Rebalance,
    RebalanceBatch,
    RebalancePage,
    RebalancePlan,
    RebalanceProgress,
)
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from sluiceway.client.aio import AsyncClient
    from sluiceway.client.aio_consumer import AsyncConsumer
    from sluiceway.client.aio_producer import AsyncProducer, AsyncSent
    from sluiceway.client.sync_consumer import Consumer

_WITH_ASYNCIO = {
    "AsyncClient": "aio",
    "AsyncConsumer": "aio_consumer",
    "AsyncProducer": "aio_producer",
    "AsyncSent": "aio_producer",
    "Consumer": "sync_consumer",
}
"""What needs asyncio, and where it is: a blocking client would be half a command line's start-up slower with it."""

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncSent",
    "AuditEntry",
    "AuditPage",
    "Backoff",
    "Browsed",
    "BrowsedItem",
    "CallError",
    "Cleared",
    "Client",
    "Completed",
    "Consumer",
    "ConsumerInfo",
    "ConsumerPage",
    "CreatedKey",
    "DeadItem",
    "Deleted",
    "Event",
    "Explanation",
    "Extended",
    "Ignored",
    "Instance",
    "InstanceList",
    "Item",
    "KeyInfo",
    "KeyPage",
    "Lease",
    "Leased",
    "LeasedItem",
    "MovedPartition",
    "OpenRebalance",
    "OwnKey",
    "PartitionExplanation",
    "PartitionStats",
    "Produced",
    "Producer",
    "QueryInfo",
    "QueueConsumers",
    "QueueHistory",
    "QueueInfo",
    "QueuePage",
    "QueueStats",
    "Rebalance",
    "RebalanceBatch",
    "RebalancePage",
    "RebalancePlan",
    "RebalanceProgress",
    "Redriven",
    "Released",
    "Reloaded",
    "Retried",
    "Retry",
    "RetryItem",
    "Round",
    "Sent",
    "Settings",
    "SluicewayError",
    "Staged",
    "TaskAlarm",
    "TaskGroup",
    "TaskList",
    "TaskMember",
    "TaskPartition",
    "TaskSummary",
    "UnseenTasks",
    "Verb",
    "Verdict",
]


def __getattr__(name: str) -> object:
    if name not in _WITH_ASYNCIO:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_ASYNCIO[name]}"), name)
