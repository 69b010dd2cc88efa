"""What a process takes of the machine, and a folder of the disk, as /proc and the file system have it."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_TICK: Final = os.sysconf("SC_CLK_TCK")
_FIXED: Final = 20_000
"""Steps of a fixed piece of work: a millisecond or two."""
_STATUS: Final = re.compile(r"^(VmRSS|RssAnon|Threads):\s+(\d+)", re.MULTILINE)
_PSS: Final = re.compile(r"^Pss:\s+(\d+)", re.MULTILINE)


class Vitals(NamedTuple):
    """Of one process. Memory in bytes."""

    resident: int
    anonymous: int
    """Resident memory that is no file's: what a leak takes."""
    handles: int
    sockets: int
    """Those of the handles that are sockets."""
    threads: int
    processor: float
    """Seconds of processor time since its start, of all threads."""


def vitals(pid: int) -> Vitals | None:
    """None if there is no such process any more."""
    place = Path(f"/proc/{pid}")
    try:
        status = {name: int(value) for name, value in _STATUS.findall((place / "status").read_text())}
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        targets = [_target(each) for each in os.scandir(place / "fd")]
    except OSError:
        return None
    if "VmRSS" not in status:
        # It has ended, and was not waited for yet.
        return None
    return Vitals(
        1024 * status["VmRSS"],
        1024 * status["RssAnon"],
        len(targets),
        sum(each.startswith("socket:") for each in targets),
        status["Threads"],
        (int(fields[11]) + int(fields[12])) / _TICK,
    )


def _target(handle: os.DirEntry[str]) -> str:
    with suppress(OSError):
        return os.readlink(handle.path)
    return ""


def proportional(pid: int) -> int | None:
    """The process's share of all memory that it uses, in bytes (PSS). The kernel goes through all of it: milliseconds."""
    with suppress(OSError):
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
        return None if found is None else 1024 * int(found[1])
    return None


class Stored(NamedTuple):
    files: int
    bytes: int
    """What they take of the disk."""


def stored(folder: Path) -> Stored:
    """All files in the folder and below. Files may come and go meanwhile."""
    files = size = 0
    with suppress(OSError):
        for each in os.scandir(folder):
            with suppress(OSError):
                if each.is_dir(follow_symlinks=False):
                    below = stored(Path(each.path))
                    files, size = files + below.files, size + below.bytes
                else:
                    files, size = files + 1, size + 512 * each.stat(follow_symlinks=False).st_blocks
    return Stored(files, size)


def yardstick() -> float:
    """Milliseconds that a fixed piece of work takes: how slow the machine is at the moment, with everything that runs on it."""
    began = time.perf_counter()
    sum(number % 7 for number in range(_FIXED))
    return 1_000 * (time.perf_counter() - began)


def machine_busy() -> tuple[float, float]:
    """Seconds that all processors together have computed, and all seconds, since the machine's start."""
    values = [int(each) / _TICK for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(values) - values[3] - values[4], sum(values)
