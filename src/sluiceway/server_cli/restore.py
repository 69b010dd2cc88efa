"""`sluiceway restore`: a backup into a new data folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluiceway.cli.backup_targets import METAVAR, TARGET, opened
from sluiceway.cli.common import FILE, Output, counted, printing

if TYPE_CHECKING:
    from sluiceway.instance.restoration import Restored

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("target", metavar=METAVAR, type=TARGET)
@click.option("--data", type=FOLDER, required=True, help="Data folder of the restored server: a new one, or an empty one.")
@click.option("--backup", "backup_id", metavar="ID", help="The backup. [default: the newest]")
@click.option("--config", type=FILE, help="Configuration file of the restored server, if the backup has partitions on other backends.")
@printing
def restore(output: Output, target: Path | str, data: Path, backup_id: str | None, config: Path | None) -> None:
    """Restore a backup in a directory or a bucket into a new data folder.

    Then start a server on it: `sluiceway serve --data NEW`. Stop the server that was backed up before, if it still runs.

    The ids that the restored server gives to items and leases differ from all that the other has given since the backup.
    """
    from sluiceway.server_cli.saved_backup import StoredBackup, restore_backup

    with opened(target) as backups:
        manifest = backups.last() if backup_id is None else backups.manifest(backup_id)
        restored = restore_backup(StoredBackup(manifest, backups), data, config, _progress(output, len(manifest.partitions)))
    text = f"Restored backup {manifest.backup_id} into {data}: {_text(restored)}\nStart it: sluiceway serve --data {data}"
    output.print({"backup": manifest.backup_id, "queues": restored.queues, "partitions": restored.partitions}, text)


def _progress(output: Output, of: int) -> Callable[[Restored], None]:
    def tell(restored: Restored) -> None:
        # One line that is overwritten.
        sys.stderr.write(f"\r{restored.partitions:,} of {counted(of, 'partition')}, {restored.bytes / 1e6:,.1f} MB\x1b[K")
        if restored.partitions == of:
            sys.stderr.write("\n")
        sys.stderr.flush()

    return tell if output.progress else lambda _: None


def _text(restored: Restored) -> str:
    return f"{counted(restored.queues, 'queue')}, {counted(restored.partitions, 'partition')}, {restored.bytes / 1e6:,.1f} MB of items"
