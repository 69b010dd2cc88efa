"""Commands on items that one has the ids of: complete, retry, release, extend; and drop."""

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
_SAFE = "before this; repeating the command is safe"


def _check_options(command: Callable[..., T]) -> Callable[..., T]:
    """What a call on leased items may insist on."""
    strict = click.option("--strict", is_flag=True, help="End with an error (3) if any id is ignored. The others are done all the same.")
    client = click.option("--client-id", metavar="NAME", help="Only what this consumer has leased; the rest is ignored.")
    return strict(client(command))


def _ids_options(command: Callable[..., T]) -> Callable[..., T]:
    """A queue, item ids, and leases."""
    lease = click.option("--lease", "lease_ids", multiple=True, metavar="LEASE_ID", help="All that is open in the lease. May be repeated.")
    return queue_argument()(click.argument("ids", nargs=-1, metavar="[ID...|-]")(lease(_check_options(command))))


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
def complete(session: Session, queue: str, ids: tuple[str, ...], lease_ids: tuple[str, ...], client_id: str | None, strict: bool) -> None:
    """Settle leased items of QUEUE for good: ids, ids on stdin (`-`), or whole leases. Repeating it is safe."""
    completed = 0
    ignored: list[Ignored] = []
    try:
        for items, leases in _id_calls(ids, lease_ids):
            answer = session.client.complete(queue, items, lease_ids=leases, client_id=client_id, strict=strict)
            completed += answer.completed
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, completed, f"items were completed {_SAFE}")
    session.print({"completed": completed, "ignored": ignored}, _settled(f"completed {completed:,}", ignored))


@click.command()
@_ids_options
@connected
def release(session: Session, queue: str, ids: tuple[str, ...], lease_ids: tuple[str, ...], client_id: str | None, strict: bool) -> None:
    """Give leased items of QUEUE back untouched: they are offered again and the attempt is not counted. Repeating it is safe."""
    released = 0
    ignored: list[Ignored] = []
    try:
        for items, leases in _id_calls(ids, lease_ids):
            answer = session.client.release(queue, items, lease_ids=leases, client_id=client_id, strict=strict)
            released += answer.released
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, released, f"items were given back {_SAFE}")
    session.print({"released": released, "ignored": ignored}, _settled(f"released {released:,}", ignored))


@click.command()
@_ids_options
@duration_option("--lease-timeout", help="How long they are yours from now on. [default: the queue's]")
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
    """Move the deadline of leases of QUEUE, or of the leases that the given items are in. Repeating it is safe."""
    extended: list[Lease] = []
    ignored: list[Ignored] = []
    try:
        for items, leases in _id_calls(ids, lease_ids):
            answer = session.client.extend(queue, leases, ids=items, lease_timeout=lease_timeout, client_id=client_id, strict=strict)
            extended += answer.leases
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, len(extended), f"leases were extended {_SAFE}")
    text = "\n".join(f"extended {each.lease_id}: {each.count} until {each.lease_deadline.astimezone():%H:%M:%S}" for each in extended)
    session.print({"leases": extended, "ignored": ignored}, _settled(text or "extended nothing", ignored))


@click.command()
@queue_argument()
@click.argument("ids", nargs=-1, required=True, metavar="ID...|-")
@duration_option("--after", help="Serve them again only after this time; 0s: at once. [default: as the queue's back-off says]")
@click.option("--dead", is_flag=True, help="Put them into the dead queue instead; without one they are dropped.")
@click.option("--reason", help="Why they are dead. Only with --dead.")
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
            verdicts = [Retry(id, retry_after=after, dead=dead, reason=reason) for id in chunk]
            answer = session.client.retry(queue, verdicts, client_id=client_id, strict=strict)
            retried += answer.retried
            died += answer.dead
            ignored += answer.ignored
    except SluicewayError as error:
        session.fail(error, retried + died, f"items were put back {_SAFE}")
    text = f"put back {retried:,}" + (f", dead {died:,}" if died or dead else "")
    session.print({"retried": retried, "dead": died, "ignored": ignored}, _settled(text, ignored))


@click.command()
@queue_argument()
@click.argument("ids", nargs=-1, required=True, metavar="ID...|-")
@connected
def drop(session: Session, queue: str, ids: tuple[str, ...]) -> None:
    """Delete items of QUEUE that are ready or scheduled, for good and without the dead queue: ids, or ids on stdin (`-`).

    Repeating it is safe.
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
    session.print({"deleted": deleted, "ignored": ignored}, _settled(f"deleted {deleted:,}", ignored))


def _settled(text: str, ignored: list[Ignored]) -> str:
    return "\n".join([text, *(f"ignored {each.id}: {each.reason.replace('_', ' ')}" for each in ignored)])
