"""Directory of backups on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from sluiceway.cli.backup_format import MANIFESTS, PACKS, SUFFIX, Manifest, Piece, backup_of, checksum, moment_text, pack_name, seal
from sluiceway.cli.backup_store import Contents
from sluiceway.kernel.durability import sync_directory
from sluiceway.kernel.errors import SluicewayError, invalid

_LOCK: Final = "lock"
_PACK_BYTES: Final = 1 << 30
"""Size from which on a backup begins another pack."""


class BackupDirectory:
    """BackupStore in a directory. One command at a time changes it, under a lock that ends with the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._manifests, self._packs = path / MANIFESTS, path / PACKS

    @property
    def name(self) -> str:
        return str(self._path)

    def ids(self) -> list[str]:
        if not self._manifests.is_dir():
            raise invalid("dir", f"{self._path} has no backups")
        names = (each.name for each in self._manifests.iterdir() if each.suffix == SUFFIX)
        return sorted(name.removesuffix(SUFFIX) for name in names if name[0] != ".")

    def manifest(self, backup_id: str) -> bytes | None:
        try:
            return self._manifest(backup_id).read_bytes()
        except FileNotFoundError:
            return None

    def _manifest(self, backup_id: str) -> Path:
        return self._manifests / f"{backup_id}{SUFFIX}"

    def contents(self) -> Contents:
        packs = {pack.name: pack.stat().st_size for pack in self._packs.iterdir()}
        return Contents(packs, self.ids(), is_changing=False)

    def read(self, pack: str, at: int, size: int) -> bytes:
        with (self._packs / pack).open("rb") as file:
            file.seek(at)
            return file.read(size)

    @contextlib.contextmanager
    def begin(self, taken_at: datetime) -> Iterator[DirectoryWriter]:
        for folder in (self._path, self._packs, self._manifests):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            found = self.contents()
            backup_id = _new_id(taken_at, {*found.ids, *map(backup_of, found.packs)})
            with DirectoryWriter(self._packs, self._manifest(backup_id), backup_id) as writer:
                yield writer

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        # That there is a directory of backups.
        self.ids()
        with self._locked():
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Nothing is written to it. In a directory that others may write to, it could be a link to a file of this user.
        with open(os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SluicewayError("unavailable", f"another command is changing {self._path}", "dir") from None
            yield

    def remove_backups(self, ids: Sequence[str]) -> None:
        for each in ids:
            self._manifest(each).unlink()
        # Before a pack of theirs goes.
        sync_directory(self._manifests)

    def remove_packs(self, packs: Sequence[str]) -> None:
        for name in packs:
            (self._packs / name).unlink()


class DirectoryWriter:
    """BackupWriter in a directory."""

    def __init__(self, packs: Path, manifest: Path, backup_id: str) -> None:
        self.backup_id = backup_id
        self._packs, self._manifest = packs, manifest
        self._part = manifest.with_name(f".{manifest.name}.part")
        self._files: list[Path] = []
        self._file: BinaryIO | None = None
        self._at = 0
        self._is_finished = False

    def add(self, data: bytes) -> Piece:
        if self._file is None or self._at >= _PACK_BYTES:
            self._close()
            path = self._packs / pack_name(self.backup_id, len(self._files))
            self._file, self._at = _create(path), 0
            self._files.append(path)
        self._file.write(data)
        self._at += len(data)
        return Piece(self._files[-1].name, self._at - len(data), len(data), checksum(data))

    def finish(self, manifest: Manifest) -> None:
        self._close()
        sync_directory(self._packs)
        self._part.unlink(missing_ok=True)
        with _create(self._part) as file:
            file.write(seal(manifest))
            file.flush()
            os.fsync(file.fileno())
        self._part.replace(self._manifest)
        self._is_finished = True
        for folder in (self._part.parent, self._packs.parent, self._packs.parent.absolute().parent):
            sync_directory(folder)

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
            # On a full disk it tries once more to write what it holds, and fails.
            with contextlib.suppress(OSError):
                self._file.close()
        if not self._is_finished:
            for path in (*self._files, self._part):
                path.unlink(missing_ok=True)


def _new_id(taken_at: datetime, known: set[str]) -> str:
    name = moment_text(taken_at)
    return next(each for each in (name, *(f"{name}-{number}" for number in range(2, len(known) + 3))) if each not in known)


def _create(path: Path) -> BinaryIO:
    """Create a file that no other user may read: it has payloads, and hashes of API keys."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
