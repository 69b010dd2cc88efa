"""A real ext4 file system on a loop device whose power can be cut: what was not synced is gone. Linux, and root, only."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from pathlib import Path
from typing import Self

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: from now on nothing reaches the device."""
NO_LOG_FLUSH = 2
"""Not even what the journal holds in memory: as if the power had gone."""
IMAGE_BYTES = 256 << 20


class LoopDiskError(Exception):
    """This machine does not allow it, and why."""


class LoopDisk:
    """Mounted at `mount` for the length of a block. Raises LoopDiskError on entering."""

    def __init__(self, folder: Path) -> None:
        self._image = folder / "disk.img"
        self.mount = folder / "disk"
        self._device = ""

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise LoopDiskError("loop devices need root")
        self.mount.mkdir()
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self._device = _run("losetup", "--find", "--show", str(self._image)).strip()
        try:
            self.power_on()
        except LoopDiskError:
            _run("losetup", "--detach", self._device)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _run("umount", str(self.mount))
        finally:
            _run("losetup", "--detach", self._device)

    def cut(self) -> None:
        """The power goes. Whatever writes from now on is told of an error."""
        handle = os.open(self.mount, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(handle, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(handle)

    def power_on(self) -> None:
        _run("mount", "-t", "ext4", self._device, str(self.mount))

    def restart(self) -> None:
        """After `cut`, when nobody has a file open any more."""
        _run("umount", str(self.mount))
        self.power_on()


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LoopDiskError(f"{command[0]}: {getattr(error, 'stderr', '') or error}") from error
