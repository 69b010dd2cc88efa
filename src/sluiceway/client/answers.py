"""The answers of the client's calls, which are the contract's types. Unknown fields are ignored."""

from __future__ import annotations

import msgspec

from sluiceway.contract.audit_answers import AuditEntry, AuditPage
from sluiceway.contract.config_answers import BackendInfo, BackendPage, Reloaded
from sluiceway.contract.instance_answers import Instance, InstanceList, LastRound, MovedPartition, PartitionPin, Round, RoundList
from sluiceway.contract.item_answers import (
    Browsed,
    BrowsedItem,
    Cleared,
    Completed,
    Deleted,
    Explanation,
    Extended,
    FailedAttempt,
    Ignored,
    Lease,
    Leased,
    LeasedItem,
    Left,
    MadeReady,
    MovedItems,
    PartitionExplanation,
    Peeked,
    Produced,
    ReasonCount,
    Reasons,
    Redriven,
    Released,
    Retried,
    Searched,
    Staged,
)
from sluiceway.contract.key_answers import CreatedKey, KeyInfo, KeyPage, OwnKey
from sluiceway.contract.queue_settings import Backoff, CircuitBreaker, Partition, QueueInfo, QueuePage
from sluiceway.contract.queue_stats import CircuitStats, LogicalQueueStats, PartitionStats, QueueKeys, QueueStats, WaitingKey

__all__ = [
    "AuditEntry",
    "AuditPage",
    "BackendInfo",
    "BackendPage",
    "Backoff",
    "Browsed",
    "BrowsedItem",
    "CircuitBreaker",
    "CircuitStats",
    "Cleared",
    "Completed",
    "CreatedKey",
    "Deleted",
    "Event",
    "Explanation",
    "Extended",
    "FailedAttempt",
    "Ignored",
    "Instance",
    "InstanceList",
    "KeyInfo",
    "KeyPage",
    "LastRound",
    "Lease",
    "Leased",
    "LeasedItem",
    "Left",
    "LogicalQueueStats",
    "MadeReady",
    "MovedItems",
    "MovedPartition",
    "OwnKey",
    "Partition",
    "PartitionExplanation",
    "PartitionPin",
    "PartitionStats",
    "Peeked",
    "Produced",
    "QueueInfo",
    "QueueKeys",
    "QueuePage",
    "QueueStats",
    "ReasonCount",
    "Reasons",
    "Redriven",
    "Released",
    "Reloaded",
    "Retried",
    "Round",
    "RoundList",
    "Searched",
    "Staged",
    "WaitingKey",
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event on the server. `type` is one of the types in docs/reference/api.md, `data` has the type's fields.

    The type `reset` means that events were missed: read again what you follow.
    """

    id: str | None
    type: str
    data: object
