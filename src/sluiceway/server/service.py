"""What the server stands on: one object that carries out the calls of the API."""

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
    """What can be told of the instances and of what each owns. Of the others it may be a second or so out of date."""

    def owner(self, record: QueueRecord, partition: int) -> Peer | None:
        """The instance that a partition of the queue is given to; None: nobody has it at the moment."""
        ...

    def elsewhere(self, record: QueueRecord, partitions: Iterable[int]) -> str | None:
        """The address of the one other instance that all of these are given to; None: there is no such."""
        ...

    def cluster(self) -> ClusterInfo: ...

    async def rounds(self, limit: int) -> Sequence[SealedRound]:
        """The last rounds, the newest first. Raises `unavailable`."""
        ...

    async def why(self, record: QueueRecord, partition: int) -> Belonging:
        """Whose that partition of the queue is, and why. Raises `unavailable`."""
        ...

    async def redefine(self, times: Mapping[str, Millis], strategy: Strategy | None, by: Actor) -> ClusterInfo:
        """Change the times by which the cluster goes, and how it divides the partitions. Raises `invalid_request`, `unavailable`,
        `outcome_unknown`."""
        ...


class RebalanceService(Protocol):
    """The calls on rebalances, as those of `QueueService`, which has them, too."""

    async def plan_rebalance(self, queue_name: str, requested: int | None) -> tuple[str, Plan, QueueRecord]:
        """What a rebalance would do now, an id for exactly that, and the queue that it is for. Without a number it keeps that of now.

        Raises `rebalance_open`, and `invalid_request` if no backend takes partitions.
        """
        ...

    async def rebalance(
        self, queue_name: str, requested: int | None, drain: DrainMode, rate: int | None, plan_id: str | None, by: Actor
    ) -> Rebalance:
        """Begin a rebalance; it is carried out from then on, whoever stops. With a `plan_id` that plan or none.

        Raises as `plan_rebalance`, `plan_changed` and `nothing_to_rebalance`.
        """
        ...

    async def rebalance_many(self, match: str, requested: int | None, drain: DrainMode, rate: int | None, by: Actor) -> RebalanceBatch:
        """Begin one for each queue whose name matches, to be carried out one after the other."""
        ...

    async def rebalances(self, queue_name: str | None, only_open: bool) -> list[Rebalance]:
        """Those that are open and the last that ended, newest first. Raises `unavailable`."""
        ...

    async def get_rebalance(self, id: str) -> Rebalance:
        """Raises `rebalance_not_found`."""
        ...

    async def cancel_rebalance(self, id: str, by: Actor) -> Rebalance:
        """Have it go back. Raises `rebalance_not_found`, `not_cancellable`."""
        ...

    async def rebalance_progress(self, rebalance: Rebalance) -> RebalanceProgress:
        """How far it is, as far as the owners of the partitions answer."""
        ...

    async def set_partition(self, queue_name: str, partition: int, paused: bool, by: Actor) -> QueueRecord:
        """Pause a partition of the queue, or let it go on; it is one of the queue's. Raises `rebalance_open` for one of a rebalance."""
        ...


class QueueService(RebalanceService, Protocol):
    """The calls of the API, on validated requests. What returns is done, durably; what raises a `SluicewayError` is refused or unknown.

    Every call that names a queue raises `queue_not_found` for one that does not exist. A call may be cancelled: what
    has not begun is not begun. A lease whose commit is under way is taken all the same, and ends by its deadline.
    Every change leaves an audit entry that names who it was `by`.
    """

    @property
    def instances(self) -> ClusterView: ...

    async def create_queue(self, spec: QueueSpec, by: Actor = SYSTEM) -> QueueRecord:
        """Raises `queue_exists`, and `invalid_request` for a dead queue that does not exist or is the queue itself."""
        ...

    async def update_queue(self, queue_name: str, patch: QueuePatch, by: Actor = SYSTEM) -> QueueRecord:
        """Change these settings and nothing else. Raises `version_conflict`, and `invalid_request` as `create_queue` does."""
        ...

    async def pause(self, queue_name: str, verbs: Sequence[Verb], paused: bool, by: Actor = SYSTEM) -> QueueRecord:
        """Pause or resume these verbs, durably; the others stay as they are."""
        ...

    async def delete_queue(self, queue_name: str, force: bool, by: Actor = SYSTEM) -> None:
        """Raises `queue_not_empty` unless `force`, and `queue_in_use`."""
        ...

    async def look_up(self, queue_name: str) -> QueueRecord:
        """The queue's record, also if another process has only just created it."""
        ...

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

    async def clear(self, queue_name: str, request: Clear, by: Actor = SYSTEM) -> Cleared:
        """Drop what waits. Raises `unavailable` for a partition that is not open; what was dropped elsewhere stays dropped."""
        ...

    async def redrive(self, queue_name: str, request: Redrive, by: Actor = SYSTEM) -> Redriven:
        """Send dead items back. Raises `invalid_request` for a target that does not exist."""
        ...

    async def browse(self, queue_name: str, request: Browse) -> BrowsedPage:
        """Read a partition as it was at one moment. Raises as `list_items`; `snapshot_gone`, `too_many_items`, `too_many_requests`."""
        ...

    async def list_items(self, queue_name: str, request: ListItems) -> ItemsPage:
        """Look at items by their place. Raises `unavailable` while the partition, which is one of the queue's, is not open."""
        ...

    async def import_items(self, queue_name: str, request: Produce, by: Actor = SYSTEM) -> Produced:
        """As `produce`, of which it leaves an audit entry."""
        ...

    async def delete_items(self, queue_name: str, request: DeleteItems, by: Actor = SYSTEM) -> Deleted:
        """Drop items that wait, by id. Raises as `clear`."""
        ...

    async def reload(self, queue_name: str, timeout: Millis, by: Actor = SYSTEM) -> None:
        """Open every partition anew from its store, within so many milliseconds. Raises `unavailable`, `partition_damaged`."""
        ...

    async def explain(self, queue_name: str, partition: int, offset: int) -> Explanation:
        """Where the item is that had that place; `partition` is one of the queue's."""
        ...

    async def count(self, queue_name: str) -> QueueStats:
        """The counts of all partitions, whoever serves them, together and by the instance that does."""
        ...

    def stats(self, queue_name: str) -> LogicalQueueStats:
        """The counts of those that this process serves."""
        ...

    def problems(self) -> list[str]:
        """Why the service is not ready; empty when it is."""
        ...

    async def checks(self) -> list[Check]:
        """What it stands on, looked at now; what does not answer is a finding, not an error."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Finish what is in flight, then release every resource."""
        ...
