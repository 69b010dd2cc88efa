"""Data-directory lock: exclusive for one process, or shared by the processes of one cluster."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_FILE = "lock"


class DirectoryInUseError(Exception):
    """The directory is in use in a conflicting way. Names the directory, the owner, and what to do."""


class DirectoryLock:
    """Owns a directory from construction until `release`, or until the process dies, however it dies.

    `shared` locks are compatible with each other, and with no exclusive one. Raises DirectoryInUseError at once on conflict; OSError if the
    lock file cannot be written.
    """

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        # The file stays behind: unlinking it would let two owners lock two files of the same name.
        # Nor is it a link, which another user may have put into a directory for all of them: what it leads to would be overwritten.
        self._file = os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not self._take(shared):
                raise DirectoryInUseError(self._refusal(directory, shared))
            # The process id is for operators. The lock holds without it, so a full disk is no obstacle.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(self._file)
            raise

    def _take(self, shared: bool) -> bool:
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _refusal(self, directory: Path, shared: bool) -> str:
        # Every shared owner writes its id there: the first is one of them.
        owner = next(iter(os.pread(self._file, 32, 0).decode("ascii", "replace").split()), "unknown")
        if shared:
            way = "a standalone server, so no instance of a cluster can use it; stop that server first"
        elif self._take(shared=True):
            return (
                f"{directory} is in use by instances of a cluster (the last one to start had the process id {owner}), so a standalone "
                "server cannot use it; stop all of them first, or join their cluster with the same [cluster] meta"
            )
        else:
            way = "another server; stop that server first, or use another directory"
        return f"{directory} is in use by the process with id {owner}, {way}"

    def release(self) -> None:
        os.close(self._file)


def has_been_used(directory: Path) -> bool:
    """Whether the directory is locked, or ever was."""
    return (directory / _FILE).exists()


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Serialise blocks for this directory across processes; others wait, so keep them short. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
