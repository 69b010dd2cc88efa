"""Commands that find items and act on them: search, show, run-now, move."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from sluiceway.cli.common import EXIT_REFUSED, WholeNumber, arguments_or_stdin, chunks, counted, printable, table
from sluiceway.cli.item_outcomes import settle_all
from sluiceway.cli.items import json_item, print_items
from sluiceway.cli.session import Session, connected, queue_argument
from sluiceway.kernel.limits import MAX_ITEMS_JSON

if TYPE_CHECKING:
    from sluiceway.client.answers import BrowsedItem, Searched

STATES = ("ready", "leased", "scheduled")
_LONGEST_LINE = 10_000


def _headers(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str | None] | None:
    """Parses headers of the form NAME=VALUE, or NAME: with any value."""
    return {name: value if equals else None for name, equals, value in (each.partition("=") for each in values)} or None


def found_items(session: Session, queue: str, count: int | None, **wanted: Any) -> Iterator[BrowsedItem]:
    """The items of the queue that match, up to `count` (None: all), from one call after the other.

    Says on stderr how many items were compared, and which partitions could not be searched.
    """
    following: str | None = None
    looked_at = found = 0
    skipped: set[int] = set()
    while True:
        limit = MAX_ITEMS_JSON if count is None else min(MAX_ITEMS_JSON, count - found)
        page: Searched = session.client.search(queue, limit=limit, next=following, **wanted)
        looked_at, found, following = looked_at + page.looked_at, found + len(page.items), page.next
        skipped.update(page.skipped)
        if session.progress:
            click.echo(f"\r{looked_at:,} items compared, {found:,} found\x1b[K", err=True, nl=False)
        yield from page.items
        if following is None or found == count:
            break
    if session.progress:
        click.echo("\r\x1b[K", err=True, nl=False)
    if not session.as_json:
        click.echo(
            f"Compared {counted(looked_at, 'item')}" + ("" if following is None else "; there may be more: pass a higher -n"), err=True
        )
    for number in sorted(skipped):
        click.echo(f"warning: partition {number} was not searched: it is not available", err=True)


@click.command()
@queue_argument()
@click.option("--id", "id", metavar="ID", help="The item with this id or origin.")
@click.option("--kind", help="Items of this kind.")
@click.option("--reference", help="Items with this reference.")
@click.option("--item-key", "key", help="Items with this key.")
@click.option("--unique-key", help="Items with this unique key.")
@click.option(
    "--header", "headers", multiple=True, metavar="NAME[=VALUE]", callback=_headers, help="Items with this header. May be repeated."
)
@click.option("--contains", metavar="TEXT", help="Items whose payload contains this text.")
@click.option("--reason", metavar="TEXT", help="Dead items whose reason contains this text.")
@click.option("--state", "states", multiple=True, type=click.Choice(STATES), help="Items in this state. May be repeated. [default: any]")
@click.option("-n", "--count", type=WholeNumber(1), help="Maximum number of items. [default: 20; all for an action]")
@click.option("--run-now", "act", flag_value="run-now", help="Make the scheduled ones ready now.")
@click.option("--drop", "act", flag_value="drop", help="Permanently delete the ready and the scheduled ones.")
@click.option("--move-to", "target", metavar="QUEUE", help="Move the ready and the scheduled ones to this queue.")
@click.option("--send-back", "act", flag_value="send-back", help="Send dead ones back to the queues in which they died.")
@click.option("--yes", is_flag=True, help="Skip the confirmation of an action.")
@connected
def search(
    session: Session, queue: str, states: tuple[str, ...], count: int | None, act: str | None, target: str | None, yes: bool, **wanted: Any
) -> None:
    """Find items of QUEUE, in all of its partitions, that match every option, and act on them if asked to.

    Reads the items without leasing them. With --json: one object per item, as `lease` prints it, with its state; for an action, its
    counts and the ignored ids.
    """
    if target is not None and act is not None:
        raise click.UsageError("--run-now, --drop, --move-to and --send-back exclude each other")
    act = "move" if target is not None else act
    if act is None:
        items = found_items(session, queue, count or 20, states=states or None, **wanted)
        print_items(session, items)
        return
    acting, option = _ACTS[act], "--move-to" if act == "move" else f"--{act}"
    allowed = states or acting.states
    if unfit := sorted(set(allowed) - set(acting.states)):
        raise click.UsageError(f"{option} does not act on {unfit[0]} items")
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(f"{option} acts on every match; pass --yes to confirm")
    ids = [item.id for item in found_items(session, queue, count, states=allowed, payload=False, **wanted)]
    where = f" to {target}" if target else ""
    if ids and not yes and not click.confirm(f"{acting.verb} {counted(len(ids), 'item')} of {queue}{where}?", err=True):
        click.echo("Nothing was changed", err=True)
        return
    acting.run(session, queue, ids, target)


def _parts(session: Session, ids: Iterable[str]) -> Iterator[list[str]]:
    """The ids of each call; says on a terminal how many are done."""
    done = 0
    for chunk in chunks(ids, MAX_ITEMS_JSON):
        yield chunk
        done += len(chunk)
        if session.progress:
            click.echo(f"\r{done:,} items\x1b[K", err=True, nl=False)
    if session.progress:
        click.echo("\r\x1b[K", err=True, nl=False)


def _run_now(session: Session, queue: str, ids: Iterable[str], target: str | None) -> None:
    del target
    calls = (session.client.run_now(queue, chunk) for chunk in _parts(session, ids))
    settle_all(session, calls, "items were made ready", lambda ready: f"Ready now {ready:,}", ready=0)


def _drop(session: Session, queue: str, ids: Iterable[str], target: str | None) -> None:
    del target
    calls = (session.client.delete_items(queue, chunk) for chunk in _parts(session, ids))
    settle_all(session, calls, "items were deleted", lambda deleted: f"Deleted {deleted:,}", deleted=0)


def _move(session: Session, queue: str, ids: Iterable[str], target: str | None) -> None:
    calls = (session.client.move_items(queue, chunk, target) for chunk in _parts(session, ids))

    def text(matched: int, moved: int) -> str:
        return f"Moved {moved:,}" + (f"; {matched - moved:,} still in transit" if matched > moved else "")

    settle_all(session, calls, "items were moved", text, matched=0, moved=0)


class _Act:
    """What can be done with items that were found: the question, the states that it applies to, and the calls."""

    def __init__(self, verb: str, states: tuple[str, ...], run: Callable[[Session, str, Iterable[str], str | None], None]) -> None:
        self.verb, self.states, self.run = verb, states, run


_ACTS = {
    "run-now": _Act("Run now", ("scheduled",), _run_now),
    "drop": _Act("Permanently delete", ("ready", "scheduled"), _drop),
    "move": _Act("Move", ("ready", "scheduled"), _move),
    "send-back": _Act("Send back", ("ready", "scheduled"), _move),
}


@click.command("run-now")
@queue_argument()
@click.argument("ids", nargs=-1, required=True, metavar="ID...|-")
@connected
def run_now(session: Session, queue: str, ids: tuple[str, ...]) -> None:
    """Make scheduled items of QUEUE, waiting retries included, ready now: ids, or ids on stdin (`-`).

    Safe to repeat: an item that was made ready has a new id.
    """
    _run_now(session, queue, arguments_or_stdin(ids, "ids"), None)


@click.command()
@queue_argument()
@click.argument("ids", nargs=-1, required=True, metavar="ID...|-")
@click.option("--to", "target", metavar="QUEUE", help="Target queue. [default: for dead items, the queue in which each died]")
@connected
def move(session: Session, queue: str, ids: tuple[str, ...], target: str | None) -> None:
    """Move ready or scheduled items of QUEUE to another queue: ids, or ids on stdin (`-`).

    They are ready there at once, with their attempts reset. Safe to repeat.
    """
    _move(session, queue, arguments_or_stdin(ids, "ids"), target)


@click.command()
@queue_argument()
@click.argument("item_id", metavar="ID")
@connected
def show(session: Session, queue: str, item_id: str) -> None:
    """Show the item ID of QUEUE, given by its id or origin, with its headers and payload. JSON is indented.

    Exits with 3 if the queue has no such item.
    """
    following: str | None = None
    while True:
        page = session.client.search(queue, id=item_id, limit=1, next=following)
        following = page.next
        if page.items or following is None:
            break
    if not page.items:
        said = session.client.explain(queue, item_id)
        session.print(said, f"{said.state}: {printable(said.reason.encode(), 1_000)}")
        click.get_current_context().exit(EXIT_REFUSED)
    item = page.items[0]
    if session.as_json:
        session.print(json_item(item), "")
        return
    values = {name: getattr(item, name) for name in _FACTS}
    facts = [(name.replace("_", " "), _shown(value)) for name, value in values.items() if value is not None]
    facts += [(f"header {printable(name.encode())}", printable(value.encode(), 1_000)) for name, value in (item.headers or {}).items()]
    session.print({}, table(("", ""), facts))
    click.echo()
    for line in readable_lines(item.payload or b""):
        click.echo(line)


_FACTS = (
    *("id", "origin", "state", "partition", "attempts", "enqueued_at", "enqueue_at", "expire_deadline", "lease_id", "lease_deadline"),
    *("kind", "encoding", "reference", "key", "priority", "unique_key"),
)


def _shown(value: object) -> object:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S} UTC"
    return printable(value.encode(), 1_000) if isinstance(value, str) else value


def readable_lines(payload: bytes) -> Iterator[str]:
    """The payload as text for a terminal, line by line: JSON indented, control characters escaped."""
    from sluiceway.kernel.json_text import indented

    for line in (indented(payload) or payload).split(b"\n"):
        yield printable(line, _LONGEST_LINE)
