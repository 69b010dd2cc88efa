"""The Python client: `Client` for blocking code, `AsyncClient` for asyncio. Both make the same calls with the same guarantees."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sluiceway.client._sync.client import Client
from sluiceway.client._sync.producer import Producer, Sent
from sluiceway.client.answers import (
    AuditEntry,
    AuditPage,
    Backoff,
    Browsed,
    BrowsedItem,
    CircuitBreaker,
    CircuitStats,
    Cleared,
    Completed,
    CreatedKey,
    Deleted,
    Event,
    Explanation,
    Extended,
    FailedAttempt,
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
    PartitionPin,
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
from sluiceway.client.consumer_common import DeadItem, RetryItem
from sluiceway.client.errors import CallError
from sluiceway.client.http_exchange import DEFAULT_URL
from sluiceway.client.item_calls import Item, Retry, Verdict
from sluiceway.client.queue_calls import Settings, Verb
from sluiceway.contract.backup_answers import BackupBegun, BackupPartition, BlobsPart, RecordsPart
from sluiceway.contract.bundle_answers import BundleInfo, BundlePage, FollowUpInfo
from sluiceway.contract.capture_answers import TaskAlarm, TaskGroup, TaskList, TaskMember, TaskPartition, TaskSummary, UnseenTasks
from sluiceway.contract.config_answers import BackendInfo
from sluiceway.contract.consumer_answers import ConsumerInfo, ConsumerPage, QueryInfo, QueueConsumers
from sluiceway.contract.history_answers import QueueHistory
from sluiceway.contract.item_answers import MadeReady, MovedItems, Reasons, Searched
from sluiceway.contract.problem_answers import ProblemInfo, ProblemList
from sluiceway.contract.queue_settings import KeyRate, Rate
from sluiceway.contract.queue_stats import QueueKeys
from sluiceway.contract.rebalances import (
    OpenRebalance,
    Rebalance,
    RebalanceBatch,
    RebalancePage,
    RebalancePlan,
    RebalanceProgress,
)
from sluiceway.contract.schedule_answers import LastFailure, LastFired, ScheduleInfo, SchedulePage, ScheduleRun
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from sluiceway.client._async.client import AsyncClient
    from sluiceway.client._async.consumer import AsyncConsumer
    from sluiceway.client._async.producer import AsyncProducer, AsyncSent
    from sluiceway.client._sync.consumer import Consumer

_WITH_ASYNCIO = {
    "AsyncClient": "_async.client",
    "AsyncConsumer": "_async.consumer",
    "AsyncProducer": "_async.producer",
    "AsyncSent": "_async.producer",
    "Consumer": "_sync.consumer",
}
"""The names that need asyncio, and their modules. Imported on first use: asyncio adds half to the start-up time of the command line."""

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncSent",
    "AuditEntry",
    "AuditPage",
    "BackendInfo",
    "Backoff",
    "BackupBegun",
    "BackupPartition",
    "BlobsPart",
    "Browsed",
    "BrowsedItem",
    "BundleInfo",
    "BundlePage",
    "CallError",
    "CircuitBreaker",
    "CircuitStats",
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
    "FailedAttempt",
    "FollowUpInfo",
    "Ignored",
    "Instance",
    "InstanceList",
    "Item",
    "KeyInfo",
    "KeyPage",
    "KeyRate",
    "LastFailure",
    "LastFired",
    "Lease",
    "Leased",
    "LeasedItem",
    "MadeReady",
    "MovedItems",
    "MovedPartition",
    "OpenRebalance",
    "OwnKey",
    "PartitionExplanation",
    "PartitionPin",
    "PartitionStats",
    "ProblemInfo",
    "ProblemList",
    "Produced",
    "Producer",
    "QueryInfo",
    "QueueConsumers",
    "QueueHistory",
    "QueueInfo",
    "QueueKeys",
    "QueuePage",
    "QueueStats",
    "Rate",
    "Reasons",
    "Rebalance",
    "RebalanceBatch",
    "RebalancePage",
    "RebalancePlan",
    "RebalanceProgress",
    "RecordsPart",
    "Redriven",
    "Released",
    "Reloaded",
    "Retried",
    "Retry",
    "RetryItem",
    "Round",
    "ScheduleInfo",
    "SchedulePage",
    "ScheduleRun",
    "Searched",
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
