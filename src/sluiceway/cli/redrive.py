"""`sluiceway redrive`: dead items back to where they came from, a call at a time."""

from __future__ import annotations

from collections import Counter
from time import monotonic, sleep

import click

from sluiceway.cli.common import per_second
from sluiceway.cli.session import Session, connected, queue_argument
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_ARROW

CALL_ITEMS = 1_000
"""Items in one call: enough that the calls cost little, few enough that the progress is one."""


@click.command()
@queue_argument()
@click.option("--to", "target", metavar="QUEUE", help="Where they go. [default: the queue that each came from]")
@click.option("--reason", metavar="TEXT", help="Only items whose reason contains this.")
@click.option("--source", metavar="QUEUE", help="Only items that came from that queue.")
@click.option("--limit", type=click.IntRange(1), help=f"At most this many items. [default: {CALL_ITEMS:,}]")
@click.option(
    "--all", "everything", is_flag=True, help="As many as wait in QUEUE now; what dies again meanwhile is left for the next time."
)
@click.option("--rate", metavar="N/s", callback=per_second, help="At most this many items a second.")
@click.option("--dry-run", is_flag=True, help=f"Count them (up to {MAX_ITEMS_ARROW:,}) and move nothing.")
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
    """Send the items of the dead queue QUEUE back to where they came from, with no attempts."""
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
        session.fail(error, redriven, "items were sent back before this; the same command goes on with the others")
    if session.progress:
        click.echo("\r\x1b[K", err=True, nl=False)
    session.print({"matched": matched, "redriven": redriven, "targets": targets}, _told(matched, redriven, targets, dry_run))


def _told(matched: int, redriven: int, targets: Counter[str], dry_run: bool) -> str:
    text = f"would send back {matched:,}" if dry_run else f"sent back {redriven:,}"
    if not dry_run and matched > redriven:
        text += f"; {matched - redriven:,} still on the way"
    return "\n".join([text, *(f"{count:,} to {name}" for name, count in sorted(targets.items()))])
