"""SQLite partition store: one database file per partition, in a directory owned by one process, or shared by a cluster's processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sluiceway.adapters import system
from sluiceway.adapters.disk import keep_private, write_durably
from sluiceway.adapters.lock import DirectoryLock, one_at_a_time
from sluiceway.adapters.storage.partition_file import PartitionFile
from sluiceway.kernel.durability import sync_directory
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import (
    Changes,
    DamagedError,
    Fence,
    Least,
    LostError,
    PartitionRef,
    Snapshot,
    StoreUnavailableError,
)

T = TypeVar("T")

ON_LOOP_BYTES = 256 << 10
"""Blob bytes of a cycle that may be committed on the event loop: copying and checking more takes too long."""

ON_LOOP_RECORDS = 300
"""Small records, put or deleted, of such a cycle: each takes about 3 µs."""


IDENTITY = "identity"
"""The file with the directory's identity."""


def identity_of(directory: Path, new: str | None) -> str | None:
    """PartitionStore.identify, for a directory that may not exist yet. Raises OSError."""
    path = directory / IDENTITY
    if path.exists() or new is None:
        return path.read_text().strip() if path.exists() else None
    keep_private(directory)
    # The instances of a cluster may all start at the same moment.
    with one_at_a_time(directory):
        if not path.exists():
            write_durably(path, new + "\n", private=True)
        return path.read_text().strip()


class Pace:
    """Decides whether commits are quick enough for the event loop: a round trip through a thread takes longer than a quick commit.

    On the loop the average counts, since it is the actual delay, whatever the distribution: every disk is slow once in a while. In threads
    a proof is required, of a surplus of quick commits over slow ones: that is the median, since a thread also waits for the interpreter,
    which says nothing about the disk. (It does so after each statement; hence only COMMIT is measured there.) Each time the average gets
    too high a longer proof is required, until it has gone well for a long time.
    """

    QUICK = 0.002
    """Seconds: where loop and threads do the same work in the same time."""
    AVERAGED = 64
    """Approximate window of the average, in commits on the loop."""
    FIRST = 100
    """Initial proof: one second's work of a server whose many callers share commits."""
    PROOF, LONGEST_PROOF = 1_000, 32_000
    """Proofs after the loop was left: the first, and the longest; each is twice the previous one."""
    WELL = 10_000
    """Commits on the loop after which earlier failures are forgotten."""

    def __init__(self) -> None:
        self._missing = self.FIRST
        """Surplus of quick commits in threads still required."""
        self._next_proof = self.PROOF
        self._average = 0.0
        self._well = 0

    @property
    def is_quick(self) -> bool:
        return self._missing <= 0

    def note(self, seconds: float, on_loop: bool) -> None:
        """Record the duration of a commit on the loop, or of COMMIT by itself in a thread."""
        if not on_loop:
            if not self.is_quick:
                self._missing += -1 if seconds <= self.QUICK else 1
                self._missing = min(self._missing, self._next_proof)
            return
        self._average += (seconds - self._average) / self.AVERAGED
        self._well += 1
        if self._average > self.QUICK:
            self._missing, self._average, self._well = self._next_proof, 0.0, 0
            self._next_proof = min(2 * self._next_proof, self.LONGEST_PROOF)
        elif self._well == self.WELL:
            self._next_proof = self.PROOF


class _Strand:
    """The jobs of one partition, in order, and its file while open. Only the running job touches the file."""

    def __init__(self, path: Path, shared: bool) -> None:
        self.path = path
        self._shared = shared
        self.jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.running = False
        self.file: PartitionFile | None = None

    def existing(self) -> PartitionFile | None:
        self._look()
        return self._opened() if self.file is not None or self.path.exists() else None

    def created(self) -> PartitionFile:
        self._look()
        return self._opened()

    def _look(self) -> None:
        """Close a file that another process has dropped: later writes would go into an unlinked file."""
        if self._shared and self.file is not None and self.file.is_gone:
            self.close()

    def _opened(self) -> PartitionFile:
        if self.file is None:
            self.file = PartitionFile(self.path, shared=self._shared)
        return self.file

    def open(self, fence: Fence, least: Least | None) -> Snapshot:
        file = self.created() if least is None else self.existing()
        if file is None:
            raise LostError(self.path.stem, f"is not there (no file {self.path})")
        return file.open(fence, least)

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
        # The database before its log: after a crash in between, the rest is an orphaned log. The log's index, used by shared files, goes
        # first: a recreated file must not find this one's index.
        try:
            for suffix in ("-shm", "", "-journal", "-wal"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            sync_directory(self.path.parent)
        except OSError as error:
            raise StoreUnavailableError(f"partition {self.path.stem}: {error}") from error

    def close(self) -> None:
        if self.file is not None:
            file, self.file = self.file, None
            file.close()


class SqlitePartitionStore:
    """A PartitionStore in a local directory. DONE means synced to the disk (as far as the disk tells the truth).

    Jobs run in threads, one at a time per partition, several partitions in parallel; but small commits run on the event loop once they have
    proved quick on this disk (docs/adr/0010). A job that has begun is carried to its end even if its caller is cancelled. At most
    `max_open` files are kept open, plus those in use at the moment; each costs two handles, three if `shared`. Raises ValueError for an
    incarnation that is not ASCII letters and digits.

    `shared`: stores of other processes of this machine, all of them shared, may use the directory concurrently, for other partitions, and
    for the same partition one after the other. `open` then waits up to TAKEOVER_TIMEOUT for a commit of the previous owner.

    The constructor raises DirectoryInUseError if the directory is owned by another process, OSError if it cannot be used.
    """

    def __init__(self, directory: Path, *, shared: bool = False, max_open: int = 256, threads: int = 8) -> None:
        keep_private(directory)
        self._directory = directory
        self._max_open = max_open
        self._shared = shared
        self._lock = DirectoryLock(directory, shared=shared)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sluiceway-sqlite")
        self._mutex = threading.Lock()
        self._pace = Pace()
        self._strands: OrderedDict[PartitionRef, _Strand] = OrderedDict()
        """Strands with a job or an open file, least recently used first. Guarded by the mutex, as are their jobs."""

    def at_once(self, ref: PartitionRef) -> bool:
        strand = self._strands.get(ref)
        return self._pace.is_quick and strand is not None and strand.file is not None and not strand.running

    async def identify(self, new: str | None) -> str | None:
        try:
            return await asyncio.to_thread(identity_of, self._directory, new)
        except OSError as error:
            raise StoreUnavailableError(f"{self._directory / IDENTITY}: {error}") from error

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        return await self._run(ref, lambda strand: strand.open(fence, least))

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        records = len(changes.puts) + len(changes.deletes)
        small = records <= ON_LOOP_RECORDS and sum(map(len, (*changes.blobs.values(), *changes.compacted_blobs.values()))) <= ON_LOOP_BYTES
        loops = threading.get_ident()

        def job(strand: _Strand) -> Outcome:
            began = system.stopwatch()
            outcome = strand.apply(changes, fence)
            if small and strand.file is not None:
                on_loop = threading.get_ident() == loops
                took = system.stopwatch() - began if on_loop else strand.file.commit_took
                with self._mutex:
                    self._pace.note(took, on_loop)
            return outcome

        return await self._run(ref, job, on_loop=small and self._pace.is_quick)

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        return await self._run(ref, lambda strand: strand.read(blobs))

    async def browse(self, ref: PartitionRef) -> Snapshot:
        return await self._run(ref, lambda strand: strand.browse())

    async def reusable(self, ref: PartitionRef) -> int:
        """Free bytes in the file of an open partition. Also checkpoints its log, which then restarts and does not grow."""
        return await self._run(ref, lambda strand: 0 if strand.file is None else strand.file.reusable())

    @property
    def owed(self) -> int:
        """Bytes of all logs not yet in the database files: these may grow by as much, while no log shrinks."""
        with self._mutex:
            files = [strand.file for strand in self._strands.values()]
        return sum(file.log_bytes for file in files if file is not None)

    async def drop(self, ref: PartitionRef) -> None:
        await self._run(ref, lambda strand: strand.drop())

    async def release(self, ref: PartitionRef) -> None:
        with self._mutex:
            strand = self._strands.get(ref)
            closing = None if strand is None else self._submit(ref, strand, strand.close)
        if closing is not None:
            # The next opening makes up for what a close leaves undone.
            with contextlib.suppress(Exception):
                await asyncio.wrap_future(closing)

    async def close(self) -> None:
        with self._mutex:
            closings = [self._submit(ref, strand, strand.close) for ref, strand in self._strands.items()]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, closings))
        finally:
            self._pool.shutdown()
            self._lock.release()

    async def _run(self, ref: PartitionRef, job: Callable[[_Strand], T], on_loop: bool = False) -> T:
        if not (ref.incarnation.isascii() and ref.incarnation.isalnum()):
            raise ValueError(f"{ref.incarnation[:64]!r} is not an incarnation")
        with self._mutex:
            strand = self._strands.get(ref)
            if strand is None:
                self._make_room()
                strand = self._strands[ref] = _Strand(self._directory / f"{ref.incarnation}-{ref.partition}.sqlite", self._shared)
            self._strands.move_to_end(ref)
            here = on_loop and strand.file is not None and not strand.running
            if here:
                strand.running = True
            else:
                future = self._submit(ref, strand, lambda: job(strand))
        if not here:
            return await asyncio.wrap_future(future)
        try:
            return job(strand)
        finally:
            self._leave(ref, strand)

    @property
    def _crowded(self) -> bool:
        """Whether more files are open than may stay open, as at a start with many partitions."""
        return len(self._strands) > self._max_open

    def _make_room(self) -> None:
        if len(self._strands) >= self._max_open:
            idle = next(((ref, strand) for ref, strand in self._strands.items() if not strand.running), None)
            if idle is not None:
                self._submit(*idle, idle[1].close)

    def _submit(self, ref: PartitionRef, strand: _Strand, call: Callable[[], T]) -> Future[T]:
        """Queue a job; if the strand is idle, hand it to a thread."""
        future: Future[T] = Future()
        strand.jobs.append((call, future))
        if not strand.running:
            strand.running = True
            self._pool.submit(self._work, ref, strand)
        return future

    def _work(self, ref: PartitionRef, strand: _Strand) -> None:
        self._do(strand)
        self._tidy(ref, strand)

    def _leave(self, ref: PartitionRef, strand: _Strand) -> None:
        """Finish a job on the event loop. A checkpoint or a close would block the loop, so a thread does those."""
        if strand.file is not None and (strand.file.checkpoint_is_due or self._crowded):
            self._pool.submit(self._tidy, ref, strand)
        else:
            self._tidy(ref, strand)

    def _do(self, strand: _Strand) -> None:
        with self._mutex:
            call, future = strand.jobs.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    def _tidy(self, ref: PartitionRef, strand: _Strand) -> None:
        """After a job and its answer: checkpoint the log if due, and start the next job."""
        if strand.file is not None and strand.file.checkpoint_is_due:
            strand.file.checkpoint()
        if self._crowded and not strand.jobs:
            # The next opening makes up for what a close leaves undone.
            with contextlib.suppress(Exception):
                strand.close()
        with self._mutex:
            if strand.jobs:
                # Back to the end of the line, so that a busy partition does not monopolise a thread.
                self._pool.submit(self._work, ref, strand)
                return
            strand.running = False
            if strand.file is None:
                del self._strands[ref]
