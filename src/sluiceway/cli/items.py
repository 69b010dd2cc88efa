"""Commands that put items in, and take them or look at them: produce, lease, peek."""

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
@click.option("--file", "file", type=click.Path(exists=True, dir_okay=False), help="Produce the file's lines, each an item.")
@click.option("--key", help="Makes the command repeatable for 24 hours: the same key and lines again store nothing twice.")
@connected
def produce(session: Session, queue: str, items: tuple[str, ...], file: str | None, key: str | None) -> None:
    """Store items in QUEUE: those given, or each line of a file or of stdin (`-`).

    Items go in calls of up to 1,000; a call stores all of its items, durably, or none.
    """
    produce_lines(session, queue, items, file, key)


@click.command()
@queue_argument()
@click.option("-n", "--count", type=click.IntRange(1), default=1, show_default=True, help="At most this many items.")
@duration_option("--wait", default="0s", help="How long to wait for the first item.")
@duration_option("--lease-timeout", help="How long the items are yours. [default: the queue's]")
@click.option("--client-id", default="cli", show_default=True, help="The consumer's name in the lease.")
@click.option(
    "--max-partitions",
    type=click.IntRange(1, MAX_PARTITIONS),
    help="Take from this many partitions at most. [default: as many as it takes]",
)
@connected
def lease(
    session: Session, queue: str, count: int, wait: str, lease_timeout: str | None, client_id: str, max_partitions: int | None
) -> None:
    """Take items from QUEUE for a while. Ends with 4 if the queue is paused.

    With --json: one object per item, its payload as `utf8`, or as `bytes` in base64.
    """
    del client_id  # it named the session's client
    spread = max_partitions or min(count, MAX_PARTITIONS)
    leased = session.client.lease(queue, batch_size=count, request_timeout=wait, lease_timeout=lease_timeout, max_partitions=spread)
    if not leased.items and "lease" in paused_verbs(session, queue):
        raise SluicewayError("queue_paused", f"queue {queue} is paused: nothing is leased from it until it is resumed", "queue_name")
    _print_items(session, leased.items)
    if session.as_json:
        return
    for each in leased.leases:
        until = each.lease_deadline.astimezone().strftime("%H:%M:%S")
        click.echo(f"lease {each.lease_id}: {each.count} until {until}; sluiceway complete {queue} --lease {each.lease_id}", err=True)


@click.command()
@queue_argument()
@click.option("-n", "--count", type=click.IntRange(1, MAX_ITEMS_ARROW), default=10, show_default=True, help="At most this many items.")
@click.option("--partition", type=click.IntRange(0), help="Only those of this partition.")
@click.option("--lease", "lease_id", metavar="LEASE_ID", help="What is still open in this lease, instead of what is served next.")
@click.option("--start", type=click.IntRange(0), help="The position in the lease to begin at. Only with --lease.")
@connected
def peek(session: Session, queue: str, count: int, partition: int | None, lease_id: str | None, start: int | None) -> None:
    """Look at the items of QUEUE that are served next, without taking them.

    With --json: as `lease` prints them.
    """
    if lease_id is None and start is not None:
        raise click.UsageError("--start goes with --lease")
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
        click.echo("no items", err=True)
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
