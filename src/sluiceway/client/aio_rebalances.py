"""What `AsyncClient` can do with rebalances, single partitions, consumers and captures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
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


class AsyncRebalances:
    """A part of `AsyncClient`."""

    async def _run(self, call: Call[T], retry_for: float | None = None) -> T:
        raise NotImplementedError

    async def plan_rebalance(self, queue_name: str, *, requested_partitions: int | None = None) -> RebalancePlan:
        """As `Client.plan_rebalance`."""
        return await self._run(rebalance_calls.plan_rebalance(queue_name, requested_partitions))

    async def rebalance(
        self,
        queue_name: str,
        *,
        requested_partitions: int | None = None,
        drain: Drain = "natural",
        rate: int | None = None,
        plan_id: str | None = None,
    ) -> Rebalance:
        """As `Client.rebalance`."""
        return await self._run(rebalance_calls.rebalance(queue_name, requested_partitions, drain, rate, plan_id))

    async def rebalance_many(
        self, match: str, *, requested_partitions: int | None = None, drain: Drain = "natural", rate: int | None = None
    ) -> RebalanceBatch:
        """As `Client.rebalance_many`."""
        return await self._run(rebalance_calls.rebalance_many(match, requested_partitions, drain, rate))

    async def get_rebalance(self, id: str) -> Rebalance:
        """As `Client.get_rebalance`."""
        return await self._run(rebalance_calls.get_rebalance(id))

    async def list_rebalances(
        self, *, queue_name: str | None = None, only_open: bool = False, pivot: str | None = None, limit: int | None = None
    ) -> RebalancePage:
        """As `Client.list_rebalances`."""
        return await self._run(rebalance_calls.list_rebalances(queue_name, only_open, pivot, limit))

    async def cancel_rebalance(self, id: str) -> Rebalance:
        """As `Client.cancel_rebalance`."""
        return await self._run(rebalance_calls.cancel_rebalance(id))

    async def browse(
        self,
        queue_name: str,
        partition: int,
        *,
        states: Iterable[State] | None = None,
        cursor: str | None = None,
        limit: int | None = None,
        payload: bool = True,
    ) -> Browsed:
        """As `Client.browse`."""
        return await self._run(item_calls.browse(queue_name, partition, states, cursor, limit, payload))

    async def browse_arrow(
        self,
        queue_name: str,
        partition: int,
        *,
        states: Iterable[State] | None = None,
        cursor: str | None = None,
        limit: int = 10_000,
        payload: bool = True,
    ) -> BrowsedTable:
        """As `Client.browse_arrow`."""
        from sluiceway.client.arrow import read_browsed

        return await self._run(item_calls.browse(queue_name, partition, states, cursor, limit, payload).as_arrow(read_browsed))

    async def delete_items(self, queue_name: str, ids: Iterable[str], *, request_timeout: Duration | None = None) -> Deleted:
        """As `Client.delete_items`."""
        return await self._run(item_calls.delete_items(queue_name, ids, request_timeout))

    async def pause_partition(self, queue_name: str, partition: int) -> QueueInfo:
        """As `Client.pause_partition`."""
        return await self._run(rebalance_calls.set_partition(queue_name, partition, True))

    async def resume_partition(self, queue_name: str, partition: int) -> QueueInfo:
        """As `Client.resume_partition`."""
        return await self._run(rebalance_calls.set_partition(queue_name, partition, False))

    async def watch_rebalance(self, id: str, *, interval: Duration = "1s") -> AsyncGenerator[Rebalance, None]:
        """As `Client.watch_rebalance`."""
        pause = seconds(interval, "interval")
        while True:
            found = await self.get_rebalance(id)
            yield found
            if not found.is_open:
                return
            await asyncio.sleep(pause)

    async def history(self, queue_name: str, *, minutes: int | None = None) -> QueueHistory:
        """As `Client.history`."""
        return await self._run(queue_calls.history(queue_name, minutes))

    async def list_consumers(self, queue_name: str | None = None, *, pivot: str | None = None, limit: int | None = None) -> ConsumerPage:
        """As `Client.list_consumers`."""
        return await self._run(queue_calls.list_consumers(queue_name, pivot, limit))

    async def list_tasks(self) -> TaskList:
        """As `Client.list_tasks`."""
        return await self._run(admin_calls.list_tasks())

    async def get_tasks(self, name: str) -> TaskGroup:
        """As `Client.get_tasks`."""
        return await self._run(admin_calls.get_tasks(name))
