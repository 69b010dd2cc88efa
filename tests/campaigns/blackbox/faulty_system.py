"""A disk that fails, fills up and dawdles, and a clock that is set: for one server's processes, by a library that is loaded before theirs.

It needs no root, only Linux and a C compiler (`cc`).
"""

from __future__ import annotations

import errno
import mmap
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

_LAYOUT = struct.Struct("qiiii")
_SOURCE = Path(__file__).with_suffix(".c")


class Mischief(NamedTuple):
    """What is to happen. All zeros: nothing."""

    clock: int = 0
    """Seconds by which the wall clock is ahead."""
    write_error: int = 0
    sync_error: int = 0
    delay: float = 0.0
    """Seconds by which each write and each sync comes late."""


FULL = Mischief(write_error=errno.ENOSPC)
READ_ONLY = Mischief(write_error=errno.EROFS)
BROKEN = Mischief(write_error=errno.EIO)
UNSYNCED = Mischief(sync_error=errno.EIO)
SLOW = Mischief(delay=0.05)


def library(folder: Path) -> Path:
    """The compiled library, in that folder. Raises OSError without a C compiler."""
    built = folder / "faulty_system.so"
    if not built.exists():
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise OSError("they need a C compiler")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"the C compiler failed: {done.stderr[-300:]}")
    return built


class FaultySystem:
    """For the processes that are started with this environment, and for what they write below `data`. Raises OSError where that cannot
    be."""

    def __init__(self, folder: Path, name: str, data: Path) -> None:
        self._library = library(folder)
        self._path = folder / f"{name}.control"
        self._path.write_bytes(bytes(_LAYOUT.size))
        self._data = data
        with self._path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _LAYOUT.size)

    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "BLACKBOX_CONTROL": str(self._path), "BLACKBOX_FOLDER": str(self._data)}

    def befall(self, mischief: Mischief) -> None:
        """From now on, until the next call."""
        self._shared[:] = _LAYOUT.pack(mischief.clock, mischief.write_error, mischief.sync_error, round(mischief.delay * 1_000_000), 0)

    def end(self) -> int:
        """Let all be well again; how many writes and syncs were struck."""
        struck = int(_LAYOUT.unpack(self._shared[:])[-1])
        self.befall(Mischief())
        return struck
