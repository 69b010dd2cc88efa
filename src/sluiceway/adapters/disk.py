"""What plain files need to survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make the names in the directory durable: a file that was created or removed there stays so after a power cut. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(directory: Path) -> None:
    """Create the directory, and the parents that are missing, so that they stay there after a power cut. Raises OSError."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)


def write_durably(path: Path, text: str) -> None:
    """Write a small file, in a directory that is there, so that after a power cut it is there whole or not at all. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)
