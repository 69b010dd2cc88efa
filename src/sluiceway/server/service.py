"""What the server stands on: one object that carries out the calls of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from sluiceway.model.queue import QueueRecord, Verb
from sluiceway.model.requests import (
    Clear,
    Cleared,
    Explanation,
    Extend,
    Extended,
    Lease,
    Leased,
    Peek,
    Produce,
    Produced,
    QueuePatch,
    QueueSpec,
    QueueStats,
    Redrive,
    Redriven,
    Settle,
    Settled,
)


class QueueService(Protocol):
    """The calls of the API, on validated requests. What returns is done, durably; what raises a `SluicewayError` is refused or unknown.

    Every call that names a queue raises `queue_not_found` for one that does not exist. A call may be cancelled: what
    has not begun is not begun. A lease whose commit is under way is taken all the same, and ends by its deadline.
    """

    async def create_queue(self, spec: QueueSpec) -> QueueRecord:
        """Raises `queue_exists`, and `invalid_request` for a dead queue that does not exist or is the queue itself."""
        ...

    async def update_queue(self, queue_name: str, patch: QueuePatch) -> QueueRecord:
        """Change these settings and nothing else. Raises `version_conflict`, and `invalid_request` as `create_queue` does."""
        ...

    async def pause(self, queue_name: str, verbs: Sequence[Verb], paused: bool) -> QueueRecord:
        """Pause or resume these verbs, durably; the others stay as they are."""
        ...

    async def delete_queue(self, queue_name: str, force: bool) -> None:
        """Raises `queue_not_empty` unless `force`, and `queue_in_use`."""
        ...

    def queue(self, queue_name: str) -> QueueRecord: ...

    def queues(self) -> list[QueueRecord]:
        """All queues, sorted by name."""
        ...

    async def produce(self, queue_name: str, request: Produce) -> Produced:
        """Raises `key_conflict`, `stale_sequence`, `unavailable`, `outcome_unknown`."""
        ...

    async def lease(self, queue_name: str, request: Lease, payload: bool) -> Leased:
        """Waits up to the request's `request_timeout` for an item, then returns no leases. Without `payload`, no batches."""
        ...

    async def settle(self, queue_name: str, request: Settle) -> Settled:
        """Complete, retry, release, or (staging) state outcomes. Also a `strict` request returns what was ignored."""
        ...

    async def extend(self, queue_name: str, request: Extend) -> Extended: ...

    async def peek(self, queue_name: str, request: Peek) -> list[pa.RecordBatch]:
        """Raises `lease_not_found`."""
        ...

    async def clear(self, queue_name: str, request: Clear) -> Cleared:
        """Drop what waits. Raises `unavailable` for a partition that is not open; what was dropped elsewhere stays dropped."""
        ...

    async def redrive(self, queue_name: str, request: Redrive) -> Redriven:
        """Send dead items back. Raises `invalid_request` for a target that does not exist."""
        ...

    async def explain(self, queue_name: str, partition: int, offset: int) -> Explanation:
        """Where the item is that had that place; `partition` is one of the queue's."""
        ...

    def stats(self, queue_name: str) -> QueueStats: ...

    def problems(self) -> list[str]:
        """Why the service is not ready; empty when it is."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Finish what is in flight, then release every resource."""
        ...
