"""Commands on the consumers of queues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import Rows, all_items, print_table, printable, table
from sluiceway.cli.session import Session, connected

if TYPE_CHECKING:
    from sluiceway.client import Client, ConsumerInfo, QueryInfo, QueueConsumers

_COLUMNS = ("queue", "consumer", "query", "state", "batch", "leases", "items", "items/s", "lag", "last seen")
_NUMBERS = ("batch", "leases", "items", "items/s", "lag")


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """A table row: a consumer, or one of its Spark queries. Without a query `state` is `waiting` (for items) or empty.

    `lag` is the number of ready items in the queue. `batch` is None before a query's first batch, `items_per_second` without a query.
    """

    queue_name: str
    client_id: str
    query: str
    state: str
    batch: int | None
    leases: int
    items: int
    items_per_second: float | None
    lag: int
    seen_at: str | None


@click.group()
def consumer() -> None:
    """List consumers."""


@consumer.command("list")
@click.argument("queue_name", metavar="[QUEUE]", required=False)
@connected
def list_(session: Session, queue_name: str | None) -> None:
    """List the consumers of a queue, or of all queues: leases, and progress of Spark queries.

    `lag` is the number of ready items in the queue. With --json: one object per queue.
    """
    found = list(queues_of(session.client, queue_name))
    rows = rows_of(found)
    if session.as_json:
        session.print_all(found, consumer_table(rows), "")
    elif not rows:
        click.echo("No consumers", err=True)
    else:
        print_table(consumer_table(rows))
        if any(queue.more for queue in found):
            click.echo("More consumers exist than are listed", err=True)


def queues_of(client: Client, queue_name: str | None = None) -> Iterator[QueueConsumers]:
    """The queue, or all queues with consumers. Raises as the call does."""
    return all_items(lambda pivot: client.list_consumers(queue_name, pivot=pivot))


def rows_of(queues: Iterable[QueueConsumers]) -> list[ConsumerRow]:
    """One row per query, and one per consumer without queries."""
    return [_row(queue, each, query) for queue in queues for each in queue.consumers for query in each.queries or (None,)]


def consumer_table(rows: Iterable[ConsumerRow]) -> Rows:
    return table(
        _COLUMNS,
        [
            (
                *(each.queue_name, printable(each.client_id.encode()), printable(each.query.encode()) or "-", each.state or "-"),
                *("-" if each.batch is None else each.batch, each.leases, each.items),
                *("-" if each.items_per_second is None else f"{each.items_per_second:,.0f}", each.lag, each.seen_at or "-"),
            )
            for each in rows
        ],
        right=_NUMBERS,
    )


def _row(queue: QueueConsumers, consumer: ConsumerInfo, query: QueryInfo | None) -> ConsumerRow:
    if query is None:
        seen = "" if consumer.seen_at is None else f"{consumer.seen_at:%H:%M:%S}"
        return ConsumerRow(
            *(queue.queue_name, consumer.client_id, "", "waiting" if consumer.waiting else "", None),
            *(consumer.leases, consumer.items, None, queue.ready, seen or None),
        )
    return ConsumerRow(
        *(queue.queue_name, consumer.client_id, query.name or query.id, query.state, query.batch),
        *(consumer.leases, consumer.items, query.processed_per_s, queue.ready, f"{query.told_at:%H:%M:%S}"),
    )
