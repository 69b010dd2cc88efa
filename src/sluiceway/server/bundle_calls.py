"""The calls on bundles."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from sluiceway.adapters.system import new_incarnation, now
from sluiceway.contract.bundle_answers import BundleInfo, BundlePage
from sluiceway.instance.bundle_catalog import not_found
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.bundle_records import BundleRecord
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_bundles


class BundleCalls:
    """Create, show, close and cancel bundles. For a caller without the right on its queue, a bundle does not exist."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/bundles.create",
                "produce",
                self._create,
                json_bundles.CreateBundleCall,
                BundleInfo,
                "Create a bundle of items, with a follow-up that is produced when all of them have ended",
                ("queue_not_found", "rebalance_open"),
            ),
            Endpoint(
                "/v1/bundles.get",
                "read",
                self._get,
                json_bundles.BundleCall,
                BundleInfo,
                "Show a bundle, and how many of its items have ended",
                ("bundle_not_found",),
            ),
            Endpoint(
                "/v1/bundles.list",
                "read",
                self._list,
                json_bundles.ListBundlesCall,
                BundlePage,
                "List the bundles, page by page",
            ),
            Endpoint(
                "/v1/bundles.close",
                "produce",
                self._close,
                json_bundles.BundleCall,
                BundleInfo,
                "Close a bundle: it takes no more items, and is over when all have ended",
                ("bundle_not_found", "bundle_closed"),
            ),
            Endpoint(
                "/v1/bundles.cancel",
                "produce",
                self._cancel,
                json_bundles.BundleCall,
                BundleInfo,
                "End a bundle without its follow-up; the items stay",
                ("bundle_not_found", "bundle_closed"),
            ),
        ]

    async def _create(self, request: Request) -> Body:
        call = json_bundles.decode_create(request.body)
        queue = await self._service.look_up(request.permit(call.queue_name))
        if call.follow_up is not None:
            await self._service.look_up(request.permit(call.follow_up.queue_name))
        if queue.rebalance is not None and len(queue.partitions) <= 2:
            # It may replace the only partition in order, which would then stay for the bundle, and hold back the new one.
            detail = f"queue {queue.queue_name!r} has a rebalance; create the bundle when it has ended"
            raise SluicewayError("rebalance_open", detail, "queue_name")
        record = call.record(new_incarnation() + new_incarnation(), queue, now())
        return await self._shown(await self._service.bundles.create(record, request.actor))

    async def _get(self, request: Request) -> Body:
        id = json_bundles.decode_bundle(request.body).id
        record = await self._service.bundles.get(id)
        if record is None:
            raise not_found(id)
        _permit(request, id)(record.queue_name)
        return await self._shown(record)

    async def _list(self, request: Request) -> Body:
        call = json_bundles.decode_list(request.body)
        if call.queue_name is not None:
            request.permit(call.queue_name)
        bundles = self._service.bundles
        records = (record for id in bundles.names(call.pivot or "") if (record := bundles.find(id)) is not None)
        seen = (
            record for record in records if call.queue_name in (None, record.queue_name) and request.caller.may("read", record.queue_name)
        )
        found = list(islice(seen, call.limit + 1))
        following = found[call.limit - 1].id if len(found) > call.limit else None
        shown = await self._service.bundle_driver.shown(found[: call.limit])
        return json_bundles.page([json_bundles.info(*each) for each in shown], following)

    async def _close(self, request: Request) -> Body:
        id = json_bundles.decode_bundle(request.body).id
        return await self._shown(await self._service.bundles.close(id, request.actor, _permit(request, id)))

    async def _cancel(self, request: Request) -> Body:
        id = json_bundles.decode_bundle(request.body).id
        return await self._shown(await self._service.bundles.cancel(id, request.actor, _permit(request, id)))

    async def _shown(self, record: BundleRecord) -> Body:
        (shown,) = await self._service.bundle_driver.shown([record])
        return json_bundles.encode_info(json_bundles.info(*shown))


def _permit(request: Request, id: str) -> Callable[[str], None]:
    """A check of the right on the bundle's queue. Raises `bundle_not_found`, so that the answer does not reveal the bundle."""

    def permit(queue_name: str) -> None:
        if not request.caller.may(request.action, queue_name):
            raise not_found(id)
        request.permit(queue_name)

    return permit
