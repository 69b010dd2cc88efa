"""Commands that look at the cluster: its instances, and how they have divided the partitions."""

from __future__ import annotations

from datetime import datetime

import click

from sluiceway.cli.common import printable, table
from sluiceway.cli.session import Session, connected


@click.group()
def instance() -> None:
    """Look at the instances of a cluster."""


@instance.command("list")
@connected
def list_(session: Session) -> None:
    """List the instances as the one that answers (*) sees them. Needs the scope `read:*` or `admin`.

    With --json: one object, with how they divide the partitions.
    """
    found = session.client.list_instances()
    rows = [
        (
            *("*" if each.here else "", each.instance, each.address or "-", each.state, each.silent_for),
            *(_moment(each.joined_at), each.partitions),
        )
        for each in found.items
    ]
    session.print(found, table(("", "instance", "address", "state", "silent for", "joined", "partitions"), rows, right=("partitions",)))
    if not session.as_json:
        last = f"; last round {found.round.number}: {printable(found.round.trigger.encode())}" if found.round else ""
        click.echo(f"strategy {found.strategy}, era {found.era}{last}", err=True)


@instance.command()
@click.option("-n", "--count", type=click.IntRange(1, 100), default=20, show_default=True, help="At most this many, the newest.")
@connected
def rounds(session: Session, count: int) -> None:
    """List the last rounds, newest first: why there was one, and how many partitions moved. Needs the scope `read:*` or `admin`."""
    found = session.client.list_rounds(limit=count)
    numbers = ("round", "instances", "moved", "kept")
    rows = [
        (
            *(each.number, _moment(each.sealed_at), each.duration, len(each.participants), each.moved, each.kept),
            printable(each.trigger.encode()),
        )
        for each in found
    ]
    columns = ("round", "sealed", "took", "instances", "moved", "kept", "because")
    session.print_all(
        found, table(columns, rows, right=numbers), "no rounds: this server is alone, or its cluster has none (strategy claims)"
    )


def _moment(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"
