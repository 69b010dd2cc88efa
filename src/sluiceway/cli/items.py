"""Commands on items: produce, lease, complete, retry, release, explain, stats."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sluiceway.cli.common import (
    Session,
    arguments_or_stdin,
    chunks,
    connected,
    duration_option,
    print_json,
    print_table,
    printable,
    table,
    wide_console,
)
from sluiceway.cli.lines import produce_lines
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_JSON

if TYPE_CHECKING:
    from rich.table import Table

    from sluiceway.client import Ignored, LeasedItem, QueueStats

T = TypeVar("T")
WATCH_PAUSE = 1.0


@click.command()
@click.argument("queue")
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
@click.argument("queue")
@click.option("-n", "--count", type=click.IntRange(1), default=1, show_default=True, help="At most this many items.")
@duration_option("--wait", default="0s", help="How long to wait for the first item.")
@duration_option("--lease-timeout", help="How long the items are yours. [default: the queue's]")
@click.option("--client-id", default="cli", show_default=True, help="The consumer's name in the lease.")
@connected
def lease(session: Session, queue: str, count: int, wait: str, lease_timeout: str | None, client_id: str) -> None:
    """Take items from QUEUE for a while.

    With --json: one object per item, its payload as `utf8`, or as `bytes` in base64.
    """
    del client_id  # it named the session's client
    leased = session.client.lease(queue, batch_size=count, request_timeout=wait, lease_timeout=lease_timeout)
    if session.as_json:
        for item in leased:
            print_json(_json_item(item))
        return
    if not leased.items:
        click.echo("no items", err=True)
        return
    longest = max(20, shutil.get_terminal_size().columns - 40) if sys.stdout.isatty() else 200
    rows = [(item.id, item.attempts, printable(item.payload, longest)) for item in leased]
    print_table(table(("id", "attempt", "payload"), rows, right=("attempt",)))
    for each in leased.leases:
        until = each.lease_deadline.astimezone().strftime("%H:%M:%S")
        click.echo(f"lease {each.lease_id}: {each.count} until {until}; sluiceway complete {queue} --lease {each.lease_id}", err=True)


def _json_item(item: LeasedItem) -> dict[str, Any]:
    import msgspec

    fields = {name: value for name, value in msgspec.structs.asdict(item).items() if value is not None}
    payload = fields.pop("payload")
    try:
        return fields | {"utf8": payload.decode()}
    except UnicodeDecodeError:
        return fields | {"bytes": payload}


def _ids_options(command: Callable[..., T]) -> Callable[..., T]:
    """A queue, item ids, and leases."""
    lease = click.option("--lease", "lease_ids", multiple=True, metavar="LEASE_ID", help="All that is open in the lease. May be repeated.")
    return click.argument("queue")(click.argument("ids", nargs=-1, metavar="[ID...|-]")(lease(command)))


def _id_calls(ids: tuple[str, ...], lease_ids: tuple[str, ...]) -> Iterator[tuple[list[str], list[str]]]:
    """Item ids and lease ids, as many as one call may carry."""
    if not ids and not lease_ids:
        raise click.UsageError("give item ids, - for ids on stdin, or --lease LEASE_ID")
    for chunk in chunks(lease_ids, MAX_ITEMS_JSON):
        yield [], chunk
    for chunk in chunks(arguments_or_stdin(ids, "ids"), MAX_ITEMS_JSON):
        yield chunk, []


@click.command()
@_ids_options
@connected
def complete(session: Session, queue: str, ids: tuple[str, ...], lease_ids: tuple[str, ...]) -> None:
    """Settle leased items of QUEUE for good: ids, ids on stdin (`-`), or whole leases. Repeating it is safe."""
    completed = 0
    ignored: list[Ignored] = []
    try:
        for items, leases in _id_calls(ids, lease_ids):
            answer = session.client.complete(queue, items, lease_ids=leases)
            completed += answer.completed
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, completed, "items were completed before this; repeating the command is safe")
    session.print({"completed": completed, "ignored": ignored}, _settled(f"completed {completed:,}", ignored))


@click.command()
@_ids_options
@connected
def release(session: Session, queue: str, ids: tuple[str, ...], lease_ids: tuple[str, ...]) -> None:
    """Give leased items of QUEUE back untouched: they are offered again and the attempt is not counted. Repeating it is safe."""
    released = 0
    ignored: list[Ignored] = []
    try:
        for items, leases in _id_calls(ids, lease_ids):
            answer = session.client.release(queue, items, lease_ids=leases)
            released += answer.released
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, released, "items were given back before this; repeating the command is safe")
    session.print({"released": released, "ignored": ignored}, _settled(f"released {released:,}", ignored))


@click.command()
@click.argument("queue")
@click.argument("ids", nargs=-1, required=True, metavar="ID...|-")
@duration_option("--after", help="Serve them again only after this time; 0s: at once. [default: as the queue's back-off says]")
@click.option("--dead", is_flag=True, help="Put them into the dead queue instead; without one they are dropped.")
@click.option("--reason", help="Why they are dead. Only with --dead.")
@connected
def retry(session: Session, queue: str, ids: tuple[str, ...], after: str | None, dead: bool, reason: str | None) -> None:
    """Put leased items of QUEUE back: ids, or ids on stdin (`-`). Repeating it is safe."""
    if dead and after is not None:
        raise click.UsageError("--after and --dead exclude each other")
    if reason and not dead:
        raise click.UsageError("--reason goes with --dead")
    from sluiceway.client import Retry

    retried = died = 0
    ignored: list[Ignored] = []
    try:
        for chunk in chunks(arguments_or_stdin(ids, "ids"), MAX_ITEMS_JSON):
            answer = session.client.retry(queue, [Retry(id, retry_after=after, dead=dead, reason=reason) for id in chunk])
            retried += answer.retried
            died += answer.dead
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, retried + died, "items were put back before this; repeating the command is safe")
    text = f"put back {retried:,}" + (f", dead {died:,}" if died or dead else "")
    session.print({"retried": retried, "dead": died, "ignored": ignored}, _settled(text, ignored))


def _settled(text: str, ignored: list[Ignored]) -> str:
    return "\n".join([text, *(f"ignored {each.id}: {each.reason.replace('_', ' ')}" for each in ignored)])


@click.command()
@click.argument("queue")
@click.argument("item_id", metavar="ID")
@connected
def explain(session: Session, queue: str, item_id: str) -> None:
    """Say where the item ID of QUEUE is, and why it is not being served."""
    answer = session.client.explain(queue, item_id)
    facts = (
        ("item", answer.id),
        ("state", answer.state),
        ("why", printable(answer.reason.encode(), 1_000)),
        ("ready before it", answer.ahead),
        ("attempts", answer.attempts),
        ("due", _moment(answer.due_at)),
        ("expires", _moment(answer.expires_at)),
        ("lease", answer.lease_id),
        ("leased by", answer.client_id and printable(answer.client_id.encode())),
        ("leased until", _moment(answer.lease_deadline)),
    )
    session.print(answer, table(("", ""), [(name, value) for name, value in facts if value is not None]))


def _moment(at: datetime | None) -> str | None:
    return None if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"


@click.command()
@click.argument("queue")
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
@connected
def stats(session: Session, queue: str, watch: bool) -> None:
    """Count the items of QUEUE, by partition."""
    answer = session.client.stats(queue)
    if not watch:
        session.print(answer, _stats_table(answer))
    elif session.as_json:
        while True:
            print_json(answer)
            time.sleep(WATCH_PAUSE)
            answer = session.client.stats(queue)
    else:
        from rich.live import Live

        with Live(_stats_table(answer), console=wide_console(), auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_PAUSE)
                live.update(_stats_table(session.client.stats(queue)), refresh=True)


def _stats_table(stats: QueueStats) -> Table:
    names = ("ready", "total_leased", "scheduled", "produced", "completed", "retried", "expired", "dead")
    titles = ("ready", "leased", "scheduled", "produced", "completed", "retried", "expired", "dead")
    rows: list[tuple[object, ...]] = []
    for part in stats.partitions:
        state = "" if part.state == "available" else f" {part.state}"
        state += " degraded" if part.degraded else ""
        rows.append((f"{part.partition}{state}", *(getattr(part, name) for name in names)))
    rows.append(("all", *(sum(getattr(part, name) for part in stats.partitions) for name in names)))
    return table(("part", *titles), rows, right=titles)
