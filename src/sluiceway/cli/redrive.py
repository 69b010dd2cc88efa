"""`sluiceway redrive`: moves dead items back to their source queues, in calls of limited size."""

from __future__ import annotations

from collections import Counter
from time import monotonic, sleep

import click

from sluiceway.cli.common import WholeNumber, per_second
from sluiceway.cli.session import Session, connected, queue_argument
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_ARROW

CALL_ITEMS = 1_000
"""Maximum items per call: large enough to be cheap, small enough to show progress."""


@click.command()
@queue_argument()
@click.option("--to", "target", metavar="QUEUE", help="Target queue. [default: each item's source queue]")
@click.option("--reason", metavar="TEXT", help="Only items whose reason contains this text.")
@click.option("--source", metavar="QUEUE", help="Only items that died in this queue.")
@click.option("--limit", type=WholeNumber(1), help=f"Maximum number of items. [default: {CALL_ITEMS:,}]")
@click.option("--all", "everything", is_flag=True, help="All items that wait in QUEUE now. Items that die again meanwhile stay there.")
@click.option("--rate", metavar="N/s", callback=per_second, help="Maximum items per second.")
@click.option("--dry-run", is_flag=True, help=f"Count the items (up to {MAX_ITEMS_ARROW:,}) without moving them.")
@connected
def redrive(
    session: Session,
    queue: str,
    target: str | None,
    reason: str | None,
    source: str | None,
    limit: int | None,
    everything: bool,
    rate: int | None,
    dry_run: bool,
) -> None:
    """Move the items of the dead queue QUEUE back to their source queues, with attempts reset."""
    if everything:
        if limit is not None:
            raise click.UsageError("--limit and --all exclude each other")
        limit = sum(part.ready for part in session.client.stats(queue).partitions)
    left = CALL_ITEMS if limit is None else limit
    most = MAX_ITEMS_ARROW if dry_run else min(CALL_ITEMS, rate or CALL_ITEMS)
    matched, redriven, targets = 0, 0, Counter[str]()
    try:
        while left:
            began = monotonic()
            answer = session.client.redrive(queue, target=target, limit=min(left, most), reason=reason, source=source, dry_run=dry_run)
            matched, redriven = matched + answer.matched, redriven + answer.redriven
            targets.update(answer.targets)
            left -= answer.matched
            if dry_run or not answer.matched:
                break
            if session.progress:
                click.echo(f"\r{redriven:,} items", err=True, nl=False)
            if rate and left:
                sleep(max(0.0, began + answer.matched / rate - monotonic()))
    except SluicewayError as error:
        session.fail(error, redriven, "items were sent back before this error; the same command continues with the rest")
    if session.progress:
        click.echo("\r\x1b[K", err=True, nl=False)
    session.print({"matched": matched, "redriven": redriven, "targets": targets}, _told(matched, redriven, targets, dry_run))


def _told(matched: int, redriven: int, targets: Counter[str], dry_run: bool) -> str:
    text = f"Would send back {matched:,}" if dry_run else f"Sent back {redriven:,}"
    if not dry_run and matched > redriven:
        text += f"; {matched - redriven:,} still in transit"
    return "\n".join([text, *(f"{count:,} to {name}" for name, count in sorted(targets.items()))])
