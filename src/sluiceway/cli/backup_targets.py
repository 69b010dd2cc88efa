"""Where the commands find backups: a directory of this machine, or a bucket by its URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from sluiceway.cli.backup_store import Backups


_PREFIXES: Final = ("s3:", "gs:", "az:", "env:", "file:")


class _Target(click.Path):
    """A directory, or the text of a bucket's URL or of a reference to one."""

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = os.fspath(value)
        # With a slash too few, it would be a folder here.
        if "://" in text or text.startswith(_PREFIXES):
            return text
        return super().convert(value, param, ctx)


TARGET: Final = _Target(file_okay=False, path_type=Path)
METAVAR: Final = "DIR|BUCKET"


@contextlib.contextmanager
def opened(target: Path | str) -> Iterator[Backups]:
    """The backups there, for the length of a block. Raises `invalid_request` for a URL that leads to no bucket."""
    from sluiceway.cli.backup_store import Backups

    if isinstance(target, Path):
        from sluiceway.cli.backup_directory import BackupDirectory

        yield Backups(BackupDirectory(target))
        return
    # Only the server's distribution has buckets.
    from sluiceway.server_cli.backup_bucket import opened_bucket

    with opened_bucket(target) as bucket:
        yield Backups(bucket)
