"""Disk room: watches the disks that an instance writes to, and refuses produces before they are full."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from sluiceway.adapters.disk_reserve import DiskReserve
from sluiceway.adapters.system import stopwatch
from sluiceway.kernel.clock import Millis
from sluiceway.model.health import Check

log = logging.getLogger(__name__)

DATA = "data"
"""Name of the data directory among the disks. Others are named after their backend, with a prefix."""
BACKEND = "backend "
LOOK_INTERVAL: Millis = 1_000
WRITTEN_TWICE = 2
"""A blob is written to the log, and then to the database."""


class DiskRoom:
    """The disks of the data directory and of the SQLite backends. `reserve`: bytes kept free on each; 0: no disk is watched.

    `on_change` is called when a disk becomes low, and when it no longer is.
    """

    def __init__(self, reserve: int, on_change: Callable[[], None]) -> None:
        self._reserve = reserve
        self._on_change = on_change
        self.disks: dict[str, DiskReserve] = {}
        self._owed: dict[str, Callable[[], int]] = {}
        self._spare = 0

    def watch(self, name: str, directory: Path, owed: Callable[[], int] = lambda: 0) -> None:
        """Watch this existing directory from now on. `owed`: bytes written to logs that will be written a second time."""
        if self._reserve:
            device = directory.stat().st_dev
            known = next((disk for disk in self.disks.values() if _is_on(disk, device)), None)
            self.disks[name] = disk = known or DiskReserve(directory, self._reserve)
            self._owed[name] = owed
            self._look_at(disk)
            self._count()

    def forget(self, name: str) -> None:
        self.disks.pop(name, None)
        self._owed.pop(name, None)

    def is_low(self, backend: str) -> bool:
        """Whether that backend's disk is too low to add anything."""
        disk = self.disks.get(BACKEND + backend)
        return disk is not None and disk.is_low

    @property
    def any_low(self) -> bool:
        return any(disk.is_low for disk in self.disks.values())

    def spend(self, nbytes: int) -> None:
        """Account for bytes about to be written. Checks the disks before the total can exceed their space."""
        if self.disks:
            self._spare -= nbytes * WRITTEN_TWICE
            if self._spare < 0:
                self.look()

    def look(self) -> None:
        """Check all disks now."""
        disks = self._each()
        before = [disk.is_low for disk in disks]
        for disk in disks:
            self._look_at(disk)
        self._count()
        if before != [disk.is_low for disk in disks]:
            self._on_change()

    def _each(self) -> list[DiskReserve]:
        """Each disk once, however many directories lie on it."""
        return list({id(disk): disk for disk in self.disks.values()}.values())

    def _count(self) -> None:
        # A quarter of the spare room: other instances and programs write to the same disks.
        self._spare = min((disk.spare // 4 for disk in self.disks.values() if not disk.is_low), default=1 << 20)

    def _look_at(self, disk: DiskReserve) -> None:
        was_low, was_given_up = disk.is_low, disk.is_given_up
        try:
            disk.look(sum(owed() for name, owed in self._owed.items() if self.disks[name] is disk))
        except OSError as error:
            log.debug("%s: the free space is not known: %s", disk.directory, error)
            return
        if disk.is_low and not was_low:
            log.error("%s", problem_of(disk))
        elif was_low and not disk.is_low:
            log.warning("%s has enough free space again: %s", disk.directory, size_of(disk.free))
        if disk.is_given_up and not was_given_up:
            log.error("%s: the reserve was released, so that items can be settled, cleared and deleted", disk.directory)

    def problems(self) -> list[str]:
        """Low disks, in words."""
        return [problem_of(disk) for disk in self._each() if disk.is_low]

    def low(self) -> dict[str, str]:
        """Why each low disk takes nothing, by the name it is watched under."""
        return {name: problem_of(disk) for name, disk in self.disks.items() if disk.is_low}

    def checks(self) -> list[Check]:
        """The health check of each disk."""
        began = stopwatch()
        self.look()
        took = round((stopwatch() - began) * 1000)
        found = []
        for name, disk in self.disks.items():
            detail = problem_of(disk) if disk.is_low else f"{size_of(disk.free)} free"
            found.append(Check(f"disk of {name}", not disk.is_low, detail, took))
        return found


def _is_on(disk: DiskReserve, device: int) -> bool:
    try:
        return disk.directory.stat().st_dev == device
    except OSError:
        # Its directory has gone, which is no reason not to watch another one.
        return False


def problem_of(disk: DiskReserve) -> str:
    return (
        f"the disk of {disk.directory} is full: {size_of(disk.free)} free, and {size_of(disk.size)} are kept for settling, clearing and "
        "deleting. Produces are refused. Complete or clear items, delete queues, or free disk space"
    )


def size_of(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:,.1f} MiB"
