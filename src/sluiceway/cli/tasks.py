"""`sluiceway tasks`: look at captures, whose tasks divide a change stream; also when none of their processes lives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from sluiceway.cli.common import Output, counted, print_json, print_table, printing, table
from sluiceway.cli.config import FILE
from sluiceway.kernel.errors import SluicewayError, invalid

if TYPE_CHECKING:
    from sluiceway.contract.capture_answers import TaskGroup, TaskSummary, UnseenTasks

T = TypeVar("T")


@click.group()
def tasks() -> None:
    """Look at captures, who reads which partition of a change stream and how far, and end them."""


def of_meta_store(command: Callable[..., T]) -> Callable[..., T]:
    """Gives a command the options that say where captures keep what they have in common."""
    config = click.option("--config", type=FILE, help="The configuration of a server whose meta store it is (cluster.meta).")
    meta = click.option(
        "--meta",
        metavar="URL",
        help="The meta store: sqlite:PATH, postgresql://…, etcd://…; or env:NAME or file:PATH that holds it. [default: cluster.meta]",
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
    from sluiceway.cli import task_tables as view
    from sluiceway.wire.json_tasks import summary

    url = _meta_url(meta, config)
    found: list[TaskSummary | UnseenTasks] = []
    for name, begun in sorted(asyncio.run(captures(url)).items()):
        try:
            found.append(summary(_group(name, url, None)))
        except SluicewayError as error:
            # A log that is somewhere else, and cannot be read, does not hide the others.
            if begun.log == "meta":
                raise
            found.append(unseen(name, begun, error.detail))
    rows = table(view.LIST_COLUMNS, [view.list_row(each) for each in found], right=view.LIST_NUMBERS)
    output.print_all(found, rows, "no captures")


@tasks.command()
@click.argument("name")
@of_meta_store
@click.option("--log", metavar="WHERE", help="Where its sync log is: meta, or kafka:HOST:PORT[,HOST:PORT]. [default: as it was begun]")
@click.option("--tree", is_flag=True, help="Show children below their parents.")
@printing
def show(output: Output, name: str, meta: str | None, config: Path | None, log: str | None, tree: bool) -> None:
    """Show the capture NAME: its members, its partitions, who reads them, how far, and what waits for what.

    What is shown is what the sync log and the meta store say: no process needs to live for that, and a member that has just died is
    shown until the others have noticed. Alarms say what does not go on without somebody's help.
    """
    import asyncio

    from sluiceway.adapters.system import now
    from sluiceway.capture import captures
    from sluiceway.cli import task_tables as view

    url = _meta_url(meta, config)
    known = asyncio.run(captures(url))
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise invalid("name", f"there is no capture {name[:64]!r} in this meta store; there are: {there}")
    group = _group(name, url, log)
    if output.as_json:
        print_json(group)
        return
    for each in (view.facts(group, now()), view.members(group), view.partitions(group, tree)):
        # A heading alone says nothing.
        if each.rows:
            print_table(each)
            click.echo()
    for line in view.trouble(group):
        click.echo(line)


@tasks.command()
@click.argument("name")
@of_meta_store
@click.option("--gone", is_flag=True, help="All of its processes are gone, also those that the log still has.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@printing
def forget(output: Output, name: str, meta: str | None, config: Path | None, gone: bool, yes: bool) -> None:
    """End the capture NAME for good: drop its log, its positions and its election from the meta store.

    It is refused while members are at work. What it says then is elsewhere, and stays; the records that were handed on do, too.
    """
    import asyncio

    from sluiceway.capture import forget as drop

    url = _meta_url(meta, config)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("this drops how far the capture is, for good; give --yes if that is meant")
        if not click.confirm(f"forget how far {name} is, for good?", err=True):
            click.echo("nothing was dropped", err=True)
            return
    forgotten = asyncio.run(drop(name, url, gone=gone))
    lines = [f"forgot {name}: {counted(forgotten.keys, 'key')}", *(f"stays: {each}" for each in forgotten.left)]
    output.print({"name": name, "keys": forgotten.keys, "left": list(forgotten.left)}, "\n".join(lines))


# ---- looking --------------------------------------------------------------------------------------------------------------


def _meta_url(meta: str | None, config: Path | None) -> str:
    """Raises as `load` does."""
    from sluiceway.instance.configuration import load

    url = meta or load(config).configuration.cluster.meta
    if not url:
        raise click.UsageError("say where the captures keep what they have in common: --meta URL, or --config FILE")
    return url


def _group(name: str, url: str, log: str | None) -> TaskGroup:
    import asyncio
    import logging

    from sluiceway.adapters.system import now
    from sluiceway.capture import look
    from sluiceway.capture.presenter import group_of

    # What the client of Kafka says of a server that does not answer is in the error, once.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    return group_of(asyncio.run(look(name, url, log)), now())
