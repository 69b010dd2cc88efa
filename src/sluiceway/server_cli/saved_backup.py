"""A backup in a directory or a bucket, as a restore reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.cli.backup_format import Manifest
from sluiceway.cli.backup_format import SavedPartition as Saved
from sluiceway.cli.backup_store import Backups
from sluiceway.instance.configuration import load
from sluiceway.instance.restoration import Restored, SavedPartition, restore
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.model.changes import PartitionRef
from sluiceway.ports.partition_store import DamagedError, FencedError, StoreUnavailableError


class StoredBackup:
    """A stored backup, as `restore` reads it."""

    def __init__(self, manifest: Manifest, backups: Backups) -> None:
        self._manifest, self._backups = manifest, backups
        self._saved = {PartitionRef(each.incarnation, each.partition): each for each in manifest.partitions}

    @property
    def layouts(self) -> tuple[int, int]:
        return self._manifest.meta_layout, self._manifest.partition_layout

    @property
    def partitions(self) -> Sequence[SavedPartition]:
        return [SavedPartition(ref, each.queue_name, each.backend) for ref, each in self._saved.items()]

    def meta(self) -> Iterator[bytes]:
        return self._backups.read(self._manifest.meta)

    def records(self, ref: PartitionRef) -> Iterator[bytes]:
        return self._backups.read(self._of(ref).records)

    def blobs(self, ref: PartitionRef) -> Iterator[tuple[int, bytes]]:
        blobs = self._of(ref).blobs
        return zip((blob.number for blob in blobs), self._backups.read(blob.piece for blob in blobs), strict=True)

    def _of(self, ref: PartitionRef) -> Saved:
        return self._saved[ref]


def restore_backup(source: StoredBackup, data: Path, config: Path | None, tell: Callable[[Restored], None]) -> Restored:
    """Restore the backup into `data` and the storage that the configuration names. Raises as `restore` does, and `unavailable`."""
    configuration = load(config).configuration
    if configuration.cluster.meta:
        raise invalid("config", "restore into a server of its own first, then bring it into the cluster: sluiceway cluster adopt DIR")
    try:
        return asyncio.run(restore(source, data, configuration.backends, tell))
    except DirectoryInUseError as error:
        raise SluicewayError("unavailable", str(error), "data") from error
    except (StoreUnavailableError, DamagedError, FencedError, OSError) as error:
        raise SluicewayError("unavailable", f"nothing was restored: {error}", "data") from error
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        # Its checksums are right, so it was written like that.
        raise invalid("dir", f"nothing was restored: the backup has records that this version cannot read: {error}") from error
