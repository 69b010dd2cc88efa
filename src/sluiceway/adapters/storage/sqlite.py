"""Partitions on a local disk: one SQLite database file each, in one directory that one process owns."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sluiceway.adapters.disk import make_directory, sync_directory
from sluiceway.adapters.lock import DirectoryLock
from sluiceway.adapters.storage.partition_file import PartitionFile
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, DamagedError, Fence, PartitionRef, Snapshot, StoreUnavailableError

T = TypeVar("T")


class _Strand:
    """The jobs of one partition, in order, and its file while it is open. Only the job that runs touches the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.running = False
        self.file: PartitionFile | None = None

    def existing(self) -> PartitionFile | None:
        if self.file is None and self.path.exists():
            self.file = PartitionFile(self.path)
        return self.file

    def created(self) -> PartitionFile:
        if self.file is None:
            self.file = PartitionFile(self.path)
        return self.file

    def open(self, fence: Fence) -> Snapshot:
        return self.created().open(fence)

    def apply(self, changes: Changes, fence: Fence) -> Outcome:
        try:
            file = self.existing()
        except (DamagedError, StoreUnavailableError):
            return Outcome.REFUSED
        return Outcome.REFUSED if file is None else file.apply(changes, fence)

    def read(self, blobs: Sequence[int]) -> dict[int, bytes]:
        file = self.existing()
        return {} if file is None else file.read(blobs)

    def browse(self) -> Snapshot:
        file = self.existing()
        return Snapshot(0, None, {}) if file is None else file.browse()

    def drop(self) -> None:
        self.close()
        # The database before its log: after a crash in between, the rest is a log that belongs to nothing.
        try:
            for suffix in ("", "-journal", "-wal"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            sync_directory(self.path.parent)
        except OSError as error:
            raise StoreUnavailableError(f"partition {self.path.stem}: {error}") from error

    def close(self) -> None:
        if self.file is not None:
            file, self.file = self.file, None
            file.close()


class SqlitePartitionStore:
    """A PartitionStore in a directory of this machine. DONE means synced to the disk (as far as the disk tells the truth).

    Everything runs in threads, one job at a time per partition, several partitions in parallel. A job that has begun is carried
    to its end even if its caller is cancelled. At most `max_open` files are kept open, plus those that are in use at the moment;
    each costs two handles. An incarnation is of ASCII letters and digits, anything else a ValueError.

    The constructor raises DirectoryInUseError if another store owns the directory, OSError if it cannot be used.
    """

    def __init__(self, directory: Path, *, max_open: int = 256, threads: int = 8) -> None:
        make_directory(directory)
        self._directory = directory
        self._max_open = max_open
        self._lock = DirectoryLock(directory)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sluiceway-sqlite")
        self._mutex = threading.Lock()
        self._strands: OrderedDict[PartitionRef, _Strand] = OrderedDict()
        """Those that have a job or an open file; the least recently used first. Guarded by the mutex, as are their jobs."""

    async def open(self, ref: PartitionRef, fence: Fence) -> Snapshot:
        return await self._run(ref, lambda strand: strand.open(fence))

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        return await self._run(ref, lambda strand: strand.apply(changes, fence))

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        return await self._run(ref, lambda strand: strand.read(blobs))

    async def browse(self, ref: PartitionRef) -> Snapshot:
        return await self._run(ref, lambda strand: strand.browse())

    async def drop(self, ref: PartitionRef) -> None:
        await self._run(ref, lambda strand: strand.drop())

    async def close(self) -> None:
        with self._mutex:
            closings = [self._submit(ref, strand, strand.close) for ref, strand in self._strands.items()]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, closings))
        finally:
            self._pool.shutdown()
            self._lock.release()

    async def _run(self, ref: PartitionRef, job: Callable[[_Strand], T]) -> T:
        if not (ref.incarnation.isascii() and ref.incarnation.isalnum()):
            raise ValueError(f"{ref.incarnation[:64]!r} is not an incarnation")
        with self._mutex:
            strand = self._strands.get(ref)
            if strand is None:
                self._make_room()
                strand = self._strands[ref] = _Strand(self._directory / f"{ref.incarnation}-{ref.partition}.sqlite")
            self._strands.move_to_end(ref)
            future = self._submit(ref, strand, lambda: job(strand))
        return await asyncio.wrap_future(future)

    def _make_room(self) -> None:
        if len(self._strands) >= self._max_open:
            idle = next(((ref, strand) for ref, strand in self._strands.items() if not strand.running), None)
            if idle is not None:
                self._submit(*idle, idle[1].close)

    def _submit(self, ref: PartitionRef, strand: _Strand, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        strand.jobs.append((call, future))
        if not strand.running:
            strand.running = True
            self._pool.submit(self._work, ref, strand)
        return future

    def _work(self, ref: PartitionRef, strand: _Strand) -> None:
        with self._mutex:
            call, future = strand.jobs.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            if strand.file is not None:
                strand.file.checkpoint_if_due()
        with self._mutex:
            if strand.jobs:
                # Back to the end of the line, so that a busy partition does not keep a thread to itself.
                self._pool.submit(self._work, ref, strand)
                return
            strand.running = False
            if strand.file is None:
                del self._strands[ref]
