"""Commands on queues as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import Session, connected, duration_option, print_table, table

if TYPE_CHECKING:
    from sluiceway.client import QueueInfo


@click.group()
def queue() -> None:
    """Create, list, show and delete queues."""


@queue.command()
@click.argument("name")
@click.option("--partitions", type=click.IntRange(1), help="[server's default: 1]")
@duration_option("--lease-timeout", help="How long a consumer may hold items unless it says otherwise. [server's default: 1m]")
@click.option("--max-attempts", type=click.IntRange(0), help="Leases an item may have used up before it is dead; 0: no limit.")
@click.option("--dead-queue", metavar="QUEUE", help="Where dead items go. It must exist.")
@click.option("--reference", help="A note of yours.")
@connected
def create(
    session: Session,
    name: str,
    partitions: int | None,
    lease_timeout: str | None,
    max_attempts: int | None,
    dead_queue: str | None,
    reference: str | None,
) -> None:
    """Create the queue NAME."""
    info = session.client.create_queue(
        name,
        requested_partitions=partitions,
        lease_timeout=lease_timeout,
        max_attempts=max_attempts,
        dead_queue=dead_queue,
        reference=reference,
    )
    count = len(info.partitions)
    session.print(info, f"created {info.queue_name} with {count} {'partition' if count == 1 else 'partitions'}")


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
    if session.as_json:
        for info in infos:
            session.print(info, "")
    elif infos:
        rows = [(i.queue_name, len(i.partitions), i.lease_timeout, i.max_attempts or "-", i.dead_queue or "-") for i in infos]
        print_table(
            table(("queue", "partitions", "lease timeout", "max attempts", "dead queue"), rows, right=("partitions", "max attempts"))
        )
    else:
        click.echo("no queues; make one with: sluiceway queue create NAME", err=True)


@queue.command()
@click.argument("name")
@connected
def info(session: Session, name: str) -> None:
    """Show the queue NAME."""
    answer = session.client.queue_info(name)
    rows = [
        ("queue", answer.queue_name),
        ("incarnation", answer.incarnation),
        ("created", f"{answer.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("lease timeout", answer.lease_timeout),
        ("max attempts", answer.max_attempts or "no limit"),
        ("dead queue", answer.dead_queue or "none"),
        ("reference", answer.reference or "-"),
        *((f"partition {part.partition}", f"{part.state}, on {part.backend}") for part in answer.partitions),
    ]
    session.print(answer, table(("", ""), rows))


@queue.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Also if there are items in it.")
@connected
def delete(session: Session, name: str, force: bool) -> None:
    """Delete the queue NAME, for good."""
    session.client.delete_queue(name, force=force)
    session.print({}, f"deleted {name}")
