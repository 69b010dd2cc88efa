"""Commands on the upgrade of a server or cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import counted, table
from sluiceway.cli.session import Session, connected

if TYPE_CHECKING:
    from sluiceway.client import InstanceList


@click.group()
def upgrade() -> None:
    """Upgrade a running cluster, instance by instance: show the releases, and finalize."""


@upgrade.command()
@connected
def show(session: Session) -> None:
    """Show the release of each instance, and what remains to be done. Needs the scope `read:*` or `admin`."""
    found = session.client.list_instances()
    rows = [(each.instance, each.release or "-", _levels(each.levels)) for each in found.items]
    session.print(found, table(("instance", "release", "levels"), rows))
    if not session.as_json:
        click.echo(_remains(found), err=True)


@upgrade.command()
@connected
def finalize(session: Session) -> None:
    """Raise the compatibility level to the highest that all instances understand. Needs the scope `admin`.

    Run it once all instances have the new release and work well: after it, the release before cannot be started any more.
    """
    found = session.client.finalize_upgrade()
    session.print(found, f"Compatibility level {found.level}")
    if not session.as_json and (behind := _behind(found)):
        click.echo(behind, err=True)


def _remains(found: InstanceList) -> str:
    behind = _behind(found)
    if found.reachable_level > found.level:
        what = f"all instances understand {found.reachable_level}: run `sluiceway upgrade finalize`, or go back to the release before"
    else:
        what = behind or "nothing to finalize"
    return f"compatibility level {found.level}; {what}"


def _behind(found: InstanceList) -> str:
    """The instances that hold the level back, as text; empty: none does."""
    newest = max((each.levels[1] for each in found.items if each.levels), default=found.level)
    if found.reachable_level >= newest:
        return ""
    behind = [each.instance for each in found.items if not each.levels or each.levels[1] < newest]
    return f"{counted(len(behind), 'instance')} to upgrade before level {newest}: {', '.join(behind)}"


def _levels(levels: list[int] | None) -> str:
    return "-" if not levels else f"{levels[0]}–{levels[1]}" if levels[0] < levels[1] else str(levels[0])
