"""Service protocols: the calls of the API as the server makes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from sluiceway.contract.queue_settings import Verb
from sluiceway.contract.queue_stats import LogicalQueueStats, QueueStats
from sluiceway.contract.rebalances import DrainMode
from sluiceway.core.group.group_records import SealedRound, Strategy
from sluiceway.core.queue.routing import Peer
from sluiceway.kernel.clock import Millis
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.health import Check
from sluiceway.model.inspection import Browse, BrowsedPage, Deleted, DeleteItems, ItemsPage, ListItems
from sluiceway.model.instances import Belonging, ClusterInfo
from sluiceway.model.queue import QueueRecord
from sluiceway.model.rebalance import Plan, Rebalance, RebalanceBatch, RebalanceProgress
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
    Redrive,
    Redriven,
    Settle,
    Settled,
)


class ClusterView(Protocol):
    """The instances and their partitions. Knowledge of other instances may be about a second old."""

    def owner(self, record: QueueRecord, partition: int) -> Peer | None:
        """Return the owner of a partition of the queue; None if it has none at the moment."""
        ...

    def elsewhere(self, record: QueueRecord, partitions: Iterable[int]) -> str | None:
        """Return the address of the one other instance that owns all of these partitions; None if there is none."""
        ...

    def cluster(self) -> ClusterInfo: ...

    async def rounds(self, limit: int) -> Sequence[SealedRound]:
        """Return the last rounds, newest first. Raises `unavailable`."""
        ...

    async def why(self, record: QueueRecord, partition: int) -> Belonging:
        """Explain the ownership of the queue's partition. Raises `unavailable`."""
        ...

    async def redefine(self, times: Mapping[str, Millis], strategy: Strategy | None, by: Actor) -> ClusterInfo:
        """Change the cluster's timing parameters and strategy. Raises `invalid_request`, `unavailable`, `outcome_unknown`."""
        ...


class RebalanceService(Protocol):
    """The calls on rebalances; a part of `QueueService`, whose rules apply."""

    async def plan_rebalance(self, queue_name: str, requested: int | None) -> tuple[str, Plan, QueueRecord]:
        """Plan a rebalance. Returns an id of the plan, the plan, and the queue. `requested` None: the present number of partitions.

        Raises `rebalance_open`, and `invalid_request` if no backend takes partitions.
        """
        ...

    async def rebalance(
        self, queue_name: str, requested: int | None, drain: DrainMode, rate: int | None, plan_id: str | None, by: Actor
    ) -> Rebalance:
        """Begin a rebalance; it is carried out from then on, even if this process stops. With `plan_id`, only if that is still the plan's.

        Raises as `plan_rebalance`, `plan_changed` and `nothing_to_rebalance`.
        """
        ...

    async def rebalance_many(self, match: str, requested: int | None, drain: DrainMode, rate: int | None, by: Actor) -> RebalanceBatch:
        """Begin a rebalance of each queue whose name matches, to be carried out one after the other."""
        ...

    async def rebalances(self, queue_name: str | None, only_open: bool) -> list[Rebalance]:
        """List the open rebalances and the last ended ones, newest first. Raises `unavailable`."""
        ...

    async def get_rebalance(self, id: str) -> Rebalance:
        """Return a rebalance. Raises `rebalance_not_found`."""
        ...

    async def cancel_rebalance(self, id: str, by: Actor) -> Rebalance:
        """Cancel a rebalance, which then reverts. Raises `rebalance_not_found`, `not_cancellable`."""
        ...

    async def rebalance_progress(self, rebalance: Rebalance) -> RebalanceProgress:
        """Return the progress, as far as the owners of the partitions answer."""
        ...

    async def set_partition(self, queue_name: str, partition: int, paused: bool, by: Actor) -> QueueRecord:
        """Pause or resume one of the queue's partitions. Raises `rebalance_open` for a partition of an open rebalance."""
        ...


class QueueService(RebalanceService, Protocol):
    """The calls of the API, on validated requests. A call that returns is done, durably; a `SluicewayError` means refused or unknown.

    Every call that names a queue raises `queue_not_found` for one that does not exist. A call may be cancelled: its parts that
    have not begun do not begin. A lease whose commit is in flight is taken all the same, and ends by its deadline.
    Every change leaves an audit entry that names its author, `by`.
    """

    @property
    def instances(self) -> ClusterView: ...

    async def create_queue(self, spec: QueueSpec, by: Actor = SYSTEM) -> QueueRecord:
        """Create a queue. Raises `queue_exists`, and `invalid_request` for a dead queue that does not exist or is the queue itself."""
        ...

    async def update_queue(self, queue_name: str, patch: QueuePatch, by: Actor = SYSTEM) -> QueueRecord:
        """Change only these settings. Raises `version_conflict`, and `invalid_request` as `create_queue` does."""
        ...

    async def pause(self, queue_name: str, verbs: Sequence[Verb], paused: bool, by: Actor = SYSTEM) -> QueueRecord:
        """Pause or resume these verbs, durably; other verbs stay as they are."""
        ...

    async def delete_queue(self, queue_name: str, force: bool, by: Actor = SYSTEM) -> None:
        """Delete a queue. Raises `queue_not_empty` unless `force`, and `queue_in_use`."""
        ...

    async def look_up(self, queue_name: str) -> QueueRecord:
        """Return the queue's record, even if another process has only just created it."""
        ...

    def queues(self) -> list[QueueRecord]:
        """List all queues, sorted by name."""
        ...

    async def produce(self, queue_name: str, request: Produce) -> Produced:
        """Store items in one partition. Raises `key_conflict`, `stale_sequence`, `unavailable`, `outcome_unknown`."""
        ...

    async def lease(self, queue_name: str, request: Lease, payload: bool) -> Leased:
        """Lease items, waiting up to the request's `request_timeout`; then returns no leases. Without `payload`, no batches."""
        ...

    async def settle(self, queue_name: str, request: Settle) -> Settled:
        """Complete, retry, release, or (staging) state outcomes. A `strict` request, too, returns the ignored ids."""
        ...

    async def extend(self, queue_name: str, request: Extend) -> Extended: ...

    async def peek(self, queue_name: str, request: Peek) -> list[pa.RecordBatch]:
        """Return items without leasing them. Raises `lease_not_found`."""
        ...

    async def clear(self, queue_name: str, request: Clear, by: Actor = SYSTEM) -> Cleared:
        """Drop waiting items. Raises `unavailable` for a partition that is not open; items dropped elsewhere stay dropped."""
        ...

    async def redrive(self, queue_name: str, request: Redrive, by: Actor = SYSTEM) -> Redriven:
        """Send dead items back. Raises `invalid_request` for a target that does not exist."""
        ...

    async def browse(self, queue_name: str, request: Browse) -> BrowsedPage:
        """Read a snapshot of a partition. Raises as `list_items`; `snapshot_gone`, `too_many_items`, `too_many_requests`."""
        ...

    async def list_items(self, queue_name: str, request: ListItems) -> ItemsPage:
        """List items by offset, in one of the queue's partitions. Raises `unavailable` while it is not open."""
        ...

    async def import_items(self, queue_name: str, request: Produce, by: Actor = SYSTEM) -> Produced:
        """Produce, with an audit entry."""
        ...

    async def delete_items(self, queue_name: str, request: DeleteItems, by: Actor = SYSTEM) -> Deleted:
        """Drop waiting items by id. Raises as `clear`."""
        ...

    async def reload(self, queue_name: str, timeout: Millis, by: Actor = SYSTEM) -> None:
        """Reopen every partition from its store, within `timeout` ms. Raises `unavailable`, `partition_damaged`."""
        ...

    async def explain(self, queue_name: str, partition: int, offset: int) -> Explanation:
        """Explain the item that was given that offset in one of the queue's partitions."""
        ...

    async def count(self, queue_name: str) -> QueueStats:
        """Count all partitions on all instances, in total and by instance."""
        ...

    def stats(self, queue_name: str) -> LogicalQueueStats:
        """Count the partitions that this process serves."""
        ...

    def problems(self) -> list[str]:
        """List the reasons why the service is not ready; empty when it is."""
        ...

    async def checks(self) -> list[Check]:
        """Run the health checks now. A dependency that does not answer is a finding, not an error."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Finish requests in flight, then release every resource."""
        ...
