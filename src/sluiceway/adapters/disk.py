"""File durability across power cuts, and file privacy."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

from sluiceway.kernel.durability import sync_directory

log = logging.getLogger(__name__)

_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600


def make_directory(directory: Path) -> None:
    """Create the directory and its missing parents durably, surviving a power cut. Raises OSError."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)


def write_durably(path: Path, text: str, *, private: bool = False) -> None:
    """Write a small file atomically into an existing directory: after a power cut it is there whole or not at all. `private`: no other user
    may read it. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    # Not through a link, which another user may have put there: what it leads to would be overwritten.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(part, flags, _PRIVATE_FILE if private else 0o666), "w", encoding="utf-8") as file:
        if private:
            os.fchmod(file.fileno(), _PRIVATE_FILE)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)


def keep_private(directory: Path) -> None:
    """Create the directory if missing, and revoke all rights of other users to it and to Sluiceway's files in it, whatever the umask.
    Revoked rights are logged. Raises OSError."""
    if not directory.exists():
        make_directory(directory)
        directory.chmod(_PRIVATE_FOLDER)
        return
    if directory.stat().st_mode & stat.S_ISVTX:
        log.warning("%s is a directory for all users of this machine and was not changed; give Sluiceway its own directory", directory)
        wide = []
    else:
        mode = stat.S_IMODE(directory.stat().st_mode)
        wide = [f"the directory ({mode:03o})"] if _narrow(directory, _PRIVATE_FOLDER) else []
    files = sum(1 for path in directory.iterdir() if _is_ours(path.name) and _narrow(path, _PRIVATE_FILE))
    wide += [f"{files} files in it"] if files else []
    if wide:
        log.warning("%s was open to other users of this machine: %s; now it is not", directory, " and ".join(wide))


def create_private(path: Path) -> None:
    """Create an empty file that no other user may read, whatever the umask; an existing one stays. SQLite gives a database's side files the
    same rights. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE_FILE)
        try:
            os.fchmod(handle, _PRIVATE_FILE)
        finally:
            os.close(handle)


def keep_database_private(path: Path) -> None:
    """Revoke other users' rights to a SQLite database, wherever it lies; creates it if missing. Raises OSError."""
    create_private(path)
    if not path.is_file():
        # Not a file, such as a directory named by mistake: leave its rights alone, SQLite reports the problem.
        return
    files = [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm")]
    if sum(_narrow(file, _PRIVATE_FILE) for file in files):
        log.warning("%s was open to other users of this machine; now it is not", path)


def _is_ours(name: str) -> bool:
    return name in ("lock", "identity", "reserve") or name.endswith((".sqlite", ".sqlite-wal", ".sqlite-shm", ".sqlite-journal"))


def _narrow(path: Path, mode: int) -> bool:
    """Whether other users had rights to it. Leaves files of other owners, which only these can change, and missing files alone."""
    try:
        if path.is_symlink() or not path.stat().st_mode & 0o077:
            return False
        path.chmod(path.stat().st_mode & mode)
    except PermissionError:
        log.warning(
            "%s is open to other users of this machine, and belongs to another user; its owner should run: chmod go= %s", path, path
        )
        return False
    except FileNotFoundError:
        return False
    return True
