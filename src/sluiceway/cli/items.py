"""Commands that produce, lease and peek items."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from sluiceway.cli.common import WholeNumber, duration_option, print_json, print_table, printable, table
from sluiceway.cli.line_producer import produce_lines
from sluiceway.cli.session import Session, connected, paused_verbs, queue_argument
from sluiceway.cli.stats import open_circuits
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON, MAX_PARTITIONS, MAX_PRIORITY

if TYPE_CHECKING:
    from sluiceway.client import LeasedItem
    from sluiceway.client.answers import BrowsedItem
    from sluiceway.client.item_calls import State


def moment(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """Parses a time; without a zone it is the local one."""
    try:
        return None if value is None else datetime.fromisoformat(value).astimezone()
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a time such as 2026-01-31T08:00:00Z", ctx, param) from None


def pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Parses headers of the form NAME=VALUE."""
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r} is not of the form NAME=VALUE", ctx, param)
    return dict(value.split("=", 1) for value in values) or None


@click.command()
@queue_argument()
@click.argument("items", nargs=-1, metavar="[ITEM...|-]")
@click.option("--file", "file", type=click.Path(exists=True, dir_okay=False), help="Produce each line of this file as an item.")
@click.option("--key", help="Idempotency key: repeating the command with the same key and lines within 24 hours stores nothing twice.")
@duration_option("--after", help="Serve the items after this time.")
@click.option("--at", "due", metavar="TIME", callback=moment, help="Serve the items from this time on, such as 2026-01-31T08:00:00Z.")
@click.option("--kind", help="Kind of the items.")
@click.option("--encoding", help="Encoding of the payloads.")
@click.option("--reference", help="Reference of the items, such as the id of an order.")
@click.option("--item-key", help="Key of the items, such as a customer. Not the idempotency key.")
@click.option("--item-key-field", metavar="NAME", help="Each line is a JSON object, and this field of it, a text, is the item's key.")
@click.option("--unique-key", help="Unique key of the items: none is stored while there is one with the same. The queue needs --unique.")
@click.option("--unique-key-field", metavar="NAME", help="The same from this field of each line's JSON object.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", callback=pairs, help="A header. May be repeated.")
@click.option("--priority", type=WholeNumber(0, MAX_PRIORITY), help="Priority of the items: from 0, the lowest, to 9. [default: as 4]")
@click.option("--bundle", metavar="ID", help="Bundle to which the items belong.")
@click.option("--blank-lines", is_flag=True, help="Blank lines are items, too.")
@connected
def produce(
    session: Session,
    queue: str,
    items: tuple[str, ...],
    file: str | None,
    key: str | None,
    after: str | None,
    due: datetime | None,
    item_key: str | None,
    item_key_field: str | None,
    unique_key: str | None,
    unique_key_field: str | None,
    bundle: str | None,
    blank_lines: bool,
    **columns: Any,
) -> None:
    """Produce items to QUEUE: the arguments, or each line of a file or of stdin (`-`).

    Items are sent in calls of up to 1,000. A call stores all of its items durably, or none. The options hold for all items.
    """
    if after is not None:
        if due is not None:
            raise click.UsageError("--after and --at exclude each other")
        if key is not None:
            raise click.UsageError("--after means another time in each run; pass --at with --key")
        due = datetime.now(UTC) + timedelta(milliseconds=parse_duration(after, "after"))
    for option, value, field in (("item-key", item_key, item_key_field), ("unique-key", unique_key, unique_key_field)):
        if value is not None and field is not None:
            raise click.UsageError(f"--{option} and --{option}-field exclude each other")
    columns |= {"enqueue_at": due, "key": item_key, "unique_key": unique_key}
    fields = {"key": item_key_field, "unique_key": unique_key_field}
    produce_lines(session, queue, items, file, key, columns, fields, blank_lines, bundle)


@click.command()
@queue_argument()
@click.option("-n", "--count", type=WholeNumber(1), default=1, show_default=True, help="Maximum number of items.")
@duration_option("--wait", default="0s", help="Time to wait for the first item.")
@duration_option("--lease-timeout", help="Lease duration. [default: the queue's]")
@click.option("--client-id", default="cli", show_default=True, help="Consumer name in the lease.")
@click.option(
    "--max-partitions",
    type=WholeNumber(1, MAX_PARTITIONS),
    help="Maximum number of partitions to lease from. [default: as many as needed]",
)
@click.option("--runs", is_flag=True, help="In a queue with order: lease several items of a key, in order, instead of one.")
@connected
def lease(
    session: Session, queue: str, count: int, wait: str, lease_timeout: str | None, client_id: str, max_partitions: int | None, runs: bool
) -> None:
    """Lease items of QUEUE. Exits with 4 if the queue is paused.

    With --json: one object per item, with its payload as `utf8`, or as base64 `bytes`.
    """
    del client_id  # used by the session
    spread = max_partitions or min(count, MAX_PARTITIONS)
    leased = session.client.lease(
        queue, batch_size=count, request_timeout=wait, lease_timeout=lease_timeout, max_partitions=spread, runs=runs
    )
    if not leased.items and "lease" in paused_verbs(session, queue):
        raise SluicewayError("queue_paused", f"queue {queue} is paused for leasing", "queue_name")
    print_items(session, leased.items)
    if session.as_json:
        return
    if len(leased.items) < count:
        # A key that may only consume is told nothing.
        with contextlib.suppress(SluicewayError):
            for line in open_circuits(session.client.stats(queue)):
                click.echo(f"{line}. See why: sluiceway doctor", err=True)
    for each in leased.leases:
        until = each.lease_deadline.astimezone().strftime("%H:%M:%S")
        click.echo(
            f"Lease {each.lease_id}: {each.count} until {until}. Complete: sluiceway complete {queue} --lease {each.lease_id}", err=True
        )


@click.command()
@queue_argument()
@click.option("-n", "--count", type=WholeNumber(1, MAX_ITEMS_ARROW), default=10, show_default=True, help="Maximum number of items.")
@click.option("--partition", type=WholeNumber(0), help="Only items of this partition.")
@click.option("--lease", "lease_id", metavar="LEASE_ID", help="Show the open items of this lease instead of the next ready ones.")
@click.option("--start", type=WholeNumber(0), help="Start position in the lease. Only with --lease.")
@click.option("--state", type=click.Choice(["ready", "leased", "scheduled"]), help="Show items in this state instead.")
@connected
def peek(
    session: Session, queue: str, count: int, partition: int | None, lease_id: str | None, start: int | None, state: State | None
) -> None:
    """Show the next ready items of QUEUE, or those in another state, without leasing them.

    With --json: the same objects as `lease`, with --state also the state.
    """
    if lease_id is None and start is not None:
        raise click.UsageError("--start needs --lease")
    if lease_id is not None and (partition is not None or state is not None):
        raise click.UsageError(f"--lease and {'--state' if partition is None else '--partition'} exclude each other")
    if state is not None:
        print_items(session, _in_state(session, queue, count, partition, state))
        return
    print_items(session, session.client.peek(queue, limit=count, partition=partition, lease_id=lease_id, start=start))


def _in_state(session: Session, queue: str, count: int, partition: int | None, state: State) -> Iterator[BrowsedItem]:
    if partition is not None:
        yield from session.client.browse(queue, partition, states=[state], limit=count)
        return
    following: str | None = None
    while count:
        page = session.client.search(queue, states=[state], limit=min(count, MAX_ITEMS_JSON), next=following)
        yield from page
        count, following = count - len(page), page.next
        if following is None:
            break


def print_items(session: Session, items: Iterable[LeasedItem | BrowsedItem]) -> None:
    """Print the items: a table with the columns in which any has a value, or a line of JSON for each."""
    items = list(items)
    if session.as_json:
        for item in items:
            print_json(json_item(item))
        return
    if not items:
        click.echo("No items", err=True)
        return
    longest = max(20, shutil.get_terminal_size().columns - 40) if sys.stdout.isatty() else 200
    columns, rows = ["id", "attempt", "payload"], [[item.id, item.attempts, printable(item.payload or b"", longest)] for item in items]
    for name, get in _OPTIONAL_COLUMNS.items():
        if any(values := [get(item) for item in items]):
            columns.append(name)
            rows = [[*row, printable((value or "-").encode(), longest)] for row, value in zip(rows, values, strict=True)]
    print_table(table(columns, rows, right=("attempt",)))


_OPTIONAL_COLUMNS: dict[str, Callable[[LeasedItem | BrowsedItem], str | None]] = {
    "state": lambda item: getattr(item, "state", None),
    "due": lambda item: f"{at:%Y-%m-%d %H:%M:%S} UTC" if (at := getattr(item, "enqueue_at", None)) else None,
    "kind": lambda item: item.kind,
    "reference": lambda item: item.reference,
    "key": lambda item: item.key,
    "priority": lambda item: None if item.priority is None else str(item.priority),
    "unique key": lambda item: item.unique_key,
    "died in": lambda item: (item.headers or {}).get("sluiceway-queue"),
    "reason": lambda item: (item.headers or {}).get("sluiceway-reason"),
}
"""Columns that are shown if an item has a value."""


def json_item(item: LeasedItem | BrowsedItem) -> dict[str, Any]:
    """The item for JSON output, without what it does not have."""
    import msgspec

    fields = {name: value for name, value in msgspec.structs.asdict(item).items() if value is not None}
    payload = fields.pop("payload", b"")
    try:
        return fields | {"utf8": payload.decode()}
    except UnicodeDecodeError:
        return fields | {"bytes": payload}
