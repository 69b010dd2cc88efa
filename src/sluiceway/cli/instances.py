"""Commands on the cluster: its instances, and how they divide the partitions."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from sluiceway.cli.common import printable, table
from sluiceway.cli.session import Session, connected


@click.group()
def instance() -> None:
    """Look at the instances of a cluster, and change the times by which they go."""


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
@click.option("--settle-timeout", metavar="DURATION", help="A round is sealed once no instance has joined it for so long.")
@click.option("--round-interval", metavar="DURATION", help="The least between two rounds.")
@click.option("--heartbeat-interval", metavar="DURATION", help="There is a round at least so often.")
@click.option("--beat-interval", metavar="DURATION", help="How often an instance shows that it lives.")
@click.option("--lease-timeout", metavar="DURATION", help="An instance that could not show it for so long serves nothing of its own.")
@click.option("--member-timeout", metavar="DURATION", help="An instance that was not heard of for so long is given up.")
@click.option("--strategy", type=click.Choice(["rounds", "claims"]), help="How the partitions are divided.")
@connected
def update(session: Session, **wanted: Any) -> None:
    """Change the times by which all instances go, while they run; a round follows. Needs the scope `admin`.

    What is not given stays as it is. An instance whose configuration sets a time has the cluster go by that again when it starts.
    """
    found = session.client.update_instances(**wanted)
    times = [(name, text) for name, text in (found.parameters or {}).items()]
    session.print(found, table(("time", "value"), [*times, ("strategy", found.strategy)]))


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
