"""Format of backups, the same in a directory and in a bucket. docs/reference/backup-format.md describes it.

A backup is a manifest, which names pieces of packs with their checksums. Its own packs are written first and its manifest last, in one
step: whatever interrupts a backup leaves the earlier ones as they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sluiceway.kernel.errors import SluicewayError, invalid

FORMAT: Final = 1
"""Raised when an older version could not read what is written."""
MANIFESTS: Final = "backups"
PACKS: Final = "packs"
SUFFIX: Final = ".json"
MAX_PIECE: Final = 1 << 30
"""Bytes of a piece, which is read as a whole: more than the largest blob."""
_SUM_BYTES: Final = 16
# A manifest may be another's: what it names is looked for in its own store, and nowhere else.
_NAME: Final = r"\A[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z"
_ID: Final = re.compile(_NAME)
_Name = Annotated[str, Meta(pattern=_NAME)]
_Incarnation = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9]{1,64}\Z")]
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """A part of a pack, with its checksum: BLAKE2b of 16 bytes, in hexadecimal."""

    pack: _Name
    at: _Number
    size: Annotated[int, Meta(ge=0, le=MAX_PIECE)]
    checksum: str

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return self.at + self.size


class SavedBlob(msgspec.Struct, array_like=True, frozen=True):
    """A blob of a partition. `state`: what its bytes depend on, beside the number."""

    number: _Number
    state: str
    piece: Piece


class SavedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition: its records, in parts, and its blobs."""

    queue_name: _Name
    incarnation: _Incarnation
    partition: _Number
    backend: _Name
    records: list[Piece]
    blobs: list[SavedBlob]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One backup."""

    format: int = FORMAT
    backup_id: _Name
    taken_at: datetime
    version: str
    meta_layout: int
    partition_layout: int
    meta: list[Piece]
    partitions: list[SavedPartition]

    def pieces(self) -> Iterator[Piece]:
        """All pieces of the backup."""
        yield from self.meta
        for partition in self.partitions:
            yield from partition.records
            yield from (blob.piece for blob in partition.blobs)

    @property
    def size(self) -> int:
        """Bytes of all pieces, those of earlier backups included."""
        return sum(piece.size for piece in self.pieces())

    @property
    def written(self) -> int:
        """Bytes of the pieces that this backup has added."""
        return sum(piece.size for piece in self.pieces() if backup_of(piece.pack) == self.backup_id)


class _Format(msgspec.Struct):
    format: int


def seal(manifest: Manifest) -> bytes:
    """The manifest as it is stored, with its checksum."""
    text = msgspec.json.encode(manifest)
    return text + b"\n" + checksum(text).encode() + b"\n"


def unseal(stored: bytes, backup_id: str) -> Manifest:
    """The manifest that was stored. Raises `invalid_request` if it is damaged, or of a newer version."""
    lines = stored.split(b"\n")
    if len(lines) != 3 or lines[2] or checksum(lines[0]).encode() != lines[1]:
        raise damaged(backup_id, f"{MANIFESTS}/{backup_id}{SUFFIX} does not have its checksum")
    try:
        if (found := msgspec.json.decode(lines[0], type=_Format).format) > FORMAT:
            what = f"backup {backup_id} was written by a newer version of Sluiceway (format {found}; this one knows {FORMAT})"
            raise invalid("dir", what)
        return msgspec.json.decode(lines[0], type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(backup_id, f"{MANIFESTS}/{backup_id}{SUFFIX} is no manifest: {error}") from None


def check_id(backup_id: str) -> None:
    """Raise `invalid_request` unless a backup may be called so."""
    if not _ID.fullmatch(backup_id):
        raise invalid("backup", f"{backup_id!r} is not the id of a backup")


def pack_name(backup_id: str, number: int) -> str:
    """The name of a backup's pack of that number."""
    return f"{backup_id}.{number}"


def backup_of(pack: str) -> str:
    """The backup that has written the pack."""
    return pack.partition(".")[0]


def moment_text(taken_at: datetime) -> str:
    """The moment of a backup, with which its id begins: ids sort by it, unless the server's clock was set back."""
    return f"{taken_at:%Y-%m-%dT%H%M%S}Z"


def checksum(data: bytes) -> str:
    """The checksum of a piece or a manifest."""
    return blake2b(data, digest_size=_SUM_BYTES).hexdigest()


def damaged(backup_id: str, what: str) -> SluicewayError:
    """The error of a backup of which something is missing or wrong."""
    return SluicewayError("invalid_request", f"backup {backup_id} is damaged: {what}", "dir")
