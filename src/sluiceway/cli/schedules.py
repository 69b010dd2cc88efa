"""Commands on schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sluiceway.cli.common import WholeNumber, all_items, duration_option, printable, table
from sluiceway.cli.item_options import item_of, item_options, item_rows
from sluiceway.cli.items import moment
from sluiceway.cli.session import Session, connected, queue_names

if TYPE_CHECKING:
    from sluiceway.client import ScheduleInfo

T = TypeVar("T")
_POLICIES = ("last", "skip", "all")
_FIELD_WORDS = {
    **dict.fromkeys(("new", "add"), "create"),
    "ls": "list",
    **dict.fromkeys(("info", "get", "describe", "inspect", "status"), "show"),
    **dict.fromkeys(("set", "edit", "alter"), "update"),
    **dict.fromkeys(("rm", "remove", "drop"), "delete"),
    **dict.fromkeys(("stop", "suspend", "disable"), "pause"),
    **dict.fromkeys(("start", "continue", "enable", "unpause"), "resume"),
    **dict.fromkeys(("trigger", "fire", "run-now"), "run"),
    **dict.fromkeys(("preview", "times"), "next"),
}
"""What users of other schedulers call the commands."""


class _Commands(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _FIELD_WORDS and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {args[0]!r}. Use sluiceway schedule {_FIELD_WORDS[args[0]]}.", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands)
def schedule() -> None:
    """Produce items at set times: create, show, change, run and delete schedules."""


def _times(*, is_new: bool) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Options that say when."""

    def add(command: Callable[..., T]) -> Callable[..., T]:
        default = "  [default: {}]" if is_new else "{}"
        for option in (
            click.option(
                "--catch-up",
                type=click.Choice(_POLICIES),
                help=f"Which of the times that nobody could fire are fired later.{default.format('last' if is_new else '')}",
            ),
            duration_option("--jitter", help=f"Delay each firing by a part of this.{default.format('0s' if is_new else '')}"),
            click.option("--timezone", metavar="ZONE", help=f"Time zone of the expression.{default.format('UTC' if is_new else '')}"),
            click.option("--cron", required=is_new, metavar="EXPRESSION", help="When: five fields, such as '*/5 * * * *', or @hourly."),
        ):
            command = option(command)
        return command

    return add


@schedule.command()
@click.argument("name")
@_times(is_new=True)
@click.option("--queue", "queue_name", required=True, shell_complete=queue_names, help="Queue that gets the items.")
@item_options
@click.option("--paused", is_flag=True, help="Fire nothing until it is resumed.")
@connected
def create(
    session: Session,
    name: str,
    queue_name: str,
    cron: str,
    timezone: str | None,
    jitter: str | None,
    catch_up: Any,
    payload: str | None,
    payload_file: Path | None,
    paused: bool,
    **columns: Any,
) -> None:
    """Create the schedule NAME. Each of its times produces one item, whatever crashes."""
    item = item_of(payload, payload_file, columns)
    if item is None:
        raise click.UsageError("an item needs a --payload or a --payload-file")
    made = session.client.create_schedule(
        name, cron=cron, queue_name=queue_name, item=item, timezone=timezone, jitter=jitter, catch_up=catch_up, paused=paused
    )
    session.print(made, f"Created {name}. {_following(made)}")


@schedule.command("list")
@click.option("--queue", "queue_name", shell_complete=queue_names, help="Only schedules of this queue.")
@click.option("--contains", "name_contains", metavar="TEXT", help="Only schedules whose names have this text, in either case.")
@connected
def list_schedules(session: Session, queue_name: str | None, name_contains: str | None) -> None:
    """List the schedules with their next and their latest firing, in UTC."""
    listed = session.client.list_schedules
    found = list(all_items(lambda pivot: listed(queue_name=queue_name, name_contains=name_contains, pivot=pivot)))
    rows = [
        (
            each.name,
            each.queue_name,
            printable(each.cron.encode()),
            each.timezone,
            "paused" if each.paused else _utc(each.next_at),
            "-" if each.last_fired is None else _utc(each.last_fired.fired_at),
            "-" if each.last_failure is None else each.last_failure.code,
        )
        for each in found
    ]
    columns = ("schedule", "queue", "cron", "time zone", "next", "last fired", "failure")
    none = "No schedules. Create one: sluiceway schedule create NAME --cron '*/5 * * * *' --queue QUEUE --payload TEXT"
    session.print_all(found, table(columns, rows), none)


@schedule.command()
@click.argument("name")
@connected
def show(session: Session, name: str) -> None:
    """Show the schedule NAME: its settings, its item, its next and its latest firing."""
    found = session.client.get_schedule(name)
    session.print(found, table(("", ""), _rows(found)))


@schedule.command()
@click.argument("name")
@_times(is_new=False)
@item_options
@connected
def update(
    session: Session,
    name: str,
    cron: str | None,
    timezone: str | None,
    jitter: str | None,
    catch_up: Any,
    payload: str | None,
    payload_file: Path | None,
    **columns: Any,
) -> None:
    """Change the schedule NAME. What is not named stays; a --payload replaces the whole item."""
    item = item_of(payload, payload_file, columns)
    changed = session.client.update_schedule(name, cron=cron, item=item, timezone=timezone, jitter=jitter, catch_up=catch_up)
    session.print(changed, f"Updated {name}. {_following(changed)}")


@schedule.command()
@click.argument("name")
@connected
def pause(session: Session, name: str) -> None:
    """Pause the schedule NAME. Times of the pause are not fired, later either."""
    session.print(session.client.pause_schedule(name), f"Paused {name}")


@schedule.command()
@click.argument("name")
@connected
def resume(session: Session, name: str) -> None:
    """Resume the schedule NAME."""
    resumed = session.client.resume_schedule(name)
    session.print(resumed, f"Resumed {name}. {_following(resumed)}")


@schedule.command()
@click.argument("name")
@connected
def run(session: Session, name: str) -> None:
    """Produce the item of the schedule NAME now, in addition to its times."""
    ran = session.client.run_schedule(name)
    session.print(ran, f"Produced {ran.id} in {ran.queue_name}")


@schedule.command()
@click.argument("name")
@connected
def delete(session: Session, name: str) -> None:
    """Delete the schedule NAME. The items that it has produced stay."""
    session.client.delete_schedule(name)
    session.print({"deleted": name}, f"Deleted {name}")


@schedule.command("next")
@click.option("--cron", required=True, metavar="EXPRESSION", help="When: five fields, such as '*/5 * * * *', or @hourly.")
@click.option("--timezone", metavar="ZONE", default="UTC", show_default=True, help="Time zone of the expression.")
@click.option("-n", "--count", type=WholeNumber(1, 100), default=5, show_default=True, help="Number of times.")
@click.option("--after", metavar="TIME", callback=moment, help="The times after this one. [default: now]")
@connected
def next_times(session: Session, cron: str, timezone: str, count: int, after: datetime | None) -> None:
    """Show the next times of an expression, in its time zone and in UTC. Creates nothing."""
    times = session.client.next_times(cron, timezone=timezone, count=count, after=after)
    zone = _zone(timezone)
    rows = [(f"{at.astimezone(zone):%a %Y-%m-%d %H:%M}", _utc(at)) for at in times]
    session.print_all([{"at": at} for at in times], table((timezone, "UTC"), rows), "No more times")


def _zone(name: str) -> tzinfo | None:
    """The zone; None, which is the local one, where its times are not known."""
    from zoneinfo import ZoneInfo

    with contextlib.suppress(LookupError, ValueError, OSError):
        return ZoneInfo(name)
    return None


def _following(info: ScheduleInfo) -> str:
    if info.paused:
        return "It is paused."
    return "It has no more times." if info.next_at is None else f"Next: {_utc(info.next_at)} UTC"


def _utc(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def _rows(info: ScheduleInfo) -> list[tuple[str, str]]:
    rows = [
        ("schedule", info.name),
        ("queue", info.queue_name),
        ("cron", printable(info.cron.encode())),
        ("time zone", info.timezone),
        ("jitter", info.jitter),
        ("catch up", info.catch_up),
        *item_rows(info.item),
        ("next", "paused" if info.paused else _utc(info.next_at)),
    ]
    if (fired := info.last_fired) is not None:
        rows.append(("last fired", f"{_utc(fired.fired_at)}, for {_utc(fired.scheduled_at)}: {fired.id or 'id not known'}"))
    if (failure := info.last_failure) is not None:
        rows.append(("last failure", f"{_utc(failure.failed_at)}: {failure.code}: {printable(failure.detail.encode())}"))
    return rows
