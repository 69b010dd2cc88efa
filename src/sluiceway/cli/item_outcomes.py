"""Commands on items by id: complete, retry, release, extend, drop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sluiceway.cli.common import arguments_or_stdin, chunks, counted, duration_option
from sluiceway.cli.session import Session, connected, queue_argument
from sluiceway.kernel.errors import KINDS, SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_JSON

if TYPE_CHECKING:
    from sluiceway.client import Lease

T = TypeVar("T")


def _check_options(command: Callable[..., T]) -> Callable[..., T]:
    """Options that restrict a call on leased items."""
    strict = click.option("--strict", is_flag=True, help="Exit with an error (3) if any id is ignored. The other items are still settled.")
    client = click.option("--client-id", metavar="NAME", help="Only items that this consumer has leased; others are ignored.")
    return strict(client(command))


def _ids_options(command: Callable[..., T]) -> Callable[..., T]:
    """Arguments and options for a queue, item ids and leases."""
    lease = click.option("--lease", "lease_ids", multiple=True, metavar="LEASE_ID", help="All open items of this lease. May be repeated.")
    return queue_argument()(click.argument("ids", nargs=-1, metavar="[ID...|-]")(lease(_check_options(command))))


def _id_chunks(ids: tuple[str, ...], lease_ids: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The client's arguments for calls of permitted size: `lease_ids` first, then `ids`."""
    if not ids and not lease_ids:
        raise click.UsageError("pass item ids, - for ids on stdin, or --lease LEASE_ID")
    for chunk in chunks(lease_ids, MAX_ITEMS_JSON):
        yield {"lease_ids": chunk}
    for chunk in chunks(arguments_or_stdin(ids, "ids"), MAX_ITEMS_JSON):
        yield {"ids": chunk}


def settle_all(session: Session, calls: Iterable[Any], done: str, text: Callable[..., str], **total: Any) -> None:
    """Make the calls, add their answers' fields to those of `total`, and print the sum; `text` makes words of it.

    `done` completes the message of a call that fails after others succeeded. Ids ignored for an error make the command fail, too.
    """
    ignored: list[Any] = []
    try:
        for answer in calls:
            for name in total:
                total[name] += getattr(answer, name)
            ignored += answer.ignored
    except SluicewayError as error:
        count = sum(each if isinstance(each, int) else len(each) for each in total.values())
        session.fail(error, count, f"{done} before this error; repeating the command is safe")
    lines = [text(*total.values()), *(f"ignored {each.id}: {each.reason.replace('_', ' ')}" for each in ignored)]
    session.print({**total, "ignored": ignored}, "\n".join(lines))
    if failed := [each.reason for each in ignored if each.reason in KINDS]:
        code = max(failed, key=lambda reason: reason == "outcome_unknown")
        session.fail(SluicewayError(code, f"{counted(len(failed), 'id')} failed; repeating the command is safe"), 0, "")


@click.command()
@_ids_options
@connected
def complete(session: Session, queue: str, ids: tuple[str, ...], lease_ids: tuple[str, ...], **checks: Any) -> None:
    """Complete leased items of QUEUE: ids, ids on stdin (`-`), or whole leases. Safe to repeat."""
    calls = (session.client.complete(queue, **chunk, **checks) for chunk in _id_chunks(ids, lease_ids))
    settle_all(session, calls, "items were completed", lambda completed: f"Completed {completed:,}", completed=0)


@click.command()
@_ids_options
@connected
def release(session: Session, queue: str, ids: tuple[str, ...], lease_ids: tuple[str, ...], **checks: Any) -> None:
    """Return leased items of QUEUE untouched. They become ready again and the attempt does not count. Safe to repeat."""
    calls = (session.client.release(queue, **chunk, **checks) for chunk in _id_chunks(ids, lease_ids))
    settle_all(session, calls, "items were released", lambda released: f"Released {released:,}", released=0)


@click.command()
@_ids_options
@duration_option("--lease-timeout", help="New lease duration from now. [default: the queue's]")
@connected
def extend(
    session: Session, queue: str, ids: tuple[str, ...], lease_ids: tuple[str, ...], lease_timeout: str | None, **checks: Any
) -> None:
    """Extend leases of QUEUE, given by id or by their items. Safe to repeat."""

    def text(leases: list[Lease]) -> str:
        lines = (f"Extended {each.lease_id}: {each.count} until {each.lease_deadline.astimezone():%H:%M:%S}" for each in leases)
        return "\n".join(lines) or "No leases extended"

    calls = (session.client.extend(queue, lease_timeout=lease_timeout, **chunk, **checks) for chunk in _id_chunks(ids, lease_ids))
    settle_all(session, calls, "leases were extended", text, leases=[])


@click.command()
@queue_argument()
@click.argument("ids", nargs=-1, required=True, metavar="ID...|-")
@duration_option("--after", help="Delay before the items are served again; 0s: none. [default: the queue's back-off]")
@click.option("--dead", is_flag=True, help="Move the items to the dead queue instead; without one they are dropped.")
@click.option("--reason", help="Reason of death. Only with --dead.")
@_check_options
@connected
def retry(session: Session, queue: str, ids: tuple[str, ...], after: str | None, dead: bool, reason: str | None, **checks: Any) -> None:
    """Put leased items of QUEUE back for another attempt: ids, or ids on stdin (`-`). Safe to repeat."""
    if dead and after is not None:
        raise click.UsageError("--after and --dead exclude each other")
    if reason and not dead:
        raise click.UsageError("--reason needs --dead")
    from sluiceway.client import Retry

    outcomes = (Retry(id, retry_after=after, dead=dead, reason=reason) for id in arguments_or_stdin(ids, "ids"))
    calls = (session.client.retry(queue, chunk, **checks) for chunk in chunks(outcomes, MAX_ITEMS_JSON))

    def text(retried: int, died: int) -> str:
        return f"Put back {retried:,}" + (f", dead {died:,}" if died or dead else "")

    settle_all(session, calls, "items were put back", text, retried=0, dead=0)


@click.command()
@queue_argument()
@click.argument("ids", nargs=-1, required=True, metavar="ID...|-")
@connected
def drop(session: Session, queue: str, ids: tuple[str, ...]) -> None:
    """Permanently delete ready or scheduled items of QUEUE, without the dead queue: ids, or ids on stdin (`-`).

    Safe to repeat.
    """
    calls = (session.client.delete_items(queue, chunk) for chunk in chunks(arguments_or_stdin(ids, "ids"), MAX_ITEMS_JSON))
    settle_all(session, calls, "items were deleted", lambda deleted: f"Deleted {deleted:,}", deleted=0)
