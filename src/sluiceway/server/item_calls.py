"""The calls on the items of one queue: bytes to a model request, a result to bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from sluiceway.adapters.system import now
from sluiceway.contract import item_answers as items
from sluiceway.core.queue.routing import numbers_of
from sluiceway.instance.service import Service
from sluiceway.model.items import with_traceparent
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import RELEASE
from sluiceway.model.small_batch import in_columns
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.server.instance_calls import explain_partition, may_stay
from sluiceway.server.long_poll import Waiting
from sluiceway.server.response_buffer import AnswerMemory
from sluiceway.wire import answers, arrow_codec, json_items, json_outcomes
from sluiceway.wire.decoding import from_query
from sluiceway.wire.outcome_selection import belongs, check_partition


class ItemCalls:
    """Produce, lease, settle and inspect items."""

    def __init__(self, service: Service, memory: AnswerMemory) -> None:
        self._service = service
        self._memory = memory
        self._waiting = Waiting()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/queue.produce",
                "produce",
                self._produce,
                json_items.ProduceCall,
                items.Produced,
                "Store items in one partition, all of them or none",
                (
                    "queue_not_found",
                    "too_many_items",
                    "key_conflict",
                    "stale_sequence",
                    "bundle_not_found",
                    "bundle_closed",
                    "queue_paused",
                    "storage_full",
                    "partition_damaged",
                ),
                query=json_items.ProduceFields,
            ),
            Endpoint(
                "/v1/queue.lease",
                "consume",
                self._lease,
                json_items.LeaseCall,
                items.Leased,
                "Lease items, and optionally wait for them",
                ("queue_not_found", "stale_ids", "partition_damaged"),
                gives_arrow=True,
            ),
            Endpoint(
                "/v1/queue.complete",
                "consume",
                self._complete,
                json_outcomes.CompleteCall,
                items.Completed,
                "Complete leased items",
                ("queue_not_found", "too_many_items", "stale_ids", "partition_damaged"),
                redirects=True,
            ),
            Endpoint(
                "/v1/queue.retry",
                "consume",
                self._retry,
                json_outcomes.RetryCall,
                items.Retried,
                "Put leased items back, or send them to the dead queue",
                ("queue_not_found", "too_many_items", "stale_ids", "partition_damaged"),
                redirects=True,
            ),
            Endpoint(
                "/v1/queue.release",
                "consume",
                self._release,
                json_outcomes.SelectCall,
                items.Released,
                "Give leased items back unprocessed",
                ("queue_not_found", "too_many_items", "stale_ids", "partition_damaged"),
                redirects=True,
            ),
            Endpoint(
                "/v1/queue.extend",
                "consume",
                self._extend,
                json_outcomes.ExtendCall,
                items.Extended,
                "Set new deadlines for leases",
                ("queue_not_found", "too_many_items", "stale_ids", "partition_damaged"),
                redirects=True,
            ),
            Endpoint(
                "/v1/queue.settle",
                "consume",
                self._settle,
                json_outcomes.SettleCall,
                items.Staged,
                "Stage outcomes, which take effect when the lease is completed",
                ("queue_not_found", "too_many_items", "partition_damaged"),
                query=json_outcomes.SettleQuery,
                redirects=True,
            ),
            Endpoint(
                "/v1/queue.peek",
                "read",
                self._peek,
                json_items.PeekCall,
                items.Peeked,
                "Read items without leasing them",
                ("queue_not_found", "lease_not_found", "partition_damaged"),
                gives_arrow=True,
                redirects=True,
            ),
            Endpoint(
                "/v1/queue.explain",
                "read",
                self._explain,
                json_items.ExplainCall,
                items.Explanation | items.PartitionExplanation,
                "Explain where an item is and why it is not being served, or which instance owns a partition and why",
                ("queue_not_found",),
                redirects=True,
            ),
        ]

    def stop_waiting(self) -> None:
        """End every long poll with `unavailable`, now and from now on. Calls that do not wait continue."""
        self._waiting.stop()

    async def _queue(self, request: Request, queue_name: str) -> QueueRecord:
        return await self._service.look_up(request.permit(queue_name))

    async def _produce(self, request: Request) -> Body:
        if request.arrow:
            query = from_query(request.query(), json_items.ProduceFields)
            query.idempotency_key = request.keyed(query.idempotency_key, "idempotency_key")
            record = await self._queue(request, query.queue_name)
            wanted = arrow_codec.produce_request(query, request.body, record, now())
        else:
            call = json_items.decode_produce(request.body)
            call.idempotency_key = request.keyed(call.idempotency_key, "idempotency_key")
            record = await self._queue(request, call.queue_name)
            wanted = call.request(record, now())
            if request.traceparent:
                # Not with Arrow: a column for it would cost every item of a bulk load some 80 bytes. A client that wants it sends headers.
                wanted.batch = with_traceparent(in_columns(wanted.batch), request.traceparent)
        return answers.produced(record, await self._service.produce(record.queue_name, wanted))

    async def _lease(self, request: Request) -> Body:
        call = json_items.decode_lease(request.body)
        call.lease_key = request.keyed(call.lease_key, "lease_key")
        record = await self._queue(request, call.queue_name)
        wanted = call.request(record)
        completes = None if call.complete is None else call.complete.done(record)
        work = self._service.lease(call.queue_name, wanted, call.payload)
        if wanted.request_timeout:
            work = self._waiting.run(request, work)
        if completes is None:
            leased, settled = await work, None
        else:
            leased, settled = await self._service.complete_and_lease(call.queue_name, completes, work)
        async with self._memory.building(_size(leased.batches)):
            return answers.leased(record, leased, settled, arrow=request.wants_arrow)

    async def _complete(self, request: Request) -> Body:
        call = json_outcomes.decode_complete(request.body)
        record = await self._queue(request, call.queue_name)
        wanted = call.done(record)
        may_stay(self._service, request, record, numbers_of(wanted))
        return answers.completed(await self._service.settle(call.queue_name, wanted), call.strict)

    async def _release(self, request: Request) -> Body:
        call = json_outcomes.decode_select(request.body)
        record = await self._queue(request, call.queue_name)
        wanted = call.request(record, RELEASE)
        may_stay(self._service, request, record, numbers_of(wanted))
        return answers.released(await self._service.settle(call.queue_name, wanted), call.strict)

    async def _retry(self, request: Request) -> Body:
        call = json_outcomes.decode_retry(request.body)
        record = await self._queue(request, call.queue_name)
        wanted = call.request(record, now())
        may_stay(self._service, request, record, numbers_of(wanted))
        return answers.retried(await self._service.settle(call.queue_name, wanted), call.strict)

    async def _settle(self, request: Request) -> Body:
        if request.arrow:
            query = from_query(request.query(), json_outcomes.SettleQuery)
            record = await self._queue(request, query.queue_name)
            wanted = arrow_codec.settle_request(query, request.body, record)
        else:
            call = json_outcomes.decode_settle(request.body)
            record = await self._queue(request, call.queue_name)
            wanted = call.request(record)
        may_stay(self._service, request, record, numbers_of(wanted))
        return answers.staged(await self._service.settle(record.queue_name, wanted))

    async def _extend(self, request: Request) -> Body:
        call = json_outcomes.decode_extend(request.body)
        record = await self._queue(request, call.queue_name)
        wanted = call.request(record)
        may_stay(self._service, request, record, numbers_of(wanted))
        return answers.extended(record, await self._service.extend(call.queue_name, wanted), call.strict)

    async def _peek(self, request: Request) -> Body:
        call = json_items.decode_peek(request.body)
        record = await self._queue(request, call.queue_name)
        wanted = call.request(record)
        may_stay(self._service, request, record, () if wanted.partition is None else (wanted.partition,))
        batches = await self._service.peek(call.queue_name, wanted)
        async with self._memory.building(_size(batches)):
            return answers.peeked(record, batches, arrow=request.wants_arrow)

    async def _explain(self, request: Request) -> Body:
        call = json_items.decode_explain(request.body)
        record, item = await self._queue(request, call.queue_name), call.item()
        if item is None:
            check_partition(call.partition, record)
            assert call.partition is not None, "one of the two is there"
            return await explain_partition(self._service, record, call.partition)
        if not belongs(item, record):
            return answers.explained(item, answers.FOREIGN)
        may_stay(self._service, request, record, (item.partition,))
        return answers.explained(item, await self._service.explain(call.queue_name, item.partition, item.offset))


def _size(batches: Sequence[pa.RecordBatch]) -> int:
    return sum(batch.nbytes for batch in batches)
