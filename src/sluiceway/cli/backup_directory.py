"""Directory of backups: its files, and how they are written and verified. docs/reference/backup-format.md describes them.

A backup is a manifest, which names pieces of pack files with their checksums. Its own pack is written first and its manifest last,
atomically: whatever interrupts a backup leaves the earlier ones as they were.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import msgspec

from sluiceway.kernel.errors import SluicewayError, invalid

FORMAT: Final = 1
"""Raised when an older version could not read what is written."""
_MANIFESTS: Final = "backups"
_PACKS: Final = "packs"
_LOCK: Final = "lock"
_SUFFIX: Final = ".json"
_PACK_BYTES: Final = 1 << 30
"""Size from which on a backup begins another pack."""
_SUM_BYTES: Final = 16


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """A part of a pack, with its checksum: BLAKE2b of 16 bytes, in hexadecimal."""

    pack: str
    at: int
    size: int
    checksum: str


class SavedBlob(msgspec.Struct, array_like=True, frozen=True):
    """A blob of a partition. `state`: what its bytes depend on, beside the number."""

    number: int
    state: str
    piece: Piece


class SavedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition: its records, in parts, and its blobs."""

    queue_name: str
    incarnation: str
    partition: int
    backend: str
    records: list[Piece]
    blobs: list[SavedBlob]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One backup."""

    format: int = FORMAT
    backup_id: str
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
        return sum(piece.size for piece in self.pieces() if piece.pack.startswith(f"{self.backup_id}."))


class _Format(msgspec.Struct):
    format: int


class BackupDirectory:
    """A directory of backups. Reading needs no lock: what a manifest names never changes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ids(self) -> list[str]:
        """The backups, oldest first. Raises `invalid_request` if this is no directory of backups."""
        folder = self.path / _MANIFESTS
        if not folder.is_dir():
            raise invalid("dir", f"{self.path} has no backups")
        return sorted(each.name.removesuffix(_SUFFIX) for each in folder.iterdir() if each.suffix == _SUFFIX and each.name[0] != ".")

    def manifest(self, backup_id: str) -> Manifest:
        """Read a backup's manifest. Raises `invalid_request` if there is none, it is damaged, or of a newer version."""
        path = self._manifest(backup_id)
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            raise invalid("backup", f"{self.path} has no backup {backup_id}; list them with `sluiceway backup list`") from None
        if len(lines) != 3 or lines[2] or _sum(lines[0]).encode() != lines[1]:
            raise _damaged(backup_id, f"{path} does not have its checksum")
        if (found := msgspec.json.decode(lines[0], type=_Format).format) > FORMAT:
            raise invalid(
                "dir", f"backup {backup_id} was written by a newer version of Sluiceway (format {found}; this one knows {FORMAT})"
            )
        return msgspec.json.decode(lines[0], type=Manifest)

    def last(self) -> Manifest:
        """The manifest of the newest backup. Raises as `ids` and `manifest` do."""
        found = self.ids()
        if not found:
            raise invalid("dir", f"{self.path} has no complete backup")
        return self.manifest(found[-1])

    def _manifest(self, backup_id: str) -> Path:
        if not backup_id or "/" in backup_id or backup_id[0] == ".":
            raise invalid("backup", f"{backup_id!r} is not the id of a backup")
        return self.path / _MANIFESTS / f"{backup_id}{_SUFFIX}"

    def damage(self, manifest: Manifest, verified: set[Piece]) -> list[str]:
        """What is wrong with the pieces of a backup, in words; those in `verified` are known to be right, and right ones are added."""
        found = []
        with Pieces(self) as pieces:
            for piece in sorted(set(manifest.pieces()) - verified, key=lambda piece: (piece.pack, piece.at)):
                try:
                    pieces.read(piece)
                except SluicewayError as error:
                    found.append(error.detail)
                else:
                    verified.add(piece)
        return found

    def pack_sizes(self) -> dict[str, int]:
        """The size of each pack, by name."""
        return {pack.name: pack.stat().st_size for pack in (self.path / _PACKS).iterdir()}

    def open_pack(self, name: str) -> BinaryIO:
        """Open a pack to read it. Raises OSError."""
        return (self.path / _PACKS / name).open("rb")

    @contextlib.contextmanager
    def written(self, taken_at: datetime) -> Iterator[BackupWriter]:
        """A writer of a new backup. Another one at the same time is refused. What an interrupted one left is removed first."""
        for folder in (self.path, self.path / _PACKS, self.path / _MANIFESTS):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            # What a damaged manifest names is not known.
            with contextlib.suppress(SluicewayError):
                self._remove_unneeded()
            known = {*self.ids(), *(name.partition(".")[0] for name in self.pack_sizes())}
            with BackupWriter(self, _new_id(taken_at, known)) as writer:
                yield writer

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.path / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SluicewayError("unavailable", f"another command is changing {self.path}", "dir") from None
            yield

    def prune(self, keep: int) -> tuple[list[str], int]:
        """Remove all backups but the newest `keep`, and what only they had. Returns the removed ones, and the bytes that this freed.

        Raises `invalid_request` if one that stays has a damaged manifest, and `unavailable` during a backup; nothing was removed then.
        """
        with self._locked():
            ids = self.ids()
            for each in ids[-keep:]:
                self.manifest(each)
            for each in ids[:-keep]:
                self._manifest(each).unlink()
            _sync(self.path / _MANIFESTS)
            return ids[:-keep], self._remove_unneeded()

    def _remove_unneeded(self) -> int:
        """Remove the packs that no manifest names. Returns their bytes. Raises `invalid_request` if a manifest is damaged."""
        needed = {piece.pack for each in self.ids() for piece in self.manifest(each).pieces()}
        unneeded = {name: size for name, size in self.pack_sizes().items() if name not in needed}
        for name in unneeded:
            (self.path / _PACKS / name).unlink()
        return sum(unneeded.values())


class Pieces:
    """Reads pieces of a directory's packs, each of which it keeps open."""

    def __init__(self, directory: BackupDirectory) -> None:
        self._directory = directory
        self._files: dict[str, BinaryIO] = {}

    def read(self, piece: Piece) -> bytes:
        """The bytes of a piece. Raises `invalid_request` if they are missing or damaged."""
        try:
            file = self._files.get(piece.pack)
            if file is None:
                file = self._files[piece.pack] = self._directory.open_pack(piece.pack)
            file.seek(piece.at)
            data = file.read(piece.size)
        except OSError as error:
            raise _damaged(piece.pack.partition(".")[0], f"the pack {piece.pack} cannot be read: {error.strerror}") from error
        if _sum(data) != piece.checksum:
            what = "ends too early" if len(data) < piece.size else "does not have its checksum"
            raise _damaged(piece.pack.partition(".")[0], f"the pack {piece.pack} {what}, {piece.size:,} bytes at {piece.at:,}")
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()


class BackupWriter:
    """Writes the pack of a new backup, then its manifest. Without `finish`, nothing stays."""

    def __init__(self, directory: BackupDirectory, backup_id: str) -> None:
        self.backup_id = backup_id
        self._directory = directory
        self._files: list[Path] = []
        self._file: BinaryIO | None = None
        self._at = 0
        self._is_finished = False

    def add(self, data: bytes) -> Piece:
        """Append bytes to the pack."""
        if self._file is None or self._at >= _PACK_BYTES:
            self._close()
            path = self._directory.path / _PACKS / f"{self.backup_id}.{len(self._files)}"
            self._file, self._at = _create(path), 0
            self._files.append(path)
        self._file.write(data)
        self._at += len(data)
        return Piece(self._files[-1].name, self._at - len(data), len(data), _sum(data))

    def finish(self, manifest: Manifest) -> None:
        """Make the backup complete, durably."""
        self._close()
        _sync(self._directory.path / _PACKS)
        path = self._directory.path / _MANIFESTS / f"{self.backup_id}{_SUFFIX}"
        part = path.with_name(f".{path.name}.part")
        part.unlink(missing_ok=True)
        text = msgspec.json.encode(manifest)
        with _create(part) as file:
            file.write(text + b"\n" + _sum(text).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        self._is_finished = True
        for folder in (path.parent, self._directory.path, self._directory.path.absolute().parent):
            _sync(folder)

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        if not self._is_finished:
            for path in self._files:
                path.unlink(missing_ok=True)


def _new_id(taken_at: datetime, known: set[str]) -> str:
    """An id that sorts after those of earlier backups, unless the server's clock was set back."""
    name = f"{taken_at:%Y-%m-%dT%H%M%S}Z"
    return next(each for each in (name, *(f"{name}-{number}" for number in range(2, len(known) + 3))) if each not in known)


def _create(path: Path) -> BinaryIO:
    """Create a file that no other user may read: it has payloads, and hashes of API keys."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(data: bytes) -> str:
    return blake2b(data, digest_size=_SUM_BYTES).hexdigest()


def _damaged(backup_id: str, what: str) -> SluicewayError:
    return SluicewayError("invalid_request", f"backup {backup_id} is damaged: {what}", "dir")
