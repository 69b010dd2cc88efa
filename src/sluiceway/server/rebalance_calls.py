"""The calls on rebalances, and on single partitions."""

from __future__ import annotations

import asyncio

from sluiceway.contract import rebalances
from sluiceway.contract.instance_answers import PartitionPin
from sluiceway.contract.queue_settings import QueueInfo
from sluiceway.contract.queue_stats import PartitionStats
from sluiceway.contract.rebalances import OpenRebalance, RebalanceBatch, RebalancePage, RebalancePlan
from sluiceway.core.group.group_records import Pin
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.queue import QueueRecord
from sluiceway.model.rebalance import Rebalance
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire import answers, json_rebalances
from sluiceway.wire.json_rebalances import Planned
from sluiceway.wire.outcome_selection import check_partition

_PATIENCE = 2.0
"""Seconds to wait for a queue's open rebalance: the meta store, or an instance, may hang."""
_UNKNOWN = ("unavailable", "error")
"""Partition states without counts."""


class RebalanceCalls:
    """Plan, begin, show and cancel rebalances; pause, resume, pin and unpin partitions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/rebalances.plan",
                "read",
                self._plan,
                json_rebalances.PlanCall,
                RebalancePlan,
                "Plan a rebalance without starting it",
                ("queue_not_found", "rebalance_open"),
            ),
            Endpoint(
                "/v1/queue.rebalance",
                "manage",
                self._begin,
                json_rebalances.RebalanceCall,
                rebalances.Rebalance,
                "Add, remove and move partitions of a queue, while it is in use",
                ("queue_not_found", "rebalance_open", "plan_changed", "nothing_to_rebalance", "version_conflict"),
            ),
            Endpoint(
                "/v1/queues.rebalance",
                "manage",
                self._begin_many,
                json_rebalances.RebalanceManyCall,
                RebalanceBatch,
                "Rebalance several queues, one after the other",
                ("version_conflict",),
            ),
            Endpoint(
                "/v1/rebalances.get",
                "read",
                self._get,
                json_rebalances.RebalanceIdCall,
                rebalances.Rebalance,
                "Show a rebalance and its progress",
                ("rebalance_not_found",),
            ),
            Endpoint(
                "/v1/rebalances.list",
                "read",
                self._list,
                json_rebalances.RebalancesListCall,
                RebalancePage,
                "List the rebalances, newest first",
                ("queue_not_found",),
            ),
            Endpoint(
                "/v1/rebalances.cancel",
                "manage",
                self._cancel,
                json_rebalances.RebalanceIdCall,
                rebalances.Rebalance,
                "Cancel a rebalance; the queue returns to its former partitions",
                ("rebalance_not_found", "not_cancellable", "version_conflict"),
            ),
            Endpoint(
                "/v1/partition.pause",
                "manage",
                self._pause,
                json_rebalances.PartitionCall,
                QueueInfo,
                "Pause a partition",
                ("queue_not_found", "rebalance_open", "version_conflict"),
            ),
            Endpoint(
                "/v1/partition.resume",
                "manage",
                self._resume,
                json_rebalances.PartitionCall,
                QueueInfo,
                "Resume a paused partition",
                ("queue_not_found", "rebalance_open", "version_conflict"),
            ),
            Endpoint(
                "/v1/partition.pin",
                "manage",
                self._pin,
                json_rebalances.PartitionPinCall,
                PartitionPin,
                "Pin a partition to an instance or a zone",
                ("queue_not_found", "version_conflict"),
            ),
            Endpoint(
                "/v1/partition.unpin",
                "manage",
                self._unpin,
                json_rebalances.PartitionCall,
                PartitionPin,
                "Unpin a partition",
                ("queue_not_found", "version_conflict"),
            ),
        ]

    async def _plan(self, request: Request) -> Body:
        call = json_rebalances.decode_plan(request.body)
        queue_name = request.permit(call.queue_name)
        await self._service.look_up(queue_name)
        plan_id, plan, record = await self._service.plan_rebalance(queue_name, call.requested_partitions)
        counted = await self._service.count(queue_name)
        items = {each.partition: _items(each) for each in counted.partitions if each.state not in _UNKNOWN}
        return json_rebalances.planned(Planned(plan_id, plan, len(plan.creates) + len(plan.keeps), record, items))

    async def _begin(self, request: Request) -> Body:
        call = json_rebalances.decode_rebalance(request.body).checked()
        queue_name = request.permit(call.queue_name)
        await self._service.look_up(queue_name)
        wanted = (call.requested_partitions, call.drain, call.rate, call.plan_id)
        return json_rebalances.rebalance(await self._service.rebalance(queue_name, *wanted, request.actor))

    async def _begin_many(self, request: Request) -> Body:
        call = json_rebalances.decode_many(request.body)
        pattern = call.pattern()
        request.caller.require(request.action, pattern)
        found = await self._service.rebalance_many(pattern, call.requested_partitions, call.drain, call.rate, request.actor)
        return json_rebalances.batch(found)

    async def _get(self, request: Request) -> Body:
        found = await self._of(request)
        progress = await self._service.rebalance_progress(found) if found.is_open and found.state != "waiting" else None
        return json_rebalances.rebalance(found, progress)

    async def _list(self, request: Request) -> Body:
        call = json_rebalances.decode_list(request.body).checked()
        if call.queue_name is not None:
            request.permit(call.queue_name)
        listed = await self._service.rebalances(call.queue_name, call.open)
        seen = [each for each in listed if request.caller.may("read", each.queue_name) and not (call.pivot and each.id >= call.pivot)]
        return json_rebalances.page(seen[: call.limit + 1], call.limit)

    async def _cancel(self, request: Request) -> Body:
        found = await self._of(request)
        return json_rebalances.rebalance(await self._service.cancel_rebalance(found.id, request.actor))

    async def _of(self, request: Request) -> Rebalance:
        """Return the rebalance named by the call. Raises `rebalance_not_found` also if the caller has no right on its queue."""
        id = json_rebalances.decode_id(request.body).checked()
        missing = SluicewayError("rebalance_not_found", f"there is no rebalance {id[:64]!r}", "id")
        try:
            found = await self._service.get_rebalance(id)
        except SluicewayError as error:
            raise (missing if error.code == missing.code else error) from None
        if not request.caller.may(request.action, found.queue_name):
            raise missing
        request.queue_name = found.queue_name
        return found

    async def _pause(self, request: Request) -> Body:
        return await self._set_paused(request, True)

    async def _resume(self, request: Request) -> Body:
        return await self._set_paused(request, False)

    async def _pin(self, request: Request) -> Body:
        call = json_rebalances.decode_pin(request.body)
        return await self._set_pin(request, call.queue_name, call.partition, call.pin())

    async def _unpin(self, request: Request) -> Body:
        call = json_rebalances.decode_partition(request.body)
        return await self._set_pin(request, call.queue_name, call.partition, None)

    async def _set_pin(self, request: Request, queue_name: str, partition: int, pin: Pin | None) -> Body:
        queue_name = request.permit(queue_name)
        check_partition(partition, await self._service.look_up(queue_name))
        await self._service.pin_partition(queue_name, partition, pin, request.actor)
        return json_rebalances.partition_pin(queue_name, partition, pin)

    async def _set_paused(self, request: Request, paused: bool) -> Body:
        call = json_rebalances.decode_partition(request.body)
        queue_name = request.permit(call.queue_name)
        check_partition(call.partition, await self._service.look_up(queue_name))
        record = await self._service.set_partition(queue_name, call.partition, paused, request.actor)
        return await shown(self._service, record)


def _items(stats: PartitionStats) -> int:
    return stats.total + stats.transferring


async def shown(service: Service, record: QueueRecord) -> Body:
    """Encode the queue, with its open rebalance, if any, and the items left to drain."""
    brief = None if record.rebalance is None else await _brief(service, record.rebalance)
    return answers.encode(answers.queue_info(record, service.instances.owner, brief))


async def _brief(service: Service, id: str) -> OpenRebalance | None:
    try:
        async with asyncio.timeout(_PATIENCE):
            found = await service.get_rebalance(id)
            left = (await service.rebalance_progress(found)).items_left
    except (TimeoutError, SluicewayError):
        # The queue is shown even without its rebalance.
        return OpenRebalance(id=id)
    return answers.open_rebalance(found, left) if found.is_open else None


async def open_ones(service: Service, records: list[QueueRecord]) -> dict[str, Rebalance]:
    """Return the queues' open rebalances by id, without asking the partitions' owners."""
    if not any(record.rebalance for record in records):
        return {}
    try:
        return {each.id: each for each in await service.rebalances(None, True)}
    except SluicewayError:
        return {}
