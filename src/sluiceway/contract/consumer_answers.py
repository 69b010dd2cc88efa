"""The consumers of queues, as the server answers them."""

from __future__ import annotations

from typing import Annotated, Literal

from sluiceway.contract.fields import Answer, Duration, QueueName, Time, about, one_of

QueryState = Literal["running", "stopped", "failed"]


class QueryInfo(Answer, frozen=True, kw_only=True):
    """What a Spark query told of itself."""

    id: Annotated[str, about("Id of the query; for Spark, the id in its checkpoint.")]
    run_id: Annotated[str, about("Id of this run.")] = ""
    name: Annotated[str, about("Name of the query; empty: none.")] = ""
    state: Annotated[str, one_of(QueryState), about("`running`, `stopped` or `failed`.")] = "running"
    batch: Annotated[int | None, about("Number of its last batch; null: none yet.")] = None
    items: Annotated[int, about("Number of items in that batch.")] = 0
    input_per_s: Annotated[float, about("Incoming items per second since the previous batch.")] = 0.0
    processed_per_s: Annotated[float, about("Items per second while the batch ran.")] = 0.0
    batch_duration: Annotated[Duration, about("Duration of the batch.")] = "0s"
    error: Annotated[str, about("Error that ended the query; empty: none.")] = ""
    told_at: Annotated[Time, about("When the server received the report.")]


class ConsumerInfo(Answer, frozen=True, kw_only=True):
    """A client that has leases, waits for items, asked for some within the last minute, or has queries that told of themselves."""

    client_id: Annotated[str, about("Name of the consumer.")]
    leases: Annotated[int, about("Its live leases.")] = 0
    items: Annotated[int, about("Open items in its leases.")] = 0
    lease_deadline: Annotated[Time | None, about("Earliest deadline of its leases; null: no leases.")] = None
    waiting: Annotated[int, about("Its lease calls waiting for items.")] = 0
    seen_at: Annotated[Time | None, about("When it last requested items; null: not within the last minute.")] = None
    queries: Annotated[list[QueryInfo], about("Its reporting queries.")] = []


class QueueConsumers(Answer, frozen=True, kw_only=True):
    """A queue's items, and its consumers by name."""

    queue_name: QueueName
    ready: Annotated[int, about("Items that could be leased now.")] = 0
    leased: Annotated[int, about("Leased items.")] = 0
    scheduled: Annotated[int, about("Items that are not due yet.")] = 0
    consumers: Annotated[list[ConsumerInfo], about("Its consumers, by name.")] = []
    more: Annotated[bool, about("Whether the queue has more consumers. Those with queries and with the most items are listed.")] = False


class ConsumerPage(Answer, frozen=True, kw_only=True):
    """Queues that have consumers, by name."""

    items: Annotated[list[QueueConsumers], about("The queues with consumers on this page.")] = []
    next: Annotated[QueueName | None, about("The pivot of the next page; null on the last.")] = None
    silent: Annotated[list[str], about("Instances that did not answer. Their consumers are missing.")] = []
