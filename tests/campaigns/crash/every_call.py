"""Crashes one call of an instance at its nth system call, for every n. A process of its own, since it forks.

`python every_call.py CALL BASE COPIES` works on copies of the directory BASE, leaves them as the crashes left them, and prints a
line of JSON for each: the copy's name, and what the call answered before the process died (null if it did not).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pyarrow as pa

from sluiceway.instance.service import Service
from sluiceway.model.requests import DONE, Disposition, Lease, ProduceKey, Selection, Settle
from tests.instance.instance_rig import eventually, produce, spec, total
from tests.storage.test_sqlite_faults import Disk, DiskFile

BASE_ITEMS = ("a", "b", "c", "d", "e", "f")
"""a, b, e and f are in partition 0, of which a and b are in lease 1; c and d are in partition 1."""
NEW_ITEMS = ("x", "y", "z")
MAX_CALLS = 500


class DyingDisk(Disk):
    """A disk whose process dies at the nth call that changes it, once armed: before the call, or in the middle of a write."""

    def __init__(self, nth: int, halfway: bool) -> None:
        super().__init__(apsw.vfs_names()[0])
        self.left = nth
        self.halfway = halfway
        self.armed = False
        self.hook = lambda _call, _path: self.step()

    def is_last(self) -> bool:
        if self.armed:
            self.left -= 1
        return self.armed and self.left < 0

    def step(self) -> None:
        if self.is_last():
            os._exit(1)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return DyingFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.step()
        super().xDelete(filename, syncdir)


class DyingFile(DiskFile):
    def __init__(self, disk: DyingDisk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(disk, name, flags)
        self._dying = disk

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._dying.is_last():
            if self._dying.halfway:
                apsw.VFSFile.xWrite(self, data[: len(data) // 2], offset)
            os._exit(1)
        apsw.VFSFile.xWrite(self, data, offset)

    def xTruncate(self, size: int) -> None:
        self._dying.step()
        super().xTruncate(size)


# -- the calls, each safe to repeat ---------------------------------------------------------------


async def prepare(service: Service) -> None:
    await service.create_queue(spec("dead", 2))
    await service.create_queue(spec("q", 2, dead_queue="dead"))
    for n in range(0, len(BASE_ITEMS), 2):
        await produce(service, "q", *BASE_ITEMS[n : n + 2])
    await service.lease("q", Lease("c", 2, lease_timeout=1_800_000, lease_key="base"))


async def start(_service: Service) -> Any:
    """The start itself is what crashes."""
    return True


async def create(service: Service) -> Any:
    return (await service.create_queue(spec("new", 2))).incarnation


async def produce_keyed(service: Service) -> Any:
    produced = await produce(service, "q", *NEW_ITEMS, key=ProduceKey("once"))
    return [produced.partition, produced.first_offset]


async def lease_keyed(service: Service) -> Any:
    leased = await service.lease("q", Lease("c", 2, lease_key="new"))
    return [[lease.partition, lease.number, lease.items] for lease in leased.leases]


def _first_two(disposition: Disposition) -> Settle:
    return Settle({0: [Selection(disposition, offsets=np.array([0, 1]))]}, 10_000)


async def complete(service: Service) -> Any:
    return (await service.settle("q", _first_two(DONE))).completed


async def bury(service: Service) -> Any:
    """To the dead queue, and all the way."""
    await service.settle("q", _first_two(Disposition("dead", reason="bad")))
    await eventually(lambda: total(service, "dead") == 2 and total(service, "q") == len(BASE_ITEMS) - 2)
    return True


async def close(service: Service) -> Any:
    """State that the first is to be tried again, and close the lease: it is put back, and the second is completed."""
    staged = Settle({0: [Selection(Disposition("retry"), offsets=np.array([0]))]}, 10_000, stage=True)
    await service.settle("q", staged)
    settled = await service.settle("q", Settle({0: [Selection(DONE, lease=1)]}, 10_000))
    return [settled.completed, settled.retried]


CALLS: dict[str, Callable[[Service], Awaitable[Any]]] = {
    "start": start,
    "create": create,
    "produce": produce_keyed,
    "lease": lease_keyed,
    "complete": complete,
    "close": close,
    "bury": bury,
}


# -- crashing ---------------------------------------------------------------------------------------


def attempt(call: str, directory: Path, nth: int, halfway: bool, answers: int) -> None:
    """Runs in a process of its own, which does not outlive it."""
    disk = DyingDisk(nth, halfway)
    apsw.set_default_vfs("faulty")

    async def work() -> None:
        disk.armed = call == "start"
        service = Service(directory)
        await service.start()
        disk.armed = True
        answer = await CALLS[call](service)
        os.write(answers, json.dumps(answer).encode())
        os._exit(0)

    asyncio.run(work())


def crash(call: str, directory: Path, nth: int, halfway: bool) -> tuple[int, Any]:
    """The exit code of a process that dies at the nth call, and the answer that it gave before, or None."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            attempt(call, directory, nth, halfway, writing)
        finally:
            os._exit(2)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(answer) if answer else None


def main() -> None:
    call, base, copies = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    # pyarrow's first conversion is slow; once here instead of once in each child.
    pa.array([b""])
    for halfway in (False, True):
        for nth in itertools.count():
            assert nth < MAX_CALLS, "it never ends"
            name = f"{call}-{nth}{'-half' if halfway else ''}"
            shutil.copytree(base, copies / name)
            code, answer = crash(call, copies / name, nth, halfway)
            assert code in (0, 1), f"{name} failed by itself, with exit code {code}"
            print(json.dumps({"copy": name, "crashed": code == 1, "answer": answer}), flush=True)
            if code == 0:
                break


if __name__ == "__main__":
    main()
