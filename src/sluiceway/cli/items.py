"""Commands that produce, lease and peek items."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from sluiceway.cli.common import duration_option, print_json, print_table, printable, table
from sluiceway.cli.line_producer import produce_lines
from sluiceway.cli.session import Session, connected, paused_verbs, queue_argument
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_PARTITIONS

if TYPE_CHECKING:
    from sluiceway.client import LeasedItem


@click.command()
@queue_argument()
@click.argument("items", nargs=-1, metavar="[ITEM...|-]")
@click.option("--file", "file", type=click.Path(exists=True, dir_okay=False), help="Produce each line of this file as an item.")
@click.option("--key", help="Idempotency key: repeating the command with the same key and lines within 24 hours stores nothing twice.")
@connected
def produce(session: Session, queue: str, items: tuple[str, ...], file: str | None, key: str | None) -> None:
    """Produce items to QUEUE: the arguments, or each line of a file or of stdin (`-`).

    Items are sent in calls of up to 1,000. A call stores all of its items durably, or none.
    """
    produce_lines(session, queue, items, file, key)


@click.command()
@queue_argument()
@click.option("-n", "--count", type=click.IntRange(1), default=1, show_default=True, help="Maximum number of items.")
@duration_option("--wait", default="0s", help="Time to wait for the first item.")
@duration_option("--lease-timeout", help="Lease duration. [default: the queue's]")
@click.option("--client-id", default="cli", show_default=True, help="Consumer name in the lease.")
@click.option(
    "--max-partitions",
    type=click.IntRange(1, MAX_PARTITIONS),
    help="Maximum number of partitions to lease from. [default: as many as needed]",
)
@connected
def lease(
    session: Session, queue: str, count: int, wait: str, lease_timeout: str | None, client_id: str, max_partitions: int | None
) -> None:
    """Lease items of QUEUE. Exits with 4 if the queue is paused.

    With --json: one object per item, with its payload as `utf8`, or as base64 `bytes`.
    """
    del client_id  # used by the session
    spread = max_partitions or min(count, MAX_PARTITIONS)
    leased = session.client.lease(queue, batch_size=count, request_timeout=wait, lease_timeout=lease_timeout, max_partitions=spread)
    if not leased.items and "lease" in paused_verbs(session, queue):
        raise SluicewayError("queue_paused", f"queue {queue} is paused for leasing", "queue_name")
    _print_items(session, leased.items)
    if session.as_json:
        return
    for each in leased.leases:
        until = each.lease_deadline.astimezone().strftime("%H:%M:%S")
        click.echo(
            f"Lease {each.lease_id}: {each.count} until {until}. Complete: sluiceway complete {queue} --lease {each.lease_id}", err=True
        )


@click.command()
@queue_argument()
@click.option("-n", "--count", type=click.IntRange(1, MAX_ITEMS_ARROW), default=10, show_default=True, help="Maximum number of items.")
@click.option("--partition", type=click.IntRange(0), help="Only items of this partition.")
@click.option("--lease", "lease_id", metavar="LEASE_ID", help="Show the open items of this lease instead of the next ready ones.")
@click.option("--start", type=click.IntRange(0), help="Start position in the lease. Only with --lease.")
@connected
def peek(session: Session, queue: str, count: int, partition: int | None, lease_id: str | None, start: int | None) -> None:
    """Show the next ready items of QUEUE without leasing them.

    With --json: the same objects as `lease`.
    """
    if lease_id is None and start is not None:
        raise click.UsageError("--start needs --lease")
    if lease_id is not None and partition is not None:
        raise click.UsageError("--lease and --partition exclude each other")
    _print_items(session, session.client.peek(queue, limit=count, partition=partition, lease_id=lease_id, start=start))


def _print_items(session: Session, items: Iterable[LeasedItem]) -> None:
    items = list(items)
    if session.as_json:
        for item in items:
            print_json(_json_item(item))
        return
    if not items:
        click.echo("No items", err=True)
        return
    longest = max(20, shutil.get_terminal_size().columns - 40) if sys.stdout.isatty() else 200
    rows = [(item.id, item.attempts, printable(item.payload, longest)) for item in items]
    print_table(table(("id", "attempt", "payload"), rows, right=("attempt",)))


def _json_item(item: LeasedItem) -> dict[str, Any]:
    import msgspec

    fields = {name: value for name, value in msgspec.structs.asdict(item).items() if value is not None}
    payload = fields.pop("payload")
    try:
        return fields | {"utf8": payload.decode()}
    except UnicodeDecodeError:
        return fields | {"bytes": payload}
