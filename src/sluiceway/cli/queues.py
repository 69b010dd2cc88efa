"""Commands on queues as a whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click

from sluiceway.cli.common import duration_option, printable, table
from sluiceway.cli.history import history
from sluiceway.cli.session import Session, connected, queue_argument

if TYPE_CHECKING:
    from sluiceway.client import QueueInfo, Settings, Verb
    from sluiceway.client.answers import Partition

T = TypeVar("T")


@click.group()
def queue() -> None:
    """Create, change, show, pause, clear and delete queues."""


queue.add_command(history)


def _logical_queues(context: click.Context, option: click.Parameter, value: str | None) -> str | int | None:
    if value is None or value == "auto":
        return value
    if not value.isascii() or not value.isdigit() or not int(value):
        raise click.BadParameter(f"{value!r} is neither a number, at least 1, nor auto")
    return int(value)


_SETTINGS = (
    duration_option("--lease-timeout", help="How long a lease lives that does not say otherwise. [server's default: 1m]"),
    duration_option("--max-lease-timeout", help="The most that a lease may ask for. [server's default: 30d]"),
    click.option("--max-attempts", type=click.IntRange(0), help="Leases an item may have used up before it is dead; 0: no limit."),
    click.option("--dead-queue", metavar="QUEUE", help="Where dead items go. It must exist."),
    duration_option("--expire-timeout", help="An item that is not completed so long after it was due is dead; 0s: never."),
    duration_option(
        "--retry-backoff",
        metavar="FIRST MOST",
        help="After a retry or an expired lease wait FIRST, then twice as long each time, up to MOST.",
    ),
    duration_option("--idempotency-window", help="How long an idempotency key is remembered at most. [server's default: 1d]"),
    duration_option("--write-timeout", help="A commit that takes longer has an unknown outcome. [default: as the backend says]"),
    click.option(
        "--logical-queues",
        metavar="NUMBER|auto",
        callback=_logical_queues,
        help="On how many instances it lies; auto: as its load takes. [server's default: on all]",
    ),
    click.option("--reference", help="A note of yours."),
)


def settings_options(command: Callable[..., T]) -> Callable[..., T]:
    """Gives a command an option for each setting of a queue."""
    for option in reversed(_SETTINGS):
        command = option(command)
    return command


def _settings(typed: dict[str, Any]) -> Settings:
    """The settings that were typed."""
    from sluiceway.client import Backoff

    settings = {name: value for name, value in typed.items() if value is not None}
    if "retry_backoff" in settings:
        settings["retry_backoff"] = Backoff(*settings["retry_backoff"])
    return cast("Settings", settings)


@queue.command()
@click.argument("name")
@click.option("--partitions", type=click.IntRange(1), help="[server's default: 1]")
@settings_options
@connected
def create(session: Session, name: str, partitions: int | None, **typed: Any) -> None:
    """Create the queue NAME."""
    info = session.client.create_queue(name, requested_partitions=partitions, **_settings(typed))
    count = len(info.partitions)
    session.print(info, f"created {info.queue_name} with {count} {'partition' if count == 1 else 'partitions'}")


@queue.command()
@queue_argument("name")
@settings_options
@click.option("--no-dead-queue", is_flag=True, help="Dead items are dropped.")
@click.option("--no-retry-backoff", is_flag=True, help="A retry waits not at all.")
@click.option("--no-write-timeout", is_flag=True, help="A commit may take as long as the backend says.")
@click.option("--no-logical-queues", is_flag=True, help="It lies on all instances.")
@click.option("--if-version", metavar="VERSION", type=click.IntRange(0), help="Only if the queue still has this version.")
@connected
def update(
    session: Session,
    name: str,
    no_dead_queue: bool,
    no_retry_backoff: bool,
    no_write_timeout: bool,
    no_logical_queues: bool,
    if_version: int | None,
    **typed: Any,
) -> None:
    """Change settings of the queue NAME, at once. What is not named stays as it is."""
    settings = _settings(typed)
    if no_dead_queue:
        _unset(settings, "dead_queue")
    if no_retry_backoff:
        _unset(settings, "retry_backoff")
    if no_write_timeout:
        _unset(settings, "write_timeout")
    if no_logical_queues:
        _unset(settings, "logical_queues")
    if not settings:
        raise click.UsageError("name at least one setting to change")
    answer = session.client.update_queue(name, version=if_version, **settings)
    session.print(answer, f"updated {name}; its version is {answer.version}")


def _unset(settings: Settings, name: Literal["dead_queue", "retry_backoff", "write_timeout", "logical_queues"]) -> None:
    if name in settings:
        option = name.replace("_", "-")
        raise click.UsageError(f"--{option} and --no-{option} exclude each other")
    settings[name] = None


@queue.command("list")
@connected
def list_(session: Session) -> None:
    """List all queues by name."""
    infos: list[QueueInfo] = []
    pivot: str | None = None
    while True:
        page = session.client.list_queues(pivot=pivot)
        infos += page.items
        pivot = page.next
        if pivot is None:
            break
    columns = ("queue", "partitions", "lease timeout", "max attempts", "dead queue", "paused")
    rows = [
        (i.queue_name, len(i.partitions), i.lease_timeout, i.max_attempts or "-", i.dead_queue or "-", " and ".join(i.paused) or "-")
        for i in infos
    ]
    # A key that may read none sees an empty list, too.
    none = "no queues that this key may read" if session.target.api_key else "no queues"
    session.print_all(
        infos, table(columns, rows, right=("partitions", "max attempts")), f"{none}; make one with: sluiceway queue create NAME"
    )


@queue.command()
@queue_argument("name")
@connected
def info(session: Session, name: str) -> None:
    """Show the queue NAME."""
    answer = session.client.queue_info(name)
    backoff = answer.retry_backoff
    rows = [
        ("queue", answer.queue_name),
        ("incarnation", answer.incarnation),
        ("created", f"{answer.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("version", answer.version),
        ("lease timeout", f"{answer.lease_timeout}, at most {answer.max_lease_timeout}"),
        ("max attempts", answer.max_attempts or "no limit"),
        ("dead queue", answer.dead_queue or "none"),
        ("items expire", "never" if answer.expire_timeout == "0s" else f"after {answer.expire_timeout}"),
        ("retry back-off", f"{backoff.first} to {backoff.most}" if backoff else "none"),
        ("idempotency window", answer.idempotency_window),
        ("write timeout", answer.write_timeout or "as the backend says"),
        ("logical queues", answer.logical_queues or "one on each instance"),
        ("reference", printable((answer.reference or "-").encode())),
        ("paused", " and ".join(answer.paused) or "no"),
        ("rebalance", _rebalance(answer)),
        *((f"partition {part.partition}", _partition(part)) for part in answer.partitions),
    ]
    session.print(answer, table(("", ""), rows))


def _partition(part: Partition) -> str:
    parents = f", in the stead of {', '.join(map(str, part.parents))}" if part.parents else ""
    return f"{part.state}, on {part.backend}{parents}"


def _rebalance(info: QueueInfo) -> str:
    found = info.rebalance
    if found is None:
        return "none"
    left = "" if found.items_left is None else f", {found.items_left:,} items left to drain"
    return f"{found.id}: {found.state or 'unknown'}, step {found.step or 'unknown'}{left}"


@queue.command()
@queue_argument("name")
@click.option("--force", is_flag=True, help="Also if there are items in it. Asks first at a terminal.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@connected
def delete(session: Session, name: str, force: bool, yes: bool) -> None:
    """Delete the queue NAME, for good."""
    if force and not yes and sys.stdin.isatty() and not click.confirm(f"delete {name} with all its items, for good?", err=True):
        click.echo("nothing was deleted", err=True)
        return
    session.client.delete_queue(name, force=force)
    session.print({}, f"deleted {name}")


@queue.command()
@queue_argument("name")
@click.option("--produce", is_flag=True, help="Only producing.")
@click.option("--lease", is_flag=True, help="Only leasing.")
@connected
def pause(session: Session, name: str, produce: bool, lease: bool) -> None:
    """Stop producing to the queue NAME and leasing from it, until `queue resume`. What is leased can still be settled."""
    answer = session.client.pause(name, _verbs(produce, lease))
    session.print(answer, _paused(answer))


@queue.command()
@queue_argument("name")
@click.option("--produce", is_flag=True, help="Only producing.")
@click.option("--lease", is_flag=True, help="Only leasing.")
@connected
def resume(session: Session, name: str, produce: bool, lease: bool) -> None:
    """Let the queue NAME go on after `queue pause`."""
    answer = session.client.resume(name, _verbs(produce, lease))
    session.print(answer, _paused(answer))


def _verbs(produce: bool, lease: bool) -> list[Verb] | None:
    chosen: dict[Verb, bool] = {"produce": produce, "lease": lease}
    return [verb for verb, wanted in chosen.items() if wanted] or None


def _paused(info: QueueInfo) -> str:
    return f"paused in {info.queue_name}: {' and '.join(info.paused) or 'nothing'}"


@queue.command()
@queue_argument("name")
@click.option("--scheduled", is_flag=True, help="Also what is not due yet.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@connected
def clear(session: Session, name: str, scheduled: bool, yes: bool) -> None:
    """Drop for good what waits in the queue NAME. Leased items stay."""
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("this drops items for good; give --yes if that is meant")
        if not click.confirm(f"drop all that waits in {name}, for good?", err=True):
            click.echo("nothing was dropped", err=True)
            return
    answer = session.client.clear(name, scheduled=scheduled)
    also = f" and {answer.scheduled:,} scheduled" if scheduled else ""
    session.print(answer, f"dropped {answer.ready:,} ready{also}")
