"""Commands on items by id: complete, retry, release, extend, drop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import click

from sluiceway.cli.common import arguments_or_stdin, chunks, duration_option
from sluiceway.cli.session import Session, connected, queue_argument
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_JSON

if TYPE_CHECKING:
    from sluiceway.client import Ignored, Lease

T = TypeVar("T")
_SAFE = "before this error; repeating the command is safe"


def _check_options(command: Callable[..., T]) -> Callable[..., T]:
    """Options that restrict a call on leased items."""
    strict = click.option("--strict", is_flag=True, help="Exit with an error (3) if any id is ignored. The other items are still settled.")
    client = click.option("--client-id", metavar="NAME", help="Only items that this consumer has leased; others are ignored.")
    return strict(client(command))


def _ids_options(command: Callable[..., T]) -> Callable[..., T]:
    """Arguments and options for a queue, item ids and leases."""
    lease = click.option("--lease", "lease_ids", multiple=True, metavar="LEASE_ID", help="All open items of this lease. May be repeated.")
    return queue_argument()(click.argument("ids", nargs=-1, metavar="[ID...|-]")(lease(_check_options(command))))


def _id_calls(ids: tuple[str, ...], lease_ids: tuple[str, ...]) -> Iterator[tuple[list[str], list[str]]]:
    """Batches of item ids and lease ids that fit into one call."""
    if not ids and not lease_ids:
        raise click.UsageError("pass item ids, - for ids on stdin, or --lease LEASE_ID")
    for chunk in chunks(lease_ids, MAX_ITEMS_JSON):
        yield [], chunk
    for chunk in chunks(arguments_or_stdin(ids, "ids"), MAX_ITEMS_JSON):
        yield chunk, []


@click.command()
@_ids_options
@connected
def complete(session: Session, queue: str, ids: tuple[str, ...], lease_ids: tuple[str, ...], client_id: str | None, strict: bool) -> None:
    """Complete leased items of QUEUE: ids, ids on stdin (`-`), or whole leases. Safe to repeat."""
    completed = 0
    ignored: list[Ignored] = []
    try:
        for items, leases in _id_calls(ids, lease_ids):
            answer = session.client.complete(queue, items, lease_ids=leases, client_id=client_id, strict=strict)
            completed += answer.completed
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, completed, f"items were completed {_SAFE}")
    session.print({"completed": completed, "ignored": ignored}, _settled(f"Completed {completed:,}", ignored))


@click.command()
@_ids_options
@connected
def release(session: Session, queue: str, ids: tuple[str, ...], lease_ids: tuple[str, ...], client_id: str | None, strict: bool) -> None:
    """Return leased items of QUEUE untouched. They become ready again and the attempt does not count. Safe to repeat."""
    released = 0
    ignored: list[Ignored] = []
    try:
        for items, leases in _id_calls(ids, lease_ids):
            answer = session.client.release(queue, items, lease_ids=leases, client_id=client_id, strict=strict)
            released += answer.released
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, released, f"items were released {_SAFE}")
    session.print({"released": released, "ignored": ignored}, _settled(f"Released {released:,}", ignored))


@click.command()
@_ids_options
@duration_option("--lease-timeout", help="New lease duration from now. [default: the queue's]")
@connected
def extend(
    session: Session,
    queue: str,
    ids: tuple[str, ...],
    lease_ids: tuple[str, ...],
    client_id: str | None,
    strict: bool,
    lease_timeout: str | None,
) -> None:
    """Extend leases of QUEUE, given by id or by their items. Safe to repeat."""
    extended: list[Lease] = []
    ignored: list[Ignored] = []
    try:
        for items, leases in _id_calls(ids, lease_ids):
            answer = session.client.extend(queue, leases, ids=items, lease_timeout=lease_timeout, client_id=client_id, strict=strict)
            extended += answer.leases
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, len(extended), f"leases were extended {_SAFE}")
    text = "\n".join(f"Extended {each.lease_id}: {each.count} until {each.lease_deadline.astimezone():%H:%M:%S}" for each in extended)
    session.print({"leases": extended, "ignored": ignored}, _settled(text or "No leases extended", ignored))


@click.command()
@queue_argument()
@click.argument("ids", nargs=-1, required=True, metavar="ID...|-")
@duration_option("--after", help="Delay before the items are served again; 0s: none. [default: the queue's back-off]")
@click.option("--dead", is_flag=True, help="Move the items to the dead queue instead; without one they are dropped.")
@click.option("--reason", help="Reason of death. Only with --dead.")
@_check_options
@connected
def retry(
    session: Session,
    queue: str,
    ids: tuple[str, ...],
    after: str | None,
    dead: bool,
    reason: str | None,
    client_id: str | None,
    strict: bool,
) -> None:
    """Put leased items of QUEUE back for another attempt: ids, or ids on stdin (`-`). Safe to repeat."""
    if dead and after is not None:
        raise click.UsageError("--after and --dead exclude each other")
    if reason and not dead:
        raise click.UsageError("--reason needs --dead")
    from sluiceway.client import Retry

    retried = died = 0
    ignored: list[Ignored] = []
    try:
        for chunk in chunks(arguments_or_stdin(ids, "ids"), MAX_ITEMS_JSON):
            verdicts = [Retry(id, retry_after=after, dead=dead, reason=reason) for id in chunk]
            answer = session.client.retry(queue, verdicts, client_id=client_id, strict=strict)
            retried += answer.retried
            died += answer.dead
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, retried + died, f"items were put back {_SAFE}")
    text = f"Put back {retried:,}" + (f", dead {died:,}" if died or dead else "")
    session.print({"retried": retried, "dead": died, "ignored": ignored}, _settled(text, ignored))


@click.command()
@queue_argument()
@click.argument("ids", nargs=-1, required=True, metavar="ID...|-")
@connected
def drop(session: Session, queue: str, ids: tuple[str, ...]) -> None:
    """Permanently delete ready or scheduled items of QUEUE, without the dead queue: ids, or ids on stdin (`-`).

    Safe to repeat.
    """
    deleted = 0
    ignored: list[Ignored] = []
    try:
        for chunk in chunks(arguments_or_stdin(ids, "ids"), MAX_ITEMS_JSON):
            answer = session.client.delete_items(queue, chunk)
            deleted += answer.deleted
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, deleted, f"items were deleted {_SAFE}")
    session.print({"deleted": deleted, "ignored": ignored}, _settled(f"Deleted {deleted:,}", ignored))


def _settled(text: str, ignored: list[Ignored]) -> str:
    return "\n".join([text, *(f"ignored {each.id}: {each.reason.replace('_', ' ')}" for each in ignored)])
