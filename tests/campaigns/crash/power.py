"""A disk below SQLite that remembers which bytes and names were synced, and what a power cut at this moment may leave of the rest."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import apsw

from sluiceway.adapters import disk as disk_module
from sluiceway.adapters.meta import sqlite as sqlite_meta
from sluiceway.adapters.storage import partition_file
from sluiceway.adapters.storage import sqlite as sqlite_partitions
from sluiceway.kernel import durability

SECTOR = 512
"""What a disk writes whole: a cut tears a write between sectors."""


class Content:
    """One file: the bytes that are safe, and the changes since, in order."""

    def __init__(self) -> None:
        self.safe = bytearray()
        self.loose: list[tuple[int, bytes | None]] = []
        """(offset, data) of a write, (size, None) of a truncation."""

    def sync(self) -> None:
        for at, data in self.loose:
            _change(self.safe, at, data)
        self.loose.clear()

    def remains(self, chance: random.Random) -> bytes:
        """Each sector of each unsynced write is there or not, whatever the order in which they were written."""
        left = bytearray(self.safe)
        share = chance.choice((0.0, 0.3, 0.7, 1.0))
        for at, data in self.loose:
            if data is None:
                if chance.random() < share:
                    _change(left, at, None)
                continue
            for start in range(0, len(data), SECTOR):
                if chance.random() < share:
                    _change(left, at + start, data[start : start + SECTOR])
        return bytes(left)


def _change(content: bytearray, at: int, data: bytes | None) -> None:
    if data is None:
        del content[at:]
        return
    content.extend(bytes(max(0, at - len(content))))
    content[at : at + len(data)] = data


class PowerDisk(apsw.VFS):
    """The real disk under the folder `root`, which is empty at first, and a record of all that is written there."""

    def __init__(self, root: Path) -> None:
        self.base = apsw.vfs_names()[0]
        super().__init__("powered", self.base)
        self.root = root
        self.mutex = threading.RLock()
        self.before_change: Callable[[], None] = lambda: None
        """Called with each change and sync of a file, before it takes effect."""
        self.lies: Callable[[], bool] = lambda: False
        """Asked at each sync, of a file or a folder: whether to say that it is done and not to do it."""
        self._files: dict[Path, Content] = {}
        self._safe_files: dict[Path, Content] = {}
        self._safe_folders = {root}

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return PoweredFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        with self.mutex:
            self._files.pop(Path(filename), None)
            if syncdir:
                self.names_are_safe(Path(filename).parent)

    def content(self, path: Path) -> Content:
        with self.mutex:
            return self._files.setdefault(path, Content())

    def names_are_safe(self, folder: Path) -> None:
        """The folder was synced: what has been created there, and what has been removed, stays so."""
        with self.mutex:
            self._safe_files = {path: content for path, content in self._safe_files.items() if path.parent != folder}
            self._safe_files |= {path: content for path, content in self._files.items() if path.parent == folder}
            self._safe_folders |= {path for path in folder.iterdir() if path.is_dir()}

    def cut(self, target: Path, chance: random.Random) -> None:
        """Write what is left into `target`: the safe names only, or in some cuts all of them."""
        with self.mutex:
            all_names = chance.random() < 0.5
            for path, content in (self._files if all_names else self._safe_files).items():
                folders = {folder for folder in path.parents if folder.is_relative_to(self.root)}
                if all_names or folders <= self._safe_folders:
                    copy = target / path.relative_to(self.root)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(content.remains(chance))


class PoweredFile(apsw.VFSFile):
    def __init__(self, disk: PowerDisk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(disk.base, name, flags)
        self._disk = disk
        self._path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name or "")
        self._content = disk.content(self._path)
        self._names_follow = not flags[0] & apsw.SQLITE_OPEN_MAIN_DB
        """SQLite syncs the folder with the first sync of a log or journal, but not of a database."""

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.before_change()
        with self._disk.mutex:
            super().xWrite(data, offset)
            self._content.loose.append((offset, bytes(data)))

    def xTruncate(self, size: int) -> None:
        self._disk.before_change()
        with self._disk.mutex:
            super().xTruncate(size)
            self._content.loose.append((size, None))

    def xSync(self, flags: int) -> None:
        self._disk.before_change()
        super().xSync(flags)
        with self._disk.mutex:
            if self._disk.lies():
                return
            self._content.sync()
            if self._names_follow:
                self._names_follow = False
                self._disk.names_are_safe(self._path.parent)


@contextlib.contextmanager
def powered(root: Path) -> Iterator[PowerDisk]:
    """Every database of this process lies on a PowerDisk for the length of the block, and it hears of folders that are synced."""
    before = apsw.vfs_names()[0]
    disk = PowerDisk(root)
    really_sync = durability.sync_directory

    def sync_directory(folder: Path) -> None:
        really_sync(folder)
        if not disk.lies():
            disk.names_are_safe(folder)

    really_write = disk_module.write_durably

    def write_durably(path: Path, text: str, *, private: bool = False) -> None:
        # It replaces whole: what was there before, or nothing, is what a cut in between leaves.
        really_write(path, text, private=private)
        content = disk.content(path)
        content.loose.append((0, text.encode()))
        if not disk.lies():
            content.sync()
        sync_directory(path.parent)

    apsw.set_default_vfs("powered")
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(sqlite_partitions, "write_durably", write_durably))
            for module in (disk_module, partition_file, sqlite_partitions, sqlite_meta):
                stack.enter_context(mock.patch.object(module, "sync_directory", sync_directory))
            yield disk
    finally:
        apsw.set_default_vfs(before)
        disk.unregister()
