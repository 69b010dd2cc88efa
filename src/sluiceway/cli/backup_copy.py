"""Copy of a running server's backup into a store of backups, over HTTP."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from sluiceway.cli.backup_format import Manifest, Piece, SavedBlob, SavedPartition
from sluiceway.cli.backup_store import Backups, BackupWriter
from sluiceway.cli.common import chunks, counted
from sluiceway.cli.session import Session
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_BACKUP_BLOBS
from sluiceway.kernel.terminal_text import plain

if TYPE_CHECKING:
    from sluiceway.client import Client
    from sluiceway.contract.backup_answers import BackupBegun, BackupPartition, RecordsPart

TRIES: Final = 5
"""Backups that are begun, if a partition was reopened since one began, and may have dropped what it has."""
PAUSE: Final = 0.5
"""Seconds between two of them, in which the partition opens."""
OTHER_BACKUP: Final = 75.0
"""Seconds to wait for the end of another backup of the server: a little longer than it keeps that of a command that was killed."""
TELL_EVERY: Final = 0.2
"""Seconds between two lines of progress."""

BlobName = tuple[str, int, int, str]
"""Incarnation, partition, number, state."""


def copy_backup(session: Session, backups: Backups) -> Manifest:
    """Take a backup, and copy it. What the newest backup there has is not copied again.

    One that cannot be read to its end is taken again, and another command's is waited for.
    """
    left, until = TRIES, time.monotonic() + OTHER_BACKUP
    while True:
        try:
            return _copied(session, backups)
        except SluicewayError as error:
            is_other = error.code == "too_many_requests"
            left -= not is_other
            if time.monotonic() > until if is_other else not left or not _may_pass(error):
                raise
            time.sleep(PAUSE)


def _may_pass(error: SluicewayError) -> bool:
    """Whether a partition was reopened since the backup began, or is not open yet. Without an answer there is no server to try again."""
    return error.code in ("snapshot_gone", "unavailable") and getattr(error, "request_id", None) is not None


def _copied(session: Session, backups: Backups) -> Manifest:
    client = session.client
    begun = client.begin_backup()
    try:
        with backups.written(begun.taken_at) as writer:
            # Not before: from here on no other command removes what this one refers to.
            manifest = _Copy(client, begun, writer, _earlier(backups), session.progress).run()
            writer.finish(manifest)
    except OSError as error:
        raise invalid("dir", f"{backups.name} cannot be written: {error.strerror}") from error
    finally:
        # The copy is complete or not, whatever becomes of the server. Without this call it ends the backup by itself.
        with contextlib.suppress(SluicewayError):
            client.end_backup(begun.backup_id)
    return manifest


def _earlier(backups: Backups) -> dict[BlobName, Piece]:
    """The blobs of the newest backup whose manifest can be read, as far as their packs are there."""
    found = backups.store.contents()
    for each in reversed(found.ids):
        try:
            manifest = backups.manifest(each)
        except SluicewayError as error:
            click.echo(f"warning: {plain(error.detail)}", err=True)
            continue
        return {
            (partition.incarnation, partition.partition, blob.number, blob.state): blob.piece
            for partition in manifest.partitions
            for blob in partition.blobs
            if blob.piece.end <= found.packs.get(blob.piece.pack, 0)
        }
    return {}


class _Copy:
    """Copies a backup that was begun."""

    def __init__(self, client: Client, begun: BackupBegun, writer: BackupWriter, earlier: dict[BlobName, Piece], shows: bool) -> None:
        self._client, self._begun, self._writer, self._earlier, self._shows = client, begun, writer, earlier, shows
        self._bytes = self._done = 0
        self._told_at = 0.0

    def run(self) -> Manifest:
        """Copy all of it. Returns the manifest to write."""
        begun = self._begun
        meta = [self._add(part.data) for part in self._parts(None)]
        partitions = [self._partition(each) for each in begun.partitions]
        if self._shows:
            click.echo("\r\x1b[K", nl=False, err=True)
        return Manifest(
            backup_id=self._writer.backup_id,
            taken_at=begun.taken_at,
            version=begun.version,
            meta_layout=begun.meta_layout,
            partition_layout=begun.partition_layout,
            meta=meta,
            partitions=partitions,
        )

    def _parts(self, of: BackupPartition | None) -> Iterator[RecordsPart]:
        incarnation, partition = (None, None) if of is None else (of.incarnation, of.partition)
        start: int | None = 0
        while start is not None:
            part = self._client.backup_records(self._begun.backup_id, incarnation, partition, start)
            yield part
            start = part.next

    def _partition(self, of: BackupPartition) -> SavedPartition:
        records: list[Piece] = []
        states: dict[int, str] = {}
        for part in self._parts(of):
            records.append(self._add(part.data))
            states.update(part.blobs)
        known = {number: self._earlier.get((of.incarnation, of.partition, number, state)) for number, state in states.items()}
        pieces = {number: piece for number, piece in known.items() if piece is not None}
        pieces |= self._blobs(of, sorted(states.keys() - pieces.keys()))
        self._done += 1
        return SavedPartition(
            queue_name=of.queue_name,
            incarnation=of.incarnation,
            partition=of.partition,
            backend=of.backend,
            records=records,
            blobs=[SavedBlob(number, state, pieces[number]) for number, state in sorted(states.items())],
        )

    def _blobs(self, of: BackupPartition, numbers: list[int]) -> dict[int, Piece]:
        pieces: dict[int, Piece] = {}
        for chunk in chunks(numbers, MAX_BACKUP_BLOBS):
            left = chunk
            while left:
                part = self._client.backup_blobs(self._begun.backup_id, of.incarnation, of.partition, left)
                pieces |= {number: self._add(data) for number, data in part.blobs.items()}
                left = [number for number in left if number not in part.blobs]
        return pieces

    def _add(self, data: bytes) -> Piece:
        self._bytes += len(data)
        if self._shows and (now := time.monotonic()) >= self._told_at + TELL_EVERY:
            self._told_at = now
            said = f"{self._done} of {counted(len(self._begun.partitions), 'partition')}, {size_text(self._bytes)} copied"
            click.echo(f"\r\x1b[K{said}", nl=False, err=True)
            sys.stderr.flush()
        return self._writer.add(data)


def described(manifest: Manifest) -> dict[str, object]:
    """A backup as JSON."""
    return {
        "backup": manifest.backup_id,
        "taken_at": manifest.taken_at.isoformat(),
        "version": manifest.version,
        "queues": len({each.incarnation for each in manifest.partitions}),
        "partitions": len(manifest.partitions),
        "blobs": sum(len(each.blobs) for each in manifest.partitions),
        "bytes": manifest.size,
        "new_bytes": manifest.written,
    }


def contents(manifest: Manifest) -> str:
    """How many queues and partitions a backup has, in words."""
    queues = len({each.incarnation for each in manifest.partitions})
    return f"{counted(queues, 'queue')}, {counted(len(manifest.partitions), 'partition')}"


def size_text(size: int) -> str:
    """A number of bytes in words."""
    for unit, number in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= number:
            return f"{size / number:.1f} {unit}"
    return f"{size} bytes"
