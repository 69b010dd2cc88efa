"""Disk reserve: room kept on a disk, so that operations that free room still work when the disk is full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE = "reserve"
HELD = 8
"""One part in this many of the reserve is a file: other programs cannot take it, and it survives restarts."""
SHARE = 4
"""On a small disk, at most one part in this many is reserved."""


class DiskReserve:
    """The reserve on one directory's disk. Call `look` before use and regularly: only it measures the disk."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self._wanted = size
        self._size = self._owed = 0
        self._file = directory / FILE
        self.free = 0
        """Bytes available to files, as of the last look."""
        self.is_low = False
        """Less than the reserve is left: nothing may be added."""
        self.is_given_up = False
        """The reserve file is gone, since operations that free room needed its room."""

    @property
    def size(self) -> int:
        """Size of the reserve on this disk, in bytes."""
        return self._size

    @property
    def spare(self) -> int:
        """Bytes that may be added before the reserve is touched."""
        return max(0, self._left() - self._size)

    def look(self, owed: int = 0) -> None:
        """Measure the free room, of which `owed` bytes count as taken; give up the reserve file, or recreate it. Raises OSError."""
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
        """Create the reserve file; of several processes one succeeds. On failure, only the free room serves as reserve."""
        with contextlib.suppress(OSError):
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, max(1, self._size // HELD))
            except OSError:
                self._file.unlink(missing_ok=True)
            finally:
                os.close(handle)
