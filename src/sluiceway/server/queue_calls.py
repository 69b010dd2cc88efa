"""The calls on queues as a whole."""

from __future__ import annotations

import logging

from sluiceway.contract.item_answers import Cleared, Redriven
from sluiceway.contract.queue_settings import DEAD_SUFFIX, QueueInfo, QueuePage
from sluiceway.contract.queue_stats import QueueDepth, QueueKeys, QueueStats
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.queue import QueueRecord
from sluiceway.server.endpoints import Endpoint, Page, Reply
from sluiceway.server.http import Body, Request
from sluiceway.server.rebalance_calls import open_ones, shown
from sluiceway.wire import answers, json_queues, shapes
from sluiceway.wire.decoding import from_query

log = logging.getLogger(__name__)
_UNCOUNTED = ("unavailable", "error")
"""States of partitions that have no counts."""


class QueueCalls:
    """Create, change, show, pause, clear, redrive and delete queues.

    `safe_queues`: a new queue gets a limit of attempts, a back-off and a dead queue, unless its call says otherwise.
    """

    def __init__(self, service: Service, safe_queues: bool = False) -> None:
        self._service = service
        self._safe_queues = safe_queues

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/v1/queues.create", "manage", self._create, json_queues.CreateCall, QueueInfo, "Create a queue", ("queue_exists",)),
            Endpoint(
                "/v1/queues.update",
                "manage",
                self._update,
                json_queues.UpdateCall,
                QueueInfo,
                "Change settings of a queue; they take effect at once",
                ("queue_not_found", "version_conflict"),
            ),
            Endpoint("/v1/queues.list", "read", self._list, json_queues.ListCall, QueuePage, "List the queues by name, page by page"),
            Endpoint("/v1/queues.info", "read", self._info, json_queues.QueueCall, QueueInfo, "Show a queue", ("queue_not_found",)),
            Endpoint(
                "/v1/queues.delete",
                "manage",
                self._delete,
                json_queues.DeleteCall,
                shapes.Done,
                "Delete a queue",
                ("queue_not_found", "queue_not_empty", "queue_in_use"),
            ),
            Endpoint(
                "/v1/queue.stats",
                "read",
                self._stats,
                json_queues.QueueCall,
                QueueStats,
                "Count items by partition",
                ("queue_not_found",),
            ),
            Endpoint(
                "/v1/queue.keys",
                "read",
                self._keys,
                json_queues.KeysCall,
                QueueKeys,
                "Show the busiest keys of a queue, and those that wait longest",
                ("queue_not_found",),
            ),
            Endpoint(
                "/v1/queue.pause",
                "manage",
                self._pause,
                json_queues.PauseCall,
                QueueInfo,
                "Pause produce, lease or both on a queue",
                ("queue_not_found", "version_conflict"),
            ),
            Endpoint(
                "/v1/queue.resume",
                "manage",
                self._resume,
                json_queues.PauseCall,
                QueueInfo,
                "Resume a paused queue",
                ("queue_not_found", "version_conflict"),
            ),
            Endpoint(
                "/v1/queue.clear",
                "manage",
                self._clear,
                json_queues.ClearCall,
                Cleared,
                "Permanently drop waiting items",
                ("queue_not_found", "partition_damaged"),
            ),
            Endpoint(
                "/v1/queue.redrive",
                "manage",
                self._redrive,
                json_queues.RedriveCall,
                Redriven,
                "Send dead items back to their source queues, or to another queue",
                ("queue_not_found", "partition_damaged"),
            ),
        ]

    def pages(self) -> list[Page]:
        return [
            Page(
                "/v1/queue.depth",
                "read",
                self._depth,
                "Count a queue's items over all instances, in one small object for autoscalers",
                answer=QueueDepth,
                query=json_queues.DepthQuery,
                errors=("queue_not_found",),
            )
        ]

    async def _depth(self, request: Request) -> Reply:
        queue_name = request.permit(from_query(request.query(), json_queues.DepthQuery).queue_name)
        await self._service.look_up(queue_name)
        partitions = (await self._service.count(queue_name)).partitions
        counted = [each for each in partitions if each.state not in _UNCOUNTED]
        ready, leased = sum(each.ready for each in counted), sum(each.total_leased for each in counted)
        depth = QueueDepth(
            queue_name=queue_name,
            ready=ready,
            servable=sum(each.servable for each in counted),
            leased=leased,
            scheduled=sum(each.scheduled for each in counted),
            active=ready + leased,
            skipped=[each.partition for each in partitions if each.state in _UNCOUNTED],
        )
        return Reply(answers.encode(depth))

    async def _shown(self, record: QueueRecord) -> Body:
        return await shown(self._service, record)

    async def _create(self, request: Request) -> Body:
        spec = json_queues.decode_create(request.body).spec(self._safe_queues)
        request.permit(spec.queue_name)
        _permit_dead_queue(request, spec.dead_queue)
        return await self._shown(await self._service.create_queue(spec, request.actor))

    async def _update(self, request: Request) -> Body:
        call = json_queues.decode_update(request.body)
        patch, queue_name = call.patch(), request.permit(call.queue_name)
        _permit_dead_queue(request, patch.settings.get("dead_queue"))
        call.check_partitions(answers.kept_partitions(await self._service.look_up(queue_name)))
        return await self._shown(await self._service.update_queue(queue_name, patch, request.actor))

    async def _list(self, request: Request) -> Body:
        call = json_queues.decode_list(request.body)
        pivot = check_queue_name(call.pivot, "pivot") if call.pivot else ""
        seen = (record for record in self._service.queues() if request.caller.may("read", record.queue_name))
        page = [record for record in seen if record.queue_name > pivot]
        following = page[call.limit - 1].queue_name if len(page) > call.limit else None
        page = page[: call.limit]
        return answers.queue_page(page, self._service.instances.owner, following, await open_ones(self._service, page))

    async def _info(self, request: Request) -> Body:
        queue_name = request.permit(json_queues.decode_queue_call(request.body).queue_name)
        return await self._shown(await self._service.look_up(queue_name))

    async def _delete(self, request: Request) -> Body:
        call = json_queues.decode_delete(request.body)
        record = await self._service.look_up(request.permit(call.queue_name))
        await self._service.delete_queue(record.queue_name, call.force, request.actor)
        await self._delete_own_dead_queue(request, record)
        return b"{}"

    async def _delete_own_dead_queue(self, request: Request, deleted: QueueRecord) -> None:
        """Delete the dead queue that was made with a queue, if it is empty and nobody has changed it."""
        name = deleted.queue_name + DEAD_SUFFIX
        if deleted.dead_queue != name or not request.caller.may("manage", name):
            return
        try:
            if (await self._service.look_up(name)).version == 1:
                await self._service.delete_queue(name, False, request.actor)
        except SluicewayError as error:
            # The call itself has succeeded: the queue is gone. A dead queue that has items, or another source, stays.
            if error.code not in ("queue_not_empty", "queue_in_use", "queue_not_found"):
                log.warning("queue %s was deleted, but its dead queue %s may still be there: %s", deleted.queue_name, name, error.detail)

    async def _stats(self, request: Request) -> Body:
        queue_name = request.permit(json_queues.decode_queue_call(request.body).queue_name)
        await self._service.look_up(queue_name)
        return answers.encode(await self._service.count(queue_name))

    async def _keys(self, request: Request) -> Body:
        call = json_queues.decode_keys(request.body)
        await self._service.look_up(request.permit(call.queue_name))
        return answers.encode(await self._service.keys(call.queue_name, call.limit))

    async def _pause(self, request: Request) -> Body:
        return await self._set_paused(request, True)

    async def _resume(self, request: Request) -> Body:
        return await self._set_paused(request, False)

    async def _set_paused(self, request: Request, paused: bool) -> Body:
        call = json_queues.decode_pause(request.body)
        record = await self._service.pause(request.permit(call.queue_name), call.wanted(), paused, request.actor)
        return await self._shown(record)

    async def _clear(self, request: Request) -> Body:
        call = json_queues.decode_clear(request.body)
        return answers.cleared(await self._service.clear(request.permit(call.queue_name), call.request(), request.actor))

    async def _redrive(self, request: Request) -> Body:
        call = json_queues.decode_redrive(request.body)
        queue_name, wanted = request.permit(call.queue_name), call.request()
        # Without a target, items go back to their source queues.
        target = wanted.target or wanted.source
        if target is not None:
            request.permit(target, "target" if wanted.target else "source")
        elif not request.caller.may_all("manage"):
            raise invalid("target", "target or source is required, because this API key may not manage every queue")
        return answers.redriven(await self._service.redrive(queue_name, wanted, request.actor))


def _permit_dead_queue(request: Request, dead_queue: object) -> None:
    """Check the right to manage the dead queue, too, since it will be sent items."""
    if isinstance(dead_queue, str):
        request.permit(dead_queue, "dead_queue")
