"""`sluiceway tasks`: list, show and forget captures, whether or not their processes run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from sluiceway.cli.common import FILE, Output, counted, print_json, print_table, printing, table
from sluiceway.kernel.errors import SluicewayError, invalid

if TYPE_CHECKING:
    from sluiceway.contract.capture_answers import TaskGroup, TaskSummary, UnseenTasks

T = TypeVar("T")


@click.group()
def tasks() -> None:
    """List, show and forget captures of change streams."""


def of_meta_store(command: Callable[..., T]) -> Callable[..., T]:
    """Adds the options that choose the captures' meta store."""
    config = click.option("--config", type=FILE, help="Configuration file of a server with that meta store (cluster.meta).")
    meta = click.option(
        "--meta",
        metavar="URL",
        help="Meta store: sqlite:PATH, postgresql://…, etcd://…, or env:NAME or file:PATH with such a URL. [default: cluster.meta]",
    )
    return meta(config(command))


@tasks.command("list")
@of_meta_store
@printing
def list_(output: Output, meta: str | None, config: Path | None) -> None:
    """List the captures of a meta store."""
    import asyncio

    from sluiceway.capture import captures
    from sluiceway.capture.presenter import unseen
    from sluiceway.server_cli import task_tables as view
    from sluiceway.wire.json_tasks import summary

    url = _meta_url(meta, config)
    found: list[TaskSummary | UnseenTasks] = []
    for name, begun in sorted(asyncio.run(captures(url)).items()):
        try:
            found.append(summary(_group(name, url, None)))
        except SluicewayError as error:
            # An unreadable external log must not hide the other captures.
            if begun.log == "meta":
                raise
            found.append(unseen(name, begun, error.detail))
    rows = table(view.LIST_COLUMNS, [view.list_row(each) for each in found], right=view.LIST_NUMBERS)
    output.print_all(found, rows, "No captures")


@tasks.command()
@click.argument("name")
@of_meta_store
@click.option("--log", metavar="WHERE", help="Sync log: meta, or kafka:HOST:PORT[,HOST:PORT]. [default: as recorded]")
@click.option("--tree", is_flag=True, help="Show partitions as a tree, children below parents.")
@printing
def show(output: Output, name: str, meta: str | None, config: Path | None, log: str | None, tree: bool) -> None:
    """Show the capture NAME: members, and partitions with owner, progress and dependencies.

    The sync log and the meta store are read directly, so no process of the capture has to run. A member that has just died is listed until
    the others have noticed. Alarms are problems that need an operator.
    """
    import asyncio

    from sluiceway.adapters.system import now
    from sluiceway.capture import captures
    from sluiceway.server_cli import task_tables as view

    url = _meta_url(meta, config)
    known = asyncio.run(captures(url))
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise invalid("name", f"there is no capture {name[:64]!r} in this meta store; known captures: {there}")
    group = _group(name, url, log)
    if output.as_json:
        print_json(group)
        return
    for each in (view.facts(group, now()), view.members(group), view.partitions(group, tree)):
        # Skip tables without rows.
        if each.rows:
            print_table(each)
            click.echo()
    for line in view.trouble(group):
        click.echo(line)


@tasks.command()
@click.argument("name")
@of_meta_store
@click.option("--gone", is_flag=True, help="Confirm that all its processes are gone, including members that the log still lists.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@printing
def forget(output: Output, name: str, meta: str | None, config: Path | None, gone: bool, yes: bool) -> None:
    """Permanently remove the capture NAME: its log, positions and election in the meta store.

    Refused while members are active. Delivered records and external resources stay; the latter are listed.
    """
    import asyncio

    from sluiceway.capture import forget as drop

    url = _meta_url(meta, config)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("this permanently drops the capture's progress; pass --yes to confirm")
        if not click.confirm(f"Permanently drop the progress of {name}?", err=True):
            click.echo("Nothing dropped", err=True)
            return
    forgotten = asyncio.run(drop(name, url, gone=gone))
    lines = [f"Removed {name}: {counted(forgotten.keys, 'key')}", *(f"Remaining: {each}" for each in forgotten.left)]
    output.print({"name": name, "keys": forgotten.keys, "left": list(forgotten.left)}, "\n".join(lines))


# ---- reading --------------------------------------------------------------------------------------------------------------


def _meta_url(meta: str | None, config: Path | None) -> str:
    """Raises as `load` does."""
    from sluiceway.instance.configuration import load

    url = meta or load(config).configuration.cluster.meta
    if not url:
        raise click.UsageError("pass the captures' meta store: --meta URL, or --config FILE")
    return url


def _group(name: str, url: str, log: str | None) -> TaskGroup:
    import asyncio
    import logging

    from sluiceway.adapters.system import now
    from sluiceway.capture import look
    from sluiceway.capture.presenter import group_of

    # The error already reports an unreachable Kafka; its client would log it repeatedly.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    return group_of(asyncio.run(look(name, url, log)), now())
