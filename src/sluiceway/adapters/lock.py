"""One process per data directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class DirectoryInUseError(Exception):
    """Another store, in this or another process, owns the data directory. Names the directory and the process id."""


class DirectoryLock:
    """Owns a directory from construction until `release`, or until the process dies, however it dies.

    Raises DirectoryInUseError at once if it is owned already; OSError if the lock file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        # The file stays behind: unlinking it would let two owners lock two files of the same name.
        self._file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            raise DirectoryInUseError(f"{directory} is in use by the process with id {owner}") from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._file)
