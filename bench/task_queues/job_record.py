"""When each job was produced, confirmed and handled: a file that the producer, the worker's processes and the harness map into memory.

Writing costs a handler a microsecond, whatever the system, and survives `kill -9`. All times are those of the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from pathlib import Path

COLUMNS = ("produced", "confirmed", "handled", "times_handled")
_DOUBLE = 8

RECORD = "JOBS_RECORD"
"""Environment variable: the record's file."""
BROKER = "JOBS_BROKER"
"""Environment variable: the URL of the system's server."""
SECONDS = "JOBS_SECONDS"
"""Environment variable: how long a handler takes."""
REDELIVERY = "JOBS_REDELIVERY"
"""Environment variable: seconds after which the jobs of a worker that died are offered again, if not the system's default."""
CONCURRENCY = 64


def create(file: Path, jobs: int) -> None:
    """Make the record of so many jobs, of which none was produced."""
    file.write_bytes(bytes(len(COLUMNS) * _DOUBLE * jobs))


class JobRecord:
    """The times of jobs 0 to n - 1, each 0 until it happens. `times_handled` counts."""

    def __init__(self, file: str | Path) -> None:
        with open(file, "r+b") as opened:
            view = memoryview(mmap.mmap(opened.fileno(), 0)).cast("d")
        jobs = len(view) // len(COLUMNS)
        self.jobs = jobs
        self.produced, self.confirmed, self.handled, self.times_handled = (view[jobs * at : jobs * (at + 1)] for at in range(len(COLUMNS)))

    def add_handled(self, job: int) -> None:
        if not self.handled[job]:
            self.handled[job] = time.monotonic()
        self.times_handled[job] += 1


class _Handling:
    """This process's record and settings, opened at the first job: forked processes share them."""

    def __init__(self) -> None:
        self.record: JobRecord | None = None
        self.seconds = float(os.environ.get(SECONDS, "0"))

    def done(self, job: int) -> None:
        if self.record is None:
            self.record = JobRecord(os.environ[RECORD])
        self.record.add_handled(job)


handling = _Handling()


def broker_url() -> str:
    return os.environ[BROKER]


def redelivery(default: int) -> int:
    """Seconds after which the jobs of a dead worker are offered again: shorter than the system's default where workers are killed."""
    return int(os.environ.get(REDELIVERY, default))


def handle(job: int) -> None:
    """The work of a blocking handler: none, or to wait."""
    if handling.seconds:
        time.sleep(handling.seconds)
    handling.done(job)


async def handle_async(job: int) -> None:
    """The work of a handler on an event loop: none, or to wait."""
    if handling.seconds:
        await asyncio.sleep(handling.seconds)
    handling.done(job)
