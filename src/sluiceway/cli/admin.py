"""Commands for operators: backends, API keys, the audit trail, events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from sluiceway.cli.common import FILE, WholeNumber, all_items, duration_option, print_json, printable, table
from sluiceway.cli.session import Session, connected, queue_names
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from sluiceway.contract.audit_answers import AuditEntry

T = TypeVar("T")
FOLLOW_PAUSE = 1.0
AUDIT_OVERLAP = timedelta(minutes=1)
"""Maximum delay between an entry's timestamp and its visibility: commits take time, and instance clocks may lag."""


# -- backends ---------------------------------------------------------------------------------------------------------


@click.group()
def backend() -> None:
    """List and accept storage backends."""


@backend.command("list")
@connected
def list_backends(session: Session) -> None:
    """List the backends with their state. Needs the scope `admin`."""
    items = session.client.list_backends()
    columns = list(items[0]) if items else []
    rows = [[_plain(item.get(column)) for column in columns] for item in items]
    session.print_all(items, table([column.replace("_", " ") for column in columns], rows), "No backends")


@backend.command("accept")
@click.argument("name")
@click.option("--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), help="The server's data folder.")
@click.option("--config", type=FILE, help="The server's configuration file, if it names a cluster.")
@click.option("--cluster-meta", metavar="URL", help="The meta store of the server's cluster, as in `serve`.")
@click.option("--queue", "queue_name", help="Only the partitions of this queue.")
@click.option("--partition", "numbers", type=WholeNumber(0), multiple=True, help="Only this partition of the queue. May be repeated.")
@connected
def accept_backend(
    session: Session,
    name: str,
    data: Path,
    config: Path | None,
    cluster_meta: str | None,
    queue_name: str | None,
    numbers: tuple[int, ...],
) -> None:
    """Accept the storage of backend NAME as it is, although it is older than before, or empty.

    Use this after a deliberate restore or a permanent loss. Stop every client first: ids that were assigned after the backup are assigned
    again, to other items. The server may be running.
    """
    if numbers and queue_name is None:
        raise click.UsageError("--partition needs --queue")
    from sluiceway.server_cli.acceptance import accept_storage

    accepted = accept_storage(data, config, cluster_meta, name, queue_name, numbers)
    rows = [{"queue_name": queue, "partition": number} for queue, number in accepted]
    session.print(
        {"backend": name, "accepted": rows},
        f"Accepted {len(rows)} partitions of backend {name}. They open at the next start of the server.",
    )


def _plain(value: object) -> str:
    """A table cell for a value that a newer server may have added."""
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text.encode("utf-8", "surrogatepass"))


# -- keys -------------------------------------------------------------------------------------------------------------


@click.group()
def key() -> None:
    """Create, list and revoke API keys. Needs the scope `admin`."""


@key.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    metavar="SCOPE",
    help="Scope of the key: ACTION:PATTERN, such as 'produce:orders-*' (produce, consume, read, manage), or admin. May be repeated.",
)
@duration_option("--expires-after", help="Lifetime of the key. [default: unlimited]")
@click.option("--requests-per-second", type=WholeNumber(0), help="Request limit; 0 = unlimited. [default: the server's]")
@click.option("--bytes-per-second", type=WholeNumber(0), help="Bandwidth limit; 0 = unlimited. [default: the server's]")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Create the key directly in this data folder, without calling a server. This is the way to the first key. A server may be "
    "running there.",
)
@click.option("--config", type=FILE, help="With --data: the server's configuration file, if it names a cluster.")
@click.option("--cluster-meta", metavar="URL", help="With --data: the meta store of the server's cluster, as in `serve`.")
@connected
def create(
    session: Session, name: str, scopes: tuple[str, ...], data: Path | None, config: Path | None, cluster_meta: str | None, **limits: Any
) -> None:
    """Create an API key called NAME and print it on stdout. It is not shown again."""
    if data is None:
        if config is not None or cluster_meta is not None:
            raise click.UsageError("--config and --cluster-meta need --data")
        made = session.client.create_key(name, scopes, **limits)
    else:
        from sluiceway.server_cli.bootstrap import create_key

        if not data.exists():
            click.echo(f"{data} is a new data folder; start the server with --data {data}", err=True)
        made = create_key(data, config, cluster_meta, name, scopes, **limits)
    if session.as_json:
        print_json(made)
        return
    until = f", until {_day(made.expires_at)}" if made.expires_at else ""
    click.echo(made.key)
    click.echo(
        f"Created key {made.key_id} for {made.name}: {', '.join(made.scopes)}{until}. Store it now: it is not shown again.", err=True
    )


@key.command("list")
@connected
def list_keys(session: Session) -> None:
    """List the API keys with their names and scopes. The secrets are never shown."""
    found = list(all_items(lambda pivot: session.client.list_keys(pivot=pivot)))
    rows = [(each.key_id, each.name, _day(each.created_at), _day(each.expires_at), " ".join(each.scopes)) for each in found]
    columns = ("key", "name", "created", "expires", "scopes")
    session.print_all(found, table(columns, rows), "No API keys. Create one: sluiceway key create NAME --scope SCOPE")


def _day(at: datetime | None) -> str:
    return "never" if at is None else f"{at:%Y-%m-%d %H:%M} UTC"


@key.command()
@click.argument("key_id", metavar="KEY_ID|NAME")
@connected
def revoke(session: Session, key_id: str) -> None:
    """Revoke the API key with this id, or the only one with this name. Every server refuses it within a second."""
    try:
        session.client.revoke_key(key_id)
    except SluicewayError as error:
        if error.code != "key_not_found":
            raise
        keys = all_items(lambda pivot: session.client.list_keys(pivot=pivot))
        named = [each.key_id for each in keys if each.name == key_id]
        if not named:
            raise
        if len(named) > 1:
            raise click.UsageError(f"{len(named)} keys are called {key_id}; pass an id: {', '.join(named)}") from None
        (key_id,) = named
        session.client.revoke_key(key_id)
    session.print({"key_id": key_id}, f"Revoked {key_id}")


# -- audit ------------------------------------------------------------------------------------------------------------


@click.group()
def audit() -> None:
    """Show the audit trail."""


def _time(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """Parses a time, or an age such as 2h."""
    if value is None:
        return None
    try:
        return datetime.now(UTC) - timedelta(milliseconds=parse_duration(value, "duration"))
    except SluicewayError:
        pass
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a time such as 2026-01-31T08:00:00Z nor a duration such as 2h", ctx, param
        ) from None
    return at if at.tzinfo else at.astimezone()


_FILTERS = (
    click.option("--queue", "queue_name", help="Only changes of this queue.", shell_complete=queue_names),
    click.option("--action", help="Only this action, such as queues.delete, or all with this prefix, which ends with a dot: rebalance."),
    click.option("--actor", help="Only changes by this API key: its name, or NAME/ID."),
)


def audit_filters(command: Callable[..., T]) -> Callable[..., T]:
    for option in reversed(_FILTERS):
        command = option(command)
    return command


@audit.command("list")
@audit_filters
@click.option("--since", metavar="TIME", callback=_time, help="Only changes since this time, or since an age such as 2h.")
@click.option("--until", metavar="TIME", callback=_time, help="Only changes before this time or age.")
@click.option("-n", "--count", type=WholeNumber(1), default=50, show_default=True, help="Number of newest changes.")
@click.option("--follow", is_flag=True, help="Then follow new changes until Ctrl-C.")
@connected
def list_audit(session: Session, until: datetime | None, count: int, follow: bool, **filters: Any) -> None:
    """List changes, newest last. Needs the scope `admin`."""
    if until is not None and follow:
        raise click.UsageError("--until and --follow exclude each other")
    entries = _audited(session, until=until, **filters)
    newest = list(islice(entries, count))
    if not (newest or follow or session.as_json):
        click.echo("No changes", err=True)
    _print_audit(session, newest)
    if follow:
        _follow_audit(session, newest, entries, filters)


@audit.command()
@audit_filters
@click.option("-n", "--count", type=WholeNumber(0), default=10, show_default=True, help="Number of latest changes to start with.")
@click.option("-f", "--follow", is_flag=True, help="Follow new changes until Ctrl-C.")
@connected
def tail(session: Session, count: int, follow: bool, **filters: Any) -> None:
    """Show the latest changes, newest last. Needs the scope `admin`."""
    entries = _audited(session, **filters)
    newest = list(islice(entries, max(count, 1)))
    _print_audit(session, newest[:count])
    if follow:
        _follow_audit(session, newest, entries, filters)


def _follow_audit(session: Session, newest: Sequence[AuditEntry], older: Iterator[AuditEntry], filters: dict[str, Any]) -> NoReturn:
    """Print new entries. Another instance's entry may arrive late, with an id that sorts before known ones."""
    last = newest[0].at if newest else None
    # Older entries that were not shown are not new.
    known = {entry.id for entry in (*newest, *takewhile(lambda entry: last is not None and entry.at >= last - AUDIT_OVERLAP, older))}
    while True:
        time.sleep(FOLLOW_PAUSE)
        # By the server's clock alone: this machine's may be ahead of it.
        since = [at for at in (filters.get("since"), None if last is None else last - AUDIT_OVERLAP) if at is not None]
        entries = list(_audited(session, **filters | ({"since": max(since)} if since else {})))
        _print_audit(session, [entry for entry in entries if entry.id not in known])
        last = max((entry.at for entry in entries), default=last)
        known = {entry.id for entry in entries}


def _audited(session: Session, **filters: Any) -> Iterator[AuditEntry]:
    """All entries, newest first, read page by page."""
    return all_items(lambda pivot: session.client.list_audit(pivot=pivot, **filters))


def _print_audit(session: Session, newest_first: Sequence[AuditEntry]) -> None:
    for entry in reversed(newest_first):
        about = _words(f"{entry.actor} {entry.action} {entry.queue_name or '-'}", entry.detail)
        session.print(entry, f"{entry.at:%Y-%m-%d %H:%M:%S} {about}")


def _words(title: str, fields: Mapping[str, Any]) -> str:
    """A line with the fields: `queue.updated queue_name=q version=2`. Zeros, too: an audit entry may say that a limit was set to 0."""
    values = (value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False) for value in fields.values())
    text = " ".join((title, *(f"{name}={value}" for name, value in zip(fields, values, strict=True))))
    return printable(text.encode("utf-8", "surrogatepass"), 1_000)


# -- events -----------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--queue", help="Only events of this queue.", shell_complete=queue_names)
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Only events of this type, such as queue.created. May be repeated.")
@click.option("-n", "--count", type=WholeNumber(1), help="Stop after this many events. [default: run until Ctrl-C]")
@connected
def events(session: Session, queue: str | None, types: tuple[str, ...], count: int | None) -> None:
    """Print the server's events as they happen. `reset` means that events were missed."""
    for number, event in enumerate(session.client.events(queue_name=queue, types=types or None), 1):
        fields = event.data if isinstance(event.data, dict) else {"data": event.data}
        session.print(event, f"{datetime.now().astimezone():%H:%M:%S} {_words(event.type, fields)}")
        if number == count:
            break
