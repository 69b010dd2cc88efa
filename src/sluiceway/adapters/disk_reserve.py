"""The room that is kept on a disk, so that what frees room can still be written when everything else is taken."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE = "reserve"
HELD = 8
"""One part of so many of the reserve is a file. Other programs cannot take it, and it is there at a start."""
SHARE = 4
"""Of a small disk no more than one part of so many is kept."""


class DiskReserve:
    """The disk of one directory. `look` before use, and again and again: nothing else asks the disk."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self._wanted = size
        self._size = self._owed = 0
        self._file = directory / FILE
        self.free = 0
        """Bytes that files may still take, as of the last look."""
        self.is_low = False
        """Less is left than is to be kept: nothing may be added."""
        self.is_given_up = False
        """The file is not there, since what frees room needs its room."""

    @property
    def size(self) -> int:
        """Bytes that are to be kept on this disk."""
        return self._size

    @property
    def spare(self) -> int:
        """Bytes that may be added before less is left than is to be kept."""
        return max(0, self._left() - self._size)

    def look(self, owed: int = 0) -> None:
        """Ask how much room there is, of which `owed` bytes are as good as taken; give the file up, or make it again. Raises OSError."""
        self._owed = owed
        self._measure()
        if self._held() > self.free:
            self._file.unlink(missing_ok=True)
            self._measure()
        elif not self._held() and self.free >= self._size > 0:
            self._make()
            self._measure()
        self.is_given_up = self._size > 0 and not self._held()
        self.is_low = self._left() < self._size + (self._size // HELD if self.is_low else 0)

    def _measure(self) -> None:
        found = os.statvfs(self.directory)
        self.free = found.f_bavail * found.f_frsize
        self._size = min(self._wanted, found.f_blocks * found.f_frsize // SHARE)

    def _left(self) -> int:
        return self.free + self._held() - self._owed

    def _held(self) -> int:
        try:
            return self._file.stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    def _make(self) -> None:
        """Of several processes one makes it. Where it cannot be, only the free room is kept."""
        with contextlib.suppress(OSError):
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, max(1, self._size // HELD))
            except OSError:
                self._file.unlink(missing_ok=True)
            finally:
                os.close(handle)
