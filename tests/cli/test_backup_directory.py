"""A directory of backups on a disk that fills up."""

from __future__ import annotations

import errno
import io
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import pytest

from sluiceway.cli import backup_directory
from sluiceway.cli.backup_directory import BackupDirectory
from sluiceway.cli.backup_format import Manifest
from sluiceway.cli.backup_store import Backups

AT = datetime(2026, 1, 31, 8, tzinfo=UTC)


class FullDisk:
    """`backup_directory._create`, on a disk that has room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def create(self, path: Path) -> BinaryIO:
        disk = self

        class File(io.FileIO):
            def write(self, data: object) -> int:
                taken = memoryview(data)[: disk.room]  # type: ignore[arg-type]
                if not taken:
                    raise OSError(errno.ENOSPC, "No space left on device")
                disk.room -= len(taken)
                return super().write(taken)

        return io.BufferedWriter(File(path, "x"))


@pytest.mark.parametrize("room", [0, 1_000, 20_000, 100_010])
def test_a_backup_that_fills_the_disk_leaves_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Its packs stayed, and with them the disk full, which may be that of the server."""
    monkeypatch.setattr(backup_directory, "_create", FullDisk(room).create)
    backups = Backups(BackupDirectory(tmp_path))

    def copy() -> None:
        with backups.written(AT) as writer:
            pieces = [writer.add(bytes(size)) for size in (100, 9_900, 90_000)]
            writer.finish(
                Manifest(
                    backup_id=writer.backup_id, taken_at=AT, version="1", meta_layout=1, partition_layout=1, meta=pieces, partitions=[]
                )
            )

    with pytest.raises(OSError, match="No space left"):
        copy()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]
    assert backups.ids() == []
