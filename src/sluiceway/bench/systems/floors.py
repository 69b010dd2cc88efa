"""Distance of each of our layers from the one below it.

`in-process`: the same instance and stores as `sluiceway`, but in its client's own process, without HTTP: batches are passed as objects.
`in-memory`: the same server, with its partitions in memory. `disk`: only the minimum of writes of a cycle. Each client has its own file,
and writes and syncs (fdatasync) the batch's payload once, and PAGE bytes each for the lease and the completion; the file has its full
length from the beginning, so that no sync has to record it. The server shares a commit among the clients that wait for it, so with many
clients and small batches it may be faster than this.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluiceway import __version__
from sluiceway.bench.rows import payload_of, rows_of
from sluiceway.bench.servers import SLUICEWAY, server
from sluiceway.bench.systems.sluiceway import PARTITIONS, lean
from sluiceway.bench.work import Client, Done, Served, Work, repeat, run
from sluiceway.instance.service import Service
from sluiceway.model.requests import DONE, Lease, Produce, QueueSpec, Selection, Settle
from sluiceway.server.run import spare_the_collector

GUARANTEES = {
    "in-process": "As sluiceway: synced to the disk. There is no server.",
    "in-memory": "None: what is confirmed is in the memory of one process.",
    "disk": "The bytes of a batch are synced to the disk.",
}
PAGE = 8_192
FILE = 64 << 20
LONG = 60_000


def found() -> str | None:
    return None


def version() -> str:
    return f"Sluiceway {__version__}"


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    if name != "in-memory":
        # The client does all the work, and needs only the folder.
        yield Served(str(folder))
        return
    config = folder / "memory.toml"
    config.write_text('[backends.default]\nkind = "memory"\n')
    with server(SLUICEWAY, folder / "data", "--config", str(config)) as started:
        yield Served(started.url, [started.pid])


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    if name == "in-memory":
        return run(lean(address, work, seconds))
    with tempfile.TemporaryDirectory(dir=address) as folder:
        return run((_on_disk if name == "disk" else _in_process)(Path(folder), work, seconds))


async def _in_process(folder: Path, work: Work, seconds: float) -> Done:
    service = Service(folder)
    await service.start()
    # As the server does.
    spare_the_collector()
    try:
        await service.create_queue(QueueSpec("bench", PARTITIONS))
        return await repeat([Here(service, work) for _ in range(work.clients)], work, seconds)
    finally:
        await service.stop()


class Here(Client):
    """A client task in the instance's own process."""

    def __init__(self, service: Service, work: Work) -> None:
        self._service, self._payload = service, work.payload
        self._produce = Produce(rows_of(work.batch, work.payload), LONG)
        self._lease = Lease("bench", work.batch, 5_000)

    async def produce(self) -> None:
        await self._service.produce("bench", self._produce)

    async def lease(self) -> tuple[int, Any]:
        leased = await self._service.lease("bench", self._lease)
        count = sum(lease.items for lease in leased.leases)
        if sum(map(payload_of, leased.batches)) != count * self._payload:
            raise RuntimeError(f"{count} items leased, and others answered")
        return count, (count, leased.leases)

    async def complete(self, leased: Any) -> None:
        count, leases = leased
        selections: dict[int, list[Selection]] = {}
        for lease in leases:
            selections.setdefault(lease.partition, []).append(Selection(DONE, lease=lease.number))
        settled = await self._service.settle("bench", Settle(selections, LONG))
        if settled.completed != count:
            raise RuntimeError(f"{settled.completed} items completed of {count}")


async def _on_disk(folder: Path, work: Work, seconds: float) -> Done:
    with ThreadPoolExecutor(work.clients) as threads:
        files = [File(folder / f"{number}", threads if work.clients > 1 else None, work) for number in range(work.clients)]
        try:
            return await repeat(files, work, seconds)
        finally:
            for file in files:
                file.close()


class File(Client):
    """One file, overwritten cyclically: in `threads`, or without them on the loop, where no other task waits."""

    def __init__(self, path: Path, threads: ThreadPoolExecutor | None, work: Work) -> None:
        self._threads, self._batch = threads, work.batch
        self._payload = b"x" * (work.batch * work.payload)
        self._page = b"x" * PAGE
        self._length = max(len(self._payload), FILE // work.clients)
        self._at = 0
        self._file = os.open(path, os.O_CREAT | os.O_RDWR)
        # Written, not only reserved: the first write into reserved space would have to be recorded, too.
        os.pwrite(self._file, bytes(self._length), 0)
        os.fsync(self._file)

    def _write(self, data: bytes) -> None:
        if self._at + len(data) > self._length:
            self._at = 0
        os.pwrite(self._file, data, self._at)
        self._at += len(data)
        os.fdatasync(self._file)

    async def _written(self, data: bytes) -> None:
        if self._threads is None:
            self._write(data)
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._write, data)

    async def produce(self) -> None:
        await self._written(self._payload)

    async def lease(self) -> tuple[int, Any]:
        await self._written(self._page)
        return self._batch, None

    async def complete(self, leased: Any) -> None:
        await self._written(self._page)

    def close(self) -> None:
        os.close(self._file)
