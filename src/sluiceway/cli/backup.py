"""`sluiceway backup`: backups of a running server in a directory of this machine or in a bucket."""

from __future__ import annotations

from pathlib import Path

import click

from sluiceway.cli.backup_targets import METAVAR, TARGET, opened
from sluiceway.cli.common import Output, WholeNumber, counted, printing, table
from sluiceway.cli.session import Session, connected
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.terminal_text import plain


class _Commands(click.Group):
    """`sluiceway backup DIR` is short for `sluiceway backup create DIR`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["create", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Commands)
def backup() -> None:
    """Back up a running server into a directory or a bucket: sluiceway backup DIR. Verify, list and prune its backups."""


@backup.command()
@click.argument("target", metavar=METAVAR, type=TARGET)
@connected
def create(session: Session, target: Path | str) -> None:
    """Back up a running server into a directory or a bucket, which may have earlier backups; what they have already is not copied again.

    A bucket is s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER, or env:NAME or file:PATH with such a URL.

    The backup has everything that the server stores as of one moment. Needs an API key with the scope admin.

    The short form is `sluiceway backup DIR`. `sluiceway restore DIR --data NEW` restores the newest backup.
    """
    from sluiceway.cli.backup_copy import contents, copy_backup, described, size_text

    with opened(target) as backups:
        manifest = copy_backup(session, backups)
    size, new = size_text(manifest.size), size_text(manifest.written)
    session.print(described(manifest), f"Backup {manifest.backup_id}: {contents(manifest)}, {size}, of which {new} are new")


@backup.command()
@click.argument("target", metavar=METAVAR, type=TARGET)
@click.option("--backup", "backup_id", metavar="ID", help="Only this backup. [default: all]")
@printing
def verify(output: Output, target: Path | str, backup_id: str | None) -> None:
    """Read the backups there, and compare all of it with its checksums. Fails if anything is damaged or missing, or if there is none."""
    from sluiceway.cli.backup_format import Piece

    verified: set[Piece] = set()
    bad = 0
    with opened(target) as backups:
        ids = backups.ids() if backup_id is None else [backup_id]
        if not ids:
            # Such as in another folder of the bucket: whoever asks means to have one.
            raise backups.none_there()
        for each in ids:
            try:
                damage = backups.damage(backups.manifest(each), verified)
            except SluicewayError as error:
                if error.retryable:
                    raise
                damage = [error.detail]
            bad += bool(damage)
            said = "\n".join([f"{each}: {'damaged' if damage else 'good'}", *damage])
            output.print({"backup": each, "damage": damage}, plain(said))
        if bad:
            raise SluicewayError("invalid_request", f"{counted(bad, 'backup')} in {backups.name} cannot be restored", "dir")


@backup.command()
@click.argument("target", metavar=METAVAR, type=TARGET)
@click.option("--keep", type=WholeNumber(1), required=True, help="Number of backups to keep: the newest ones.")
@printing
def prune(output: Output, target: Path | str, keep: int) -> None:
    """Remove old backups, and what no other backup there needs."""
    from sluiceway.cli.backup_copy import size_text

    with opened(target) as backups:
        removed, freed = backups.prune(keep)
    lines = [*(f"Removed {plain(each)}" for each in removed), f"{counted(len(removed), 'backup')} removed, {size_text(freed)} freed"]
    text = "\n".join(lines)
    output.print({"removed": removed, "freed_bytes": freed}, text)


@backup.command("list")
@click.argument("target", metavar=METAVAR, type=TARGET)
@printing
def list_backups(output: Output, target: Path | str) -> None:
    """List the backups there, oldest first."""
    from sluiceway.cli.backup_copy import contents, described, size_text

    with opened(target) as backups:
        found = [backups.manifest(each) for each in backups.ids()]
        rows = [
            (
                each.backup_id,
                f"{each.taken_at:%Y-%m-%d %H:%M:%S}",
                contents(each),
                size_text(each.size),
                size_text(each.written),
                each.version,
            )
            for each in found
        ]
        shown = table(("backup", "taken at", "contents", "size", "new", "version"), rows, right=("size", "new"))
        output.print_all([described(each) for each in found], shown, f"No complete backup in {backups.name}")
