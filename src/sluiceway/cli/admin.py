"""Commands for whoever runs a server: backends, API keys, the audit trail, events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from sluiceway.cli.common import duration_option, print_json, printable, table
from sluiceway.cli.config import FILE
from sluiceway.cli.session import Session, connected, queue_names
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from sluiceway.contract.audit_answers import AuditEntry
    from sluiceway.contract.key_answers import KeyInfo

T = TypeVar("T")
FOLLOW_PAUSE = 1.0
AUDIT_OVERLAP = timedelta(minutes=1)
"""How much later an entry may be seen than it says: its commit takes time, and another instance's clock may lag."""


# -- backends ---------------------------------------------------------------------------------------------------------


@click.group()
def backend() -> None:
    """Look at the storage systems that hold partitions."""


@backend.command("list")
@connected
def list_backends(session: Session) -> None:
    """List the backends and how they are. Needs the scope `admin`."""
    items = session.client.list_backends()
    columns = list(items[0]) if items else []
    rows = [[_plain(item.get(column)) for column in columns] for item in items]
    session.print_all(items, table([column.replace("_", " ") for column in columns], rows), "no backends")


@backend.command("accept")
@click.argument("name")
@click.option("--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), help="The data folder of the server.")
@click.option("--config", type=FILE, help="The server's configuration file, which may name a cluster.")
@click.option("--cluster-meta", metavar="URL", help="The meta store of the server's cluster, as for `serve`.")
@click.option("--queue", "queue_name", help="Only the partitions of this queue.")
@click.option("--partition", "numbers", type=click.IntRange(0), multiple=True, help="Only this partition of the queue. May be repeated.")
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
    """Serve what lies in the backend NAME although it is older than it was, or empty.

    For a storage that was restored on purpose, or is lost for good. First stop every client: ids that were given since are given again, to
    other items. A server may be running on the data folder.
    """
    if numbers and queue_name is None:
        raise click.UsageError("--partition is one of a queue: say which by --queue")
    from sluiceway.cli.acceptance import accept_storage

    accepted = accept_storage(data, config, cluster_meta, name, queue_name, numbers)
    rows = [{"queue_name": queue, "partition": number} for queue, number in accepted]
    session.print(
        {"backend": name, "accepted": rows},
        f"accepted {len(rows)} partitions of backend {name} as they are. They are opened at the next start of the server.",
    )


def _plain(value: object) -> str:
    """A value of a server that may be newer than this program, for a table."""
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text.encode("utf-8", "surrogatepass"))


# -- keys -------------------------------------------------------------------------------------------------------------


@click.group()
def key() -> None:
    """Make, list and revoke API keys. Needs the scope `admin`."""


@key.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    metavar="SCOPE",
    help="What it may do: ACTION:PATTERN, such as 'produce:orders-*' (produce, consume, read, manage), or admin. May be repeated.",
)
@duration_option("--expires-after", help="When it stops to work. [default: never]")
@click.option("--requests-per-second", type=click.IntRange(0), help="Its own limit; 0: none. [default: the server's]")
@click.option("--bytes-per-second", type=click.IntRange(0), help="Its own limit; 0: none. [default: the server's]")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Make it in this data folder, without asking a server: the first key. A server may be running there, or come later.",
)
@click.option("--config", type=FILE, help="With --data: the server's configuration file, which may name a cluster.")
@click.option("--cluster-meta", metavar="URL", help="With --data: the meta store of the server's cluster, as for `serve`.")
@connected
def create(
    session: Session, name: str, scopes: tuple[str, ...], data: Path | None, config: Path | None, cluster_meta: str | None, **limits: Any
) -> None:
    """Make an API key called NAME, and print it: on stdout, this once and never again."""
    if data is None:
        if config is not None or cluster_meta is not None:
            raise click.UsageError("--config and --cluster-meta say where the keys of a server are that is not asked: they go with --data")
        made = session.client.create_key(name, scopes, **limits)
    else:
        from sluiceway.cli.bootstrap import create_key

        if not data.exists():
            click.echo(f"{data} is a new data folder: start the server with --data {data}", err=True)
        made = create_key(data, config, cluster_meta, name, scopes, **limits)
    if session.as_json:
        print_json(made)
        return
    until = f", until {_day(made.expires_at)}" if made.expires_at else ""
    click.echo(made.key)
    click.echo(f"key {made.key_id} for {made.name}: {', '.join(made.scopes)}{until}. Keep it: it is not shown again.", err=True)


@key.command("list")
@connected
def list_keys(session: Session) -> None:
    """List the API keys: who has them and what they may do, never the keys themselves."""
    found = _all_keys(session)
    rows = [(each.key_id, each.name, _day(each.created_at), _day(each.expires_at), " ".join(each.scopes)) for each in found]
    columns = ("key", "name", "created", "expires", "scopes")
    session.print_all(found, table(columns, rows), "no keys; make one with: sluiceway key create NAME --scope SCOPE")


def _all_keys(session: Session) -> list[KeyInfo]:
    found: list[KeyInfo] = []
    pivot: str | None = None
    while True:
        page = session.client.list_keys(pivot=pivot)
        found += page.items
        pivot = page.next
        if pivot is None:
            return found


def _day(at: datetime | None) -> str:
    return "never" if at is None else f"{at:%Y-%m-%d %H:%M} UTC"


@key.command()
@click.argument("key_id", metavar="KEY_ID|NAME")
@connected
def revoke(session: Session, key_id: str) -> None:
    """Revoke the API key with this id, or the only one of this name. It is refused from then on, by every server within a second."""
    try:
        session.client.revoke_key(key_id)
    except SluicewayError as error:
        if error.code != "key_not_found":
            raise
        named = [each.key_id for each in _all_keys(session) if each.name == key_id]
        if not named:
            raise
        if len(named) > 1:
            raise click.UsageError(f"{len(named)} keys are called {key_id}: say which by its id: {', '.join(named)}") from None
        (key_id,) = named
        session.client.revoke_key(key_id)
    session.print({"key_id": key_id}, f"revoked {key_id}")


# -- audit ------------------------------------------------------------------------------------------------------------


@click.group()
def audit() -> None:
    """See who changed what."""


def _time(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """A time, or how long ago it was."""
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
    click.option("--action", help="Only this call, such as queues.delete; all that begin so if it ends with a dot, such as rebalance."),
    click.option("--actor", help="Only what this key has changed: its name, or NAME/ID."),
)


def audit_filters(command: Callable[..., T]) -> Callable[..., T]:
    for option in reversed(_FILTERS):
        command = option(command)
    return command


@audit.command("list")
@audit_filters
@click.option("--since", metavar="TIME", callback=_time, help="Only from then on: a time, or how long ago, such as 2h.")
@click.option("--until", metavar="TIME", callback=_time, help="Only before then.")
@click.option("-n", "--count", type=click.IntRange(1), default=50, show_default=True, help="At most this many, the newest.")
@click.option("--follow", is_flag=True, help="Then go on with what comes, until Ctrl-C.")
@connected
def list_audit(session: Session, until: datetime | None, count: int, follow: bool, **filters: Any) -> None:
    """List the last changes, the newest at the end. Needs the scope `admin`."""
    if until is not None and follow:
        raise click.UsageError("--until and --follow exclude each other")
    entries = _audited(session, until=until, **filters)
    newest = list(islice(entries, count))
    if not (newest or follow or session.as_json):
        click.echo("no changes", err=True)
    _print_audit(session, newest)
    if follow:
        _follow_audit(session, newest, entries, filters)


@audit.command()
@audit_filters
@click.option("-n", "--count", type=click.IntRange(0), default=10, show_default=True, help="Begin with so many of the last.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@connected
def tail(session: Session, count: int, follow: bool, **filters: Any) -> None:
    """Show the last changes, the newest at the end. Needs the scope `admin`."""
    entries = _audited(session, **filters)
    newest = list(islice(entries, max(count, 1)))
    _print_audit(session, newest[:count])
    if follow:
        _follow_audit(session, newest, entries, filters)


def _follow_audit(session: Session, newest: Sequence[AuditEntry], older: Iterator[AuditEntry], filters: dict[str, Any]) -> NoReturn:
    """Print what comes. An entry of another instance may come with a time, and so an id, that is before those that were there."""
    last = newest[0].at if newest else datetime.now(UTC)
    # What was there and was not to be shown is no news either.
    known = {entry.id for entry in (*newest, *takewhile(lambda entry: entry.at >= last - AUDIT_OVERLAP, older))}
    while True:
        time.sleep(FOLLOW_PAUSE)
        entries = list(_audited(session, **filters | {"since": last - AUDIT_OVERLAP}))
        _print_audit(session, [entry for entry in entries if entry.id not in known])
        last = max(last, *(entry.at for entry in entries)) if entries else last
        known = {entry.id for entry in entries}


def _audited(session: Session, **filters: Any) -> Iterator[AuditEntry]:
    """All entries, newest first, read as far as they are wanted."""
    pivot: str | None = None
    while True:
        page = session.client.list_audit(pivot=pivot, **filters)
        yield from page.items
        pivot = page.next
        if pivot is None:
            return


def _print_audit(session: Session, newest_first: Sequence[AuditEntry]) -> None:
    for entry in reversed(newest_first):
        detail = json.dumps(entry.detail, ensure_ascii=False) if entry.detail else ""
        about = printable(
            f"{entry.actor} {entry.action} {entry.queue_name or '-'} {detail}".rstrip().encode("utf-8", "surrogatepass"), 1_000
        )
        session.print(entry, f"{entry.at:%Y-%m-%d %H:%M:%S} {about}")


# -- events -----------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--queue", help="Only what happens to this queue.", shell_complete=queue_names)
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Only these, such as queue.created. May be repeated.")
@click.option("-n", "--count", type=click.IntRange(1), help="End after this many. [default: go on until Ctrl-C]")
@connected
def events(session: Session, queue: str | None, types: tuple[str, ...], count: int | None) -> None:
    """Tell what happens on the server, as it happens. `reset` means that something was missed."""
    for number, event in enumerate(session.client.events(queue_name=queue, types=types or None), 1):
        data = printable(json.dumps(event.data, ensure_ascii=False).encode("utf-8", "surrogatepass"), 1_000)
        session.print(event, f"{event.type} {data}")
        if number == count:
            break
