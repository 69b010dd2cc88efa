"""Commands on bundles."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluiceway.cli.common import WholeNumber, all_items, table
from sluiceway.cli.item_options import item_of, item_options, item_rows
from sluiceway.cli.session import Session, connected, queue_argument, queue_names

if TYPE_CHECKING:
    from sluiceway.client import BundleInfo

_FIELD_WORDS = {
    **dict.fromkeys(("new", "add", "start"), "create"),
    "ls": "list",
    **dict.fromkeys(("info", "get", "describe", "inspect", "status", "progress"), "show"),
    **dict.fromkeys(("finish", "complete", "seal", "end"), "close"),
    **dict.fromkeys(("rm", "remove", "delete", "drop", "abort", "stop"), "cancel"),
}
"""What users of other queues call the commands."""


class _Commands(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _FIELD_WORDS and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {args[0]!r}. Use sluiceway bundle {_FIELD_WORDS[args[0]]}.", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands)
def bundle() -> None:
    """Produce an item when all items of a bundle have ended: create, show, close and cancel bundles."""


@bundle.command()
@queue_argument()
@click.option("--items", type=WholeNumber(0), help="Close it when so many items are stored. [default: close it by hand]")
@click.option("--follow-up", "follow_up_queue", shell_complete=queue_names, help="Queue that gets the follow-up. [default: QUEUE]")
@item_options
@connected
def create(
    session: Session,
    queue: str,
    items: int | None,
    follow_up_queue: str | None,
    payload: str | None,
    payload_file: Path | None,
    **columns: Any,
) -> None:
    """Create a bundle of items of QUEUE, and print its id.

    The other options describe the follow-up, which is produced once when all items have ended.
    """
    follow_up = item_of(payload, payload_file, columns)
    if follow_up is None and follow_up_queue is not None:
        raise click.UsageError("a follow-up needs a --payload or a --payload-file")
    made = session.client.create_bundle(queue, follow_up=follow_up, follow_up_queue=follow_up_queue, items=items)
    session.print(made, made.id)
    if not session.as_json:
        click.echo(f"Produce its items: sluiceway produce {queue} --bundle {made.id} ITEM", err=True)


@bundle.command()
@click.argument("id")
@connected
def close(session: Session, id: str) -> None:
    """Close the bundle ID: it takes no more items, and is over when all have ended."""
    closed = session.client.close_bundle(id)
    session.print(closed, f"Closed {id}. {_progress(closed)}")


@bundle.command()
@click.argument("id")
@connected
def cancel(session: Session, id: str) -> None:
    """End the bundle ID without its follow-up. The items stay."""
    session.print(session.client.cancel_bundle(id), f"Cancelled {id}")


@bundle.command()
@click.argument("id")
@connected
def show(session: Session, id: str) -> None:
    """Show the bundle ID: how many of its items have ended, and its follow-up."""
    found = session.client.get_bundle(id)
    session.print(found, table(("", ""), _rows(found)))


@bundle.command("list")
@click.option("--queue", "queue_name", shell_complete=queue_names, help="Only bundles of this queue.")
@connected
def list_bundles(session: Session, queue_name: str | None) -> None:
    """List the bundles: those that are not over, and those that ended within a day."""
    found = list(all_items(lambda pivot: session.client.list_bundles(queue_name=queue_name, pivot=pivot)))
    rows = [
        (each.id, each.queue_name, each.state, *(_count(getattr(each, name)) for name in _COUNTS), _utc(each.created_at)) for each in found
    ]
    none = "No bundles. Create one: sluiceway bundle create QUEUE --payload TEXT"
    session.print_all(found, table(("bundle", "queue", "state", *_COUNTS, "created"), rows), none)


_COUNTS = ("stored", "completed", "dead", "dropped", "left")


def _count(items: int | None) -> str:
    return "?" if items is None else f"{items:,}"


def _utc(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def _progress(info: BundleInfo) -> str:
    if info.left is None:
        return "How many of its items have ended is not known now."
    return f"{info.left:,} of {info.stored:,} items have not ended."


def _rows(info: BundleInfo) -> list[tuple[str, str]]:
    rows = [("bundle", info.id), ("queue", info.queue_name), ("state", info.state)]
    if info.items is not None:
        rows.append(("items", f"{info.items:,}"))
    rows += [(name, _count(getattr(info, name))) for name in _COUNTS]
    rows += [("created", _utc(info.created_at)), ("closed", _utc(info.closed_at)), ("over", _utc(info.ended_at))]
    if info.problem is not None:
        rows.append(("problem", info.problem))
    if (follow_up := info.follow_up) is not None:
        rows += [("follow-up", follow_up.id or "-"), ("into queue", follow_up.queue_name), *item_rows(follow_up.item)]
    return rows
