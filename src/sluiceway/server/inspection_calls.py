"""The calls on a queue's items by their place in storage."""

from __future__ import annotations

import asyncio

from sluiceway.adapters.system import now
from sluiceway.contract import item_answers
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_JSON
from sluiceway.model.inspection import ItemsPage, ListItems
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Produced
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.server.instance_calls import may_stay
from sluiceway.server.response_buffer import AnswerMemory
from sluiceway.wire import answers, browse_call, json_inspection, json_queues, search_call, shapes
from sluiceway.wire.decoding import request_timeout


class InspectionCalls:
    """Search, browse and list items, act on items by id, import some, and reload partitions."""

    def __init__(self, service: Service, memory: AnswerMemory) -> None:
        self._service = service
        self._memory = memory

    def endpoints(self) -> list[Endpoint]:
        errors = ("queue_not_found", "partition_damaged")
        return [
            Endpoint(
                "/v1/queue.browse",
                "read",
                self._browse,
                browse_call.BrowseCall,
                item_answers.Browsed,
                "Browse a snapshot of a partition, page by page",
                (*errors, "snapshot_gone", "too_many_items"),
                gives_arrow=True,
                redirects=True,
            ),
            Endpoint(
                "/v1/queue.search",
                "read",
                self._search,
                search_call.SearchCall,
                item_answers.Searched,
                "Search the items of a queue, page by page",
                ("queue_not_found",),
            ),
            Endpoint(
                "/v1/queue.reasons",
                "read",
                self._reasons,
                json_queues.QueueCall,
                item_answers.Reasons,
                "Count the items of a dead queue by reason",
                ("queue_not_found",),
            ),
            Endpoint(
                "/v1/storage/items.list",
                "read",
                self._list,
                json_inspection.ListItemsCall,
                json_inspection.ListedItems,
                "List the ready and the leased items of a partition, page by page",
                errors,
            ),
            Endpoint(
                "/v1/storage/scheduled.list",
                "read",
                self._list_scheduled,
                json_inspection.ListItemsCall,
                json_inspection.ListedItems,
                "List the scheduled items of a partition, page by page",
                errors,
            ),
            Endpoint(
                "/v1/storage/items.import",
                "manage",
                self._import,
                json_inspection.ImportCall,
                item_answers.Produced,
                "Store items as new ones in a given partition",
                ("queue_not_found", "too_many_items", "queue_paused", "storage_full"),
            ),
            Endpoint(
                "/v1/storage/items.delete",
                "manage",
                self._delete,
                json_inspection.DeleteItemsCall,
                item_answers.Deleted,
                "Permanently drop waiting items by id",
                (*errors, "too_many_items"),
            ),
            Endpoint(
                "/v1/storage/items.run_now",
                "manage",
                self._run_now,
                json_inspection.RunNowCall,
                item_answers.MadeReady,
                "Make scheduled items, and retries that wait for their back-off, ready now",
                (*errors, "too_many_items"),
            ),
            Endpoint(
                "/v1/storage/items.move",
                "manage",
                self._move,
                json_inspection.MoveItemsCall,
                item_answers.MovedItems,
                "Move waiting items by id to another queue, or dead ones back to their source queues",
                (*errors, "too_many_items"),
            ),
            Endpoint(
                "/v1/queue.reload",
                "manage",
                self._reload,
                json_inspection.ReloadCall,
                shapes.Done,
                "Reopen every partition from its storage",
                errors,
            ),
        ]

    async def _queue(self, request: Request, queue_name: str) -> QueueRecord:
        return await self._service.look_up(request.permit(queue_name))

    async def _browse(self, request: Request) -> Body:
        call = browse_call.decode_browse(request.body)
        record = await self._queue(request, call.queue_name)
        wanted = call.request(record)
        may_stay(self._service, request, record, (wanted.partition,))
        page = await self._service.browse(call.queue_name, wanted)
        async with self._memory.building(sum(batch.nbytes for batch, _ in page.rows)):
            return browse_call.browsed(record, wanted, page, arrow=request.wants_arrow)

    async def _list(self, request: Request, scheduled: bool = False) -> Body:
        call = json_inspection.decode_list_items(request.body)
        record = await self._queue(request, call.queue_name)
        page = await self._service.list_items(call.queue_name, call.request(record, scheduled))
        async with self._memory.building(sum(batch.nbytes for batch, _ in page.rows)):
            if sum(batch.num_rows for batch, _ in page.rows) <= MAX_ITEMS_JSON:
                return json_inspection.listed(record, call.partition, page)
            # Encoding a long page takes a second, during which other calls must be served.
            return await asyncio.to_thread(json_inspection.listed, record, call.partition, page)

    async def _list_scheduled(self, request: Request) -> Body:
        return await self._list(request, True)

    async def _import(self, request: Request) -> Body:
        call = json_inspection.decode_import(request.body)
        record = await self._queue(request, call.queue_name)
        wanted = call.request(record, now())
        produced = await self._service.import_items(call.queue_name, wanted, request.actor)
        if not request.protobuf:
            return answers.produced(record, produced)
        return json_inspection.imported(record, produced, await self._stored(call.queue_name, produced))

    async def _stored(self, queue_name: str, produced: Produced) -> ItemsPage:
        """List the imported items as stored, except any that are gone already or cannot be read. All of them were stored."""
        found = ItemsPage([])
        for scheduled in (False, True):
            wanted = ListItems(produced.partition, produced.first_offset, produced.items, scheduled)
            try:
                found.rows += (await self._service.list_items(queue_name, wanted)).rows
            except SluicewayError:
                break
        return found

    async def _delete(self, request: Request) -> Body:
        call = json_inspection.decode_delete_items(request.body)
        wanted = call.request(await self._queue(request, call.queue_name))
        return json_inspection.deleted(await self._service.delete_items(call.queue_name, wanted, request.actor))

    async def _search(self, request: Request) -> Body:
        call = search_call.decode_search(request.body)
        record = await self._queue(request, call.queue_name)
        wanted = call.request()
        found = await self._service.search(call.queue_name, wanted)
        async with self._memory.building(sum(batch.nbytes for batch, _ in found.rows)):
            return search_call.searched(record, wanted, found)

    async def _reasons(self, request: Request) -> Body:
        queue_name = json_queues.decode_queue_call(request.body).queue_name
        await self._queue(request, queue_name)
        return answers.encode(await self._service.reasons(queue_name))

    async def _run_now(self, request: Request) -> Body:
        call = json_inspection.decode_run_now(request.body)
        wanted = call.request(await self._queue(request, call.queue_name))
        return json_inspection.made_ready(await self._service.run_now(call.queue_name, wanted, request.actor))

    async def _move(self, request: Request) -> Body:
        call = json_inspection.decode_move_items(request.body)
        wanted = call.request(await self._queue(request, call.queue_name))
        if wanted.target is not None:
            request.permit(wanted.target, "target")
        elif not request.caller.may_all("manage"):
            raise invalid("target", "required, because this API key may not manage every queue")
        return json_inspection.moved(await self._service.move_items(call.queue_name, wanted, request.actor))

    async def _reload(self, request: Request) -> Body:
        call = json_inspection.decode_reload(request.body)
        queue_name = (await self._queue(request, call.queue_name)).queue_name
        await self._service.reload(queue_name, request_timeout(call.request_timeout), request.actor)
        return b"{}"
