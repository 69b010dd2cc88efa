"""JSON codec of the calls on a queue's consumers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from sluiceway.contract.consumer_answers import ConsumerInfo, ConsumerPage, QueryInfo, QueryState, QueueConsumers
from sluiceway.contract.fields import Duration, Label, Pivot, QueueName, ShortText, time_field
from sluiceway.kernel.clock import check_duration, format_duration
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_SCHEDULE
from sluiceway.kernel.names import check_text
from sluiceway.model.consumers import Consumer, Consumers, Query
from sluiceway.wire.decoding import Call, JsonDecoder, Natural, given_text

MAX_QUEUES = 20
"""Maximum number of queues in one answer. A queue with its consumers takes up to 700 KB, so an answer takes up to 14 MB."""

Rate = Annotated[float, Meta(ge=0)]


class ConsumersListCall(msgspec.Struct, forbid_unknown_fields=True):
    queue_name: QueueName | None = None
    pivot: Pivot | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_QUEUES)] = MAX_QUEUES


class QueryFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """The report of a streaming query. Rates are items per second."""

    id: Label
    run_id: ShortText = ""
    name: ShortText = ""
    state: QueryState
    batch: Natural | None = None
    items: Natural = 0
    input_per_s: Rate = 0.0
    processed_per_s: Rate = 0.0
    batch_duration: Duration = "0s"
    error: ShortText = ""

    def query(self) -> Query:
        """The checked report. Raises `invalid_request`."""
        for field in ("run_id", "name", "error"):
            check_text(getattr(self, field), f"query.{field}")
        for field in ("input_per_s", "processed_per_s"):
            if not math.isfinite(getattr(self, field)):
                raise invalid(f"query.{field}", "expected a finite number")
        return Query(
            given_text(self.id, "query.id") or "",
            self.run_id,
            self.name,
            self.state,
            self.batch,
            self.items,
            self.input_per_s,
            self.processed_per_s,
            check_duration(self.batch_duration, "query.batch_duration", 0, MAX_SCHEDULE),
            self.error,
        )


class ConsumersReportCall(Call):
    client_id: Label
    query: QueryFields

    def told(self) -> tuple[str, Query]:
        """The client's id and its query's report. Raises `invalid_request`."""
        return given_text(self.client_id, "client_id") or "", self.query.query()


decode_list = JsonDecoder(ConsumersListCall)
decode_report = JsonDecoder(ConsumersReportCall)


def page(queues: Sequence[tuple[str, Consumers]], following: str | None, silent: Sequence[str]) -> bytes:
    """One page of queues with their consumers, as JSON. `following`: the next page's pivot. `silent`: instances that did not answer."""
    items = [
        QueueConsumers(
            queue_name=name,
            ready=found.ready,
            leased=found.leased,
            scheduled=found.scheduled,
            consumers=[_consumer(each) for each in found.consumers],
            more=found.more,
        )
        for name, found in queues
    ]
    return msgspec.json.encode(ConsumerPage(items=items, next=following, silent=list(silent)))


def _consumer(consumer: Consumer) -> ConsumerInfo:
    return ConsumerInfo(
        client_id=consumer.client_id,
        leases=consumer.leases,
        items=consumer.items,
        lease_deadline=time_field(consumer.lease_deadline),
        waiting=consumer.waiting,
        seen_at=time_field(consumer.seen_at),
        queries=[_query(each) for each in consumer.queries],
    )


def _query(query: Query) -> QueryInfo:
    about = query._asdict()
    return QueryInfo(**about | {"batch_duration": format_duration(query.batch_duration), "told_at": time_field(query.told_at)})
