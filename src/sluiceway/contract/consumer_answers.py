"""The consumers of queues, as the server answers them."""

from __future__ import annotations

from typing import Annotated, Literal

from sluiceway.contract.fields import Answer, Duration, QueueName, Time, about, one_of

QueryState = Literal["running", "stopped", "failed"]


class QueryInfo(Answer, frozen=True, kw_only=True):
    """What a Spark query told of itself."""

    id: Annotated[str, about("The query, whoever runs it: of Spark, the id in its checkpoint.")]
    run_id: Annotated[str, about("This run of it.")] = ""
    name: Annotated[str, about("What it is called; empty: nothing.")] = ""
    state: Annotated[str, one_of(QueryState), about("`running`, `stopped` or `failed`.")] = "running"
    batch: Annotated[int | None, about("The number of its last batch; null: there was none.")] = None
    items: Annotated[int, about("Items of that batch.")] = 0
    input_per_s: Annotated[float, about("Items a second that came in since the batch before.")] = 0.0
    processed_per_s: Annotated[float, about("Items a second while the batch ran.")] = 0.0
    batch_duration: Annotated[Duration, about("How long the batch took.")] = "0s"
    error: Annotated[str, about("Why it failed; empty: it has not.")] = ""
    told_at: Annotated[Time, about("When the server heard it.")]


class ConsumerInfo(Answer, frozen=True, kw_only=True):
    """A client that has leases, waits for items, asked for some within the last minute, or has queries that told of themselves."""

    client_id: Annotated[str, about("The consumer, as it calls itself.")]
    leases: Annotated[int, about("Its live leases.")] = 0
    items: Annotated[int, about("Items that are open in them.")] = 0
    lease_deadline: Annotated[Time | None, about("When the first of them runs out, unless it is extended; null: it has none.")] = None
    waiting: Annotated[int, about("Its lease calls that wait for items.")] = 0
    seen_at: Annotated[Time | None, about("When it last asked for items; null: not within the last minute.")] = None
    queries: Annotated[list[QueryInfo], about("Its queries that have told of themselves.")] = []


class QueueConsumers(Answer, frozen=True, kw_only=True):
    """A queue's items, and its consumers by name."""

    queue_name: QueueName
    ready: Annotated[int, about("Items that could be leased now.")] = 0
    leased: Annotated[int, about("Items that are leased.")] = 0
    scheduled: Annotated[int, about("Items that wait for their time.")] = 0
    consumers: Annotated[list[ConsumerInfo], about("Its consumers, by name.")] = []
    more: Annotated[bool, about("Whether there are consumers beside these, which are those with queries and with most items.")] = False


class ConsumerPage(Answer, frozen=True, kw_only=True):
    """Queues that have consumers, by name."""

    items: Annotated[list[QueueConsumers], about("The queues of this page that have consumers.")] = []
    next: Annotated[QueueName | None, about("The pivot of the next page; null on the last.")] = None
    silent: Annotated[list[str], about("Instances that did not answer: what they know of consumers is missing.")] = []
