"""The calls on the consumers of queues."""

from __future__ import annotations

from sluiceway.contract.consumer_answers import ConsumerPage
from sluiceway.instance.service import Service
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.queue import QueueRecord
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_consumers, shapes


class ConsumerCalls:
    """List consumers, and receive the reports of streaming queries."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/consumers.list",
                "read",
                self._list,
                json_consumers.ConsumersListCall,
                ConsumerPage,
                "List the consumers of one queue, or of all queues with consumers, page by page",
                ("queue_not_found",),
            ),
            Endpoint(
                "/v1/consumers.report",
                "consume",
                self._report,
                json_consumers.ConsumersReportCall,
                shapes.Done,
                "Report the progress of a consuming query",
                ("queue_not_found",),
            ),
        ]

    async def _list(self, request: Request) -> Body:
        call = json_consumers.decode_list(request.body)
        following = None
        if call.queue_name is not None:
            records = [await self._service.look_up(request.permit(call.queue_name))]
        else:
            records, following = self._page(request, call)
        seen = await self._service.consumers.list(records)
        found = [(record.queue_name, seen.queues[record.incarnation]) for record in records]
        shown = [(name, each) for name, each in found if each.consumers or call.queue_name is not None]
        return json_consumers.page(shown, following, seen.silent)

    def _page(self, request: Request, call: json_consumers.ConsumersListCall) -> tuple[list[QueueRecord], str | None]:
        """Return one page of the readable queues, and the pivot of the next one."""
        pivot = check_queue_name(call.pivot, "pivot") if call.pivot else ""
        seen = (record for record in self._service.queues() if request.caller.may("read", record.queue_name))
        records = [record for record in seen if record.queue_name > pivot]
        page = records[: call.limit]
        return page, page[-1].queue_name if len(records) > len(page) else None

    async def _report(self, request: Request) -> Body:
        call = json_consumers.decode_report(request.body)
        record = await self._service.look_up(request.permit(call.queue_name))
        self._service.consumers.tell(record, *call.told())
        return b"{}"
