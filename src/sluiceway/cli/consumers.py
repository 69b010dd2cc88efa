"""Commands that look at the consumers of queues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import Rows, print_table, printable, table
from sluiceway.cli.session import Session, connected

if TYPE_CHECKING:
    from sluiceway.client import Client, ConsumerInfo, QueryInfo, QueueConsumers

_COLUMNS = ("queue", "consumer", "query", "state", "batch", "leases", "items", "items/s", "lag", "last seen")
_NUMBERS = ("batch", "leases", "items", "items/s", "lag")


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """A consumer, or one of its Spark queries, as it is shown: `state` is then that of the query, else `waiting` for items, or empty.

    `lag` is how many items of the queue are ready. `batch` is None before a query's first one, `items_per_second` without a query.
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
    """Look at who consumes."""


@consumer.command("list")
@click.argument("queue_name", metavar="[QUEUE]", required=False)
@connected
def list_(session: Session, queue_name: str | None) -> None:
    """List the consumers of a queue, or of all: their leases, and how their Spark queries get on.

    `lag` is how many items of the queue are ready. With --json: one object a queue.
    """
    found = list(queues_of(session.client, queue_name))
    rows = rows_of(found)
    if session.as_json:
        session.print_all(found, consumer_table(rows), "")
    elif not rows:
        click.echo("no consumers", err=True)
    else:
        print_table(consumer_table(rows))
        if any(queue.more for queue in found):
            click.echo("there are more consumers than these", err=True)


def queues_of(client: Client, queue_name: str | None = None) -> Iterator[QueueConsumers]:
    """The queue, or all that have consumers; raises what the call raises."""
    pivot = None
    while True:
        page = client.list_consumers(queue_name, pivot=pivot)
        yield from page.items
        pivot = page.next
        if pivot is None:
            return


def rows_of(queues: Iterable[QueueConsumers]) -> list[ConsumerRow]:
    """One row a query, and one for each consumer without any."""
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
