"""`sluiceway backup`: backups of a running server in a directory of this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import click

from sluiceway.cli.common import Output, WholeNumber, counted, printing, table
from sluiceway.cli.session import Session, connected
from sluiceway.kernel.errors import SluicewayError

TRIES: Final = 5
"""A partition that was reopened since the backup began may have dropped what it has: then another backup is begun."""
PAUSE: Final = 0.5
"""Seconds between two of them, in which the partition opens."""
DIRECTORY: Final = click.Path(file_okay=False, path_type=Path)


class _Commands(click.Group):
    """`sluiceway backup DIR` is short for `sluiceway backup create DIR`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["create", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Commands)
def backup() -> None:
    """Back up a running server into a directory: sluiceway backup DIR. Verify, list and prune its backups."""


@backup.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@connected
def create(session: Session, directory: Path) -> None:
    """Back up a running server into DIR, which may have earlier backups; what they have already is not copied again.

    The backup has everything that the server stores as of one moment. Needs an API key with the scope admin.

    The short form is `sluiceway backup DIR`. `sluiceway restore DIR --data NEW` restores the newest backup.
    """
    from sluiceway.cli.backup_copy import contents, copy_backup, described, size_text
    from sluiceway.cli.backup_directory import BackupDirectory

    target = BackupDirectory(directory)
    for left in reversed(range(TRIES)):
        try:
            manifest = copy_backup(session, target)
            break
        except SluicewayError as error:
            # Without an answer there is no server to try again.
            if not left or error.code not in ("snapshot_gone", "unavailable") or getattr(error, "request_id", None) is None:
                raise
            time.sleep(PAUSE)
    size, new = size_text(manifest.size), size_text(manifest.written)
    session.print(described(manifest), f"Backup {manifest.backup_id}: {contents(manifest)}, {size}, of which {new} are new")


@backup.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.option("--backup", "backup_id", metavar="ID", help="Only this backup. [default: all]")
@printing
def verify(output: Output, directory: Path, backup_id: str | None) -> None:
    """Read the backups in DIR, and compare all of it with its checksums. Fails if anything is damaged or missing."""
    from sluiceway.cli.backup_directory import BackupDirectory, Piece

    target = BackupDirectory(directory)
    verified: set[Piece] = set()
    bad = 0
    for each in target.ids() if backup_id is None else [backup_id]:
        try:
            damage = target.damage(target.manifest(each), verified)
        except SluicewayError as error:
            damage = [error.detail]
        bad += bool(damage)
        output.print({"backup": each, "damage": damage}, "\n".join([f"{each}: {'damaged' if damage else 'good'}", *damage]))
    if bad:
        raise SluicewayError("invalid_request", f"{counted(bad, 'backup')} in {directory} cannot be restored", "dir")


@backup.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.option("--keep", type=WholeNumber(1), required=True, help="Number of backups to keep: the newest ones.")
@printing
def prune(output: Output, directory: Path, keep: int) -> None:
    """Remove old backups from DIR, and what no other backup there needs."""
    from sluiceway.cli.backup_copy import size_text
    from sluiceway.cli.backup_directory import BackupDirectory

    removed, freed = BackupDirectory(directory).prune(keep)
    text = "\n".join([*(f"Removed {each}" for each in removed), f"{counted(len(removed), 'backup')} removed, {size_text(freed)} freed"])
    output.print({"removed": removed, "freed_bytes": freed}, text)


@backup.command("list")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@printing
def list_backups(output: Output, directory: Path) -> None:
    """List the backups in DIR, oldest first."""
    from sluiceway.cli.backup_copy import contents, described, size_text
    from sluiceway.cli.backup_directory import BackupDirectory

    target = BackupDirectory(directory)
    found = [target.manifest(each) for each in target.ids()]
    rows = [
        (each.backup_id, f"{each.taken_at:%Y-%m-%d %H:%M:%S}", contents(each), size_text(each.size), size_text(each.written), each.version)
        for each in found
    ]
    shown = table(("backup", "taken at", "contents", "size", "new", "version"), rows, right=("size", "new"))
    output.print_all([described(each) for each in found], shown, f"No complete backup in {directory}")
