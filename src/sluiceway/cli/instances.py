"""Commands on the cluster: its instances and rounds."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from sluiceway.cli.common import WholeNumber, printable, table
from sluiceway.cli.session import Session, connected


@click.group()
def instance() -> None:
    """Show the instances of a cluster, and change its timings."""


@instance.command("list")
@connected
def list_(session: Session) -> None:
    """List the instances as seen by the one that answers (*). Needs the scope `read:*` or `admin`.

    With --json: one object, including the strategy and the last round.
    """
    found = session.client.list_instances()
    rows = [
        (
            *("*" if each.here else "", each.instance, each.address or "-", each.state, each.silent_for),
            *(each.zone or "-", _moment(each.joined_at), each.partitions, "-" if each.load is None else f"{each.load:.0%}"),
        )
        for each in found.items
    ]
    columns = ("", "instance", "address", "state", "silent for", "zone", "joined", "partitions", "load")
    session.print(found, table(columns, rows, right=("partitions", "load")))
    if not session.as_json:
        last = f"; last round {found.round.number}: {printable(found.round.trigger.encode())}" if found.round else ""
        click.echo(f"strategy {found.strategy}, era {found.era}{last}", err=True)


@instance.command()
@click.option("--settle-timeout", metavar="DURATION", help="Join window: a round is sealed once no instance has joined for this long.")
@click.option("--round-interval", metavar="DURATION", help="Minimum time between two rounds.")
@click.option("--heartbeat-interval", metavar="DURATION", help="Maximum age of a round.")
@click.option("--beat-interval", metavar="DURATION", help="Time between two heartbeats of an instance.")
@click.option(
    "--lease-timeout", metavar="DURATION", help="An instance stops serving after this long without a stored heartbeat of its own."
)
@click.option("--member-timeout", metavar="DURATION", help="The others replace an instance after this long without a heartbeat.")
@click.option("--strategy", type=click.Choice(["rounds", "claims"]), help="Assignment of partitions to instances.")
@click.option("--load-moves", type=WholeNumber(0, 20), help="Partitions that may move in a minute to level loads; 0: none.")
@connected
def update(session: Session, **wanted: Any) -> None:
    """Change the cluster's timings while it runs. A round follows. Needs the scope `admin`.

    Omitted options stay unchanged. An instance applies the timings in its own configuration again when it starts.
    """
    found = session.client.update_instances(**wanted)
    times = [(name, text) for name, text in (found.parameters or {}).items()]
    session.print(found, table(("time", "value"), [*times, ("strategy", found.strategy), ("load_moves", found.load_moves)]))


@instance.command()
@click.option("-n", "--count", type=WholeNumber(1, 100), default=20, show_default=True, help="Number of newest rounds.")
@connected
def rounds(session: Session, count: int) -> None:
    """List the latest rounds, newest first, with their triggers and moves. Needs the scope `read:*` or `admin`."""
    found = session.client.list_rounds(limit=count)
    numbers = ("round", "instances", "moved", "kept")
    rows = [
        (
            *(each.number, _moment(each.sealed_at), each.duration, len(each.participants), each.moved, each.kept),
            printable(each.trigger.encode()),
        )
        for each in found
    ]
    columns = ("round", "sealed", "duration", "instances", "moved", "kept", "trigger")
    session.print_all(
        found,
        table(columns, rows, right=numbers),
        "No rounds: a standalone server has none, and neither has a cluster with the strategy claims",
    )


def _moment(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"
