"""Backups in a store: a directory (`backup_directory.py`) or a bucket (`server_cli/backup_bucket.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Final, NamedTuple, Protocol

from sluiceway.cli.backup_format import Manifest, Piece, backup_of, check_id, checksum, damaged, unseal
from sluiceway.kernel.errors import SluicewayError, invalid

MAX_SPAN: Final = 8 << 20
"""Bytes that are read together: a request to a bucket takes as long as a megabyte."""
MAX_GAP: Final = 1 << 20
"""Unneeded bytes between two pieces that are read together."""


class Contents(NamedTuple):
    """What a store has. The packs, with their sizes, were looked at before the backups, whose ids are sorted.

    `is_changing`: another command may be writing a backup, which may need any of the packs.
    """

    packs: Mapping[str, int]
    ids: Sequence[str]
    is_changing: bool


class BackupWriter(Protocol):
    """Writes the packs of a new backup, then its manifest. Without `finish`, nothing stays."""

    @property
    def backup_id(self) -> str: ...

    def add(self, data: bytes) -> Piece:
        """Append bytes to the packs."""
        ...

    def finish(self, manifest: Manifest) -> None:
        """Make the backup complete, durably and in one step."""
        ...


class BackupStore(Protocol):
    """Where backups are. What a manifest names never changes, so reading needs no lock. Methods raise OSError, and `unavailable`."""

    @property
    def name(self) -> str:
        """What the operator calls it, without secrets."""
        ...

    def ids(self) -> list[str]:
        """The complete backups, oldest first. Raises `invalid_request` if this is no store of backups."""
        ...

    def manifest(self, backup_id: str) -> bytes | None:
        """The stored manifest; None: there is no such backup."""
        ...

    def contents(self) -> Contents: ...

    def read(self, pack: str, at: int, size: int) -> bytes:
        """Those bytes of the pack, fewer at its end. Raises OSError if there is no such pack."""
        ...

    def begin(self, taken_at: datetime) -> AbstractContextManager[BackupWriter]:
        """A writer of a new backup, for the length of a block. From its begin on, no other command removes a pack that a backup needs which
        is complete then. Raises `unavailable` where there can be only one at a time."""
        ...

    def changing(self) -> AbstractContextManager[None]:
        """A block in which backups are removed. Raises `unavailable` while one is written."""
        ...

    def remove_backups(self, ids: Sequence[str]) -> None:
        """Remove the manifests."""
        ...

    def remove_packs(self, packs: Sequence[str]) -> None: ...


class Backups:
    """The backups in a store."""

    def __init__(self, store: BackupStore) -> None:
        self.store = store

    @property
    def name(self) -> str:
        """What the operator calls the store."""
        return self.store.name

    def ids(self) -> list[str]:
        """The complete backups, oldest first. Raises `invalid_request` if this is no store of backups."""
        return self.store.ids()

    def manifest(self, backup_id: str) -> Manifest:
        """Read a backup's manifest. Raises `invalid_request` if there is none, it is damaged, or of a newer version."""
        check_id(backup_id)
        stored = self.store.manifest(backup_id)
        if stored is None:
            raise invalid("backup", f"{self.name} has no backup {backup_id}; list them with `sluiceway backup list`")
        return unseal(stored, backup_id)

    def last(self) -> Manifest:
        """The manifest of the newest backup. Raises as `ids` and `manifest` do."""
        found = self.ids()
        if not found:
            raise self.none_there()
        return self.manifest(found[-1])

    def none_there(self) -> SluicewayError:
        """The error of a store without a backup."""
        return invalid("dir", f"{self.name} has no complete backup")

    def read(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        """The bytes of each piece. Raises `invalid_request` if they are missing or damaged."""
        for piece, data, problem in self._read(pieces):
            if problem:
                raise damaged(backup_of(piece.pack), problem)
            yield data

    def damage(self, manifest: Manifest, verified: set[Piece]) -> list[str]:
        """What is wrong with the pieces of a backup, in words; those in `verified` are known to be right, and right ones are added."""
        found = []
        for piece, _, problem in self._read(sorted(set(manifest.pieces()) - verified, key=lambda piece: (piece.pack, piece.at))):
            if problem:
                found.append(damaged(backup_of(piece.pack), problem).detail)
            else:
                verified.add(piece)
        return found

    def _read(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, bytes, str]]:
        """Each piece with its bytes, and what is wrong with them in words."""
        for span in spans(pieces):
            first, pack = span[0].at, span[0].pack
            try:
                data = self.store.read(pack, first, span[-1].end - first)
            except OSError as error:
                yield from ((piece, b"", f"the pack {pack} cannot be read: {error.strerror}") for piece in span)
                continue
            for piece in span:
                found = data[piece.at - first : piece.end - first]
                yield piece, found, _problem(piece, found)

    @contextlib.contextmanager
    def written(self, taken_at: datetime) -> Iterator[BackupWriter]:
        """A writer of a new backup. What an interrupted one left is removed first, if no other one is being written."""
        with self.store.begin(taken_at) as writer:
            # What a damaged manifest names is not known.
            with contextlib.suppress(SluicewayError):
                self._remove_unneeded()
            yield writer

    def prune(self, keep: int) -> tuple[list[str], int]:
        """Remove all backups but the newest `keep`, and what only they had. Returns the removed ones, and the bytes that this freed.

        Raises `invalid_request` if one that stays has a damaged manifest, and `unavailable` during a backup; nothing was removed then.
        """
        with self.store.changing():
            ids = self.ids()
            for each in ids[-keep:]:
                self.manifest(each)
            self.store.remove_backups(ids[:-keep])
            return ids[:-keep], self._remove_unneeded()

    def _remove_unneeded(self) -> int:
        """Remove the packs that no manifest names. Returns their bytes. Raises `invalid_request` if a manifest is damaged or was removed
        meanwhile."""
        found = self.store.contents()
        # A backup needs all of its own.
        others = {name: size for name, size in found.packs.items() if backup_of(name) not in found.ids}
        if found.is_changing or not others:
            return 0
        needed = {piece.pack for each in found.ids for piece in self.manifest(each).pieces()}
        unneeded = {name: size for name, size in others.items() if name not in needed}
        self.store.remove_packs(list(unneeded))
        return sum(unneeded.values())


def spans(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces that follow one another in a pack into runs to read together. Their order stays."""
    span: list[Piece] = []
    for piece in pieces:
        if span and not _follows(span, piece):
            yield span
            span = []
        span.append(piece)
    if span:
        yield span


def _follows(span: Sequence[Piece], piece: Piece) -> bool:
    gap = piece.at - span[-1].end
    return piece.pack == span[0].pack and 0 <= gap <= MAX_GAP and piece.end - span[0].at <= MAX_SPAN


def _problem(piece: Piece, data: bytes) -> str:
    """What is wrong with the bytes of a piece, in words."""
    if checksum(data) == piece.checksum:
        return ""
    what = "ends too early" if len(data) < piece.size else "does not have its checksum"
    return f"the pack {piece.pack} {what}, {piece.size:,} bytes at {piece.at:,}"
