"""What `Client` can do with rebalances, single partitions, items that are not leased, consumers and captures."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, TypeVar

from sluiceway.client import admin_calls, item_calls, queue_calls, rebalance_calls
from sluiceway.client.answers import Browsed, Deleted, QueueInfo
from sluiceway.client.capture_answers import TaskGroup, TaskList
from sluiceway.client.consumer_answers import ConsumerPage
from sluiceway.client.history_answers import QueueHistory
from sluiceway.client.http_exchange import seconds
from sluiceway.client.item_calls import State
from sluiceway.client.protocol import Call, Duration
from sluiceway.client.rebalance_calls import Drain
from sluiceway.contract.rebalances import Rebalance, RebalanceBatch, RebalancePage, RebalancePlan

if TYPE_CHECKING:
    from sluiceway.client.arrow import BrowsedTable

T = TypeVar("T")


class Rebalances:
    """A part of `Client`."""

    def _run(self, call: Call[T], retry_for: float | None = None) -> T:
        raise NotImplementedError

    def plan_rebalance(self, queue_name: str, *, requested_partitions: int | None = None) -> RebalancePlan:
        """What a rebalance to so many partitions (by default as many as now) would do, by the backends and affinities of now."""
        return self._run(rebalance_calls.plan_rebalance(queue_name, requested_partitions))

    def rebalance(
        self,
        queue_name: str,
        *,
        requested_partitions: int | None = None,
        drain: Drain = "natural",
        rate: int | None = None,
        plan_id: str | None = None,
    ) -> Rebalance:
        """Begin to add, remove and move partitions, while the queue is in use; the servers carry it out.

        The backlog of a partition that is removed is taken by consumers (`natural`), or moved to the others (`copy`, at most `rate` items a
        second). With the `plan_id` of a plan exactly that is done: raises `plan_changed` if it would be another by now. Raises
        `nothing_to_rebalance`, and `rebalance_open` if one is under way.
        """
        return self._run(rebalance_calls.rebalance(queue_name, requested_partitions, drain, rate, plan_id))

    def rebalance_many(
        self, match: str, *, requested_partitions: int | None = None, drain: Drain = "natural", rate: int | None = None
    ) -> RebalanceBatch:
        """Begin one for every queue whose name matches (`orders-*`; `*`: all), to be carried out one after the other."""
        return self._run(rebalance_calls.rebalance_many(match, requested_partitions, drain, rate))

    def get_rebalance(self, id: str) -> Rebalance:
        """A rebalance, and how far it is. Raises `rebalance_not_found`."""
        return self._run(rebalance_calls.get_rebalance(id))

    def list_rebalances(
        self, *, queue_name: str | None = None, only_open: bool = False, pivot: str | None = None, limit: int | None = None
    ) -> RebalancePage:
        """Rebalances that are open and the last that ended, newest first, without their progress."""
        return self._run(rebalance_calls.list_rebalances(queue_name, only_open, pivot, limit))

    def cancel_rebalance(self, id: str) -> Rebalance:
        """Have it go back to how it was. Raises `not_cancellable` once a partition was removed."""
        return self._run(rebalance_calls.cancel_rebalance(id))

    def browse(
        self,
        queue_name: str,
        partition: int,
        *,
        states: Iterable[State] | None = None,
        cursor: str | None = None,
        limit: int | None = None,
        payload: bool = True,
    ) -> Browsed:
        """A page of the partition as it was at one moment, without taking: items of these states (by default the ready ones).

        The next page is that of the answer's `cursor`, without `states`. Raises `snapshot_gone` if the pages are asked for too slowly (5
        minutes between two, an hour for all), or if the partition was opened anew or has gone to another instance: begin anew then.
        """
        return self._run(item_calls.browse(queue_name, partition, states, cursor, limit, payload))

    def browse_arrow(
        self,
        queue_name: str,
        partition: int,
        *,
        states: Iterable[State] | None = None,
        cursor: str | None = None,
        limit: int = 10_000,
        payload: bool = True,
    ) -> BrowsedTable:
        """As `browse`, as one Arrow table."""
        from sluiceway.client.arrow import read_browsed

        return self._run(item_calls.browse(queue_name, partition, states, cursor, limit, payload).as_arrow(read_browsed))

    def delete_items(self, queue_name: str, ids: Iterable[str], *, request_timeout: Duration | None = None) -> Deleted:
        """Drop items that are ready or scheduled, for good and without the dead queue; leased ones and those that are gone are ignored."""
        return self._run(item_calls.delete_items(queue_name, ids, request_timeout))

    def pause_partition(self, queue_name: str, partition: int) -> QueueInfo:
        """Let one partition take and give out nothing, until it is resumed. What is leased can still be settled."""
        return self._run(rebalance_calls.set_partition(queue_name, partition, True))

    def resume_partition(self, queue_name: str, partition: int) -> QueueInfo:
        """Let it go on."""
        return self._run(rebalance_calls.set_partition(queue_name, partition, False))

    def watch_rebalance(self, id: str, *, interval: Duration = "1s") -> Generator[Rebalance, None, None]:
        """How far it is, looked at again and again until it has ended; the last one says how. Raises as `get_rebalance`."""
        pause = seconds(interval, "interval")
        while True:
            found = self.get_rebalance(id)
            yield found
            if not found.is_open:
                return
            time.sleep(pause)

    def history(self, queue_name: str, *, minutes: int | None = None) -> QueueHistory:
        """How the queue was in each of the last minutes that have ended: 60, or as many as are asked for, 1,440 at most."""
        return self._run(queue_calls.history(queue_name, minutes))

    def list_consumers(self, queue_name: str | None = None, *, pivot: str | None = None, limit: int | None = None) -> ConsumerPage:
        """Who consumes the queue; without a name, the queues that have consumers, page by page."""
        return self._run(queue_calls.list_consumers(queue_name, pivot, limit))

    def list_tasks(self) -> TaskList:
        """The captures in the server's meta store. For a key with the scope `read:*` or `admin`."""
        return self._run(admin_calls.list_tasks())

    def get_tasks(self, name: str) -> TaskGroup:
        """The capture of that name, with each of its partitions. Raises `capture_not_found`, and `unavailable` if its log cannot be read.

        For a key with the scope `read:*` or `admin`.
        """
        return self._run(admin_calls.get_tasks(name))
